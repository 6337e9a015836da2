"""Products with a weight matrix whose bits do not depend on the number of tokens, nor on a token's place among them.

Each output is one chain: an fp32 sum from zero, to which the products over K are added from the first to the last, as
many at a time as the matrix unit takes. One program computes all of a chain, and programs work on tiles of one shape
whatever the number of tokens is, so that the same instructions compute a token's outputs in every step.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.activations import Activation
from octavo.kernels.gpu.activation import act_and_mul
from octavo.kernels.gpu.launch import overlaps, wait_for_inputs
from octavo.kernels.gpu.quantized import PackedWeight
from octavo.kernels.gpu.quantized_linear import invariant_linear

HALF_TYPES = (torch.bfloat16, torch.float16)


class Tile(NamedTuple):
    """What a program computes, and how."""

    tokens: int
    outputs: int
    depth: int  # of K, a stage
    num_warps: int
    num_stages: int


TILE = Tile(64, 64, 64, 4, 6)
"""Of products through tensor descriptors.

Chosen for few tokens: 64 lines are the fewest that a matrix instruction of compute capability 9.0 takes, 64 outputs make
64 programs of N = 4096, and six stages keep 40 KB of weights under way in a program and let two share a multiprocessor.
Larger tiles would read weights and tokens from the L2 cache less often, which many tokens are slow for.
"""

POINTER_TILE = Tile(64, 64, 32, 4, 3)
"""Of all other products: fp32, K that is no multiple of 8, processors without descriptors."""

_GROUP = tl.constexpr(16)
"""Tiles of tokens that share weights while these are in the L2 cache."""


@triton.jit
def _place(num_tokens, num_outputs, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr):
    """Return the first token and the first output of the program's tile: in a group, tokens run before outputs."""
    tile = tl.program_id(0)
    token_tiles = tl.cdiv(num_tokens, TOKENS)
    tiles_a_group = tl.cdiv(num_outputs, OUTPUTS) * _GROUP
    first = tile // tiles_a_group * _GROUP
    size = tl.minimum(token_tiles - first, _GROUP)
    rest = tile % tiles_a_group
    return (first + rest % size) * TOKENS, rest // size * OUTPUTS


@triton.jit
def _store(total, bias, out, token, output, num_tokens, num_outputs, HAS_BIAS: tl.constexpr):
    """Add the bias to fp32 sums [tokens, outputs], round and store them."""
    if HAS_BIAS:
        total += tl.load(bias + output, output < num_outputs, other=0.0).to(tl.float32)[None, :]
    place = out + token.to(tl.int64)[:, None] * num_outputs + output[None, :]
    mask = (token < num_tokens)[:, None] & (output < num_outputs)[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["num_tokens"])
