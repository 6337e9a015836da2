"""Products of few tokens with a weight matrix: both kernels read the weights once, at the speed of memory.

Up to 2 tokens run as multiply and add, up to 64 on the matrix units where that pays, others in cuBLAS. No result depends
on timing: a program holds all of K for its outputs, so there is nothing to reduce between programs.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.activations import Activation
from octavo.kernels.gpu import quantized, quantized_linear
from octavo.kernels.gpu.activation import act_and_mul, silu
from octavo.kernels.gpu.launch import overlaps, prefetch, wait_for_inputs
from octavo.kernels.gpu.quantized import PackedWeight
from octavo.kernels.weights import Weight

__all__ = ["linear", "linear_act_and_mul", "prepare_weight"]

STREAM_TOKENS = 2
"""Most tokens of the multiply-and-add kernel; measured, from 3 on its arithmetic takes longer than the weights."""

TILE_TOKENS = 64
"""Most tokens of the matrix-unit kernel; what is behind was not measured."""

MANY_OUTPUTS = 16384
"""From here on there are more programs than the processor holds at a time."""

_LARGE_SIZE = 4096
_LARGE_OUTPUTS = 65536

_HALF_TYPES = (torch.bfloat16, torch.float16)


@triton.jit
def _ahead(lines, AHEAD: tl.constexpr, OVERLAP: tl.constexpr):
    """Fetch the first AHEAD columns of the lines [rows, 1] of pointers while the kernel before still runs.

    Only into the L2 cache, which is coherent: a weight that was written a moment ago is still read rightly.
    """
    if OVERLAP and AHEAD > 0:
        prefetch(lines + tl.arange(0, AHEAD // 64)[None, :] * 64)


@triton.jit
def _products(w, x, left, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """w [ROWS, COLUMNS] fp32 times the values at x, of which ``left`` are left -> sums of each 8, [ROWS, COLUMNS / 8].

    Eight neighbours lie in one thread, so the sum needs no exchange, and the sums an eighth of the registers.
    """
    place = tl.arange(0, COLUMNS)
    if EVEN:
        value = tl.load(x + place, eviction_policy="evict_last").to(tl.float32)
    else:
        value = tl.load(x + place, place < left, other=0.0).to(tl.float32)
    return tl.sum(tl.reshape(w * value[None, :], [ROWS, COLUMNS // 8, 8]), axis=2)


@triton.jit
def _store(out, total, bias, output, num_outputs, mask, GATED: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Store sums at out + output; total is a pair (gate, up) where GATED, with both biases [2 * num_outputs]."""
    dtype: tl.constexpr = out.dtype.element_ty
    if GATED:
        gate, up = total
        if HAS_BIAS:
            gate += tl.load(bias + output, mask, other=0.0).to(tl.float32)
            up += tl.load(bias + num_outputs + output, mask, other=0.0).to(tl.float32)
        activated = silu(gate.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        tl.store(out + output, (activated * up.to(dtype).to(tl.float32)).to(dtype), mask)
    else:
        if HAS_BIAS:
            total += tl.load(bias + output, mask, other=0.0).to(tl.float32)
        tl.store(out + output, total.to(dtype), mask)


@triton.jit
def _stream_kernel(
    x,
    weight,
    bias,
    out,
    x_stride,
    num_outputs,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program i takes ROWS rows of weights for all tokens; where GATED, each gate's row beside its up row."""
    WAYS: tl.constexpr = 2 if GATED else 1
    OUTPUTS: tl.constexpr = ROWS // WAYS
    EVEN: tl.constexpr = K % COLUMNS == 0
    lane = tl.arange(0, ROWS)
    # Rows behind the last output are read as the last one again: the loads need no mask then.
    row = tl.minimum(tl.program_id(0) * OUTPUTS + lane // WAYS, num_outputs - 1) + lane % WAYS * num_outputs
    lines = weight + row.to(tl.int64)[:, None] * K
    _ahead(lines, AHEAD, OVERLAP)
    wait_for_inputs(OVERLAP)
    place = tl.arange(0, COLUMNS)[None, :]
    first = tl.zeros([ROWS, COLUMNS // 8], tl.float32)
    second = first
    for k in tl.range(0, K, COLUMNS, loop_unroll_factor=UNROLL):
        if EVEN:
            w = tl.load(lines + k + place, eviction_policy="evict_first").to(tl.float32)
        else:
            w = tl.load(lines + k + place, place < K - k, other=0.0).to(tl.float32)
        first += _products(w, x + k, K - k, ROWS, COLUMNS, EVEN)
        if TOKENS == 2:
            second += _products(w, x + x_stride + k, K - k, ROWS, COLUMNS, EVEN)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    mask = output < num_outputs
    for token in tl.static_range(TOKENS):
        total = tl.sum(first if token == 0 else second, axis=1)
        if GATED:
            total = tl.split(tl.reshape(total, [OUTPUTS, 2]))
        _store(out + token * num_outputs, total, bias, output, num_outputs, mask, GATED, HAS_BIAS)


@triton.jit(do_not_specialize=["num_tokens"])
def _tile_kernel(
    x,
    tiles,
    weight,
    bias,
    out,
    num_tokens,
    num_outputs,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program i takes OUTPUTS outputs, gate and up rows of each where GATED; x and tiles are tensor descriptors.

    x has blocks [TOKENS, COLUMNS], tiles, the weights as [gate and up, outputs, K], blocks [WAYS, OUTPUTS, COLUMNS].
    The weights are the left operand: their rows fill the matrix unit, which the tokens would not.
    """
    WAYS: tl.constexpr = 2 if GATED else 1
    ROWS: tl.constexpr = WAYS * OUTPUTS
    first = tl.program_id(0) * OUTPUTS
    if OVERLAP and AHEAD > 0:
        lane = tl.arange(0, ROWS)
        row = tl.minimum(first + lane % OUTPUTS, num_outputs - 1) + lane // OUTPUTS * num_outputs
        _ahead(weight + row.to(tl.int64)[:, None] * K, AHEAD, OVERLAP)
    wait_for_inputs(OVERLAP)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for k in tl.range(0, K, COLUMNS, num_stages=STAGES):
        w = tl.reshape(tiles.load([0, first, k]), [ROWS, COLUMNS])
        total = tl.dot(w, tl.trans(x.load([0, k])), total)
    output = first + tl.arange(0, OUTPUTS)[:, None]
    token = tl.arange(0, TOKENS)[None, :]
    mask = (output < num_outputs) & (token < num_tokens)
    if GATED:
        total = tl.split(tl.permute(tl.reshape(total, [2, OUTPUTS, TOKENS]), (1, 2, 0)))
    _store(out + token * num_outputs, total, bias, output, num_outputs, mask, GATED, HAS_BIAS)


@dataclass(frozen=True)
class StreamShape:
    """How the multiply-and-add kernel cuts its work: rows and columns of weights a turn, turns unrolled."""

    rows: int
    columns: int
    unroll: int
    num_warps: int = 4
    ahead: int = 512  # columns fetched into the L2 cache before the inputs are there


@dataclass(frozen=True)
class TileShape:
    """How the matrix-unit kernel cuts its work: outputs a program, columns a stage, stages in flight."""

    outputs: int
    columns: int
    stages: int
    num_warps: int = 4
    ahead: int = 512


def stream_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, shape: StreamShape, *, gated: bool = False
) -> Tensor:
    """Multiply one or two tokens x [T, K] by weight [N, K] of the same 16-bit dtype; K is a multiple of 8."""
    num_tokens, size = x.shape
    num_outputs = weight.shape[0] // (2 if gated else 1)
    out = torch.empty((num_tokens, num_outputs), dtype=x.dtype, device=x.device)
    overlap = overlaps(x)
    _stream_kernel[(triton.cdiv(num_outputs, shape.rows // (2 if gated else 1)),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        x.stride(0),
        num_outputs,
        K=size,
        TOKENS=num_tokens,
        GATED=gated,
        HAS_BIAS=bias is not None,
        ROWS=shape.rows,
        COLUMNS=shape.columns,
        UNROLL=shape.unroll,
        AHEAD=min(shape.ahead, size // 64 * 64),
        OVERLAP=overlap,
        num_warps=shape.num_warps,
        launch_pdl=overlap,
    )
    return out


def tile_product(x: Tensor, weight: Tensor, bias: Tensor | None, shape: TileShape, *, gated: bool = False) -> Tensor:
    """Multiply few tokens x [T, K] by weight [N, K] of the same 16-bit dtype; lines begin at multiples of 16 bytes."""
    num_tokens, size = x.shape
    ways = 2 if gated else 1
    num_outputs = weight.shape[0] // ways
    padded = max(16, triton.next_power_of_2(num_tokens))
    out = torch.empty((num_tokens, num_outputs), dtype=x.dtype, device=x.device)
    lines = TensorDescriptor(x, [num_tokens, size], [x.stride(0), 1], [padded, shape.columns])
    tiles = TensorDescriptor(
        weight, [ways, num_outputs, size], [num_outputs * size, size, 1], [ways, shape.outputs, shape.columns]
    )
    overlap = overlaps(x)
    _tile_kernel[(triton.cdiv(num_outputs, shape.outputs),)](
        lines,
        tiles,
        weight,
        weight if bias is None else bias,
        out,
        num_tokens,
        num_outputs,
        K=size,
        TOKENS=padded,
        GATED=gated,
        HAS_BIAS=bias is not None,
        OUTPUTS=shape.outputs,
        COLUMNS=shape.columns,
        STAGES=shape.stages,
        AHEAD=min(shape.ahead, size // 64 * 64),
        OVERLAP=overlap,
        num_warps=shape.num_warps,
        launch_pdl=overlap,
    )
    return out


def prepare_weight(weight: Weight, dtype: torch.dtype) -> Tensor | PackedWeight:
    """Return a weight [N, K] as ``linear`` of this backend wants it, for inputs of a dtype; quantised ones stay packed."""
    return quantized.prepare(weight, dtype)


def linear(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: x [T, K], weight [N, K] (from ``prepare_weight``), bias [N] -> [T, N].

    Sums are fp32. The kernel is chosen by T, N and K alone. The reference is ``octavo.kernels.reference.linear``.
    """
    if isinstance(weight, PackedWeight):
        return quantized_linear.linear(x, weight, bias)
    if not _fits(x, weight):
        return functional.linear(x, weight, bias)
    return _product(x, weight, bias, gated=False)


def linear_act_and_mul(
    x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None, activation: Activation = "silu"
) -> Tensor:
    """``act_and_mul(linear(x, weight, bias))``: x [T, K], weight [2I, K], gate first, bias [2I] -> [T, I].

    For few tokens and silu it is one kernel; gate and up are rounded to x's dtype before the activation, as if they were
    two.
    """
    if isinstance(weight, PackedWeight):
        return quantized_linear.linear_act_and_mul(x, weight, bias, activation)
    if activation != "silu" or not _fits(x, weight):
        return act_and_mul(linear(x, weight, bias), activation)
    return _product(x, weight, bias, gated=True)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool) -> Tensor:
    tokens, (outputs, size) = x.shape[0], weight.shape
    if tokens == 1 or (tokens == STREAM_TOKENS and (size >= _LARGE_SIZE or outputs < 4096)):
        return stream_product(x, weight, bias, stream_shape(tokens, outputs, size), gated=gated)
    return tile_product(x, weight, bias, tile_shape(tokens, outputs, gated), gated=gated)


def stream_shape(tokens: int, outputs: int, size: int) -> StreamShape:
    """Return the fastest shape of those measured on an H200 at Llama-3.1-8B's and Qwen3-0.6B's products."""
    if tokens == 1:
        if outputs >= MANY_OUTPUTS:
            return StreamShape(4, 1024, 2, 2, 256) if size >= _LARGE_SIZE else StreamShape(8, 512, 4, 2, 256)
        if size >= _LARGE_SIZE:
            return StreamShape(2, 2048, 2, 4, 512)
        return StreamShape(4 if outputs >= 6144 else 2, 1024, 3, 4, 256)
    if size < _LARGE_SIZE:
        return StreamShape(2, 1024, 1, 4, 256)
    return StreamShape(4, 1024, 2, 4, 256) if outputs >= 6144 else StreamShape(8, 1024, 2, 4, 512)


def tile_shape(tokens: int, outputs: int, gated: bool) -> TileShape:
    """Return the fastest shape of those measured on an H200 at Llama-3.1-8B's and Qwen3-0.6B's products."""
    many = outputs >= MANY_OUTPUTS
    if tokens > 16:
        if gated:
            return TileShape(32, 128, 4, ahead=256)
        return TileShape(128, 128, 4, ahead=256) if many else TileShape(64, 128, 6, ahead=256)
    if gated:
        return TileShape(32, 256, 3 if many else 4, ahead=256)
    if many:
        return TileShape(64, 128, 4, ahead=256)
    return TileShape(64, 256, 3 if outputs > 4096 else 4, ahead=256)


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Return whether one of the kernels here takes this product."""
    return (
        x.dim() == 2
        and 0 < x.shape[0] <= TILE_TOKENS
        and _pays(x.shape[0], *weight.shape)
        and x.dtype in _HALF_TYPES
        and weight.dtype == x.dtype
        and overlaps(x)  # the processors that have it have what the kernels use
        and weight.is_contiguous()
        and x.stride(1) == 1
        and (x.stride(0) % 8, x.shape[1] % 8, x.data_ptr() % 16, weight.data_ptr() % 16) == (0, 0, 0, 0)
    )


def _pays(tokens: int, outputs: int, size: int) -> bool:
    """Return whether the kernels here were faster than cuBLAS in a pass over a whole model, not only alone.

    On the matrix units the layers of Llama-3.1-8B were not: the times of the products alone add up to 3.90 ms at 8
    tokens, one after the other, each launched ahead, they took 4.16, cuBLAS 4.02. Small layers and output heads are.
    """
    return tokens <= STREAM_TOKENS or size < _LARGE_SIZE or outputs >= _LARGE_OUTPUTS
