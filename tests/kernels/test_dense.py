"""Matrix product, norm, gate, rotary embedding and block copy, against formulas and transformers."""

import importlib
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from octavo.kernels import reference
from octavo.kernels.activations import Activation
from octavo.kernels.ops import get_ops

BACKENDS = ["cpu", "reference"]  # the Triton kernels have tests of their own, on the device's tensors
DTYPES = [torch.float32, torch.bfloat16]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {  # of float64
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * (1 + torch.special.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: x.clamp_min(0.0),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 16, 33])
@pytest.mark.parametrize("shape", [(7, 48), (960, 576), (33, 1)])
def test_product_is_that_of_the_formula(
    shape: tuple[int, int], num_tokens: int, dtype: torch.dtype, backend: str
) -> None:
    torch.manual_seed(0)
    ops = get_ops(backend)
    x, bias = torch.randn(num_tokens, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
    weight = (torch.randn(shape) * shape[1] ** -0.5).to(dtype)
    expected = x.double() @ weight.double().T
    bound = 1e-5 if dtype is torch.float32 else 2e-2
    prepared = ops.prepare_weight(weight, weight.dtype)
    torch.testing.assert_close(ops.linear(x, prepared).double(), expected, rtol=bound, atol=bound)
    torch.testing.assert_close(ops.linear(x, prepared, bias).double(), expected + bias.double(), rtol=bound, atol=bound)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gated_product_is_the_product_then_the_gate(backend: str) -> None:
    torch.manual_seed(0)
    ops = importlib.import_module(f"octavo.kernels.{backend}")
    x, weight, bias = torch.randn(3, 40), torch.randn(26, 40), torch.randn(26)
    gate, up = (x @ weight.T + bias).chunk(2, -1)
    got = ops.linear_act_and_mul(x, ops.prepare_weight(weight, weight.dtype), bias)
    torch.testing.assert_close(got, gate * gate.sigmoid() * up)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_and_weights_may_be_strided_views(backend: str) -> None:
    torch.manual_seed(0)
    ops = get_ops(backend)
    x, weight = torch.randn(6, 80)[::2, ::2], torch.randn(40, 50).T
    torch.testing.assert_close(ops.linear(x, ops.prepare_weight(weight, weight.dtype)), x @ weight.T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cpu_backend_agrees_with_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    fast, slow = get_ops("cpu"), get_ops("reference")
    x, residual, weight = torch.randn(19, 576).to(dtype), torch.randn(19, 576).to(dtype), torch.randn(576).to(dtype)
    for got, expected in zip(fast.rms_norm(x, weight, 1e-5, residual), slow.rms_norm(x, weight, 1e-5, residual)):
        torch.testing.assert_close(got, expected)
    torch.testing.assert_close(fast.act_and_mul(x), slow.act_and_mul(x))


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_has_the_bits_of_llama(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = LlamaRMSNorm(576, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x = torch.randn(9, 576).to(dtype)
    assert torch.equal(reference.rms_norm(x, norm.weight, 1e-5)[0], norm(x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_by_one_plus_weight_is_rounded_once(backend: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 7, 576).to(dtype)
    weight = torch.randn(576).to(dtype)
    summed = x + residual
    wide = summed.double()
    exact = (1.0 + weight.double()) * wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    out, new_residual = get_ops(backend).rms_norm(x, weight, 1e-5, residual, unit_offset=True)
    torch.testing.assert_close(out, exact.to(dtype))
    assert torch.equal(new_residual, summed)
    assert torch.equal(get_ops(backend).rms_norm(summed, weight, 1e-5, unit_offset=True)[0], out)
    norm = Gemma3RMSNorm(576, eps=1e-5).to(dtype)
    norm.weight.data.copy_(weight)
    if backend == "reference":  # others may add up in another order
        assert torch.equal(out, norm(summed))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_is_that_of_the_formula(backend: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(2, 7, 576) * 3 + 5).to(dtype)  # a mean far from zero
    weight, bias = torch.randn(2, 576).to(dtype)
    summed = x + residual
    wide = summed.double()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt()
    expected = (normed * weight.double() + bias.double()).to(dtype)
    out, new_residual = get_ops(backend).layer_norm(x, weight, bias, 1e-2, residual)
    torch.testing.assert_close(out, expected)
    assert torch.equal(new_residual, summed)
    alone, same = get_ops(backend).layer_norm(summed, weight, bias, 1e-2)
    torch.testing.assert_close(alone, expected)
    assert torch.equal(same, summed)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_those_of_the_formulas(activation: Activation, dtype: torch.dtype, backend: str) -> None:
    torch.manual_seed(0)
    ops = get_ops(backend)
    x = (torch.randn(7, 2 * 48 + 3) * 4).to(dtype)[:, :-3]  # lines apart
    formula = ACTIVATIONS[activation]
    torch.testing.assert_close(ops.act(x, activation), formula(x.double()).to(dtype))
    gate, up = x.double().chunk(2, -1)
    expected = (formula(gate).to(dtype).double() * up).to(dtype)
    torch.testing.assert_close(ops.act_and_mul(x, activation), expected)
    weight = torch.randn(30, 96).to(dtype) * 0.1
    both = ops.linear(x, ops.prepare_weight(weight, dtype))
    fused = ops.linear_act_and_mul(x, ops.prepare_weight(weight, dtype), None, activation)
    torch.testing.assert_close(fused, ops.act_and_mul(both, activation))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_at_the_ends_of_the_range(activation: Activation, backend: str) -> None:
    out = get_ops(backend).act(torch.tensor([[1e4, -1e4, 0.0, float("nan"), 100.0, -100.0]]), activation)
    assert out[0, [0, 2, 4]].tolist() == [1e4, 0.0, 100.0]
    assert out[0, [1, 5]].abs().tolist() == [0.0, 0.0]
    assert out[0, 3].isnan()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_soft_cap_is_that_of_the_formula(backend: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(3, 97) * 40).to(dtype)
    x[0, :5] = torch.tensor([0.0, 1e4, -1e4, float("inf"), float("-inf")])
    before = x.clone()
    out = get_ops(backend).soft_cap(x, 30.0)
    torch.testing.assert_close(out, (30.0 * (x.double() / 30.0).tanh()).to(dtype))
    assert torch.equal(x, before)
    assert get_ops(backend).soft_cap(torch.tensor([float("nan")]), 3.0).isnan().all()


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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_heads_are_normalised_before_they_are_rotated(
    dtype: torch.dtype, bound: float, unit_offset: bool, backend: str
) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 4, 32).to(dtype), torch.randn(5, 2, 32).to(dtype), torch.randn(5, 2, 32).to(dtype)
    weights = torch.randn(2, 32).to(dtype)
    angles = torch.arange(50.0).double()[:, None] * 100.0 ** -(torch.arange(0, 32, 2) / 32)
    positions = torch.tensor([7, 0, 49, 3, 3])
    keys, values = torch.zeros(2, 2, 4, 2, 32).to(dtype)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).float()
    rotate = get_ops(backend).rotary_and_write_kv
    norms = weights[0], weights[1], 1e-3
    rotated = rotate(q, k, v, positions, cos_sin, keys, values, torch.arange(5), *norms, unit_offset=unit_offset)

    def formula(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.double()
        normed = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * (weight.double() + unit_offset)
        first, second = normed.chunk(2, -1)
        cos, sin = angles[positions].cos()[:, None], angles[positions].sin()[:, None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    torch.testing.assert_close(rotated.double(), formula(q, weights[0]), rtol=bound, atol=bound)
    torch.testing.assert_close(keys.flatten(0, 1)[:5].double(), formula(k, weights[1]), rtol=bound, atol=bound)
    assert torch.equal(values.flatten(0, 1)[:5], v)


def test_partial_rotation_leaves_the_rest_of_a_head() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 8), torch.randn(3, 1, 8), torch.randn(3, 1, 8)
    cos_sin = reference.rotary_cos_sin(torch.tensor([1.0, 0.5]), 10)  # 4 of 8 dimensions
    caches = torch.zeros(2, 1, 4, 1, 8)
    positions = torch.tensor([0, 3, 9])
    out = reference.rotary_and_write_kv(q, k, v, positions, cos_sin, caches[0], caches[1], torch.arange(3))
    qh, kh, vh = (x[..., :4] for x in (q, k, v))
    halves = torch.zeros(2, 1, 4, 1, 4)
    whole = reference.rotary_and_write_kv(qh, kh, vh, positions, cos_sin, halves[0], halves[1], torch.arange(3))
    assert torch.equal(out, torch.cat((whole, q[..., 4:]), -1))
    assert torch.equal(caches[0, 0, :3, :, 4:], k[..., 4:])


def test_rotary_table_holds_cosines_then_sines() -> None:
    inv_freq = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    table = reference.rotary_cos_sin(inv_freq, 100, scaling=1.5)
    angles = torch.arange(100).double()[:, None] * inv_freq.double()
    torch.testing.assert_close(table, (1.5 * torch.cat((angles.cos(), angles.sin()), -1)).float(), rtol=0, atol=1e-5)


def test_blocks_are_copied_whole() -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 6, 4, 2, 8)
    before = keys.clone(), values.clone()
    reference.copy_blocks(keys, values, torch.tensor([1, 1, 5]), torch.tensor([2, 4, 0]))
    for cache, old in zip((keys, values), before, strict=True):
        assert torch.equal(cache, old[[5, 1, 1, 3, 1, 5]])


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match="unknown kernel backend 'gpu3'; known: cpu, reference"):
        get_ops("gpu3")
