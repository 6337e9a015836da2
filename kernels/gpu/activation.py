"""Gated activations."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu.launch import overlaps, wait_for_inputs

_BLOCK = 1024


@triton.jit
def silu(x):
    """``x * sigmoid(x)`` of fp32 values."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _silu_and_mul_kernel(x, out, x_stride, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Programs run over the chunks of a line, then over the lines."""
    chunks = tl.cdiv(size, BLOCK)
    program = tl.program_id(0)
    line = (program // chunks).to(tl.int64)
    place = program % chunks * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    wait_for_inputs(OVERLAP)
    gate = tl.load(x + line * x_stride + place, inside, other=0.0).to(tl.float32)
    up = tl.load(x + line * x_stride + size + place, inside, other=0.0).to(tl.float32)
    activated = silu(gate).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + line * size + place, (activated * up).to(out.dtype.element_ty), inside)


def silu_and_mul(x: Tensor) -> Tensor:
    """Gate: x [T, 2I] -> ``round(silu(x[:, :I])) * x[:, I:]`` [T, I], with ``silu(g) = g / (1 + exp(-g))`` in fp32.

    Lines are contiguous, any distance apart. The reference is ``octavo.kernels.reference.silu_and_mul``.
    """
    size = x.shape[-1] // 2
    lines = x.reshape(-1, x.shape[-1])
    if lines.stride(-1) != 1:
        lines = lines.contiguous()
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    if out.numel():
        overlap = overlaps(x)
        grid = (lines.shape[0] * triton.cdiv(size, _BLOCK),)
        _silu_and_mul_kernel[grid](
            lines, out, lines.stride(0), size, BLOCK=_BLOCK, OVERLAP=overlap, num_warps=4, launch_pdl=overlap
        )
    return out
