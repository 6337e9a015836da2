"""Activations, gated and not, and the soft cap of logits."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.activations import Activation
from octavo.kernels.gpu.launch import overlaps, wait_for_inputs

_BLOCK = 1024
_SQRT_HALF = tl.constexpr(math.sqrt(0.5))
_SQRT_2_PI = tl.constexpr(math.sqrt(2 / math.pi))


@triton.jit
def silu(x):
    """``x * sigmoid(x)`` of fp32 values."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Activate fp32 values."""
    if ACTIVATION == "silu":
        return silu(x)
    elif ACTIVATION == "gelu_tanh":
        return x / (1.0 + tl.exp(-2.0 * _SQRT_2_PI * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    else:
        # A NaN stays one: comparing with it is false.
        return tl.where(x < 0.0, 0.0, x)


@triton.jit
def _act_and_mul_kernel(
    x, out, x_stride, size, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """Programs run over the chunks of a line, then over the lines."""
    chunks = tl.cdiv(size, BLOCK)
    program = tl.program_id(0)
    line = (program // chunks).to(tl.int64)
    place = program % chunks * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    wait_for_inputs(OVERLAP)
    gate = tl.load(x + line * x_stride + place, inside, other=0.0).to(tl.float32)
    result = activated(gate, ACTIVATION).to(out.dtype.element_ty).to(tl.float32)
    if GATED:
        result *= tl.load(x + line * x_stride + size + place, inside, other=0.0).to(tl.float32)
    tl.store(out + line * size + place, result.to(out.dtype.element_ty), inside)


def act(x: Tensor, activation: Activation) -> Tensor:
    """Activate: x [T, I] -> [T, I], in fp32, rounded once.

    Lines are contiguous, any distance apart. The reference is ``octavo.kernels.reference.act``.
    """
    return _launch(x, activation, x.shape[-1], is_gated=False)


def act_and_mul(x: Tensor, activation: Activation = "silu") -> Tensor:
    """Gate: x [T, 2I] -> ``round(act(x[:, :I])) * x[:, I:]`` [T, I], with the activation in fp32.

    Lines are contiguous, any distance apart. The reference is ``octavo.kernels.reference.act_and_mul``.
    """
    return _launch(x, activation, x.shape[-1] // 2, is_gated=True)


def _launch(x: Tensor, activation: Activation, size: int, *, is_gated: bool) -> Tensor:
    lines = x.reshape(-1, x.shape[-1])
    if lines.stride(-1) != 1:
        lines = lines.contiguous()
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    if out.numel():
        overlap = overlaps(x)
        grid = (lines.shape[0] * triton.cdiv(size, _BLOCK),)
        _act_and_mul_kernel[grid](
            lines,
            out,
            lines.stride(0),
            size,
            ACTIVATION=activation,
            GATED=is_gated,
            BLOCK=_BLOCK,
            OVERLAP=overlap,
            num_warps=4,
            launch_pdl=overlap,
        )
    return out


@triton.jit
def _soft_cap_kernel(x, out, x_stride, size, cap, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Programs run over the chunks of a line, then over the lines."""
    chunks = tl.cdiv(size, BLOCK)
    program = tl.program_id(0)
    line = (program // chunks).to(tl.int64)
    place = program % chunks * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    wait_for_inputs(OVERLAP)
    value = tl.load(x + line * x_stride + place, inside, other=0.0).to(tl.float32)
    weight = tl.exp(tl.abs(value) * (-2.0 / cap))
    capped = cap * ((1.0 - weight) / (1.0 + weight))
    # A NaN stays one: it is in `capped` as well.
    capped = tl.where(value < 0.0, -capped, capped)
    tl.store(out + line * size + place, capped.to(out.dtype.element_ty), inside)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Keep each value within -cap .. cap: x [S, V] -> ``cap * tanh(x / cap)`` [S, V], in fp32, rounded once.

    Lines are contiguous, any distance apart. The reference is ``octavo.kernels.reference.soft_cap``.
    """
    lines = x.reshape(-1, x.shape[-1])
    if lines.stride(-1) != 1:
        lines = lines.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        overlap = overlaps(x)
        size = x.shape[-1]
        grid = (lines.shape[0] * triton.cdiv(size, _BLOCK),)
        _soft_cap_kernel[grid](
            lines, out, lines.stride(0), size, cap, BLOCK=_BLOCK, OVERLAP=overlap, num_warps=4, launch_pdl=overlap
        )
    return out
