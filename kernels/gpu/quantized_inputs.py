"""Inputs as packed weights want them: in another order, or as float8 with a scale of each token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu.launch import overlaps, wait_for_inputs

_BLOCK = 1024
_FLOAT8_MAX = tl.constexpr(448.0)


@triton.jit
def _take_kernel(x, perm, out, x_stride, size, padded, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(perm + place, place < size, other=0)
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    value = tl.load(x + token * x_stride + source, place < size, other=0.0)
    tl.store(out + token * padded + place, value, place < padded)


def take_inputs(x: Tensor, perm: Tensor) -> Tensor:
    """Return x [T, K] with input perm[k] at place k; lines begin at multiples of 16 bytes, zeros fill them up."""
    num_tokens, size = x.shape
    padded = -(-size // 8) * 8
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((num_tokens, padded), dtype=x.dtype, device=x.device)
    if num_tokens:
        overlap = overlaps(x)
        _take_kernel[(num_tokens, triton.cdiv(padded, _BLOCK))](
            x, perm, out, x.stride(0), size, padded, BLOCK=_BLOCK, OVERLAP=overlap, num_warps=4, launch_pdl=overlap
        )
    return out


@triton.jit
def _float8_kernel(
    x, fixed, codes, scales, x_stride, size, PADDED: tl.constexpr, BLOCK: tl.constexpr, FIXED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token a program. Of 128 inputs, i and 64 + i become neighbours, as they are in the words of the weights."""
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    source = place // 128 * 128 + place % 2 * 64 + place % 128 // 2
    value = tl.load(x + token * x_stride + source, source < size, other=0.0).to(tl.float32)
    scale = tl.load(fixed) if FIXED else tl.maximum(tl.max(tl.abs(value), 0), 1e-12) / _FLOAT8_MAX
    value = tl.minimum(tl.maximum(value / scale, -_FLOAT8_MAX), _FLOAT8_MAX)
    tl.store(codes + token * PADDED + place, value.to(tl.float8e4nv), place < PADDED)
    tl.store(scales + token, scale)


def to_float8(x: Tensor, fixed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Quantise inputs x [T, K], T > 0 -> codes [T, K'] float8_e4m3fn, in the order of packed weights, and scales [T] fp32.

    K' is K filled up with zeros to a multiple of 128. A token's scale takes its largest input to the largest code,
    unless a ``fixed`` one is given.
    """
    num_tokens, size = x.shape
    padded = -(-size // 128) * 128
    if x.stride(1) != 1:
        x = x.contiguous()
    codes = torch.empty((num_tokens, padded), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    overlap = overlaps(x)
    block = triton.next_power_of_2(padded)
    _float8_kernel[(num_tokens,)](
        x,
        scales if fixed is None else fixed,
        codes,
        scales,
        x.stride(0),
        size,
        PADDED=padded,
        BLOCK=block,
        FIXED=fixed is not None,
        OVERLAP=overlap,
        num_warps=8 if block > 4096 else 4,
        launch_pdl=overlap,
    )
    return codes, scales
