"""Products with a weight matrix whose bits do not depend on the number of tokens, nor on a token's place among them.

Each output is one chain: an fp32 sum from zero, to which the matrix unit adds the products of 16 elements of K at a time,
from the first to the last. No program shares K with another, and nothing is added behind the chain but the bias.

The tiles that programs work on do follow the number of tokens. They say which outputs a program computes at a time, and
which operand is the left one, but no link of a chain: that the matrix unit of compute capability 9.0 gives the same bits
for a link wherever it stands in an instruction of whatever shape is what ``tests/gpu/test_batch_invariance.py`` checks
there. Other processors, and dtypes and sizes that have no tensor descriptors, get one tile for all.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.gpu.launch import overlaps, wait_for_inputs

HALF_TYPES = (torch.bfloat16, torch.float16)


class Tile(NamedTuple):
    """What a program computes at a time, and how.

    With ``weights_left`` the weights are the left operand of the matrix unit, which takes 64 lines of it at least and
    as few as 8 of the right one: right for few tokens.
    """

    tokens: int
    outputs: int
    depth: int  # of K, a stage
    num_warps: int
    num_stages: int
    weights_left: bool
    persistent: bool = False


@triton.jit
def _place(tile, num_tokens, num_outputs, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr):
    """Return the first token and output of a tile: tokens run first within a group, so that weights are read once."""
    token_tiles = tl.cdiv(num_tokens, TOKENS)
    output_tiles = tl.cdiv(num_outputs, OUTPUTS)
    group = tile // (GROUP * output_tiles)
    size = tl.minimum(token_tiles - group * GROUP, GROUP)
    rest = tile % (GROUP * output_tiles)
    return (group * GROUP + rest % size) * TOKENS, rest // size * OUTPUTS


@triton.jit
def _store(total, bias, out, first_token, first_output, num_tokens, num_outputs, HAS_BIAS: tl.constexpr):
    """Add the bias and store a tile [tokens, outputs] of fp32 sums."""
    token = first_token + tl.arange(0, total.shape[0])
    output = first_output + tl.arange(0, total.shape[1])
    if HAS_BIAS:
        total += tl.load(bias + output, output < num_outputs, other=0.0).to(tl.float32)[None, :]
    place = out + token.to(tl.int64)[:, None] * num_outputs + output[None, :]
    mask = (token < num_tokens)[:, None] & (output < num_outputs)[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def descriptor_kernel(
    lines,
    weights,
    bias,
    out,
    num_tokens,
    num_tiles,
    num_outputs,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    WEIGHTS_LEFT: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Programs take every n-th tile; lines and weights are tensor descriptors of [T, K] and [N, K], zeros outside."""
    wait_for_inputs(OVERLAP)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLATTEN):
        first_token, first_output = _place(tile, num_tokens, num_outputs, TOKENS, OUTPUTS, GROUP)
        total = tl.zeros([OUTPUTS, TOKENS] if WEIGHTS_LEFT else [TOKENS, OUTPUTS], tl.float32)
        for k in range(0, K, DEPTH):
            x = lines.load([first_token, k])
            w = weights.load([first_output, k])
            total = tl.dot(w, tl.trans(x), total) if WEIGHTS_LEFT else tl.dot(x, tl.trans(w), total)
        if WEIGHTS_LEFT:
            total = tl.trans(total)
        _store(total, bias, out, first_token, first_output, num_tokens, num_outputs, HAS_BIAS)


