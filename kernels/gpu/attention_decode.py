"""Attention of rows with one query each: the keys of all rows are shared out evenly among a fixed number of programs.

The tiles of BLOCK_N keys of all (row, KV head) pairs stand in one line, pairs in order; program i of n takes its n-th
part of the line, whatever the lengths are. It computes a *piece* for each pair that its part meets. A piece that is the
whole of its pair goes to the output; others are kept as partial results, and the program that comes last to a pair
combines its pieces in their order, so that the result does not depend on the order of arrival.
"""

import triton
import triton.language as tl

from octavo.kernels.gpu.attention_tiles import cap, load_blocks, load_tile, softmax_step


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
):
    """See the module; arguments are explained at ``octavo.kernels.gpu.attention._launch_decode``.

    ``partials`` holds two pieces a program: accumulators [num_partials, GROUP, d] fp32 (not divided by the mass), then
    peaks [num_partials, GROUP], then masses. ``counters`` [rows * NUM_KV] int32 holds zeros before and after.
    """
    NUM_KV: tl.constexpr = SHAPE[0]
    GROUP: tl.constexpr = SHAPE[1]
    HEAD: tl.constexpr = SHAPE[2]
    PADDED: tl.constexpr = triton.next_power_of_2(HEAD)
    LINES: tl.constexpr = max(16, triton.next_power_of_2(GROUP))

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
    place = (program * total // programs).to(tl.int32)
    end = ((program + 1) * total // programs).to(tl.int32)
    row = tl.sum((ends <= place).to(tl.int32), 0)
    row_start = tl.sum(tl.where(rows < row, tiles, 0), 0) * NUM_KV

    lines = tl.arange(0, LINES)
    lane = tl.arange(0, PADDED)
    inside = (lines < GROUP)[:, None] & (lane < HEAD)[None, :]
    cells = lines[:, None] * HEAD + lane[None, :]
    while place < end:
        seq_len = tl.load(seq_lens + row)
        count = _num_tiles(seq_len, WINDOW, BLOCK_N)
        head = (place - row_start) // count
        pair_start = row_start + head * count
        first = place - pair_start
        last = tl.minimum(count, end - pair_start)

        acc, mass, peak = _attend(
            q + row.to(tl.int64) * q_token_stride + (head * GROUP).to(tl.int64) * q_head_stride,
            q_head_stride,
            key_cache + head.to(tl.int64) * STRIDES[2],
            value_cache + head.to(tl.int64) * STRIDES[2],
            block_tables + row.to(tl.int64) * table_stride,
            first,
            last,
            seq_len,
            scale,
            STRIDES,
            SHAPE,
            WINDOW,
            SOFTCAP,
            BLOCK_N,
            LINES,
        )
        target = out + (row * NUM_KV + head).to(tl.int64) * (GROUP * HEAD)
        if last - first == count:
            acc = acc / tl.where(mass > 0, mass, 1.0)[:, None]
            tl.store(target + cells, acc.to(out.dtype.element_ty), inside)
        else:
            # A program has at most two such pieces: the first of its part, which goes on with the pair of the program
            # before it (place 0), and the last, which begins a pair that the next program goes on with (place 1).
            slot = program * 2 + (first == 0).to(tl.int64)
            numbers = partials + num_partials * (GROUP * HEAD)
            tl.store(partials + slot * (GROUP * HEAD) + cells, acc, inside)
            tl.store(numbers + slot * GROUP + lines, peak, lines < GROUP)
            tl.store(numbers + (num_partials + slot) * GROUP + lines, mass, lines < GROUP)
            from_program = ((pair_start.to(tl.int64) + 1) * programs - 1) // total
            to_program = ((pair_start + count).to(tl.int64) * programs - 1) // total
            pieces = (to_program - from_program + 1).to(tl.int32)
            tl.debug_barrier()  # all of the partial result is written before its arrival is counted
            counter = counters + row * NUM_KV + head
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == pieces - 1:
                tl.store(counter, 0)
                _combine(target, partials, numbers, num_partials, from_program, pieces, SHAPE)
        place += last - first
        if place == row_start + count * NUM_KV:
            row_start = place
            row += 1


@triton.jit
def _num_tiles(seq_len, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tiles that a row's query sees, at least one."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0) // BLOCK_N
    return tl.maximum((seq_len + BLOCK_N - 1) // BLOCK_N - first, 1)


@triton.jit
def _attend(
    q,
    q_head_stride,
    keys,
    values,
    table,
    first,
    last,
    seq_len,
    scale,
    STRIDES: tl.constexpr,
    SHAPE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LINES: tl.constexpr,
):
    """Attend the queries of one (row, KV head) to its tiles [first, last), counted from the first visible one.

    Returns acc [LINES, d'] not divided by the mass, mass [LINES] and peak [LINES] (base two).
    """
    GROUP: tl.constexpr = SHAPE[1]
    HEAD: tl.constexpr = SHAPE[2]
    PADDED: tl.constexpr = triton.next_power_of_2(HEAD)
    lines = tl.arange(0, LINES)
    lane = tl.arange(0, PADDED)
    queries = tl.load(
        q + lines[:, None].to(tl.int64) * q_head_stride + lane[None, :],
        (lines < GROUP)[:, None] & (lane < HEAD)[None, :],
        other=0.0,
    )
    low = 0
    if WINDOW > 0:
        low = tl.maximum(seq_len - WINDOW, 0)
    origin = low // BLOCK_N * BLOCK_N
    acc = tl.zeros([LINES, PADDED], tl.float32)
    mass = tl.zeros([LINES], tl.float32)
    peak = tl.full([LINES], float("-inf"), tl.float32)
    begin = origin + first * BLOCK_N
    place = begin + tl.arange(0, BLOCK_N)
    blocks = load_blocks(table, place, place < seq_len, True, SHAPE)
    for start in range(begin, origin + last * BLOCK_N, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        visible = place < seq_len
        if WINDOW > 0:
            visible = visible & (place >= low)
        next_blocks = load_blocks(table, place + BLOCK_N, place + BLOCK_N < seq_len, True, SHAPE)
        k, v = load_tile(keys, values, blocks, place, visible, True, STRIDES, SHAPE, q.dtype.element_ty)
        blocks = next_blocks
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        exponent = scale
        if SOFTCAP > 0:
            scores = cap(scores * scale, SOFTCAP)
            exponent = 1.4426950408889634
        scores = tl.where(visible[None, :], scores, float("-inf"))
        acc, mass, peak = softmax_step(acc, mass, peak, scores, v, exponent, True)
    return acc, mass, peak


@triton.jit
def _combine(out, partials, numbers, num_partials, from_program, pieces, SHAPE: tl.constexpr):
    """Combine the pieces of one (row, KV head) into out [GROUP, d], several pieces at a time.

    An accumulator and a mass count ``2 ** (their peak - the greatest peak)``.
    """
    GROUP: tl.constexpr = SHAPE[1]
    HEAD: tl.constexpr = SHAPE[2]
    PADDED: tl.constexpr = triton.next_power_of_2(HEAD)
    LINES: tl.constexpr = triton.next_power_of_2(GROUP)
    AT_ONCE: tl.constexpr = max(1, min(16, 4096 // (LINES * PADDED)))
    lines = tl.arange(0, LINES)
    lane = tl.arange(0, PADDED)
    inside = (lines < GROUP)[:, None] & (lane < HEAD)[None, :]
    cells = lines[:, None] * HEAD + lane[None, :]
    acc = tl.zeros([LINES, PADDED], tl.float32)
    mass = tl.zeros([LINES], tl.float32)
    peak = tl.full([LINES], float("-inf"), tl.float32)
    for done in range(0, pieces, AT_ONCE):
        piece = done + tl.arange(0, AT_ONCE)
        exists = piece < pieces
        # The piece that begins the pair stands in place 1 of its program, the others in place 0 of theirs.
        slot = (from_program + piece) * 2 + (piece == 0).to(tl.int64)
        known = exists[:, None] & (lines < GROUP)[None, :]
        place = slot[:, None] * GROUP + lines[None, :]
        peaks = tl.load(numbers + place, known, other=float("-inf"), cache_modifier=".cg")
        masses = tl.load(numbers + num_partials * GROUP + place, known, other=0.0, cache_modifier=".cg")
        accs = tl.load(
            partials + slot[:, None, None] * (GROUP * HEAD) + cells[None, :, :],
            exists[:, None, None] & inside[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new = tl.maximum(peak, tl.max(peaks, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        decay = tl.exp2(peak - base)
        shares = tl.exp2(peaks - base[None, :])
        mass = mass * decay + tl.sum(masses * shares, 0)
        acc = acc * decay[:, None] + tl.sum(accs * shares[:, :, None], 0)
        peak = new
    acc = acc / tl.where(mass > 0, mass, 1.0)[:, None]
    tl.store(out + cells, acc.to(out.dtype.element_ty), inside)
