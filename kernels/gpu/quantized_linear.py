"""Products of tokens with packed weights: one kernel for few and some tokens, a plain matrix and cuBLAS for many."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.activations import Activation
from octavo.kernels.gpu.activation import act_and_mul
from octavo.kernels.gpu.counters import counters
from octavo.kernels.gpu.launch import overlaps
from octavo.kernels.gpu.quantized import PackedWeight
from octavo.kernels.gpu.quantized_dequantize import dequantize
from octavo.kernels.gpu.quantized_inputs import take_inputs, to_float8
from octavo.kernels.gpu.quantized_product import packed_kernel
from octavo.kernels.gpu.quantized_sparse import sparse_product

FEW_TOKENS = 64
"""Most tokens for which reading the weights is what takes time; unmeasured. Behind it float8 inputs pay, where wanted."""

PACKED_TOKENS = 512
"""Most tokens of the kernel for packed weights; unmeasured, from an estimate of what writing the plain matrix takes."""


@dataclass(frozen=True)
class PackedShape:
    """How the kernel for packed weights cuts its work."""

    rows: int  # of weights a program: outputs, or half as many gates and as many ups
    tokens: int  # a program, a power of two from 8 on
    depth: int  # blocks of inputs a stage; 1 where that does not divide a row's blocks
    stages: int  # in flight
    split: int  # programs that share a tile's inputs
    num_warps: int = 4
    ahead: int = 4  # blocks fetched into the L2 cache before the inputs are there


def packed_shape(tokens: int, weight: PackedWeight, multiprocessors: int) -> PackedShape:
    """Return how to cut a product. All of these are unmeasured: chosen by counting instructions and bytes.

    Few tokens are bound by memory and by unpacking, and want many warps a multiprocessor: inputs are shared out until
    there are about three programs for each, or until partial results take as many bytes as the weights. From 65 tokens
    on the matrix unit is the limit, and a program more than there are multiprocessors takes a whole turn.
    """
    (outputs, size), blocks = weight.shape, weight.num_blocks
    tiles = -(-outputs // 128)
    if tokens > FEW_TOKENS:
        padded = 128 if tokens <= 128 else 256
        split = max(1, min(4, multiprocessors // (tiles * -(-tokens // padded)), blocks // 8))
        return PackedShape(128, padded, 1, 4 if padded == 128 else 3, split, num_warps=8)
    padded = max(8, triton.next_power_of_2(tokens))
    depth, stages = (max(1, 8 // weight.bits), 3) if padded <= 16 else (1, 3)
    most = max(1, min(16, blocks // depth // 2, size * weight.bits // (64 * padded)))
    split = max(1, min(most, round(3 * multiprocessors / tiles)))
    rows = 128 if tiles * split > multiprocessors else 64
    return PackedShape(rows, padded, depth, stages, split)


INVARIANT_SHAPE = PackedShape(128, 64, 1, 4, 1)
"""Of products whose bits do not depend on the number of tokens: one shape for all, and no inputs shared out."""


def packed_product(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    shape: PackedShape,
    *,
    activation: Activation | None = None,
    addend: Tensor | None = None,
) -> Tensor:
    """Multiply x [T, K] by a packed weight of its dtype, inputs in the packed order, T > 0.

    ``addend`` [T, N] fp32 is added to the sums. With an ``activation``, outputs are ``act(gate) * up``.
    """
    num_tokens = x.shape[0]
    rows, ways = weight.shape[0], 1 if activation is None else 2
    num_outputs = rows // ways
    x = _aligned(x)
    depth = shape.depth if weight.num_blocks % shape.depth == 0 else 1
    split = min(shape.split, weight.num_blocks // depth)
    token_tiles = triton.cdiv(num_tokens, shape.tokens)
    tiles = triton.cdiv(num_outputs, shape.rows // ways) * token_tiles
    out = torch.empty((num_tokens, num_outputs), dtype=x.dtype, device=x.device)
    sums = out if split == 1 else torch.empty((split, num_tokens, rows), dtype=torch.float32, device=x.device)
    overlap = overlaps(x)
    packed_kernel[(tiles * split,)](
        TensorDescriptor(x, [num_tokens, x.shape[1]], [x.stride(0), 1], [shape.tokens, depth * weight.block]),
        weight.words,
        weight.metas,
        weight.metas if weight.scales is None else weight.scales,
        out if bias is None else bias,
        out if addend is None else addend,
        out,
        sums,
        out if split == 1 else counters(x.device, tiles),
        num_tokens,
        num_outputs,
        weight.metas.shape[1],
        weight.num_blocks,
        split,
        KIND=weight.kind,
        LAYOUT=(weight.bits, weight.width, weight.group_size),
        STRIDES=weight.strides,
        TILE=(
            shape.rows,
            shape.tokens,
            depth,
            shape.stages,
            _ahead(shape.ahead, weight.num_blocks // depth // split * depth),
        ),
        WAYS=ways,
        ACTIVATION=activation,
        HAS=(weight.scales is not None, bias is not None, addend is not None, split > 1),
        OVERLAP=overlap,
        num_warps=shape.num_warps,
        launch_pdl=overlap,
    )
    return out


def _ahead(wanted: int, least: int) -> int:
    """Return the largest power of two that is neither above what is wanted nor above the fewest blocks of a part."""
    return 1 << (min(wanted, least).bit_length() - 1)


def _aligned(x: Tensor) -> Tensor:
    """Return x [T, K] such that lines begin at multiples of 16 bytes; K may grow, by zeros."""
    if x.shape[1] % 8:
        return functional.pad(x, (0, -x.shape[1] % 8))
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: x [T, K], packed weight [N, K], bias [N] -> [T, N]; sums are fp32."""
    return _product(x, weight, bias, None)


