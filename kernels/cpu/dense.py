"""Matrix product, norm and gate on the CPU; ``octavo.kernels.reference`` says what each of them is."""

import torch
from torch import Tensor
from torch.nn import functional

_PACK_FOR_ROWS = 16
"""Rows that the packed layout is chosen for; measured, it serves 1 to 512 rows well, while 1 serves many badly."""


def prepare_weight(weight: Tensor) -> Tensor:
    """Bring a [N, K] weight into the blocked layout of oneDNN, once.

    Measured at the demo model's shapes with two threads, the product then takes a third to a half of the time of the
    plain one at 4 to 32 rows. The result is opaque: only ``linear`` reads it. Where oneDNN, or the processor's
    instructions for the dtype, are missing, it is the weight itself.
    """
    if not _packs(weight.dtype):
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_FOR_ROWS)
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


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Add the residual, then normalise; see ``octavo.kernels.reference.rms_norm``."""
    summed = x if residual is None else x + residual
    if x.dtype is torch.float32:
        return functional.rms_norm(summed, weight.shape, weight, eps), summed
    wide = summed.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype), summed


def silu_and_mul(x: Tensor) -> Tensor:
    """Gate; see ``octavo.kernels.reference.silu_and_mul``."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def linear_silu_and_mul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply, then gate; see ``octavo.kernels.reference.linear_silu_and_mul``."""
    return silu_and_mul(linear(x, weight, bias))
