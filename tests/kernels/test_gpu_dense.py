"""Norm, gate, block copy and matrix products in Triton, against the formulas in float64 and the reference."""

from functools import partial
from typing import get_args

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.activations import Activation

pytest.importorskip("triton")
from octavo.kernels.gpu.activation import act, act_and_mul, soft_cap
from octavo.kernels.gpu.copy import copy_blocks
from octavo.kernels.gpu.linear import (
    TILE_TOKENS,
    StreamShape,
    TileShape,
    linear,
    linear_act_and_mul,
    stream_product,
    tile_product,
)
from octavo.kernels.gpu.norm import layer_norm, rms_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = list(BOUNDS)


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (5, 4096), (3, 1000), (2, 16384), (33, 48), (0, 64), (4, 1)])
def test_norm_is_that_of_the_formula(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype)
    weight = random(shape[1], dtype=dtype)
    out, total = rms_norm(x, weight, 1e-5, residual)
    if DEVICE == "cpu":  # the interpreter cuts off where it should round
        torch.testing.assert_close(total, x + residual, rtol=BOUNDS[dtype], atol=0.0)
    else:
        assert torch.equal(total, x + residual)
    wide = (x + residual).double()
    exact = weight.double() * (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt())
    torch.testing.assert_close(out.double(), exact, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
    out, total = rms_norm(x, weight, 1e-5)
    assert total is x
    torch.testing.assert_close(out, reference.rms_norm(x, weight, 1e-5)[0], rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 576), (3, 1000), (33, 48)])
def test_norm_by_one_plus_weight_is_that_of_the_formula(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(8)
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype)
    weight = random(shape[1], dtype=dtype)
    out, total = rms_norm(x, weight, 1e-5, residual, unit_offset=True)
    wide = total.double()
    exact = (1.0 + weight.double()) * (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt())
    torch.testing.assert_close(out.double(), exact, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
    out, _ = rms_norm(x, weight, 1e-5, unit_offset=True)
    expected, _ = reference.rms_norm(x, weight, 1e-5, unit_offset=True)
    torch.testing.assert_close(out, expected, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (3, 1000), (2, 16384), (33, 48), (0, 64), (4, 1)])
