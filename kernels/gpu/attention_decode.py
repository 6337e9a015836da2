"""Attention of rows with one query each: the keys of all rows are shared out evenly among a fixed number of programs.

The tiles of BLOCK_N keys of all (row, KV head) pairs stand in one line, pairs in order; program i of n takes the i-th
of n equal parts of the line, whatever the lengths are, and goes through it in one loop whose loads run ahead over the
ends of pairs. A pair that lies in the part whole goes to the output. The first and the last may not: such a piece is
kept as a partial result, and the program that comes last to a pair combines its pieces in their order, so that the
result does not depend on the order of arrival.
"""

import triton
import triton.language as tl

from octavo.kernels.gpu.attention_tiles import cap, load_blocks, load_tile, softmax_step
from octavo.kernels.gpu.launch import wait_for_inputs


@triton.jit(
    do_not_specialize=["num_rows", "num_partials", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens"],
)
def decode_kernel(
    q,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    out,
    partials,
    counters,
    num_rows,
    num_partials,
    q_token_stride,
    q_head_stride,
    table_stride,
    scale,
    STRIDES: tl.constexpr,
    SHAPE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """See the module; arguments are explained at ``octavo.kernels.gpu.attention._launch_decode``.

    ``partials`` holds two pieces a program: results [num_partials, GROUP, d] fp32, then the base-two logarithms of
    their sums of exponentials [num_partials, GROUP]. ``counters`` [rows * NUM_KV] int32 holds zeros before and after.
    """
    NUM_KV: tl.constexpr = SHAPE[0]
    wait_for_inputs(OVERLAP)
    rows = tl.arange(0, ROWS)
    lens = tl.load(seq_lens + rows, rows < num_rows, other=0)
    # An empty row gets a tile too: it computes the zeros.
    tiles = tl.where(rows < num_rows, _num_tiles(lens, WINDOW, BLOCK_N), 0)
    ends = tl.cumsum(tiles, 0) * NUM_KV
    total = tl.sum(tiles, 0).to(tl.int64) * NUM_KV
    programs = tl.minimum(tl.num_programs(0).to(tl.int64), total)
    program = tl.program_id(0).to(tl.int64)
    if program >= programs:
        return
    begin = (program * total // programs).to(tl.int32)
    end = ((program + 1) * total // programs).to(tl.int32)
    row = tl.sum((ends <= begin).to(tl.int32), 0)
    row_start = tl.sum(tl.where(rows < row, tiles, 0), 0) * NUM_KV
    count = tl.sum(tl.where(rows == row, tiles, 0), 0)
    head = (begin - row_start) // count
    tile = begin - row_start - head * count

    end_row, end_head, end_tile, end_count = _attend(
        q, key_cache, value_cache, block_tables, seq_lens, out, partials, num_rows, num_partials, q_token_stride,
        q_head_stride, table_stride, scale, begin, end, row, head, tile, count,
        STRIDES, SHAPE, WINDOW, SOFTCAP, BLOCK_N,
    )  # fmt: skip

    # Pieces at both ends of the part: of its first pair, and of the pair that goes on behind it unless that is the same.
    # Their arrivals are counted in one operation: it waits for all that the program wrote to be visible.
    end_start = end - end_tile
    start = begin - tile
    is_split = (tile > 0) | (start + count > end)
    is_end_split = (end_tile > 0) & (end_start != start)
    pair = row * NUM_KV + head
    end_pair = end_row * NUM_KV + end_head
    which = tl.arange(0, 2)
    mine = tl.where(which == 0, is_split, is_end_split)
    places = counters + tl.where(which == 0, pair, end_pair)
    tl.debug_barrier()
    arrived = tl.atomic_add(places, 1, mine, sem="acq_rel", scope="gpu")
    for side in range(2):
        if side == 1:
            start = end_start
            count = end_count
            pair = end_pair
            is_split = is_end_split
        from_program = ((start.to(tl.int64) + 1) * programs - 1) // total
        to_program = ((start + count).to(tl.int64) * programs - 1) // total
        pieces = (to_program - from_program + 1).to(tl.int32)
        before = tl.sum(tl.where(which == side, arrived, 0), 0)
        if is_split & (before == pieces - 1):
            tl.store(counters + pair, 0)
            _combine(out, pair.to(tl.int64), partials, num_partials, from_program, pieces, SHAPE)


@triton.jit
def _num_tiles(seq_len, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tiles that a row's query sees, at least one."""
    return tl.maximum((seq_len + BLOCK_N - 1) // BLOCK_N - _first_key(seq_len, WINDOW) // BLOCK_N, 1)


@triton.jit
def _first_key(seq_len, WINDOW: tl.constexpr):
    if WINDOW > 0:
        return tl.maximum(seq_len - WINDOW, 0)
    return seq_len * 0


@triton.jit
def _attend(
    q, key_cache, value_cache, block_tables, seq_lens, out, partials, num_rows, num_partials, q_token_stride,
    q_head_stride, table_stride, scale, begin, end, row, head, tile, count,
    STRIDES: tl.constexpr, SHAPE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the tiles [begin, end) of the line, the first of which is ``tile`` of ``count`` of (row, head).

    Returns row, head, tile and count of the tile at ``end``.
    """
    NUM_KV: tl.constexpr = SHAPE[0]
    GROUP: tl.constexpr = SHAPE[1]
    HEAD: tl.constexpr = SHAPE[2]
    PADDED: tl.constexpr = triton.next_power_of_2(HEAD)
    LINES: tl.constexpr = max(16, triton.next_power_of_2(GROUP))
    lines = tl.arange(0, LINES)
    lane = tl.arange(0, PADDED)
    keys = tl.arange(0, BLOCK_N)
    inside = (lines < GROUP)[:, None] & (lane < HEAD)[None, :]
    q += lines[:, None].to(tl.int64) * q_head_stride + lane[None, :]

    acc = tl.zeros([LINES, PADDED], tl.float32)
    mass = tl.zeros([LINES], tl.float32)
    peak = tl.full([LINES], float("-inf"), tl.float32)
    seq_len = tl.load(seq_lens + row)
    place = _first_key(seq_len, WINDOW) // BLOCK_N * BLOCK_N + tile * BLOCK_N + keys
    table = block_tables + row.to(tl.int64) * table_stride
    blocks = load_blocks(table, place, place < seq_len, True, SHAPE)
    for i in range(begin, end):
        place = _first_key(seq_len, WINDOW) // BLOCK_N * BLOCK_N + tile * BLOCK_N + keys
        visible = place < seq_len
        if WINDOW > 0:
            visible = visible & (place >= _first_key(seq_len, WINDOW))
        # Where the next tile lies, and its blocks.
        is_last = tile == count - 1
        next_tile = tl.where(is_last, 0, tile + 1)
        next_head = tl.where(is_last, head + 1, head)
        next_row = tl.where(next_head == NUM_KV, row + 1, row)
        next_head = tl.where(next_head == NUM_KV, 0, next_head)
        next_len = tl.load(seq_lens + next_row, next_row < num_rows, other=0)
        next_place = _first_key(next_len, WINDOW) // BLOCK_N * BLOCK_N + next_tile * BLOCK_N + keys
        next_table = block_tables + next_row.to(tl.int64) * table_stride
        next_blocks = load_blocks(next_table, next_place, next_place < next_len, True, SHAPE)

        queries = tl.load(
            q + row.to(tl.int64) * q_token_stride + (head * GROUP).to(tl.int64) * q_head_stride, inside, other=0.0
        )
        k, v = load_tile(
            key_cache + head.to(tl.int64) * STRIDES[2],
            value_cache + head.to(tl.int64) * STRIDES[2],
            blocks, place, visible, True, STRIDES, SHAPE, q.dtype.element_ty,
        )  # fmt: skip
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        exponent = scale
        if SOFTCAP > 0:
            scores = cap(scores * scale, SOFTCAP)
            exponent = 1.4426950408889634
        scores = tl.where(visible[None, :], scores, float("-inf"))
        acc, mass, peak = softmax_step(acc, mass, peak, scores, v, exponent, True)

        is_done = is_last | (i == end - 1)
        if is_done:
            result = acc / tl.where(mass > 0, mass, 1.0)[:, None]
            cells = lines[:, None] * HEAD + lane[None, :]
            has_begun = i - tile >= begin
            if is_last & has_begun:
                pair = (row * NUM_KV + head).to(tl.int64)
                tl.store(out + pair * (GROUP * HEAD) + cells, result.to(out.dtype.element_ty), inside)
            else:
                # The first piece of a part, which goes on with the pair of the program before it, stands in place 0 of
                # the program's two; the last, which begins a pair that the next program goes on with, in place 1.
                slot = tl.program_id(0).to(tl.int64) * 2 + has_begun.to(tl.int64)
                tl.store(partials + slot * (GROUP * HEAD) + cells, result, inside)
                logarithms = partials + num_partials * (GROUP * HEAD) + slot * GROUP
                tl.store(logarithms + lines, peak + tl.log2(mass), lines < GROUP)
        acc = tl.where(is_done, 0.0, acc)
        mass = tl.where(is_done, 0.0, mass)
        peak = tl.where(is_done, float("-inf"), peak)
        row = next_row
        head = next_head
        tile = next_tile
        count = _num_tiles(next_len, WINDOW, BLOCK_N)
        seq_len = next_len
        blocks = next_blocks
    return row, head, tile, count


@triton.jit
def _combine(out, pair, partials, num_partials, from_program, pieces, SHAPE: tl.constexpr):
    """Combine the pieces of a (row, KV head) into its GROUP lines of out, several pieces at a time.

    A piece counts as ``2 ** (its logarithm - the greatest one)``.
    """
    GROUP: tl.constexpr = SHAPE[1]
    HEAD: tl.constexpr = SHAPE[2]
    PADDED: tl.constexpr = triton.next_power_of_2(HEAD)
    LINES: tl.constexpr = triton.next_power_of_2(GROUP)
    AT_ONCE: tl.constexpr = max(1, min(16, 8192 // (LINES * PADDED)))
    lines = tl.arange(0, LINES)
    lane = tl.arange(0, PADDED)
    inside = (lines < GROUP)[:, None] & (lane < HEAD)[None, :]
    cells = lines[:, None] * HEAD + lane[None, :]
    acc = tl.zeros([LINES, PADDED], tl.float32)
    mass = tl.zeros([LINES], tl.float32)
    peak = tl.full([LINES], float("-inf"), tl.float32)
    for done in range(0, pieces, AT_ONCE):
        piece = done + tl.arange(0, AT_ONCE)
        # The piece that begins the pair stands in place 1 of its program, the others in place 0 of theirs.
        slot = (from_program + piece) * 2 + (piece == 0).to(tl.int64)
        known = (lines < GROUP)[:, None] & (piece < pieces)[None, :]
        logarithms = tl.load(
            partials + num_partials * (GROUP * HEAD) + slot[None, :] * GROUP + lines[:, None],
            known,
            other=float("-inf"),
            cache_modifier=".cg",
        )
        results = tl.load(
            partials + slot[None, :, None] * (GROUP * HEAD) + cells[:, None, :],
            known[:, :, None] & inside[:, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new = tl.maximum(peak, tl.max(logarithms, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        decay = tl.exp2(peak - base)
        shares = tl.exp2(logarithms - base[:, None])
        mass = mass * decay + tl.sum(shares, 1)
        acc = acc * decay[:, None] + tl.sum(results * shares[:, :, None], 1)
        peak = new
    acc = acc / tl.where(mass > 0, mass, 1.0)[:, None]
    tl.store(out + pair * (GROUP * HEAD) + cells, acc.to(out.dtype.element_ty), inside)
