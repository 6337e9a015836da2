"""Copies of whole KV blocks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import reference

_CHUNK = 4096
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit(do_not_specialize_on_alignment=["src", "dst"])  # they may be cut out of wider tensors
def _copy_blocks_kernel(keys, values, src, dst, block_size, keys_stride, values_stride, CHUNK: tl.constexpr):
    """Program (i, j) copies chunk j of block i in both caches."""
    source = tl.load(src + tl.program_id(0)).to(tl.int64)
    target = tl.load(dst + tl.program_id(0)).to(tl.int64)
    place = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = place < block_size
    key = tl.load(keys + source * keys_stride + place, inside)
    value = tl.load(values + source * values_stride + place, inside)
    tl.store(keys + target * keys_stride + place, key, inside)
    tl.store(values + target * values_stride + place, value, inside)


def copy_blocks(key_cache: Tensor, value_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """``cache[dst] = cache[src]`` for both caches [num_blocks, ...], bit for bit; src and dst [n] int64 or int32.

    No block is both a source and a target, so the order of the copies does not matter. A block may lie in memory in any
    order of its dimensions; where it has gaps, plain PyTorch copies. The reference is
    ``octavo.kernels.reference.copy_blocks``.
    """
    count = src.shape[0]
    if count == 0:
        return
    if not (_is_dense(key_cache) and _is_dense(value_cache)):
        reference.copy_blocks(key_cache, value_cache, src, dst)
        return
    block_size = key_cache[0].numel()
    bits = _INTEGERS[key_cache.element_size()]
    grid = (count, triton.cdiv(block_size, _CHUNK))
    _copy_blocks_kernel[grid](
        key_cache.view(bits),
        value_cache.view(bits),
        src.contiguous(),
        dst.contiguous(),
        block_size,
        key_cache.stride(0),
        value_cache.stride(0),
        CHUNK=_CHUNK,
        num_warps=8,
    )


def _is_dense(cache: Tensor) -> bool:
    """Return whether a block's elements fill one range of memory, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
