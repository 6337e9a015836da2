"""Matrix product, norm and gate on the CPU; ``octavo.kernels.reference`` says what each of them is."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from octavo.kernels import reference
from octavo.kernels.activations import Activation
from octavo.kernels.weights import Weight, dequantized

_PACK_FOR_ROWS = 16
"""Rows that the packed layout is chosen for; measured, it serves 1 to 512 rows well, while 1 serves many badly."""


def prepare_weight(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Bring a [N, K] weight into the blocked layout of oneDNN, once.

    Measured at the demo model's shapes with two threads, the product then takes a third to a half of the time of the
    plain one at 4 to 32 rows. The result is opaque: only ``linear`` reads it. Where oneDNN, or the processor's
    instructions for the dtype, are missing, it is the weight itself.
    """
    plain = dequantized(weight, dtype)
    if not _packs(dtype):
        return plain
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(plain, _PACK_FOR_ROWS)
    return packed


def _packs(dtype: torch.dtype) -> bool:
    has_onednn: bool = torch.backends.mkldnn.is_available()
    if dtype is torch.bfloat16:
        return has_onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return has_onednn and dtype is torch.float32


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by a weight matrix, packed or plain; see ``octavo.kernels.reference.linear``."""
    if weight.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return functional.linear(x, weight, bias)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Add the residual, then normalise; see ``octavo.kernels.reference.rms_norm``."""
    summed = x if residual is None else x + residual
    if unit_offset:
        return reference.rms_norm(summed, weight, eps, unit_offset=True)
    if x.dtype is torch.float32:
        return functional.rms_norm(summed, weight.shape, weight, eps), summed
    wide = summed.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype), summed


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Add the residual, then normalise; see ``octavo.kernels.reference.layer_norm``."""
    summed = x if residual is None else x + residual
    return functional.layer_norm(summed, weight.shape, weight, bias, eps), summed


def act(x: Tensor, activation: Activation) -> Tensor:
    """Activate; see ``octavo.kernels.reference.act``."""
    return _ACTIVATIONS[activation](x)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Keep within a cap; see ``octavo.kernels.reference.soft_cap``."""
    return (x.float() / cap).tanh_().mul_(cap).to(x.dtype)


def act_and_mul(x: Tensor, activation: Activation = "silu") -> Tensor:
    """Gate; see ``octavo.kernels.reference.act_and_mul``."""
    gate, up = x.chunk(2, dim=-1)
    return act(gate, activation) * up


def linear_act_and_mul(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation = "silu"
) -> Tensor:
    """Multiply, then gate; see ``octavo.kernels.reference.linear_act_and_mul``."""
    return act_and_mul(linear(x, weight, bias), activation)


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}
