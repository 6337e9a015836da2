"""Products with packed weights in Triton, against the weights dequantised by their definition, in float64."""

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from octavo.kernels.weights import (
    Float8Weight,
    GroupedWeight,
    SparseRows,
    TableWeight,
    Weight,
    dequantized,
    pack_codes,
)

pytest.importorskip("triton")
import octavo.kernels.gpu as ops
from octavo.kernels.gpu import invariant, quantized_linear
from octavo.kernels.gpu.quantized import PackedWeight, prepare
from octavo.kernels.gpu.quantized_dequantize import dequantize
from octavo.kernels.gpu.quantized_inputs import to_float8
from octavo.kernels.gpu.quantized_linear import PackedShape, _ahead, _float8_product, packed_product

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PRODUCT_BOUND = 0.02 if DEVICE == "cpu" else 0.005  # the interpreter cuts off where it should round


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(DEVICE, dtype)


def grouped(
    outputs: int, inputs: int, bits: int, group: int, dtype: torch.dtype, *, zeros: bool = True, perm: bool = False
) -> GroupedWeight:
    groups = -(-inputs // group)
    codes = torch.randint(0, 2**bits, (outputs, inputs), device=DEVICE)
    return GroupedWeight(
        pack_codes(codes, bits),
        bits,
        (torch.rand(groups, outputs, device=DEVICE) * 0.2 + 0.1).div(2**bits).to(dtype),
        torch.randint(0, 2**bits, (groups, outputs), device=DEVICE, dtype=torch.uint8) if zeros else None,
        group,
        torch.randperm(inputs, device=DEVICE).int() if perm else None,
    )


def table(outputs: int, inputs: int, bits: int, dtype: torch.dtype) -> TableWeight:
    codes = torch.randint(0, 2**bits, (outputs, inputs), device=DEVICE)
    return TableWeight(pack_codes(codes, bits), bits, random(outputs, 2**bits, dtype=dtype, scale=0.1))


def float8(outputs: int, inputs: int, block_n: int, block_k: int) -> Float8Weight:
    codes = random(outputs, inputs, dtype=torch.float32, scale=100.0).clamp(-448, 448)
    codes[0, :8] = torch.tensor([0.0, -0.0, 2**-9, -(2**-9), 2**-7, 448.0, -448.0, 2**-6], device=DEVICE)
    scales = torch.rand(-(-outputs // block_n), -(-inputs // block_k), device=DEVICE) * 0.01 + 0.001
    return Float8Weight(codes.to(torch.float8_e4m3fn), scales, None, "none", block_n, block_k)


def packed(weight: Weight, dtype: torch.dtype) -> PackedWeight:
    result = prepare(weight, dtype)
    assert isinstance(result, PackedWeight)
    return result


HALF = torch.float16
CASES: list[Weight] = [
    grouped(70, 256, 4, 128, HALF),
    grouped(70, 352, 4, 32, HALF),
    grouped(130, 320, 4, 64, HALF, zeros=False),
    grouped(70, 200, 4, 200, HALF),
    grouped(70, 384, 4, 192, HALF),
    grouped(70, 256, 4, 16, HALF),
    grouped(70, 384, 2, 128, HALF),
    grouped(70, 256, 2, 16, HALF),
    grouped(70, 256, 8, 128, HALF),
    grouped(70, 256, 8, 32, HALF, zeros=False),
    table(70, 320, 4, HALF),
    table(70, 128, 2, HALF),
    float8(70, 320, 1, 320),
    float8(300, 320, 128, 128),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weight", CASES, ids=range(len(CASES)))
def test_packed_weights_are_what_their_definition_says(weight: Weight, dtype: torch.dtype) -> None:
    got = dequantize(packed(weight, dtype))
    expected = dequantized(weight, dtype)
    bound = 2**-9 if dtype == torch.float16 else 2**-6  # the interpreter cuts off, and scales are rounded
    torch.testing.assert_close(got.float(), expected.float(), rtol=bound, atol=1e-7)


def exact_product(x: Tensor, weight: Weight, bias: Tensor | None, gated: bool) -> Tensor:
    """Return the product in float64; where gated, gate and up are rounded to x's dtype as separate kernels would."""
    out = x.double() @ dequantized(weight, x.dtype).double().T
    out = out if bias is None else out + bias.double()
    if not gated:
        return out
    gate, up = out.to(x.dtype).double().chunk(2, -1)
    return gate * gate.sigmoid() * up


def relative_error(got: Tensor, exact: Tensor) -> float:
    assert not got.isnan().any()
    return float((got.double() - exact).norm() / exact.norm())


# The interpreter multiplies bfloat16 tiles wrongly.
PRODUCT_DTYPES = [torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16]
PRODUCTS = [
    (CASES[0], PackedShape(64, 8, 1, 3, 1)),
    (CASES[1], PackedShape(64, 16, 2, 3, 3)),
    (CASES[2], PackedShape(128, 32, 1, 4, 2, num_warps=8)),
    (CASES[4], PackedShape(64, 16, 1, 3, 2)),
    (CASES[6], PackedShape(64, 8, 1, 3, 2)),
    (CASES[9], PackedShape(64, 8, 2, 3, 2)),
    (CASES[11], PackedShape(64, 8, 1, 3, 1)),
    (CASES[12], PackedShape(64, 16, 1, 3, 2)),
    (CASES[13], PackedShape(64, 8, 1, 3, 1)),
]


@pytest.mark.parametrize("dtype", PRODUCT_DTYPES)
@pytest.mark.parametrize(("weight", "shape"), PRODUCTS, ids=range(len(PRODUCTS)))
def test_products_with_packed_weights_are_exact(weight: Weight, shape: PackedShape, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    prepared = packed(weight, dtype)
    outputs, size = prepared.shape
    for tokens, gated in ((1, False), (7, True), (shape.tokens + 1, False)):
        x = random(tokens, size + 8, dtype=dtype)[:, :size]
        bias = random(outputs, dtype=dtype) if tokens > 1 else None
        got = packed_product(x, prepared, bias, shape, activation="silu" if gated else None)
        assert got.shape == (tokens, outputs // 2 if gated else outputs)
        assert relative_error(got, exact_product(x, weight, bias, gated)) < PRODUCT_BOUND


def sparse_rows(outputs: int, inputs: int, dtype: torch.dtype) -> SparseRows:
    """Return a matrix with a few numbers in most rows, none in some, and two whole rows."""
    dense = random(outputs, inputs, dtype=dtype) * (torch.rand(outputs, inputs, device=DEVICE) < 0.02)
    dense[3], dense[outputs - 1] = random(inputs, dtype=dtype), random(inputs, dtype=dtype)
    dense[4:8] = 0.0
    row, column = dense.nonzero().unbind(1)
    start = torch.zeros(outputs + 1, dtype=torch.int32, device=DEVICE)
    start[1:] = torch.bincount(row, minlength=outputs).cumsum(0)
    return SparseRows(start, column.int(), dense[row, column])


LAYERS: list[Weight] = [
    grouped(70, 256, 4, 128, HALF, perm=True),
    grouped(64, 200, 4, 200, HALF),
    replace(table(34, 160, 4, HALF), sparse=sparse_rows(34, 160, HALF)),
    float8(80, 320, 80, 320),
]


@pytest.mark.parametrize("weight", LAYERS, ids=range(len(LAYERS)))
def test_layers_of_packed_weights_are_those_of_the_formula(weight: Weight, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    monkeypatch.setattr(quantized_linear, "FEW_TOKENS", 20)
    monkeypatch.setattr(quantized_linear, "PACKED_TOKENS", 20)
    prepared = ops.prepare_weight(weight, HALF)
    outputs, size = prepared.shape
    bias = random(outputs, dtype=HALF)
    for tokens in (0, 1, 21):
        x = random(tokens, size + 3, dtype=HALF)[:, :size]
        assert ops.linear(x, prepared, bias).shape == (tokens, outputs)
        if tokens:
            got = ops.linear(x, prepared, bias)
            assert relative_error(got, exact_product(x, weight, bias, False)) < PRODUCT_BOUND
            got = ops.linear_act_and_mul(x, prepared)
            assert relative_error(got, exact_product(x, weight, None, True)) < PRODUCT_BOUND


@pytest.mark.parametrize("weight", [LAYERS[0], LAYERS[3]], ids=range(2))
def test_bits_of_invariant_products_do_not_depend_on_the_other_tokens(weight: Weight) -> None:
    torch.manual_seed(3)
    prepared = packed(weight, HALF)
    x = random(70, prepared.shape[1], dtype=HALF)
    whole = invariant.linear(x, prepared)
    assert relative_error(whole, exact_product(x, weight, None, False)) < PRODUCT_BOUND
    for rows in (slice(0, 1), slice(66, 68)):
        assert torch.equal(invariant.linear(x[rows], prepared), whole[rows])


def test_models_in_fp32_get_plain_weights() -> None:
    weight = CASES[0]
    prepared = ops.prepare_weight(weight, torch.float32)
    assert isinstance(prepared, Tensor)
    assert torch.equal(prepared, dequantized(weight, torch.float32))


def test_groups_that_no_kernel_takes_become_plain_weights(caplog: pytest.LogCaptureFixture) -> None:
    weight = grouped(8, 120, 4, 24, HALF)
    prepared = ops.prepare_weight(weight, HALF)
    assert isinstance(prepared, Tensor)
    assert torch.equal(prepared, dequantized(weight, HALF))
    assert "kept as plain" in caplog.text


@pytest.mark.parametrize("fixed", [None, 0.02])
def test_float8_inputs_are_in_the_order_of_the_weights(fixed: float | None) -> None:
    torch.manual_seed(4)
    weight = float8(80, 320, 1, 320)
    prepared = packed(weight, torch.bfloat16)
    x = random(5, 320, dtype=torch.bfloat16)
    codes, scales = to_float8(x, None if fixed is None else torch.tensor(fixed, device=DEVICE))
    expected = torch.full_like(scales, fixed) if fixed else x.float().abs().amax(1) / 448
    torch.testing.assert_close(scales, expected)
    ordered = codes.float().view(5, -1, 64, 2).transpose(2, 3).flatten(1)[:, :320]
    close = torch.isclose(ordered * scales[:, None], x.float(), rtol=2**-3, atol=float(scales.max()) * 2**-9)
    assert close.float().mean() > 0.95  # the interpreter loses a carry where it rounds
    matrix = prepared.words.view(torch.float8_e4m3fn).view(-1, codes.shape[1])[:80]
    assert torch.equal(codes.double() @ matrix.double().T, ordered.double() @ weight.codes.double().T)


@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_float8_inputs_times_float8_weights(activations: Literal["dynamic", "static"]) -> None:
    torch.manual_seed(5)
    weight = replace(float8(80, 320, 1, 320), activations=activations, input_scale=torch.tensor(0.01, device=DEVICE))
    prepared = packed(weight, torch.bfloat16)
    assert prepared.scales is not None
    x, bias = random(70, 320, dtype=torch.bfloat16), random(80, dtype=torch.bfloat16)
    got = _float8_product(x, prepared, prepared.scales, bias)
    codes, scales = to_float8(x, prepared.input_scale if activations == "static" else None)
    ordered = codes.double().view(70, -1, 64, 2).transpose(2, 3).flatten(1)[:, :320]
    exact = ordered * scales[:, None] @ dequantized(weight, torch.float32).double().T + bias.double()
    assert relative_error(got, exact) < 0.005
    assert relative_error(got, exact_product(x, weight, bias, False)) < 0.15


@pytest.mark.parametrize(("wanted", "least", "expected"), [(4, 9, 4), (4, 3, 2), (4, 1, 1), (3, 8, 2)])
def test_blocks_ahead_are_a_power_of_two_and_exist(wanted: int, least: int, expected: int) -> None:
    assert _ahead(wanted, least) == expected
