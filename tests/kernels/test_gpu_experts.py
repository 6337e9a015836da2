"""Mixture of experts in Triton, against the reference: choice, sort, products of every shape, and their bits."""

import importlib

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.activations import Activation

pytest.importorskip("triton")
from octavo.kernels.gpu import invariant, prepare_experts
from octavo.kernels.gpu.routing import route, sort_pairs
from octavo.kernels.weights import GroupedWeight, dequantized, pack_codes
from tests.kernels.test_gpu_invariant import same_bits

# The function of the same name hides the module from an import.
module = importlib.import_module("octavo.kernels.gpu.experts")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# The interpreter has no products of bf16, and cuts off where it should round.
BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3} | ({torch.bfloat16: 3e-2} if CUDA else {})
# Experts, experts a token, hidden size, inner size.
SIZES = [(5, 3, 40, 24), (3, 1, 33, 7)]
SIZES += [(128, 8, 2048, 768), (8, 2, 4096, 1792)] if CUDA else []
NUM_TOKENS = [0, 1, 17, *([300, 2500] if CUDA else [])]


def make(
    sizes: tuple[int, int, int, int], num_tokens: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return x, ids and weights of experts, gate_up and down."""
    torch.manual_seed(0)
    num_experts, top_k, hidden, inner = sizes
    ids, weights = reference.route(torch.randn(num_tokens, num_experts), top_k, renormalize=True)
    gate_up = torch.randn(num_experts, 2 * inner, hidden) * hidden**-0.5
    down = torch.randn(num_experts, hidden, inner) * inner**-0.5
    x = torch.randn(num_tokens, hidden)
    return x.to(DEVICE, dtype), ids.to(DEVICE), weights.to(DEVICE), gate_up.to(DEVICE, dtype), down.to(DEVICE, dtype)


def agree(got: Tensor, expected: Tensor) -> None:
    bound = BOUNDS[got.dtype]
    assert got.dtype is expected.dtype
    torch.testing.assert_close(got, expected, rtol=bound, atol=bound)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (8, 2), (60, 4)])
def test_the_choice_is_that_of_the_reference(num_experts: int, top_k: int) -> None:
    torch.manual_seed(1)
    logits = torch.randn(12, num_experts)
    logits[1:5] = (logits[1:5] * 2).round() / 2  # many equal ones, and zeros of both signs
    logits[5] = 0.0
    logits[6], logits[7, 0], logits[8, -1] = float("-inf"), float("-inf"), float("nan")
    logits[9] = float("nan")
    logits[10] *= 1e30
    for dtype, renormalize in ((torch.float32, False), (torch.bfloat16, True)):
        wide = torch.cat((logits, logits), 1).to(DEVICE, dtype)[:, :num_experts]
        got, expected = (f(wide, top_k, renormalize=renormalize) for f in (route, reference.route))
        assert torch.equal(got[0], expected[0])
        torch.testing.assert_close(got[1], expected[1], rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("num_tokens", [1, 9, 700])
def test_pairs_are_sorted_by_expert_and_keep_their_order(num_tokens: int) -> None:
    torch.manual_seed(2)
    ids = torch.randint(0, 6, (num_tokens, 3), dtype=torch.int32, device=DEVICE)
    ids[ids == 2] = 4  # an expert without tokens
    pairs, starts = sort_pairs(ids, 7)
    assert torch.equal(pairs.long(), torch.argsort(ids.flatten(), stable=True))
    assert starts.tolist() == [0, *torch.bincount(ids.flatten(), minlength=7).cumsum(0).tolist()]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_experts_are_those_of_the_reference(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    for num_tokens in NUM_TOKENS:
        arguments = make(sizes, num_tokens, dtype)
        expected = reference.experts(*arguments)
        agree(module.experts(*arguments), expected)
        if num_tokens < 2 or CUDA:
            agree(invariant.experts(*arguments), expected)


ACTIVATIONS: list[Activation] = ["gelu", "relu", "gelu_tanh"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_any_activation(activation: Activation) -> None:
    arguments = make(SIZES[0], 6, torch.float32)
    agree(module.experts(*arguments, activation), reference.experts(*arguments, activation))


@pytest.mark.parametrize("each", [1, 20, 40, 100])
def test_every_shape_of_tiles_with_and_without_descriptors(each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = make((4, 2, 136, 40), 37, torch.float16)
    shape = module.choose_shape(each * 4, 4, torch.float16)
    expected = reference.experts(*arguments)
    for has in (True, False):
        monkeypatch.setattr(module, "has_descriptors", lambda weight, has=has: has)
        agree(module.run_experts(*arguments, "silu", shape), expected)
    few = make((4, 2, 136, 40), 1, torch.float16)
    agree(module.run_experts(*few, "silu", shape, sorts=False), reference.experts(*few))


def test_all_tokens_may_go_to_one_expert_and_others_are_not_read() -> None:
    x, _, _, gate_up, down = make(SIZES[0], 20, torch.float32)
    ids, weights = torch.full((20, 1), 3, dtype=torch.int32, device=DEVICE), torch.rand(20, 1, device=DEVICE)
    for expert in (0, 1, 2, 4):
        gate_up[expert], down[expert] = float("nan"), float("nan")
    got = module.experts(x, ids, weights, gate_up, down)
    agree(got, reference.experts(x, ids, weights, gate_up, down))
    x[7] = float("nan")
    spoilt = module.experts(x, ids, weights, gate_up, down)
    assert spoilt[7].isnan().all()
    assert same_bits(spoilt[8:], got[8:])


def test_tiles_are_enough_for_any_spread() -> None:
    for num_pairs, num_experts, tokens in ((1, 8, 16), (40, 3, 16), (64, 128, 16), (1000, 7, 64), (16, 1, 16)):
        used = min(num_pairs, num_experts)
        # The most tiles: every expert but one has a single pair in its last tile.
        worst = [1] * (used - 1) + [num_pairs - used + 1]
        assert sum(-(-count // tokens) for count in worst) <= module.most_tiles(num_pairs, num_experts, tokens)
        assert module.most_tiles(num_pairs, num_experts, tokens) <= num_pairs // tokens + used


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_token_is_the_same_in_any_company(dtype: torch.dtype) -> None:
    num_tokens = 200 if CUDA else 20
    x, ids, weights, gate_up, down = make((4, 2, 72, 40), num_tokens, dtype)
    x[num_tokens - 1] = float("nan")
    expected = invariant.experts(x, ids, weights, gate_up, down)
    for begin, end in ((0, 1), (5, 6), (6, 9), (16, num_tokens)):
        part = slice(begin, end)
        got = invariant.experts(x[part].clone(), ids[part].clone(), weights[part].clone(), gate_up, down)
        assert same_bits(got, expected[part]), (begin, end)
    logits = torch.randn(num_tokens, 60, device=DEVICE)
    chosen = invariant.route(logits, 4, renormalize=False)
    for begin, end in ((0, 1), (7, 30)):
        for mine, whole in zip(invariant.route(logits[begin:end], 4, renormalize=False), chosen, strict=True):
            assert same_bits(mine, whole[begin:end])


def test_quantised_experts_are_held_as_plain_numbers(caplog: pytest.LogCaptureFixture) -> None:
    codes = torch.randint(16, (3, 24, 16))
    stored = [GroupedWeight(pack_codes(c, 4).to(DEVICE), 4, torch.rand(2, 24, device=DEVICE), None, 8) for c in codes]
    module._tell_of_plain_experts.cache_clear()
    with caplog.at_level("INFO"):
        for _ in range(2):
            prepared = prepare_experts(stored, torch.float16)
    assert len(caplog.records) == 1
    assert torch.equal(prepared, torch.stack([dequantized(weight, torch.float16) for weight in stored]))
    assert prepare_experts(prepared, torch.float16) is prepared


@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_a_captured_graph_runs_whatever_is_chosen() -> None:
    x, ids, weights, gate_up, down = make((16, 4, 512, 256), 64, torch.bfloat16)
    module.experts(x, ids, weights, gate_up, down)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module.experts(x, ids, weights, gate_up, down)
    for chosen in (ids.clone(), ids.flip(0), torch.arange(4, device=DEVICE, dtype=torch.int32).expand(64, 4)):
        ids.copy_(chosen)
        graph.replay()
        agree(out, reference.experts(x, ids, weights, gate_up, down))
