"""Packed weights as a plain matrix: for many tokens, where a library's product more than makes up for writing it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu.launch import overlaps, wait_for_inputs
from octavo.kernels.gpu.quantized import PackedWeight
from octavo.kernels.gpu.quantized_codes import TABLE
from octavo.kernels.gpu.quantized_product import TILE_ROWS, load_table, weights
from octavo.kernels.gpu.quantized_sparse import add_sparse

_ROWS = tl.constexpr(TILE_ROWS)
_TABLE = tl.constexpr(TABLE)


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def _dequantize_kernel(
    words,
    metas,
    scales,
    out,
    num_outputs,
    num_rows,
    num_blocks,
    K: tl.constexpr,
    KIND: tl.constexpr,
    LAYOUT: tl.constexpr,
    STRIDES: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (tile of rows, DEPTH blocks of inputs); rows are padded to whole tiles."""
    WIDTH: tl.constexpr = LAYOUT[1]
    SIZE: tl.constexpr = DEPTH * (16 // LAYOUT[0]) * WIDTH
    DTYPE: tl.constexpr = out.dtype.element_ty
    lane = tl.arange(0, _ROWS)
    row = tl.program_id(0) * _ROWS + lane
    atom = tl.program_id(1) * DEPTH + tl.arange(0, DEPTH)
    lines = words + tl.program_id(0).to(tl.int64) * (num_blocks * (_ROWS * WIDTH)) + lane * STRIDES[0]
    place = lines[:, None, None] + atom[None, :, None] * STRIDES[1] + tl.arange(0, WIDTH)[None, None, :]
    w = tl.load(place)
    table = metas
    if KIND == _TABLE:
        table = load_table(metas, row[:, None], num_rows, DEPTH, WIDTH)
    number = weights(w, table, metas, row[:, None], atom[None, :], num_rows, KIND, LAYOUT, DTYPE, OVERLAP)
    inside = row < num_outputs
    if HAS_SCALES:
        scale = tl.load(scales + row, inside, other=0.0)
        number = (number.to(tl.float32) * scale[:, None]).to(DTYPE)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    mask = inside[:, None] & (column < K)[None, :]
    wait_for_inputs(OVERLAP)  # the kernel before may still read what lay in this memory
    tl.store(out + row.to(tl.int64)[:, None] * K + column[None, :], number, mask)


def dequantize(weight: PackedWeight) -> Tensor:
    """Return the numbers of a weight as [N, K] of its dtype, inputs in the packed order."""
    (outputs, size), blocks = weight.shape, weight.num_blocks
    out = torch.empty((outputs, size), dtype=weight.dtype, device=weight.words.device)
    depth = 2 if blocks % 2 == 0 else 1
    overlap = overlaps(out)
    _dequantize_kernel[(weight.words.shape[0], blocks // depth)](
        weight.words,
        weight.metas,
        weight.metas if weight.scales is None else weight.scales,
        out,
        outputs,
        weight.metas.shape[1],
        blocks,
        K=size,
        KIND=weight.kind,
        LAYOUT=(weight.bits, weight.width, weight.group_size),
        STRIDES=weight.strides,
        DEPTH=depth,
        HAS_SCALES=weight.scales is not None,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    if weight.sparse is not None:
        add_sparse(out, weight.sparse)
    return out
