"""Norm and rotation of queries and keys, and the write of keys and values to the cache, in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu.launch import overlaps, wait_for_inputs
from octavo.kernels.reference import FLOAT8_MAX, rotary_cos_sin

__all__ = ["rotary_and_write_kv", "rotary_cos_sin"]

_TILE = 1024
"""Elements of the heads that one program takes, about; half of them where the tokens are few."""

_FEW_TOKENS = 64


@triton.jit
def _weighted(normed, weight, DTYPE: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    """Multiply normalised fp32 values by the norm's weight; return what the model's dtype makes of it, in fp32."""
    weighted = normed * (1.0 + weight) if UNIT_OFFSET else normed.to(DTYPE).to(tl.float32) * weight
    return weighted.to(DTYPE).to(tl.float32)


@triton.jit
def _turn(
    x,
    norm,
    cos,
    sin,
    eps,
    inside,
    head_size,
    half,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    NORM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    """Norm and rotate the heads at x [heads, 1] of pointers; inside [heads, 1] masks them.

    Returns the first halves and the second halves [heads, HALF] of the rotated part, and what lies behind it
    [heads, REST] (nothing of use where REST is 0), in fp32.
    """
    lane = tl.arange(0, HALF)[None, :]
    mask = inside & (lane < half)
    dtype = x.dtype.element_ty
    first = tl.load(x + lane, mask, other=0.0).to(tl.float32)
    second = tl.load(x + half + lane, mask, other=0.0).to(tl.float32)
    rest = first
    if REST:
        behind = 2 * half + tl.arange(0, REST)[None, :]
        rest = tl.load(x + behind, inside & (behind < head_size), other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if REST:
            square += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(square / head_size + eps)[:, None]
        weight = tl.load(norm + lane, lane < half, other=0.0).to(tl.float32)
        first = _weighted(first * scale, weight, dtype, UNIT_OFFSET)
        weight = tl.load(norm + half + lane, lane < half, other=0.0).to(tl.float32)
        second = _weighted(second * scale, weight, dtype, UNIT_OFFSET)
        if REST:
            weight = tl.load(norm + behind, behind < head_size, other=0.0).to(tl.float32)
            rest = _weighted(rest * scale, weight, dtype, UNIT_OFFSET)
    return first * cos - second * sin, second * cos + first * sin, rest


@triton.jit
def _put(target, x, mask, DTYPE: tl.constexpr, FLOAT8: tl.constexpr, LIMIT: tl.constexpr):
    """Store fp32 values, rounded to the model's dtype first, then to the target's."""
    if FLOAT8:
        rounded = x.to(DTYPE).to(tl.float32)
        limited = tl.clamp(rounded, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        tl.store(target, limited.to(target.dtype.element_ty), mask)
    else:
        tl.store(target, x.to(DTYPE).to(target.dtype.element_ty), mask)


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])  # they may be cut out of wider tensors
def _rotary_kernel(
    q,
    k,
    v,
    positions,
    cos_sin,
    key_cache,
    value_cache,
    slot_mapping,
    q_norm,
    k_norm,
    out,
    eps,
    q_stride,
    k_stride,
    v_stride,
    block_stride,
    slot_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    FLOAT8: tl.constexpr,
    LIMIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (t, g) takes the query heads g * HEADS .. of token t; those behind take key heads with their values."""
    half: tl.constexpr = ROTATED // 2
    query_groups: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    dtype: tl.constexpr = q.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    lane = tl.arange(0, HALF)[None, :]
    behind = 2 * half + tl.arange(0, REST if REST else 1)[None, :]
    wait_for_inputs(OVERLAP)
    turn = cos_sin + tl.load(positions + token).to(tl.int64) * ROTATED + lane
    cos = tl.load(turn, lane < half, other=0.0).to(dtype).to(tl.float32)
    sin = tl.load(turn + half, lane < half, other=0.0).to(dtype).to(tl.float32)
    if group < query_groups:
        head = group * HEADS + tl.arange(0, HEADS)[:, None]
        inside = head < NUM_HEADS
        mask = inside & (lane < half)
        first, second, rest = _turn(
            q + token * q_stride + head * HEAD_SIZE,
            q_norm,
            cos,
            sin,
            eps,
            inside,
            HEAD_SIZE,
            half,
            HALF,
            REST,
            Q_NORM,
            UNIT_OFFSET,
        )
        target = out + (token * NUM_HEADS + head) * HEAD_SIZE
        tl.store(target + lane, first.to(dtype), mask)
        tl.store(target + half + lane, second.to(dtype), mask)
        if REST:
            tl.store(target + behind, rest.to(dtype), inside & (behind < HEAD_SIZE))
    else:
        slot = tl.load(slot_mapping + token)
        head = (group - query_groups) * HEADS + tl.arange(0, HEADS)[:, None]
        inside = (head < NUM_KV_HEADS) & (slot >= 0)
        mask = inside & (lane < half)
        source = v + token * v_stride + head * HEAD_SIZE
        value_first = tl.load(source + lane, mask, other=0.0)
        value_second = tl.load(source + half + lane, mask, other=0.0)
        first, second, rest = _turn(
            k + token * k_stride + head * HEAD_SIZE,
            k_norm,
            cos,
            sin,
            eps,
            inside,
            HEAD_SIZE,
            half,
            HALF,
            REST,
            K_NORM,
            UNIT_OFFSET,
        )
        offset = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride + head * head_stride
        _put(key_cache + offset + lane, first, mask, dtype, FLOAT8, LIMIT)
        _put(key_cache + offset + half + lane, second, mask, dtype, FLOAT8, LIMIT)
        _put(value_cache + offset + lane, value_first.to(tl.float32), mask, dtype, FLOAT8, LIMIT)
        _put(value_cache + offset + half + lane, value_second.to(tl.float32), mask, dtype, FLOAT8, LIMIT)
        if REST:
            rest_mask = inside & (behind < HEAD_SIZE)
            value_rest = tl.load(source + behind, rest_mask, other=0.0).to(tl.float32)
            _put(key_cache + offset + behind, rest, rest_mask, dtype, FLOAT8, LIMIT)
            _put(value_cache + offset + behind, value_rest, rest_mask, dtype, FLOAT8, LIMIT)


