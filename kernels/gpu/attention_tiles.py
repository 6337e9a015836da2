"""Device functions that decode and prefill attention share: tiles of keys and values, and the running softmax."""

import triton
import triton.language as tl


@triton.jit
def load_blocks(table, place, visible, MASKED: tl.constexpr, SHAPE: tl.constexpr):
    """Return the blocks that hold ``place`` [N] of the row whose block table ``table`` points at.

    Places that are not ``visible`` [N] are not looked up where MASKED, and give 0. A loop loads the blocks of the next
    tile while it computes one, so that the loads of keys and values need not wait for them.
    """
    BLOCK_SIZE: tl.constexpr = SHAPE[3]
    if MASKED:
        return tl.load(table + place // BLOCK_SIZE, visible, other=0)
    return tl.load(table + place // BLOCK_SIZE)


@triton.jit
def load_tile(
    keys, values, blocks, place, visible, MASKED: tl.constexpr, STRIDES: tl.constexpr, SHAPE: tl.constexpr, DTYPE
):
    """Gather keys and values [N, d'] at ``place`` [N] in ``blocks`` [N], in q's dtype; d' is d padded to a power of two.

    ``keys`` and ``values`` point at the head in block 0. Where MASKED, places that are not ``visible`` [N] are not read
    and give zeros.
    """
    BLOCK_SIZE: tl.constexpr = SHAPE[3]
    HEAD: tl.constexpr = SHAPE[2]
    PADDED: tl.constexpr = triton.next_power_of_2(HEAD)
    lane = tl.arange(0, PADDED)
    offset = (blocks.to(tl.int64) * STRIDES[0] + (place % BLOCK_SIZE) * STRIDES[1])[:, None] + lane[None, :]
    if MASKED:
        inside = visible[:, None]
        if HEAD != PADDED:
            inside = inside & (lane < HEAD)[None, :]
        k = tl.load(keys + offset, inside, other=0.0)
        v = tl.load(values + offset, inside, other=0.0)
    elif HEAD == PADDED:
        k = tl.load(keys + offset)
        v = tl.load(values + offset)
    else:
        k = tl.load(keys + offset, (lane < HEAD)[None, :], other=0.0)
        v = tl.load(values + offset, (lane < HEAD)[None, :], other=0.0)
    return k.to(DTYPE), v.to(DTYPE)


@triton.jit
def cap(scores, SOFTCAP: tl.constexpr):
    """``SOFTCAP * tanh(scores / SOFTCAP)``."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    # tanh(x) = 1 - 2 / (exp(2 x) + 1), which is right at both ends.
    return SOFTCAP - 2.0 * SOFTCAP / (tl.exp2(scores * (2.0 * LOG2_E / SOFTCAP)) + 1.0)


@triton.jit
def softmax_step(acc, mass, peak, scores, v, scale, MASKED: tl.constexpr):
    """Take a tile into the running softmax (Milakov and Gimelshein 2018, arXiv 1805.02867).

    acc [M, d'], mass [M] and peak [M] fp32; scores [M, N] fp32 unscaled, -inf where hidden; v [N, d']. Exponentials are
    of base two: ``scale`` holds log2(e) and is positive.
    """
    new = tl.maximum(peak, tl.max(scores, 1) * scale)
    base = new
    if MASKED:
        # A line that has seen no key yet keeps a peak of -inf; 0 in its place avoids inf - inf.
        base = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores * scale - base[:, None])
    decay = tl.exp2(peak - base)
    mass = mass * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, mass, new
