"""Normalisation with the residual's addition, one pass over the data."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu.launch import overlaps, wait_for_inputs


@triton.jit
def _summed(
    x, residual, total, line, place, inside, x_stride, residual_stride, hidden_size, HAS_RESIDUAL: tl.constexpr
):
    """Return a line of x, to which the residual is added and stored as the total, in fp32."""
    value = tl.load(x + line * x_stride + place, inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + line * residual_stride + place, inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + line * hidden_size + place, rounded, inside)
        value = rounded.to(tl.float32)
    return value


@triton.jit
def _rms_norm_kernel(
    x,
    weight,
    residual,
    out,
    total,
    x_stride,
    residual_stride,
    hidden_size,
    eps,
    UNIT_OFFSET: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program t normalises line t, which it holds in registers."""
    line = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < hidden_size
    wait_for_inputs(OVERLAP)
    scale = tl.load(weight + place, inside, other=0.0).to(tl.float32)
    value = _summed(x, residual, total, line, place, inside, x_stride, residual_stride, hidden_size, HAS_RESIDUAL)
    mean = tl.sum(value * value, axis=0) / hidden_size
    normed = value * tl.rsqrt(mean + eps)
    if UNIT_OFFSET:
        scale += 1.0
    else:
        normed = normed.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + line * hidden_size + place, (normed * scale).to(out.dtype.element_ty), inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Add the residual, then normalise over the last dimension::

        total = x + residual
        out = weight * round(total * rsqrt(mean(total ** 2) + eps))

    or with ``unit_offset`` ``out = round((1 + weight) * total * rsqrt(mean(total ** 2) + eps))``.

    x and residual [T, H] (lines contiguous, any distance apart), weight [H], one dtype for all; H up to 65,536. Sums
    are rounded to that dtype, the rest is fp32. Returns ``(out, total)``, both [T, H]; total is x where no residual
    came in. The reference is ``octavo.kernels.reference.rms_norm``.
    """
    return _launch(_rms_norm_kernel, x, (weight,), eps, residual, UNIT_OFFSET=unit_offset)


@triton.jit
def _layer_norm_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    total,
    x_stride,
    residual_stride,
    hidden_size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program t normalises line t, which it holds in registers."""
    line = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < hidden_size
    wait_for_inputs(OVERLAP)
    value = _summed(x, residual, total, line, place, inside, x_stride, residual_stride, hidden_size, HAS_RESIDUAL)
    centred = tl.where(inside, value - tl.sum(value, axis=0) / hidden_size, 0.0)
    variance = tl.sum(centred * centred, axis=0) / hidden_size
    scale = tl.load(weight + place, inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + place, inside, other=0.0).to(tl.float32)
    normed = centred * tl.rsqrt(variance + eps) * scale + shift
    tl.store(out + line * hidden_size + place, normed.to(out.dtype.element_ty), inside)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Add the residual, then normalise by mean and variance over the last dimension::

        total = x + residual
        out = weight * (total - mean) * rsqrt(mean((total - mean) ** 2) + eps) + bias

    Shapes, strides and what is returned as of ``rms_norm``; rounded once. The reference is
    ``octavo.kernels.reference.layer_norm``.
    """
    return _launch(_layer_norm_kernel, x, (weight, bias), eps, residual)


def _launch(
    kernel: Any, x: Tensor, weights: tuple[Tensor, ...], eps: float, residual: Tensor | None, **constants: bool
) -> tuple[Tensor, Tensor]:
    """Run a kernel of norms over the lines of x; return the normalised ones and the sums."""
    hidden_size = x.shape[-1]
    lines = _as_lines(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    if lines.shape[0] == 0:
        return out, total
    added = lines if residual is None else _as_lines(residual)
    block = triton.next_power_of_2(hidden_size)
    overlap = overlaps(x)
    kernel[(lines.shape[0],)](
        lines,
        *weights,
        added,
        out,
        total,
        lines.stride(0),
        added.stride(0),
        hidden_size,
        eps,
        **constants,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        OVERLAP=overlap,
        num_warps=min(16, max(1, block // 512)),
        launch_pdl=overlap,
    )
    return out, total


def _as_lines(x: Tensor) -> Tensor:
    """View as [lines, H] with contiguous lines; copies only what has no such view."""
    lines = x.reshape(-1, x.shape[-1])
    return lines if lines.stride(-1) == 1 else lines.contiguous()
