"""Device functions for the noise of ``octavo.kernels.philox``: the words, exact noise in fp64, near noise in fp32."""

import os

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

NEAR_NOISE_ERROR = 2.0**-7
"""Bound on the error of ``near_gumbel_bits``: it drops u^2 / 3 <= 1/300 of the exponential noise, 0.0048 bits."""


@triton.jit
def philox_words(group, position, choice, seed):
    """The four 32-bit words of ids ``4 * group .. 4 * group + 3``: group uint32 of any shape -> 4 x uint32.

    seed (int64), position and choice are scalars, taken modulo 2^64 and 2^32. Philox4x32-10 with the seed's low and
    high word as the key and the counter (group, position, choice, 0).
    """
    c0 = group
    c1 = tl.zeros_like(group) + position.to(tl.uint32)
    c2 = tl.zeros_like(group) + choice.to(tl.uint32)
    c3 = tl.zeros_like(group)
    k0 = tl.zeros_like(group) + seed.to(tl.uint32)
    k1 = tl.zeros_like(group) + (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        # One wide multiplication gives both halves of a product.
        low = c0.to(tl.uint64) * 0xD2511F53
        high = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (high >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = high.to(tl.uint32)
        c2 = (low >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = low.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def words_of_ids(ids, position, choice, seed):
    """The 32-bit word of each id: ids int32 of any shape -> uint32."""
    w0, w1, w2, w3 = philox_words((ids >> 2).to(tl.uint32), position, choice, seed)
    lane = ids & 3
    return tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))


@triton.jit
def gumbel(words):
    """``-log(-log(1 - u))`` in fp64 with ``u = (word + 1/2) / 2^32``; 1 - u is exact in fp64, so no log1p is needed."""
    rest = (4294967295.5 - words.to(tl.float64)) * 2.0**-32
    return -tl.log(-tl.log(rest))


@triton.jit
def _fast_log2(x):
    """log2 of normal fp32 values, within a few units in the last place: one instruction on the device."""
    if _INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def near_gumbel_bits(words):
    """``gumbel(words) / log(2)`` in fp32, within ``NEAR_NOISE_ERROR`` and rounding.

    For u < 0.1 the exponential noise is u + u^2 / 2, else it is the logarithm of 1 - u, taken from the word's complement
    so that it is right for u near 1 as well.
    """
    is_low = words < 429496730
    part = (tl.where(is_low, words, words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.0**-32
    noise = tl.where(is_low, part * 0.5 * part + part, _fast_log2(part) * -0.6931471805599453)
    return -_fast_log2(noise)
