"""Plain PyTorch that defines the input preparation of a step: tensors with one row a slot, changed in place.

The persistent rows are ``ids`` [N, L] int32, the token ids of each slot by position, and ``tables`` [N, M] int32, its
block table. A step's rows are slots; R rows, T tokens, blocks of B tokens.
"""

import torch
from torch import Tensor


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
    """Write what a forward pass reads, from the persistent rows.

    Row i of the step is slot ``rows[i]`` [R] int32; with ``n = query_start[i + 1] - query_start[i]`` ([R + 1] int32) its
    tokens stand at the positions ``starts[i] .. starts[i] + n - 1`` ([R] int32). For the token at position p of slot s::

        input_ids[t] = ids[s, p]                                        [T] int32
        positions[t] = p                                                [T] int32
        slot_mapping[t] = tables[s, p // B] * B + p % B                 [T] int64
        seq_lens[i] = starts[i] + n                                     [R] int32
        block_tables[i, : ceil(seq_lens[i] / B)] = tables[s, the same]  [R, M'] int32; cells behind are left alone

    ``starts[i] = -1`` marks a padding row: its tokens get id 0, position 0 and slot -1, its length is 0. So do tokens
    at or behind ``query_start[R]``, where the outputs have more.
    """
    input_ids.zero_()
    positions.zero_()
    slot_mapping.fill_(-1)
    bounds = query_start.tolist()
    for row, (slot, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
        begin, end = bounds[row], bounds[row + 1]
        length = 0 if start < 0 else start + end - begin
        seq_lens[row] = length
        cells = -(-length // block_size)
        block_tables[row, :cells] = tables[slot, :cells]
        if start >= 0:
            places = torch.arange(start, length, device=ids.device)
            input_ids[begin:end] = ids[slot, start:length]
            positions[begin:end] = places
            slot_mapping[begin:end] = tables[slot].long()[places // block_size] * block_size + places % block_size


def write_cells(tables: Tensor, cells: Tensor) -> None:
    """``tables[slot, place] = block`` for each of the cells [C, 3] int32: slot (-1: padding, skipped), place, block.

    No two cells of one call name the same place.
    """
    for slot, place, block in cells.tolist():
        if slot >= 0:
            tables[slot, place] = block


def write_ids(ids: Tensor, slots: Tensor, starts: Tensor, bounds: Tensor, flat: Tensor) -> None:
    """``ids[slots[k], starts[k]:] = flat[bounds[k] : bounds[k + 1]]``, as many as these are.

    slots and starts [K] int32, bounds [K + 1] int32 (ascending), flat int32. A slot of -1 is padding and skipped.
    """
    ends = bounds.tolist()
    for k, (slot, start) in enumerate(zip(slots.tolist(), starts.tolist(), strict=True)):
        count = ends[k + 1] - ends[k]
        if slot >= 0:
            ids[slot, start : start + count] = flat[ends[k] : ends[k + 1]]


def store_tokens(ids: Tensor, rows: Tensor, places: Tensor, tokens: Tensor) -> None:
    """``ids[rows[i], places[i]] = max(tokens[i], 0)``: rows and places [S] int32, tokens [S] int64.

    A place of -1 is padding and skipped. A token of -1 says that nothing could be drawn; id 0 stands in for it.
    """
    for row, place, token in zip(rows.tolist(), places.tolist(), tokens.tolist(), strict=True):
        if place >= 0:
            ids[row, place] = max(token, 0)


def copy_rows(ids: Tensor, tables: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy whole lines of both: src and dst [F] int32, no slot being both; a src of -1 is padding and skipped."""
    for source, target in zip(src.tolist(), dst.tolist(), strict=True):
        if source >= 0:
            ids[target] = ids[source]
            tables[target] = tables[source]