def descriptor_kernel(
    lines,
    weights,
    bias,
    out,
    num_tokens,
    num_outputs,
    size,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile a program; lines and weights are tensor descriptors of [T, K] and [N, K] and give zeros outside."""
    wait_for_inputs(OVERLAP)
    first_token, first_output = _place(num_tokens, num_outputs, TOKENS, OUTPUTS)
    total = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for k in range(0, size, DEPTH):
        x = lines.load([first_token, k])
        w = weights.load([first_output, k])
        total = tl.dot(x, tl.trans(w), total)
    token, output = first_token + tl.arange(0, TOKENS), first_output + tl.arange(0, OUTPUTS)
    _store(total, bias, out, token, output, num_tokens, num_outputs, HAS_BIAS)


@triton.jit(do_not_specialize=["num_tokens"])
def pointer_kernel(
    lines,
    weights,
    bias,
    out,
    num_tokens,
    num_outputs,
    size,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile a program, of any dtype, for any K; lines and weights are contiguous [T, K] and [N, K]."""
    wait_for_inputs(OVERLAP)
    first_token, first_output = _place(num_tokens, num_outputs, TOKENS, OUTPUTS)
    token, output = first_token + tl.arange(0, TOKENS), first_output + tl.arange(0, OUTPUTS)
    lane = tl.arange(0, DEPTH)
    # Lines outside are read as the last one again: what they give is not stored.
    x_place = lines + tl.minimum(token, num_tokens - 1).to(tl.int64)[:, None] * size + lane[None, :]
    w_place = weights + tl.minimum(output, num_outputs - 1).to(tl.int64)[:, None] * size + lane[None, :]
    total = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for k in range(0, size, DEPTH):
        inside = (lane < size - k)[None, :]
        x = tl.load(x_place + k, inside, other=0.0)
        w = tl.load(w_place + k, inside, other=0.0)
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    _store(total, bias, out, token, output, num_tokens, num_outputs, HAS_BIAS)


def linear(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: x [T, K], weight [N, K] (from ``prepare_weight``), bias [N], of one dtype -> [T, N].

    Sums are fp32, the bias is added before they are rounded, and the bits of a line of the result depend on that line of
    x, on weight and on bias alone. The reference is ``octavo.kernels.reference.linear``.

    Raises:
        ValueError: the weight is not contiguous.
    """
    if isinstance(weight, PackedWeight):
        return invariant_linear(x, weight, bias)
    if not weight.is_contiguous():
        raise ValueError(f"weight of strides {weight.stride()}: expected a contiguous one")
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    if out.numel():
        if has_descriptors(weight):
            descriptor_product(x, weight, bias, out)
        else:
            _pointer_product(x.contiguous(), weight, bias, out)
    return out


def linear_act_and_mul(
    x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None, activation: Activation = "silu"
) -> Tensor:
    """``act_and_mul(linear(x, weight, bias))``: x [T, K], weight [2I, K], gate first, bias [2I] -> [T, I]."""
    return act_and_mul(linear(x, weight, bias), activation)


def has_descriptors(weight: Tensor) -> bool:
    """Return whether products with a weight go through tensor descriptors: 16-bit lines at multiples of 16 bytes.

    The weight alone decides, so that it is the same in every step.
    """
    return (
        overlaps(weight)  # the processors that have it have descriptors
        and weight.dtype in HALF_TYPES
        and weight.shape[1] % 8 == 0
        and weight.data_ptr() % 16 == 0
    )


def descriptor_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: Tile = TILE) -> None:
    """Write the product to out [T, N]; the weight has descriptors. A step must not mix tiles: bits may differ."""
    num_tokens, size = x.shape
    num_outputs = weight.shape[0]
    lines = x.contiguous()
    if lines.data_ptr() % 16:
        lines = lines.clone()
    descriptor_kernel[_grid(num_tokens, num_outputs, tile)](
        TensorDescriptor(lines, [num_tokens, size], [size, 1], [tile.tokens, tile.depth]),
        TensorDescriptor(weight, [num_outputs, size], [size, 1], [tile.outputs, tile.depth]),
        weight if bias is None else bias,
        out,
        num_tokens,
        num_outputs,
        size,
        HAS_BIAS=bias is not None,
        TOKENS=tile.tokens,
        OUTPUTS=tile.outputs,
        DEPTH=tile.depth,
        OVERLAP=True,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=True,
    )


def _pointer_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    tile, overlap = POINTER_TILE, overlaps(x)
    (num_tokens, size), num_outputs = x.shape, weight.shape[0]
    pointer_kernel[_grid(num_tokens, num_outputs, tile)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        num_tokens,
        num_outputs,
        size,
        HAS_BIAS=bias is not None,
        TOKENS=tile.tokens,
        OUTPUTS=tile.outputs,
        DEPTH=tile.depth,
        OVERLAP=overlap,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=overlap,
    )


def _grid(num_tokens: int, num_outputs: int, tile: Tile) -> tuple[int]:
    return (triton.cdiv(num_tokens, tile.tokens) * triton.cdiv(num_outputs, tile.outputs),)
