"""Mixture of experts: who is chosen, and what the chosen ones make of a token, on the CPU's two backends."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from octavo.kernels import cpu, experts, reference
from octavo.kernels.activations import Activation
from octavo.kernels.ops import Ops, get_ops
from octavo.kernels.weights import GroupedWeight, Weight, dequantized, pack_codes

NUM_EXPERTS, HIDDEN, INNER, TOP_K = 5, 40, 24, 3
BACKENDS = [get_ops("reference"), get_ops("cpu")]
IDS = ["reference", "cpu"]


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def make(num_tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, the router's logits, gate_up and down."""
    torch.manual_seed(0)
    x, logits = torch.randn(num_tokens, HIDDEN).to(dtype), torch.randn(num_tokens, NUM_EXPERTS)
    gate_up = (torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN) * HIDDEN**-0.5).to(dtype)
    return x, logits, gate_up, (torch.randn(NUM_EXPERTS, HIDDEN, INNER) * INNER**-0.5).to(dtype)


def formula(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: Activation = "silu"
) -> Tensor:
    """Every token through every one of its experts, in float64."""
    gate, up = torch.einsum("th,eih->tei", x.double(), gate_up.double()).chunk(2, -1)
    every = torch.einsum(
        "tei,ehi->teh", (functional.silu if activation == "silu" else functional.gelu)(gate) * up, down.double()
    )
    chosen = every.gather(1, ids.long()[..., None].expand(-1, -1, x.shape[1]))
    return (chosen * weights.double()[..., None]).sum(1)


def test_the_highest_logits_are_chosen_and_weighed_by_softmax() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [-1.0, -2.0, -3.0, -4.0]])
    ids, weights = reference.route(logits, 2, renormalize=False)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert ids.tolist() == [[1, 3], [0, 1]]
    torch.testing.assert_close(weights, logits.softmax(-1).gather(1, ids.long()))
    _, weights = reference.route(logits.bfloat16(), 2, renormalize=True)
    torch.testing.assert_close(weights, torch.tensor([[3.0, 2.0], [-1.0, -2.0]]).softmax(-1))


def test_of_equal_logits_the_lower_id_is_chosen() -> None:
    zeros = [0.0, -0.0] * 40
    for logits, expected in (
        ([1.0, 2.0, 2.0, 1.0, 1.0], [1, 2, 0]),
        ([5.0] * 5, [0, 1, 2]),
        ([-0.0, 0.0, -0.0, 0.0, 1.0], [4, 0, 1]),
        (zeros, [0, 1, 2]),
        ([float("-inf")] * 4 + [0.0], [4, 0, 1]),
    ):
        ids, weights = reference.route(torch.tensor([logits]), 3, renormalize=True)
        assert ids.tolist() == [expected]
        assert weights.sum() == pytest.approx(1.0)


def test_logits_that_are_no_numbers_make_no_false_ids() -> None:
    nan = float("nan")
    ids, weights = reference.route(torch.tensor([[nan, 1.0, nan, 2.0], [nan] * 4]), 3, renormalize=True)
    assert ids.tolist() == [[3, 1, 0], [0, 1, 2]]
    assert weights.isnan().all()


@pytest.mark.parametrize("ops", BACKENDS, ids=IDS)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 33])
def test_experts_are_those_of_the_formula(ops: Ops, num_tokens: int) -> None:
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        x, logits, gate_up, down = make(num_tokens, dtype)
        ids, weights = ops.route(logits, TOP_K, renormalize=True)
        prepared = ops.prepare_experts(gate_up, dtype), ops.prepare_experts(down, dtype)
        for activation in ("silu", "gelu"):
            got = ops.experts(x, ids, weights, *prepared, activation)
            exact = formula(x, ids, weights, gate_up, down, activation)
            assert (got.shape, got.dtype) == (x.shape, dtype)
            torch.testing.assert_close(got.double(), exact, rtol=bound, atol=bound)


@pytest.mark.parametrize("ops", BACKENDS, ids=IDS)
def test_all_tokens_may_go_to_one_expert(ops: Ops) -> None:
    x, _, gate_up, down = make(19)
    ids, weights = torch.full((19, 1), 3, dtype=torch.int32), torch.rand(19, 1)
    got = ops.experts(x, ids, weights, ops.prepare_experts(gate_up, x.dtype), ops.prepare_experts(down, x.dtype))
    torch.testing.assert_close(got.double(), formula(x, ids, weights, gate_up, down), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ops", BACKENDS, ids=IDS)
def test_an_expert_without_tokens_is_not_looked_at(ops: Ops) -> None:
    x, _, gate_up, down = make(4)
    gate_up[2], down[2] = float("nan"), float("nan")
    ids, weights = torch.tensor([[0, 4], [1, 3], [3, 0], [4, 1]], dtype=torch.int32), torch.rand(4, 2)
    got = ops.experts(x, ids, weights, ops.prepare_experts(gate_up, x.dtype), ops.prepare_experts(down, x.dtype))
    assert got.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_is_the_same_in_any_company(dtype: torch.dtype) -> None:
    x, logits, gate_up, down = make(40, dtype)
    x[7] = float("nan")
    ids, weights = reference.route(logits, TOP_K, renormalize=True)
    expected = reference.experts(x, ids, weights, gate_up, down)
    for begin, end in ((0, 1), (5, 6), (6, 9), (0, 17), (16, 40), (39, 40)):
        part = slice(begin, end)
        some, some_weights = reference.route(logits[part].clone(), TOP_K, renormalize=True)
        assert torch.equal(some, ids[part])
        assert same_bits(some_weights, weights[part])
        got = reference.experts(x[part].clone(), some, some_weights, gate_up, down)
        assert same_bits(got, expected[part]), (begin, end)


def grouped(seed: int) -> GroupedWeight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(16, (2 * INNER, HIDDEN), generator=generator)
    return GroupedWeight(pack_codes(codes, 4), 4, torch.rand(5, 2 * INNER, generator=generator) * 0.1, None, 8)


def test_quantised_experts_are_plain_ones_after_loading() -> None:
    x, logits, _, down = make(9)
    ids, weights = reference.route(logits, TOP_K, renormalize=True)
    stored: list[Weight] = [grouped(seed) for seed in range(NUM_EXPERTS)]
    plain = torch.stack([dequantized(weight, x.dtype) for weight in stored])
    assert torch.equal(experts.stacked(stored, x.dtype), plain)
    exact = formula(x, ids, weights, plain, down)
    for ops in BACKENDS:
        got = ops.experts(x, ids, weights, ops.prepare_experts(stored, x.dtype), ops.prepare_experts(down, x.dtype))
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)


def test_a_stack_is_not_copied_and_each_backend_has_the_operations() -> None:
    _, _, gate_up, _ = make(1)
    assert reference.prepare_experts(gate_up, gate_up.dtype) is gate_up
    assert {"route", "experts", "prepare_experts"} <= set(reference.__all__) & set(cpu.__all__)