def rotary_and_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    *,
    unit_offset: bool = False,
) -> Tensor:
    """Norm and rotate q and k, write k and v into the cache; one launch.

    For each head of q and of k, with (a, b) the halves of its first r elements and the cosines and sines of the token's
    position rounded to q's dtype::

        x = norm * round(x * rsqrt(mean(x ** 2) + eps))     where a norm [d] is given
        x = round((1 + norm) * x * rsqrt(mean(x ** 2) + eps))   with unit_offset
        (a, b) -> (a * cos - b * sin, b * cos + a * sin)    in fp32, rounded once

    q [T, nq, d], k and v [T, nkv, d] with heads side by side (views of one projection's output are), positions [T] int64
    or int32, cos_sin [max_positions, r] fp32, contiguous, slot_mapping [T] int64, -1 for a token that writes nothing.
    The caches [num_blocks, B, nkv, d] have contiguous heads and otherwise any strides, the same ones for both; their
    dtype is q's or float8_e4m3fn (values are limited to 448 then). Returns rotated queries [T, nq, d], contiguous.
    The reference is ``octavo.kernels.reference.rotary_and_write_kv``.

    Raises:
        ValueError: the caches lie differently in memory, or their heads are not contiguous.
    """
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads = k.shape[1]
    if key_cache.stride() != value_cache.stride() or key_cache.stride(3) != 1:
        raise ValueError(
            f"caches of strides {key_cache.stride()} and {value_cache.stride()}: expected equal ones that end in 1"
        )
    out = torch.empty((num_tokens, num_heads, head_size), dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    q, k, v = _side_by_side(q), _side_by_side(k), _side_by_side(v)
    rotated = cos_sin.shape[-1]
    padded = triton.next_power_of_2(head_size)
    # The order in which a norm's squares are added follows the tile: with norms it must not depend on the other tokens.
    few = num_tokens <= _FEW_TOKENS and q_norm is None and k_norm is None
    tile = _TILE // 2 if few else _TILE
    heads = min(max(1, tile // padded), triton.next_power_of_2(num_heads))
    overlap = overlaps(q)
    grid = (num_tokens, triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads))
    _rotary_kernel[grid](
        q,
        k,
        v,
        positions,
        cos_sin,
        key_cache,
        value_cache,
        slot_mapping,
        q if q_norm is None else q_norm,
        k if k_norm is None else k_norm,
        out,
        eps,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        *key_cache.stride()[:3],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        ROTATED=rotated,
        BLOCK_SIZE=key_cache.shape[1],
        HEADS=heads,
        HALF=triton.next_power_of_2(max(1, rotated // 2)),
        REST=triton.next_power_of_2(head_size - rotated) if rotated < head_size else 0,
        Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None,
        UNIT_OFFSET=unit_offset,
        FLOAT8=key_cache.dtype is torch.float8_e4m3fn,
        LIMIT=FLOAT8_MAX,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return out


def _side_by_side(x: Tensor) -> Tensor:
    """Return x [T, n, d] with each token's heads contiguous and next to each other; a copy only where they are not."""
    return x if x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1) else x.contiguous()
