"""Quantised weights as the kernels here want them: codes packed anew, once, after loading.

What a packed weight stands for is what `octavo.kernels.weights.dequantized` says of the weight it was made of, except
that scales are first rounded to the model's dtype: a checkpoint's float16 scales lose bits in a bfloat16 model, about as
many as its weights do.
"""

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from octavo.kernels.gpu.quantized_codes import FLOAT8, FLOAT8_SCALED, GROUPED, TABLE, base
from octavo.kernels.gpu.quantized_product import TILE_ROWS
from octavo.kernels.weights import (
    Activations,
    Float8Weight,
    GroupedWeight,
    SparseRows,
    TableWeight,
    Weight,
    dequantized,
    unpack_codes,
)

HALF_TYPES = (torch.bfloat16, torch.float16)
WORD_BITS = 16
LEAST_WIDTH = 16
"""Fewest inputs that the matrix unit takes at a time, so fewest words of a block."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight matrix [N, K] of packed codes, for products with inputs of one 16-bit dtype.

    A row's codes come in blocks of 16 / bits * width inputs, padded with zeros to whole ones; code i of word j of a
    block is its input i * width + j. Rows are padded to whole tiles of TILE_ROWS.
    """

    words: Tensor  # int16: [tiles, blocks, TILE_ROWS, width], or [tiles, TILE_ROWS, blocks, width] of float8
    metas: Tensor  # [G or 8, tiles * TILE_ROWS] int32; see quantized_codes
    kind: int
    bits: int
    width: int
    group_size: int  # of metas, in inputs
    dtype: torch.dtype  # of the numbers that codes become
    shape: tuple[int, int]  # N, K
    scales: Tensor | None = None  # [N] fp32, times each sum
    perm: Tensor | None = None  # [K] int32: input k here is input perm[k] of the layer
    sparse: SparseRows | None = None  # added to the matrix
    input_scale: Tensor | None = None
    activations: Activations = "none"

    @property
    def block(self) -> int:
        """Inputs of a block."""
        return WORD_BITS // self.bits * self.width

    @property
    def num_blocks(self) -> int:
        """Blocks of a row."""
        return math.ceil(self.shape[1] / self.block)

    @property
    def strides(self) -> tuple[int, int]:
        """Words from one row's to the next row's, and to its next block's."""
        if self.kind in (FLOAT8, FLOAT8_SCALED):
            return self.num_blocks * self.width, self.width
        return self.width, TILE_ROWS * self.width


def prepare(weight: Weight, dtype: torch.dtype) -> Tensor | PackedWeight:
    """Pack a quantised weight for the kernels; what they do not take becomes a plain [N, K] of the dtype.

    That is every weight of an fp32 model, and sizes of groups and blocks that no checkpoint known to us has.
    """
    if isinstance(weight, Tensor):
        return weight.to(dtype)
    packed = None
    if dtype in HALF_TYPES:
        if isinstance(weight, GroupedWeight):
            packed = _pack_grouped(weight, dtype)
        elif isinstance(weight, TableWeight):
            packed = _pack_table(weight, dtype)
        else:
            packed = _pack_float8(weight, dtype)
    if packed is None:
        _log.warning("a %s is kept as plain %s: no kernel takes it", type(weight).__name__, dtype)
        return dequantized(weight, dtype)
    return packed