def linear_act_and_mul(
    x: Tensor, weight: PackedWeight, bias: Tensor | None = None, activation: Activation = "silu"
) -> Tensor:
    """``act_and_mul(linear(x, weight, bias))``: x [T, K], packed weight [2I, K], gate first -> [T, I]."""
    return _product(x, weight, bias, activation)


def invariant_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """``linear`` such that a token's bits do not depend on the others; inputs are not quantised."""
    return _in_registers(x, weight, bias, INVARIANT_SHAPE, None) if len(x) else _in_full(x, weight, bias)


def _product(x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: Activation | None) -> Tensor:
    num_tokens = x.shape[0]
    if num_tokens > FEW_TOKENS and weight.scales is not None and _takes_float8(x, weight):
        out = _float8_product(x, weight, weight.scales, bias)
    elif 0 < num_tokens <= (PACKED_TOKENS if weight.sparse is None else FEW_TOKENS):
        shape = packed_shape(num_tokens, weight, _multiprocessors(x.device))
        return _in_registers(x, weight, bias, shape, activation)
    else:
        out = _in_full(x, weight, bias)
    return out if activation is None else act_and_mul(out, activation)


def _in_registers(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, shape: PackedShape, activation: Activation | None
) -> Tensor:
    """Multiply by a packed weight, one number in a register at a time."""
    if weight.perm is not None:
        x = take_inputs(x, weight.perm)
    addend = None if weight.sparse is None else sparse_product(x, weight.sparse)
    return packed_product(x, weight, bias, shape, activation=activation, addend=addend)


def _in_full(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Write the plain matrix and multiply by it."""
    if weight.perm is not None:
        x = take_inputs(x, weight.perm)[:, : x.shape[1]]
    return functional.linear(x, dequantize(weight), bias)


def _takes_float8(x: Tensor, weight: PackedWeight) -> bool:
    """Return whether the checkpoint wants float8 inputs and PyTorch multiplies them with such a weight."""
    return weight.activations != "none" and x.dtype == torch.bfloat16 and overlaps(x) and weight.shape[0] % 16 == 0


def _float8_product(x: Tensor, weight: PackedWeight, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Quantise x [T, K] bf16 and multiply float8 by float8, with a scale of each token and of each output."""
    codes, token_scales = to_float8(x, weight.input_scale if weight.activations == "static" else None)
    matrix = weight.words.view(torch.float8_e4m3fn).view(-1, codes.shape[1])[: weight.shape[0]]
    return torch._scaled_mm(codes, matrix.T, token_scales[:, None], scales[None, :], bias=bias, out_dtype=x.dtype)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
