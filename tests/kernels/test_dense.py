"""Matrix product, norm, gate and rotary embedding: formulas, backends, and bits that do not depend on the batch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.ops import BACKENDS, get_ops

DTYPES = [torch.float32, torch.bfloat16]
MATRICES = [(576, 576), (960, 576), (3072, 576), (576, 1536), (4096, 576), (256, 64), (80, 48)]  # out, in


def rows_alone(operation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.cat([operation(x[i : i + 1]) for i in range(x.shape[0])])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", MATRICES)
def test_bits_of_a_product_depend_on_nothing_but_the_row(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(shape) * shape[1] ** -0.5).to(dtype)
    x = torch.randn(40, shape[1]).to(dtype)
    expected = rows_alone(lambda row: reference.linear(row, weight), x)
    for count in (*range(1, 20), 31, 32, 33, 40):
        assert torch.equal(reference.linear(x[:count], weight), expected[:count])
    for place in range(reference.TILE_ROWS):
        company = torch.randn(reference.TILE_ROWS, shape[1]).to(dtype) * 5
        company[place] = x[0]
        assert torch.equal(reference.linear(company, weight)[place], expected[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_product_with_bias(backend: str) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 48), torch.randn(7, 48), torch.randn(7)
    torch.testing.assert_close(get_ops(backend).linear(x, weight, bias), x @ weight.T + bias)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_is_that_of_the_formula(backend: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 7, 576).to(dtype)
    weight = torch.randn(576).to(dtype)
    summed = x + residual
    wide = summed.double()
    expected = weight * (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).to(dtype)
    out, new_residual = get_ops(backend).rms_norm(x, weight, 1e-5, residual)
    torch.testing.assert_close(out, expected)
    assert torch.equal(new_residual, summed)
    assert torch.equal(get_ops(backend).rms_norm(x, weight, 1e-5)[1], x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gate_is_that_of_the_formula(backend: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 96) * 4
    gate, up = x.double().chunk(2, -1)
    torch.testing.assert_close(get_ops(backend).silu_and_mul(x), (gate * gate.sigmoid() * up).float())


@pytest.mark.parametrize("width", [64, 96, 576, 1536, 1000])
def test_bits_of_norm_and_gate_depend_on_nothing_but_the_row(width: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(40, 2 * width) * 3, torch.randn(2 * width)
    norm: Callable[[Tensor], Tensor] = lambda row: reference.rms_norm(row, weight, 1e-5)[0]  # noqa: E731
    for operation in (norm, reference.silu_and_mul):
        expected = rows_alone(operation, x)
        for begin, end in ((0, 40), (1, 40), (3, 17), (7, 8), (0, 33)):
            assert torch.equal(operation(x[begin:end]), expected[begin:end])


@pytest.mark.parametrize("head_size", [64, 80, 128])
def test_rotary_embedding_rotates_pairs_and_stores_what_it_should(head_size: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 4, head_size), torch.randn(5, 2, head_size), torch.randn(5, 2, head_size)
    angles = torch.arange(50.0)[:, None] * 10000.0 ** -(torch.arange(0, head_size, 2) / head_size)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.tensor([7, 0, 49, 3, 3])
    slots = torch.tensor([5, -1, 0, 31, 16])
    keys, values = torch.full((2, 4, 8, 2, head_size), 9.0)
    rotated = reference.rotary_and_write_kv(q, k, v, positions, cos_sin, keys, values, slots)

    def formula(x: Tensor) -> Tensor:
        pairs = torch.complex(*x.chunk(2, -1))
        turned = pairs * torch.polar(torch.ones(()), angles[positions])[:, None]
        return torch.cat((turned.real, turned.imag), -1)

    torch.testing.assert_close(rotated, formula(q), rtol=1e-5, atol=1e-5)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            torch.testing.assert_close(keys[slot // 8, slot % 8], formula(k)[token], rtol=1e-5, atol=1e-5)
            assert torch.equal(values[slot // 8, slot % 8], v[token])
    untouched = torch.ones(32, dtype=torch.bool)
    untouched[slots[slots >= 0]] = False
    assert (keys.flatten(0, 1)[untouched] == 9).all()
    assert (values.flatten(0, 1)[untouched] == 9).all()


def test_blocks_are_copied_whole() -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 6, 4, 2, 8)
    before = keys.clone(), values.clone()
    reference.copy_blocks(keys, values, torch.tensor([1, 1, 5]), torch.tensor([2, 4, 0]))
    for cache, old in zip((keys, values), before, strict=True):
        assert torch.equal(cache, old[[5, 1, 1, 3, 1, 5]])


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match="'gpu3' is unknown; there are reference, cpu"):
        get_ops("gpu3")