def _pack_grouped(weight: GroupedWeight, dtype: torch.dtype) -> PackedWeight | None:
    codes = unpack_codes(weight.packed, weight.bits)
    outputs, inputs = codes.shape
    width = 8 * weight.bits
    group = weight.group_size
    if weight.scales.shape[0] == 1:
        group = math.ceil(inputs / 128) * 128
    while width > LEAST_WIDTH and group % width:
        width //= 2
    if group % width:
        return None
    scales = weight.scales.to(dtype)
    zeros = torch.full_like(scales, 2 ** (weight.bits - 1)) if weight.zeros is None else weight.zeros.to(dtype)
    metas = _low(scales) | _low(-(zeros + base(dtype, weight.bits))) << 16
    blocks = math.ceil(inputs / (WORD_BITS // weight.bits * width))
    groups = math.ceil(blocks * (WORD_BITS // weight.bits * width) / group)
    metas = functional.pad(metas, (0, -outputs % TILE_ROWS, 0, groups - len(metas)))
    return PackedWeight(
        words=_blocks(codes, weight.bits, width).transpose(1, 2).contiguous(),
        metas=metas,
        kind=GROUPED,
        bits=weight.bits,
        width=width,
        group_size=group,
        dtype=dtype,
        shape=(outputs, inputs),
        perm=weight.perm,
    )


def _low(numbers: Tensor) -> Tensor:
    """Return the bits of 16-bit numbers as int32 without a sign."""
    return numbers.view(torch.int16).to(torch.int32) & 0xFFFF


def _blocks(codes: Tensor, bits: int, width: int) -> Tensor:
    """Codes [N, K] uint8 -> words [tiles, TILE_ROWS, blocks, width] int16."""
    per_word = WORD_BITS // bits
    outputs, inputs = codes.shape
    codes = functional.pad(codes, (0, -inputs % (per_word * width), 0, -outputs % TILE_ROWS))
    parts = codes.view(codes.shape[0] // TILE_ROWS, TILE_ROWS, -1, per_word, width)
    words = torch.zeros_like(parts[:, :, :, 0], dtype=torch.int32)
    for place in range(per_word):
        words |= parts[:, :, :, place].to(torch.int32) << (place * bits)
    return _signed(words)


def _signed(words: Tensor) -> Tensor:
    """Return the low 16 bits of int32 words as int16."""
    return torch.where(words >= 2**15, words - 2**16, words).to(torch.int16)


def _pack_table(weight: TableWeight, dtype: torch.dtype) -> PackedWeight | None:
    if weight.bits > 4:
        return None
    outputs = weight.packed.shape[0]
    codes = unpack_codes(weight.packed, weight.bits)
    table = functional.pad(weight.table.to(dtype), (0, 16 - weight.table.shape[1]))
    # Bytes of entry e: low ones in words 0 to 3, high ones in words 4 to 7.
    parts = table.view(torch.uint8).view(outputs, 16, 2).permute(2, 0, 1).contiguous().view(torch.int32)
    metas = parts.permute(0, 2, 1).reshape(8, outputs)
    width = 32
    words = _blocks(codes, 4, width).to(torch.int32) & 0xFFFF
    even, odd = words[..., 0::2], words[..., 1::2]
    # Codes of a pair of words are interleaved: code 0 of both, code 1 of both, ...
    pairs = torch.zeros_like(even, dtype=torch.int64)
    for place in range(4):
        pairs |= (even >> (4 * place) & 15).long() << (8 * place)
        pairs |= (odd >> (4 * place) & 15).long() << (8 * place + 4)
    words = _signed(torch.stack((pairs & 0xFFFF, pairs >> 16), dim=-1).flatten(-2))
    return PackedWeight(
        words=words.transpose(1, 2).contiguous(),
        metas=functional.pad(metas, (0, -outputs % TILE_ROWS)),
        kind=TABLE,
        bits=4,
        width=width,
        group_size=4 * width,
        dtype=dtype,
        shape=(outputs, codes.shape[1]),
        sparse=weight.sparse,
    )


def _pack_float8(weight: Float8Weight, dtype: torch.dtype) -> PackedWeight | None:
    width = 64
    outputs, inputs = weight.codes.shape
    row = torch.arange(outputs, device=weight.scales.device) // weight.block_n
    per_row = weight.scales[row]  # [N, B]
    whole = weight.block_k >= inputs
    group = 2 * width if whole else weight.block_k
    if group % width:
        return None
    metas = per_row.new_zeros(1, 1).view(torch.int32)
    if not whole:
        groups = math.ceil(math.ceil(inputs / (2 * width)) * 2 * width / group)
        metas = per_row.T.contiguous().view(torch.int32)
        metas = functional.pad(metas, (0, -outputs % TILE_ROWS, 0, groups - len(metas)))
    return PackedWeight(
        words=_blocks(weight.codes.view(torch.uint8), 8, width),
        metas=metas,
        kind=FLOAT8 if whole else FLOAT8_SCALED,
        bits=8,
        width=width,
        group_size=group,
        dtype=dtype,
        shape=(outputs, inputs),
        scales=per_row[:, 0].contiguous() if whole else None,
        input_scale=weight.input_scale,
        activations=weight.activations,
    )
