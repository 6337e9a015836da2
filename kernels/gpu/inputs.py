"""Input preparation on the device; ``octavo.kernels.inputs_reference`` says what each operation does."""

import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 1024
"""Tokens or cells that one pass of a program's loop handles."""

_SCATTER = 256
"""Cells or tokens that one program of a scatter handles."""

# What differs from step to step must not be compiled in: columns are cut out of one that was sent as a whole.
_SHAPES = ["num_rows", "num_tokens", "block_tables_stride", "num_cells", "count"]
_COLUMNS = [
    "rows",
    "starts",
    "query_start",
    "cells",
    "slots",
    "bounds",
    "flat",
    "places",
    "tokens",
    "src",
    "dst",
    "block_tables",
]


@triton.jit(
    do_not_specialize=_SHAPES,
    do_not_specialize_on_alignment=_COLUMNS,
)
def _prepare_inputs_kernel(
    ids,
    tables,
    rows,
    starts,
    query_start,
    input_ids,
    positions,
    slot_mapping,
    seq_lens,
    block_tables,
    num_rows,
    num_tokens,
    ids_stride,
    tables_stride,
    block_tables_stride,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program i < R prepares row i; program R fills the tokens behind the last row."""
    row = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    begin = tl.load(query_start + row)
    if row == num_rows:
        for first in range(begin, num_tokens, CHUNK):
            token = first + lane
            inside = token < num_tokens
            tl.store(input_ids + token, tl.zeros([CHUNK], tl.int32), inside)
            tl.store(positions + token, tl.zeros([CHUNK], tl.int32), inside)
            tl.store(slot_mapping + token, tl.full([CHUNK], -1, tl.int64), inside)
    else:
        start = tl.load(starts + row)
        slot = tl.load(rows + row).to(tl.int64)
        count = tl.load(query_start + row + 1) - begin
        real = start >= 0
        length = tl.where(real, start + count, 0)
        tl.store(seq_lens + row, length)
        table = tables + slot * tables_stride
        for first in range(0, count, CHUNK):
            place = first + lane
            inside = place < count
            used = inside & real
            position = tl.where(real, start + place, 0)
            token = tl.load(ids + slot * ids_stride + position, used, other=0)
            block = tl.load(table + position // BLOCK_SIZE, used, other=0).to(tl.int64)
            cell = tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
            tl.store(input_ids + begin + place, token, inside)
            tl.store(positions + begin + place, position, inside)
            tl.store(slot_mapping + begin + place, cell, inside)
        num_cells = (length + BLOCK_SIZE - 1) // BLOCK_SIZE
        target = block_tables + row.to(tl.int64) * block_tables_stride
        for first in range(0, num_cells, CHUNK):
            place = first + lane
            inside = place < num_cells
            tl.store(target + place, tl.load(table + place, inside, other=0), inside)


def prepare_inputs(
    ids: Tensor,
    tables: Tensor,
    rows: Tensor,
    starts: Tensor,
    query_start: Tensor,
    block_size: int,
    input_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
) -> None:
    """Write what a forward pass reads, from the persistent rows, in one launch of R + 1 programs."""
    num_rows = rows.shape[0]
    _prepare_inputs_kernel[(num_rows + 1,)](
        ids,
        tables,
        rows,
        starts,
        query_start,
        input_ids,
        positions,
        slot_mapping,
        seq_lens,
        block_tables,
        num_rows,
        input_ids.shape[0],
        ids.stride(0),
        tables.stride(0),
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        CHUNK=_CHUNK,
        num_warps=4,
    )


@triton.jit(
    do_not_specialize=_SHAPES,
    do_not_specialize_on_alignment=_COLUMNS,
)
def _write_cells_kernel(tables, cells, num_cells, tables_stride, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_cells
    slot = tl.load(cells + index * 3, inside, other=-1).to(tl.int64)
    place = tl.load(cells + index * 3 + 1, inside, other=0)
    block = tl.load(cells + index * 3 + 2, inside, other=0)
    tl.store(tables + slot * tables_stride + place, block, slot >= 0)


def write_cells(tables: Tensor, cells: Tensor) -> None:
    """Scatter cells [C, 3] int32 (slot, place, block) into the tables; a slot of -1 is padding."""
    count = cells.shape[0]
    if count:
        grid = (triton.cdiv(count, _SCATTER),)
        _write_cells_kernel[grid](tables, cells, count, tables.stride(0), BLOCK=_SCATTER, num_warps=4)


@triton.jit(
    do_not_specialize=_SHAPES,
    do_not_specialize_on_alignment=_COLUMNS,
)
def _write_ids_kernel(ids, slots, starts, bounds, flat, ids_stride, CHUNK: tl.constexpr):
    """Program (k, j) writes the chunks j, j + J, ... of line k, J programs to a line."""
    line = tl.program_id(0)
    slot = tl.load(slots + line).to(tl.int64)
    if slot >= 0:
        begin = tl.load(bounds + line)
        count = tl.load(bounds + line + 1) - begin
        target = ids + slot * ids_stride + tl.load(starts + line)
        for first in range(tl.program_id(1) * CHUNK, count, tl.num_programs(1) * CHUNK):
            place = first + tl.arange(0, CHUNK)
            inside = place < count
            tl.store(target + place, tl.load(flat + begin + place, inside, other=0), inside)


def write_ids(ids: Tensor, slots: Tensor, starts: Tensor, bounds: Tensor, flat: Tensor) -> None:
    """Write runs of ids, ``flat[bounds[k] : bounds[k + 1]]``, into the slots from their starts on."""
    count = slots.shape[0]
    if count:
        grid = (count, min(8, triton.cdiv(flat.shape[0], _CHUNK) or 1))
        _write_ids_kernel[grid](ids, slots, starts, bounds, flat, ids.stride(0), CHUNK=_CHUNK, num_warps=4)


@triton.jit(
    do_not_specialize=_SHAPES,
    do_not_specialize_on_alignment=_COLUMNS,
)
def _store_tokens_kernel(ids, rows, places, tokens, count, ids_stride, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    place = tl.load(places + index, inside, other=-1)
    row = tl.load(rows + index, inside, other=0).to(tl.int64)
    token = tl.maximum(tl.load(tokens + index, inside, other=0), 0).to(tl.int32)
    tl.store(ids + row * ids_stride + place, token, place >= 0)


def store_tokens(ids: Tensor, rows: Tensor, places: Tensor, tokens: Tensor) -> None:
    """Put sampled tokens [S] int64 into their rows at their places; a place of -1 is padding."""
    count = rows.shape[0]
    if count:
        grid = (triton.cdiv(count, _SCATTER),)
        _store_tokens_kernel[grid](ids, rows, places, tokens, count, ids.stride(0), BLOCK=_SCATTER, num_warps=4)


@triton.jit(
    do_not_specialize=_SHAPES,
    do_not_specialize_on_alignment=_COLUMNS,
)
def _copy_rows_kernel(ids, tables, src, dst, ids_width, tables_width, ids_stride, tables_stride, CHUNK: tl.constexpr):
    """Program (f, j) copies chunk j of line f of the ids, or of the table where j lies behind them."""
    source = tl.load(src + tl.program_id(0)).to(tl.int64)
    target = tl.load(dst + tl.program_id(0)).to(tl.int64)
    if source >= 0:
        id_chunks = tl.cdiv(ids_width, CHUNK)
        chunk = tl.program_id(1)
        if chunk < id_chunks:
            place = chunk * CHUNK + tl.arange(0, CHUNK)
            inside = place < ids_width
            tl.store(ids + target * ids_stride + place, tl.load(ids + source * ids_stride + place, inside), inside)
        else:
            place = (chunk - id_chunks) * CHUNK + tl.arange(0, CHUNK)
            inside = place < tables_width
            line = tl.load(tables + source * tables_stride + place, inside)
            tl.store(tables + target * tables_stride + place, line, inside)


def copy_rows(ids: Tensor, tables: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy whole lines of ids and tables from slots src to slots dst; a src of -1 is padding."""
    count = src.shape[0]
    if count:
        width, cells = ids.shape[1], tables.shape[1]
        grid = (count, triton.cdiv(width, _CHUNK) + triton.cdiv(cells, _CHUNK))
        _copy_rows_kernel[grid](
            ids, tables, src, dst, width, cells, ids.stride(0), tables.stride(0), CHUNK=_CHUNK, num_warps=4
        )
