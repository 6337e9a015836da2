"""Products with packed weights, which are read once and become numbers in registers on their way to the matrix unit.

The weights are the left operand: their rows fill the matrix unit, which few tokens would not, and they need not pass
through shared memory once they are numbers. Where there are fewer tiles of outputs than the processor holds programs,
the inputs are shared out too: each program keeps its sums as a partial result, and the one that comes last to a tile
adds them up in their order, so that the result does not depend on the order of arrival.
"""

import triton
import triton.language as tl

from octavo.kernels.gpu.activation import activated
from octavo.kernels.gpu.launch import prefetch, wait_for_inputs
from octavo.kernels.gpu.quantized_codes import FLOAT8, TABLE, numbers

TILE_ROWS = 64
"""Outputs whose words lie together."""

_TILE_ROWS = tl.constexpr(TILE_ROWS)
_FLOAT8 = tl.constexpr(FLOAT8)
_TABLE = tl.constexpr(TABLE)


@triton.jit
def _meta(metas, row, atom, num_rows, PLACE: tl.constexpr, LAYOUT: tl.constexpr):
    """Meta of code PLACE of the words in rows [ROWS, 1] and blocks ``atom`` [1, DEPTH] -> [ROWS, DEPTH]."""
    BITS: tl.constexpr = LAYOUT[0]
    WIDTH: tl.constexpr = LAYOUT[1]
    GROUP: tl.constexpr = LAYOUT[2]
    group = (atom * (16 // BITS * WIDTH) + PLACE * WIDTH) // GROUP
    return tl.load(metas + group * num_rows + row)


@triton.jit
def _spread(meta, WIDTH: tl.constexpr):
    return tl.broadcast_to(tl.expand_dims(meta, 2), [meta.shape[0], meta.shape[1], WIDTH])


@triton.jit
def load_table(metas, row, num_rows, DEPTH: tl.constexpr, WIDTH: tl.constexpr):
    """The tables of rows [ROWS, 1], eight words each, spread over the tile."""
    ROWS: tl.constexpr = row.shape[0]
    return (
        _spread(tl.broadcast_to(tl.load(metas + row), [ROWS, DEPTH]), WIDTH),
        _spread(tl.broadcast_to(tl.load(metas + num_rows + row), [ROWS, DEPTH]), WIDTH),
        _spread(tl.broadcast_to(tl.load(metas + 2 * num_rows + row), [ROWS, DEPTH]), WIDTH),
        _spread(tl.broadcast_to(tl.load(metas + 3 * num_rows + row), [ROWS, DEPTH]), WIDTH),
        _spread(tl.broadcast_to(tl.load(metas + 4 * num_rows + row), [ROWS, DEPTH]), WIDTH),
        _spread(tl.broadcast_to(tl.load(metas + 5 * num_rows + row), [ROWS, DEPTH]), WIDTH),
        _spread(tl.broadcast_to(tl.load(metas + 6 * num_rows + row), [ROWS, DEPTH]), WIDTH),
        _spread(tl.broadcast_to(tl.load(metas + 7 * num_rows + row), [ROWS, DEPTH]), WIDTH),
    )


@triton.jit
def _one_span(w, metas, row, atom, num_rows, PLACE: tl.constexpr, KIND: tl.constexpr, LAYOUT: tl.constexpr,
              DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):  # fmt: skip
    meta = _spread(_meta(metas, row, atom, num_rows, PLACE, LAYOUT), LAYOUT[1])
    return numbers(w, meta, KIND, LAYOUT[0], DTYPE, ASSEMBLY)


@triton.jit
def weights(
    w, table, metas, row, atom, num_rows, KIND: tl.constexpr, LAYOUT: tl.constexpr, DTYPE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Words [ROWS, DEPTH, WIDTH] of rows [ROWS, 1] and blocks ``atom`` [1, DEPTH] -> numbers [ROWS, inputs].

    LAYOUT is (bits, width, group size). Codes of a word that lie in one group share its meta.
    """
    BITS: tl.constexpr = LAYOUT[0]
    WIDTH: tl.constexpr = LAYOUT[1]
    GROUP: tl.constexpr = LAYOUT[2]
    CODES: tl.constexpr = 16 // BITS
    SIZE: tl.constexpr = CODES * WIDTH
    # How many codes of a word share their meta.
    SPAN: tl.constexpr = CODES if GROUP % SIZE == 0 else (GROUP // WIDTH if SIZE % GROUP == 0 else 1)
    if KIND == _TABLE:
        parts = numbers(w, table, KIND, BITS, DTYPE, ASSEMBLY)
    elif KIND == _FLOAT8:
        parts = numbers(w, w, KIND, BITS, DTYPE, ASSEMBLY)
    elif SPAN == CODES:
        parts = _one_span(w, metas, row, atom, num_rows, 0, KIND, LAYOUT, DTYPE, ASSEMBLY)
    elif CODES == 2:
        a = _one_span(w, metas, row, atom, num_rows, 0, KIND, LAYOUT, DTYPE, ASSEMBLY)
        b = _one_span(w, metas, row, atom, num_rows, 1, KIND, LAYOUT, DTYPE, ASSEMBLY)
        parts = (a[0], b[1])
    elif CODES == 4:
        a = _one_span(w, metas, row, atom, num_rows, 0, KIND, LAYOUT, DTYPE, ASSEMBLY)
        c = _one_span(w, metas, row, atom, num_rows, 2, KIND, LAYOUT, DTYPE, ASSEMBLY)
        if SPAN == 2:
            parts = (a[0], a[1], c[2], c[3])
        else:
            b = _one_span(w, metas, row, atom, num_rows, 1, KIND, LAYOUT, DTYPE, ASSEMBLY)
            d = _one_span(w, metas, row, atom, num_rows, 3, KIND, LAYOUT, DTYPE, ASSEMBLY)
            parts = (a[0], b[1], c[2], d[3])
    else:
        a = _one_span(w, metas, row, atom, num_rows, 0, KIND, LAYOUT, DTYPE, ASSEMBLY)
        b = _one_span(w, metas, row, atom, num_rows, 1, KIND, LAYOUT, DTYPE, ASSEMBLY)
        c = _one_span(w, metas, row, atom, num_rows, 2, KIND, LAYOUT, DTYPE, ASSEMBLY)
        d = _one_span(w, metas, row, atom, num_rows, 3, KIND, LAYOUT, DTYPE, ASSEMBLY)
        e = _one_span(w, metas, row, atom, num_rows, 4, KIND, LAYOUT, DTYPE, ASSEMBLY)
        f = _one_span(w, metas, row, atom, num_rows, 5, KIND, LAYOUT, DTYPE, ASSEMBLY)
        g = _one_span(w, metas, row, atom, num_rows, 6, KIND, LAYOUT, DTYPE, ASSEMBLY)
        h = _one_span(w, metas, row, atom, num_rows, 7, KIND, LAYOUT, DTYPE, ASSEMBLY)
        parts = (a[0], b[1], c[2], d[3], e[4], f[5], g[6], h[7])
    return _in_order(parts, w.shape[0], w.shape[1], CODES, WIDTH)


@triton.jit
def _in_order(parts, ROWS: tl.constexpr, DEPTH: tl.constexpr, CODES: tl.constexpr, WIDTH: tl.constexpr):
    """Code i of words [ROWS, DEPTH, WIDTH], for each i -> [ROWS, DEPTH * CODES * WIDTH], inputs in order."""
    if CODES == 2:
        joined = tl.join(parts[0], parts[1])
        ordered = tl.permute(joined, (0, 1, 3, 2))
    elif CODES == 4:
        joined = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
        ordered = tl.permute(joined, (0, 1, 3, 4, 2))
    else:
        joined = tl.join(
            tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6])),
            tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7])),
        )
        ordered = tl.permute(joined, (0, 1, 3, 4, 5, 2))
    return tl.reshape(ordered, [ROWS, DEPTH * CODES * WIDTH])


@triton.jit
def _finish(
    total, scales, bias, addend, out, row, first, first_token, num_tokens, num_outputs, WAYS: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS: tl.constexpr,
):  # fmt: skip
    """Scale the sums [ROWS, TOKENS], add what is to be added, gate, round and store them."""
    ROWS: tl.constexpr = total.shape[0]
    TOKENS: tl.constexpr = total.shape[1]
    OUTPUTS: tl.constexpr = ROWS // WAYS
    dtype: tl.constexpr = out.dtype.element_ty
    token = tl.arange(0, TOKENS)[None, :]
    known = token < num_tokens - first_token
    if HAS[0]:
        total = total * tl.load(scales + row)[:, None]
    if HAS[1]:
        total += tl.load(bias + row).to(tl.float32)[:, None]
    if HAS[2]:
        sums = addend + first_token.to(tl.int64) * (WAYS * num_outputs)
        total += tl.load(sums + token * (WAYS * num_outputs) + row[:, None], known, other=0.0)
    if WAYS == 2:
        gate, up = tl.split(tl.permute(tl.reshape(total, [2, OUTPUTS, TOKENS]), (1, 2, 0)))
        gate = activated(gate.to(dtype).to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
        total = gate * up.to(dtype).to(tl.float32)
    output = first + tl.arange(0, OUTPUTS)[:, None]
    lines = out + first_token.to(tl.int64) * num_outputs
    tl.store(lines + token * num_outputs + output, total.to(dtype), (output < num_outputs) & known)


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_blocks", "split"])
def packed_kernel(
    x,
    words,
    metas,
    scales,
    bias,
    addend,
    out,
    partials,
    counters,
    num_tokens,
    num_outputs,
    num_rows,
    num_blocks,
    split,
    KIND: tl.constexpr,
    LAYOUT: tl.constexpr,
    STRIDES: tl.constexpr,
    TILE: tl.constexpr,
    WAYS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (output tile, part of the inputs, token tile), the last fastest; see ``octavo.kernels.gpu.quantized``.

    x: tensor descriptor of [T, K] with blocks [TOKENS, DEPTH * block]. LAYOUT: bits, width, group size. STRIDES: from
    a row's words to the next row's and to its next block's. TILE: rows, tokens, blocks a stage, stages, blocks fetched
    ahead. Where WAYS is 2, half of the rows are gates to be activated, half the ups beside them. HAS: scales, bias,
    addend, several parts. ``partials`` [split, T, WAYS * num_outputs] fp32; ``counters`` hold zeros before and after.
    """
    WIDTH: tl.constexpr = LAYOUT[1]
    SIZE: tl.constexpr = 16 // LAYOUT[0] * WIDTH
    ROWS: tl.constexpr = TILE[0]
    TOKENS: tl.constexpr = TILE[1]
    DEPTH: tl.constexpr = TILE[2]
    OUTPUTS: tl.constexpr = ROWS // WAYS
    DTYPE: tl.constexpr = out.dtype.element_ty
    token_tiles = tl.cdiv(num_tokens, TOKENS)
    first_token = tl.program_id(0) % token_tiles * TOKENS
    part = tl.program_id(0) // token_tiles % split
    tile = tl.program_id(0) // (token_tiles * split)
    first = tile * OUTPUTS
    lane = tl.arange(0, ROWS)
    # Rows behind the last output are read as the last one again: what they give is not stored.
    row = tl.minimum(first + lane % OUTPUTS, num_outputs - 1) + lane // OUTPUTS * num_outputs
    depth = tl.arange(0, DEPTH)
    steps = num_blocks // DEPTH
    begin = part * steps // split
    end = (part + 1) * steps // split
    lines = (
        words + (row // _TILE_ROWS).to(tl.int64) * (num_blocks * (_TILE_ROWS * WIDTH)) + row % _TILE_ROWS * STRIDES[0]
    )
    if OVERLAP and TILE[4] > 0:
        prefetch(lines[:, None] + (begin * DEPTH + tl.arange(0, TILE[4]))[None, :] * STRIDES[1])
    if HAS[2] and OVERLAP:
        # The kernel that writes the addend let this one begin when all before it had ended.
        tl.extra.cuda.gdc_launch_dependents()
    else:
        wait_for_inputs(OVERLAP)
    table = metas
    if KIND == _TABLE:
        table = load_table(metas, row[:, None], num_rows, DEPTH, WIDTH)
    place = lines[:, None, None] + depth[None, :, None] * STRIDES[1] + tl.arange(0, WIDTH)[None, None, :]
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for step in tl.range(begin, end, num_stages=TILE[3]):
        w = tl.load(place + step * (DEPTH * STRIDES[1]))
        atom = step * DEPTH + depth
        a = weights(w, table, metas, row[:, None], atom[None, :], num_rows, KIND, LAYOUT, DTYPE, OVERLAP)
        total = tl.dot(a, tl.trans(x.load([first_token, step * (DEPTH * SIZE)])), total)
    if HAS[2] and OVERLAP:
        tl.extra.cuda.gdc_wait()
    if not HAS[3]:
        _finish(
            total, scales, bias, addend, out, row, first, first_token, num_tokens, num_outputs, WAYS, ACTIVATION, HAS
        )  # fmt: skip
    else:
        token = tl.arange(0, TOKENS)[None, :]
        known = (first + lane % OUTPUTS < num_outputs)[:, None] & (token < num_tokens - first_token)
        cells = token * (WAYS * num_outputs) + row[:, None]
        size = num_tokens.to(tl.int64) * (WAYS * num_outputs)
        pieces = partials + first_token.to(tl.int64) * (WAYS * num_outputs)
        tl.store(pieces + part * size + cells, total, known)
        counter = counters + tile * token_tiles + first_token // TOKENS
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == split - 1:
            tl.store(counter, 0)
            total = tl.zeros([ROWS, TOKENS], tl.float32)
            for piece in tl.range(0, split, loop_unroll_factor=4 if TOKENS <= 16 else 1):
                total += tl.load(pieces + piece * size + cells, known, other=0.0, cache_modifier=".cg")
            _finish(
                total, scales, bias, addend, out, row, first, first_token, num_tokens, num_outputs, WAYS, ACTIVATION,
                HAS,
            )  # fmt: skip