@triton.jit(do_not_specialize=["num_tokens"])
def pointer_kernel(
    lines,
    weights,
    bias,
    out,
    num_tokens,
    num_outputs,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile a program, of any dtype, for any K."""
    wait_for_inputs(OVERLAP)
    first_token, first_output = _place(tl.program_id(0), num_tokens, num_outputs, TOKENS, OUTPUTS, GROUP)
    token = first_token + tl.arange(0, TOKENS)
    output = first_output + tl.arange(0, OUTPUTS)
    lane = tl.arange(0, DEPTH)
    # Lines outside are read as the last one again: what they give is not stored.
    x_place = lines + tl.minimum(token, num_tokens - 1).to(tl.int64)[:, None] * K + lane[None, :]
    w_place = weights + tl.minimum(output, num_outputs - 1).to(tl.int64)[:, None] * K + lane[None, :]
    total = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for k in range(0, K, DEPTH):
        inside = (lane < K - k)[None, :]
        x = tl.load(x_place + k, inside, other=0.0)
        w = tl.load(w_place + k, inside, other=0.0)
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    _store(total, bias, out, first_token, first_output, num_tokens, num_outputs, HAS_BIAS)


# For so many tokens at most. The last one is for any number.
_TILES = (
    (16, Tile(16, 64, 256, 4, 3, weights_left=True)),
    (32, Tile(32, 64, 128, 4, 5, weights_left=True)),
    (64, Tile(64, 64, 128, 4, 4, weights_left=True)),
    (512, Tile(128, 64, 64, 4, 4, weights_left=False)),
)
_LARGE = Tile(128, 256, 64, 8, 4, weights_left=False, persistent=True)
_ONE_TILE = Tile(64, 64, 64, 4, 4, weights_left=False)
_POINTER_TILE = Tile(64, 64, 32, 4, 3, weights_left=False)
_GROUP = 8
"""Tiles of tokens that share weights while these are in the L2 cache."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: x [T, K], weight [N, K], contiguous, bias [N], of one dtype -> [T, N].

    Sums are fp32, and the bits of a line of the result depend on that line of x, weight and bias alone. The reference is
    ``octavo.kernels.reference.linear``.
    """
    num_tokens = x.shape[0]
    out = torch.empty((num_tokens, weight.shape[0]), dtype=x.dtype, device=x.device)
    if num_tokens > 0:
        if has_descriptors(weight):
            descriptor_product(x, weight, bias, out, choose_tile(num_tokens, weight.device))
        else:
            _pointer_product(x.contiguous(), weight, bias, out)
    return out


def choose_tile(num_tokens: int, device: torch.device) -> Tile:
    """Return the tile for so many tokens."""
    if _capability(device) != (9, 0):
        return _ONE_TILE
    return next((tile for most, tile in _TILES if num_tokens <= most), _LARGE)


def has_descriptors(weight: Tensor) -> bool:
    """Return whether products with a weight go through tensor descriptors: 16-bit lines at multiples of 16 bytes."""
    return (
        overlaps(weight)  # the processors that have it have descriptors
        and weight.dtype in HALF_TYPES
        and weight.shape[1] % 8 == 0
        and weight.data_ptr() % 16 == 0
    )


def descriptor_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: Tile) -> None:
    """Write the product to out with a given tile; the weight has descriptors."""
    num_tokens, size = x.shape
    num_outputs = weight.shape[0]
    lines = x.contiguous()
    if lines.data_ptr() % 16:
        lines = lines.clone()
    num_tiles = triton.cdiv(num_tokens, tile.tokens) * triton.cdiv(num_outputs, tile.outputs)
    programs = min(num_tiles, _num_multiprocessors(x.device)) if tile.persistent else num_tiles
    descriptor_kernel[(programs,)](
        TensorDescriptor(lines, [num_tokens, size], [size, 1], [tile.tokens, tile.depth]),
        TensorDescriptor(weight, [num_outputs, size], [size, 1], [tile.outputs, tile.depth]),
        weight if bias is None else bias,
        out,
        num_tokens,
        num_tiles,
        num_outputs,
        K=size,
        HAS_BIAS=bias is not None,
        TOKENS=tile.tokens,
        OUTPUTS=tile.outputs,
        DEPTH=tile.depth,
        WEIGHTS_LEFT=tile.weights_left,
        GROUP=_GROUP,
        FLATTEN=tile.persistent,
        OVERLAP=True,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=True,
    )


def _pointer_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    tile, overlap = _POINTER_TILE, overlaps(x)
    num_tiles = triton.cdiv(x.shape[0], tile.tokens) * triton.cdiv(weight.shape[0], tile.outputs)
    pointer_kernel[(num_tiles,)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        x.shape[0],
        weight.shape[0],
        K=x.shape[1],
        HAS_BIAS=bias is not None,
        TOKENS=tile.tokens,
        OUTPUTS=tile.outputs,
        DEPTH=tile.depth,
        GROUP=_GROUP,
        OVERLAP=overlap,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=overlap,
    )


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
