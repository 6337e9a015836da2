"""Matrix product, norm and gate on the CPU; see octavo.kernels.reference for what each of them is."""

import torch
from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by a weight matrix; see octavo.kernels.reference.linear."""
    return functional.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Add the residual, then normalise; see octavo.kernels.reference.rms_norm."""
    summed = x if residual is None else x + residual
    if x.dtype is torch.float32:
        return functional.rms_norm(summed, weight.shape, weight, eps), summed
    wide = summed.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype), summed


def silu_and_mul(x: Tensor) -> Tensor:
    """Gate; see octavo.kernels.reference.silu_and_mul."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up
