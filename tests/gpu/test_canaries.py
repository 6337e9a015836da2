"""Every operation at the sizes of an 8B model, between guards: it writes all of its outputs, and nothing beside them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.kernels import inputs_reference, reference
from octavo.kernels.gpu import inputs
from octavo.kernels.gpu.linear import linear, linear_act_and_mul
from octavo.kernels.ops import get_ops
from tests.kernels.test_gpu_attention import Step
from tests.support.gpu import CUDA, DEVICE, ON_GPU_OR_INTERPRETED
from tests.support.guarded import Guards

pytestmark = ON_GPU_OR_INTERPRETED

DTYPE = torch.bfloat16 if CUDA else torch.float32
BOUND = 2e-2 if CUDA else 1e-4
TOKENS, HIDDEN, INNER = (301, 4096, 14_336) if CUDA else (5, 48, 80)
HEADS, KV_HEADS, HEAD_SIZE = (32, 8, 128) if CUDA else (6, 2, 8)
ROWS, VOCABULARY = (67, 128_256) if CUDA else (5, 300)
BLOCKS, BLOCK_SIZE = (200, 16) if CUDA else (7, 4)
OPS = get_ops("triton")

Case = Callable[[Guards], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_written_beside_the_outputs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    guards = Guards()
    guards.replace_empty(monkeypatch)
    CASES[name](guards)
    assert guards.check() > 0


def random(*shape: int, dtype: torch.dtype = DTYPE, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(DEVICE, dtype)


def ints(size: int, end: int, begin: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(begin, end, (size,), dtype=dtype).to(DEVICE)


def same(got: Tensor, expected: Tensor, bound: float = BOUND) -> None:
    torch.testing.assert_close(got, expected, rtol=bound, atol=bound)


@case
def rms_norm(guards: Guards) -> None:
    x, residual, weight = random(TOKENS, HIDDEN), random(TOKENS, HIDDEN), random(HIDDEN)
    for added in (residual, None):
        for got, expected in zip(
            OPS.rms_norm(x, weight, 1e-5, added), reference.rms_norm(x, weight, 1e-5, added), strict=True
        ):
            same(got, expected)


@case
def act_and_mul(guards: Guards) -> None:
    x = random(TOKENS, 2 * INNER)
    same(OPS.act_and_mul(x), reference.act_and_mul(x))


@case
def products(guards: Guards) -> None:
    weight, bias = guards.copy(random(HIDDEN + 16, HIDDEN, scale=HIDDEN**-0.5)), guards.copy(random(HIDDEN + 16))
    for tokens in (1, 2, 3, 16, TOKENS):
        x = guards.copy(random(tokens, HIDDEN))
        exact = x.float() @ weight.float().T + bias.float()
        for product in (OPS.linear, linear):
            same(product(x, weight, bias).float(), exact)
        gated = reference.act_and_mul(exact.to(DTYPE)).float()
        same(linear_act_and_mul(x, weight, bias).float(), gated, 2 * BOUND)


@case
def experts(guards: Guards) -> None:
    num_experts, top_k, inner = (60, 8, 776) if CUDA else (5, 3, 40)
    gate_up = guards.copy(random(num_experts, 2 * inner, HIDDEN, scale=HIDDEN**-0.5))
    down = guards.copy(random(num_experts, HIDDEN, inner, scale=inner**-0.5))
    for tokens in (1, 2, TOKENS, *((1500,) if CUDA else ())):
        logits, x = guards.copy(random(tokens, num_experts)), guards.copy(random(tokens, HIDDEN))
        ids, weights = OPS.route(logits, top_k, renormalize=True)
        expected_ids, expected_weights = reference.route(logits, top_k, renormalize=True)
        assert torch.equal(ids, expected_ids)
        same(weights, expected_weights, 1e-4)
        expected = reference.experts(x, ids, weights, gate_up, down)
        for ops in (OPS, get_ops("triton", batch_invariant=True)):
            same(ops.experts(x, ids, weights, gate_up, down), expected, 2 * BOUND)


@case
def rotary_and_write_kv(guards: Guards) -> None:
    fused = random(TOKENS, (HEADS + 2 * KV_HEADS) * HEAD_SIZE)
    parts = fused.split([heads * HEAD_SIZE for heads in (HEADS, KV_HEADS, KV_HEADS)], -1)
    q, k, v = (part.unflatten(1, (-1, HEAD_SIZE)) for part in parts)
    table = reference.rotary_cos_sin(1000.0 ** -(torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE), 999).to(DEVICE)
    positions = ints(TOKENS, 999)
    last = BLOCKS * BLOCK_SIZE - 1
    slots = torch.cat((torch.tensor([last, 0]), torch.randperm(last - 1)[: TOKENS - 2] + 1)).to(DEVICE)
    slots[3::7] = -1
    blank = torch.full((BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_SIZE), 9.0).to(DEVICE, DTYPE)
    caches = [(guards.copy(blank).transpose(1, 2), guards.copy(blank).transpose(1, 2)) for _ in "or"]
    norms = random(HEAD_SIZE), random(HEAD_SIZE)
    q_ours, q_theirs = (
        ops.rotary_and_write_kv(q, k, v, positions, table, *pair, slots, *norms, 1e-5)
        for ops, pair in zip((OPS, get_ops("reference")), caches, strict=True)
    )
    same(q_ours, q_theirs, 2 * BOUND)
    for ours, theirs in zip(*caches, strict=True):
        same(ours, theirs, 2 * BOUND)


@case
def paged_attention(guards: Guards) -> None:
    rows = [(1, 37), (1, 0), (1, 700), (1, 1), (5, 70), (0, 9), (1, 20), (133, 133), (40, 391)]
    if not CUDA:
        rows = rows[:2] + rows[3:5]
    step = Step(rows, (HEADS, KV_HEADS, HEAD_SIZE), BLOCK_SIZE, DTYPE, extra_tokens=9)
    out = OPS.paged_attention(*step.arguments(), num_decodes=3 if not CUDA else 4)
    same(out.double().cpu(), step.formula())


@case
def copy_blocks(guards: Guards) -> None:
    shape = (BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    keys, values = (guards.copy(random(*shape)) for _ in "kv")
    before = keys.clone(), values.clone()
    source, target = torch.tensor([[1, BLOCKS - 2], [BLOCKS - 1, 0], [3, 2]], device=DEVICE).unbind(1)
    OPS.copy_blocks(keys, values, source, target)
    for got, expected in zip((keys, values), before, strict=True):
        expected[target] = expected[source]
        assert torch.equal(got, expected)


@case
def draws(guards: Guards) -> None:
    logits = guards.copy(random(ROWS, VOCABULARY, dtype=torch.float32, scale=3.0))
    temperature = torch.tensor([0.0, 1.0, 0.3] * ROWS)[:ROWS].to(DEVICE)
    numbers = [ints(ROWS, 2**31 - 1) for _ in range(3)]
    got = OPS.sample(logits, temperature, *numbers)
    expected = reference.sample(*(x.cpu() for x in (logits, temperature, *numbers)))
    assert torch.equal(got.cpu(), expected)
    logits[1, VOCABULARY - 1] = float("nan")
    assert OPS.first_nonfinite(logits).nonzero().flatten().tolist() == [1]


@case
def logprobs(guards: Guards) -> None:
    logits = guards.copy(random(ROWS, VOCABULARY, dtype=torch.float32, scale=3.0))
    ids = ints(ROWS, VOCABULARY)
    for got, expected in zip(OPS.logprobs(logits, ids, 20), reference.logprobs(logits, ids, 20), strict=True):
        same(got, expected, 1e-4)


@case
def masks_penalties_filters(guards: Guards) -> None:
    source = random(ROWS, VOCABULARY, dtype=torch.float32, scale=3.0)
    rows, ids = ints(90, ROWS), ints(90, VOCABULARY)
    few = torch.randperm(ROWS)[: ROWS // 2].to(DEVICE)
    counts = torch.randint(0, 3, (len(few), VOCABULARY)).int().to(DEVICE)
    factors = [(torch.rand(len(few)) + 0.5).to(DEVICE) for _ in range(3)]
    settings = [torch.tensor(list(x) * ROWS)[:ROWS].to(DEVICE) for x in ((1.0, 0.7), (0.0, 0.01), (0, 40), (0.9, 1.0))]

    def run(ops: object) -> list[Tensor]:
        out = []
        for name, arguments in (
            ("apply_allowed", (rows, ids)),
            (
                "apply_token_mask",
                (rows.unique(), torch.full((rows.unique().numel(), 3), 5, dtype=torch.int32, device=rows.device)),
            ),
            ("apply_logit_bias", (rows, ids, torch.ones(90, device=DEVICE))),
            ("apply_penalties", (few, counts > 1, counts, *factors)),
            ("filter_logits", tuple(settings)),
        ):
            logits = guards.copy(source)
            getattr(ops, name)(logits, *arguments)
            out.append(logits)
        return out

    *others, filtered = run(OPS)
    *expected, expected_filtered = run(get_ops("reference"))
    for got, wanted in zip(others, expected, strict=True):
        same(got, wanted, 1e-5)
    # Where masses add up to top-p, the order of additions may decide about an id or two.
    assert int((filtered != expected_filtered).sum()) <= 3 * ROWS


@case
def input_preparation(guards: Guards) -> None:
    slots, width, cells = (257, 8192, 512) if CUDA else (5, 60, 15)
    ids = ints(slots * width, 99_999, dtype=torch.int32).view(slots, width)
    tables = ints(slots * cells, 2**31 - 1, dtype=torch.int32).view(slots, cells)
    rows = torch.randperm(slots)[: slots // 2].int().to(DEVICE)
    starts = ints(len(rows), width - 9, dtype=torch.int32)
    starts[::5] = -1
    query_start = torch.cat((ints(1, 1), ints(len(rows), 4))).cumsum(0).int()
    num_tokens = int(query_start[-1]) + 5

    def run(module: object) -> list[Tensor]:
        column = [guards.empty(num_tokens, dtype=torch.int32, device=DEVICE) for _ in range(2)]
        column += [guards.empty(num_tokens, dtype=torch.int64, device=DEVICE)]
        column += [guards.empty(len(rows), dtype=torch.int32, device=DEVICE)]
        column += [guards.empty(len(rows), cells, dtype=torch.int32, device=DEVICE)]
        getattr(module, "prepare_inputs")(ids, tables, rows, starts, query_start, width // cells, *column)  # noqa: B009
        changed = guards.copy(ids), guards.copy(tables)
        getattr(module, "store_tokens")(changed[0], rows, starts, ints(len(rows), 1).add_(7))  # noqa: B009
        edge = torch.tensor([[slots - 1, cells - 1, 5], [0, 0, 6], [-1, 3, 7]], dtype=torch.int32, device=DEVICE)
        getattr(module, "write_cells")(changed[1], edge)  # noqa: B009
        pair = torch.tensor([[slots - 1], [0]], dtype=torch.int32, device=DEVICE)
        getattr(module, "copy_rows")(*changed, *pair)  # noqa: B009
        line = torch.tensor([slots - 1, 0, 0, width], dtype=torch.int32, device=DEVICE)
        flat = ids[0].clone()
        getattr(module, "write_ids")(changed[0], line[:1], line[1:2], line[2:], flat)  # noqa: B009
        return [*column, *changed]

    for got, expected in zip(run(inputs), run(inputs_reference), strict=True):
        assert torch.equal(got, expected)