def test_layer_norm_is_that_of_the_formula(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual = random(*shape, dtype=dtype) + 5, random(shape[0], shape[1] + 3, dtype=dtype)[:, :-3]
    weight, bias = random(shape[1], dtype=dtype), random(shape[1], dtype=dtype)
    out, total = layer_norm(x, weight, bias, 1e-2, residual)
    torch.testing.assert_close(total, x + residual, rtol=BOUNDS[dtype], atol=0.0)
    wide = total.double()
    centred = wide - wide.mean(-1, keepdim=True)
    exact = weight.double() * (centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt()) + bias.double()
    torch.testing.assert_close(out.double(), exact, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
    out, same = layer_norm(total, weight, bias, 1e-2)
    assert same is total
    torch.testing.assert_close(out.double(), exact, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_takes_views_of_any_rank(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    wide, weight = random(6, 3 * 4 * 80, dtype=dtype), random(80, dtype=dtype)
    heads = wide[:, 320:640].unflatten(1, (4, 80))
    before = wide.clone()
    for x in (heads, heads.transpose(0, 1), random(5, 160, dtype=dtype)[:, ::2], random(80, dtype=dtype)):
        out, _ = rms_norm(x, weight, 1e-5)
        expected, _ = reference.rms_norm(x, weight, 1e-5)
        torch.testing.assert_close(out, expected, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
    assert torch.equal(wide, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 28), (5, 14336), (3, 1001), (0, 64), (2, 1024)])
def test_gate_is_that_of_the_formula(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x = random(shape[0], 2 * shape[1] + 3, dtype=dtype, scale=4.0)[:, :-3]
    gate, up = x.double().chunk(2, -1)
    out = act_and_mul(x)
    assert out.shape == shape
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), gate * gate.sigmoid() * up, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_activations_are_those_of_the_reference(activation: Activation, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x = random(3, 2 * 1027 + 3, dtype=dtype, scale=4.0)[:, :-3]
    close = partial(torch.testing.assert_close, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
    out = act(x, activation)
    assert out.is_contiguous()
    close(out, reference.act(x, activation))
    close(act_and_mul(x, activation), reference.act_and_mul(x, activation))
    weight = random(70, 2054, dtype=dtype, scale=0.02)
    expected = reference.linear_act_and_mul(x, weight, None, activation)
    close(linear_act_and_mul(x, weight, None, activation), expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("activation", get_args(Activation))
def test_activations_at_the_ends_of_the_range(activation: Activation) -> None:
    out = act(torch.tensor([[1e4, -1e4, 0.0, float("nan"), 100.0, -100.0]], device=DEVICE), activation)
    assert out[0, [0, 2, 4]].tolist() == [1e4, 0.0, 100.0]
    assert out[0, [1, 5]].abs().tolist() == [0.0, 0.0]
    assert out[0, 3].isnan()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_gate_at_the_ends_of_the_range() -> None:
    x = torch.tensor([[1e4, -1e4, 100.0, -100.0, 2.0, 3.0, 1.0, 5.0]], device=DEVICE)
    assert act_and_mul(x).tolist() == [[2e4, 0.0, 100.0, 0.0]]
    assert act_and_mul(torch.tensor([[float("nan"), 1.0]], device=DEVICE)).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 97), (3, 2049), (0, 64)])
def test_soft_cap_is_that_of_the_formula(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(9)
    x = random(shape[0], shape[1] + 3, dtype=dtype, scale=40.0)[:, :-3]
    out = soft_cap(x, 30.0)
    assert out.is_contiguous()
    exact = 30.0 * (x.double() / 30.0).tanh()
    torch.testing.assert_close(out.double(), exact, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
    ends = torch.tensor([[1e4, -1e4, 0.0, float("inf"), float("-inf")]], device=DEVICE)
    assert soft_cap(ends, 5.0).tolist() == [[5.0, -5.0, 0.0, 5.0, -5.0]]
    assert soft_cap(ends.log(), 5.0).isnan().tolist() == [[False, True, False, False, True]]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), "gaps"])
def test_blocks_are_copied_whole(order: tuple[int, ...] | str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    sizes = {0: 9, 1: 16, 2: 6, 3: 80}
    shape = (9, 16, 6, 96) if isinstance(order, str) else tuple(sizes[axis] for axis in order)
    whole = torch.randn(2, *shape).to(DEVICE, dtype)
    pair = (
        whole[..., :80] if isinstance(order, str) else whole.permute(0, *(1 + order.index(axis) for axis in range(4)))
    )
    keys, values = pair[0], pair[1]
    if dtype is torch.float8_e4m3fn and isinstance(order, str):
        pytest.skip("plain PyTorch copies these, and its index has no float8")
    before = keys.float(), values.float()
    pairs = torch.tensor([[1, 2], [1, 4], [5, 0]], device=DEVICE)
    copy_blocks(keys, values, *pairs.unbind(1))  # columns need not be contiguous
    for cache, old in zip((keys, values), before, strict=True):
        assert torch.equal(cache.float(), old[[5, 1, 1, 3, 1, 5, 6, 7, 8]])
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    copy_blocks(keys, values, none, none)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs 9 GB of GPU memory")
def test_blocks_behind_2_to_the_31_elements_are_copied() -> None:
    blocks = 2**31 // (16 * 8 * 128) + 2
    caches = torch.zeros(2, blocks, 8, 16, 128, dtype=torch.bfloat16, device=DEVICE).transpose(2, 3)
    caches[:, 3] = 1.5
    caches[:, blocks - 1] = 2.5
    copy_blocks(
        caches[0],
        caches[1],
        torch.tensor([3, blocks - 1], device=DEVICE),
        torch.tensor([blocks - 2, 7], device=DEVICE),
    )
    assert (caches[:, blocks - 2] == 1.5).all()
    assert (caches[:, 7] == 2.5).all()
    assert (caches[:, blocks - 3] == 0).all()


def relative_error(got: Tensor, exact: Tensor) -> float:
    assert not got.isnan().any()
    return float((got.double() - exact).norm() / exact.norm())


def exact_product(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    """Return the product in float64; where gated, gate and up are rounded to x's dtype as separate kernels would."""
    out = x.double() @ weight.double().T
    out = out if bias is None else out + bias.double()
    if not gated:
        return out
    gate, up = out.to(x.dtype).double().chunk(2, -1)
    return gate * gate.sigmoid() * up


PRODUCT_BOUND = 0.02 if DEVICE == "cpu" else 0.005  # the interpreter cuts off where it should round


@pytest.mark.parametrize(("with_bias", "gated"), [(False, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "size"), [(70, 1024), (38, 1000), (2, 64), (64, 2048)])
def test_streamed_products_are_exact(outputs: int, size: int, dtype: torch.dtype, with_bias: bool, gated: bool) -> None:
    torch.manual_seed(4)
    weight = random(outputs, size, dtype=dtype, scale=size**-0.5)
    bias = random(outputs, dtype=dtype) if with_bias else None
    for tokens in (1, 2):
        x = random(tokens, size + 8, dtype=dtype)[:, :size]
        got = stream_product(x, weight, bias, StreamShape(4, 512, 2), gated=gated)
        assert got.shape == (tokens, outputs // 2 if gated else outputs)
        assert relative_error(got, exact_product(x, weight, bias, gated)) < PRODUCT_BOUND


@pytest.mark.parametrize(("with_bias", "gated"), [(True, False), (False, True)])
@pytest.mark.parametrize(("outputs", "size"), [(140, 1024), (38, 1000), (2, 64)])
def test_tiled_products_are_exact(outputs: int, size: int, with_bias: bool, gated: bool) -> None:
    torch.manual_seed(5)
    # The interpreter multiplies bfloat16 tiles wrongly.
    for dtype in [torch.float16] if DEVICE == "cpu" else [torch.bfloat16, torch.float16]:
        weight = random(outputs, size, dtype=dtype, scale=size**-0.5)
        bias = random(outputs, dtype=dtype) if with_bias else None
        for tokens in (1, 9, 16, 17):
            x = random(tokens, size + 8, dtype=dtype)[:, :size]
            got = tile_product(x, weight, bias, TileShape(32 if gated else 64, 128, 3), gated=gated)
            assert got.shape == (tokens, outputs // 2 if gated else outputs)
            assert relative_error(got, exact_product(x, weight, bias, gated)) < PRODUCT_BOUND


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 16, 31, TILE_TOKENS, TILE_TOKENS + 1])
@pytest.mark.parametrize(("outputs", "size"), [(258, 576), (1024, 4096), (65536, 4096), (34, 7)])
def test_any_product_is_that_of_the_formula(outputs: int, size: int, tokens: int, dtype: torch.dtype) -> None:
    if DEVICE == "cpu":
        outputs = min(outputs, 66)
    torch.manual_seed(6)
    weight = random(outputs, size, dtype=dtype, scale=size**-0.5)
    bias = random(outputs, dtype=dtype) if outputs == 258 else None
    wide = random(tokens, size + 1, dtype=dtype)
    bound = max(1e-4, BOUNDS[dtype])
    for x in (wide[:, :size], wide[:, 1:], wide[:, :size].contiguous()):
        exact = exact_product(x, weight, bias, gated=False)
        torch.testing.assert_close(linear(x, weight, bias).double(), exact, rtol=bound, atol=bound)
        exact = exact_product(x, weight, bias, gated=True)
        torch.testing.assert_close(linear_act_and_mul(x, weight, bias).double(), exact, rtol=0.04, atol=0.04)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs kernels that overlap")
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 40])
def test_overlapping_kernels_see_what_the_ones_before_wrote(tokens: int) -> None:
    """A long chain in which each kernel's start hides behind the one before gives, bit for bit, what slow steps give."""
    torch.manual_seed(7)
    first = [random(3072, 1024, dtype=torch.bfloat16, scale=0.03) for _ in range(12)]
    second = [random(1024, 1536, dtype=torch.bfloat16, scale=0.03) for _ in range(12)]
    norm, start = random(1024, dtype=torch.bfloat16), random(tokens, 1024, dtype=torch.bfloat16)

    def chain(wait: bool) -> Tensor:
        x = residual = start
        for gate_up, down in zip(first, second, strict=True):
            x, residual = rms_norm(x, norm, 1e-5, residual)
            if wait:
                torch.cuda.synchronize()
            x = linear_act_and_mul(x, gate_up)
            if wait:
                torch.cuda.synchronize()
            x = linear(x, down)
            if wait:
                torch.cuda.synchronize()
        return x

    expected = chain(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(wait=False)
    for _ in range(50):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
