"""Attention of rows with any number of queries: tiles of packed queries, the longest first."""

import triton
import triton.language as tl

from octavo.kernels.gpu.attention_tiles import cap, load_blocks, load_tile, softmax_step
from octavo.kernels.gpu.launch import wait_for_inputs


@triton.jit(
    do_not_specialize=["num_tokens", "num_rows", "num_decodes", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "query_start", "seq_lens"],
)
def prefill_kernel(
    q,
    key_cache,
    value_cache,
    block_tables,
    query_start,
    seq_lens,
    out,
    num_tokens,
    num_rows,
    num_decodes,
    q_token_stride,
    q_head_stride,
    table_stride,
    scale,
    STRIDES: tl.constexpr,
    SHAPE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (h, t) computes tile t from the end, of KV head h; see ``octavo.kernels.gpu.attention._launch_prefill``.

    A tile is QUERIES queries of one row times the GROUP heads of a KV head: line m is head ``m % GROUP`` of query
    ``m // GROUP``. Row r, counted from the first behind the decode rows, owns the tiles from
    ``(query_start[r] - query_start[0]) // QUERIES + r`` on: always enough, and known without a sum over the rows. The
    tokens behind the last row are a row of no keys, so that they get their zeros.
    """
    GROUP: tl.constexpr = SHAPE[1]
    HEAD: tl.constexpr = SHAPE[2]
    PADDED: tl.constexpr = triton.next_power_of_2(HEAD)
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    NUM_HEADS: tl.constexpr = SHAPE[0] * GROUP

    wait_for_inputs(OVERLAP)
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row, first, end, seq_len = _find_row(tile, query_start, seq_lens, num_tokens, num_rows, num_decodes, QUERIES, ROWS)
    if first >= end:
        return

    lines = tl.arange(0, BLOCK_M)
    lane = tl.arange(0, PADDED)
    token = first + lines // GROUP
    inside = (token < end) & (lines < QUERIES * GROUP)
    both = inside[:, None] & (lane < HEAD)[None, :]
    heads = (head * GROUP + lines % GROUP).to(tl.int64)
    places = token.to(tl.int64) * q_token_stride + heads * q_head_stride
    queries = tl.load(q + places[:, None] + lane[None, :], both, other=0.0)

    # Keys that the tile's first and last query and each line see.
    least = seq_len - (end - first) + 1
    most = tl.minimum(least + QUERIES - 1, seq_len)
    limits = least + lines // GROUP
    start = 0
    full = tl.maximum(least, 0) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        start = tl.maximum(least - WINDOW, 0) // BLOCK_N * BLOCK_N
        full = start
    keys = key_cache + head.to(tl.int64) * STRIDES[2]
    values = value_cache + head.to(tl.int64) * STRIDES[2]
    table = block_tables + (num_decodes + row).to(tl.int64) * table_stride
    acc = tl.zeros([BLOCK_M, PADDED], tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if WINDOW == 0:
        acc, mass, peak = _attend(
            acc, mass, peak, queries, keys, values, table, start, full, limits, most, scale,
            False, STRIDES, SHAPE, WINDOW, SOFTCAP, BLOCK_N,
        )  # fmt: skip
    acc, mass, peak = _attend(
        acc, mass, peak, queries, keys, values, table, full, most, limits, most, scale,
        True, STRIDES, SHAPE, WINDOW, SOFTCAP, BLOCK_N,
    )  # fmt: skip
    acc = acc / tl.where(mass > 0, mass, 1.0)[:, None]
    places = (token.to(tl.int64) * NUM_HEADS + heads) * HEAD
    tl.store(out + places[:, None] + lane[None, :], acc.to(out.dtype.element_ty), both)


@triton.jit
def _find_row(
    tile, query_start, seq_lens, num_tokens, num_rows, num_decodes, QUERIES: tl.constexpr, ROWS: tl.constexpr
):
    """Return the tile's row, counted behind the decode rows, the tile's first token, the one behind the row, its length.

    All from one load of the tables, not a search: one trip to memory in place of several in a chain.
    """
    rows = tl.arange(0, ROWS)
    count = num_rows - num_decodes
    starts = tl.load(query_start + num_decodes + rows, rows <= count, other=0)
    lens = tl.load(seq_lens + num_decodes + rows, rows < count, other=0)
    origin = tl.sum(tl.where(rows == 0, starts, 0), 0)
    mine = (rows <= count) & ((starts - origin) // QUERIES + rows <= tile)
    row = tl.sum(mine.to(tl.int32), 0) - 1
    begin = tl.max(tl.where(mine, starts, 0), 0)
    end = tl.sum(tl.where(rows == row + 1, starts, 0), 0)
    end = tl.where(row == count, num_tokens, end)
    first = begin + (tile - (begin - origin) // QUERIES - row) * QUERIES
    return row, first, end, tl.sum(tl.where(rows == row, lens, 0), 0)


@triton.jit
def _attend(
    acc,
    mass,
    peak,
    queries,
    keys,
    values,
    table,
    start,
    end,
    limits,
    most,
    scale,
    MASKED: tl.constexpr,
    STRIDES: tl.constexpr,
    SHAPE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend queries [M, d'] to the keys [start, end), of which line m sees those below ``limits`` [M].

    Where not MASKED, every line sees all of them. No place at or behind ``most`` is read.
    """
    place = start + tl.arange(0, BLOCK_N)
    blocks = load_blocks(table, place, place < most, True, SHAPE)
    for begin in range(start, end, BLOCK_N):
        place = begin + tl.arange(0, BLOCK_N)
        next_blocks = load_blocks(table, place + BLOCK_N, place + BLOCK_N < most, True, SHAPE)
        k, v = load_tile(keys, values, blocks, place, place < most, MASKED, STRIDES, SHAPE, queries.dtype)
        blocks = next_blocks
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        exponent = scale
        if SOFTCAP > 0:
            scores = cap(scores * scale, SOFTCAP)
            exponent = 1.4426950408889634
        if MASKED:
            visible = place[None, :] < limits[:, None]
            if WINDOW > 0:
                visible = visible & (place[None, :] >= limits[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        acc, mass, peak = softmax_step(acc, mass, peak, scores, v, exponent, MASKED)
    return acc, mass, peak
