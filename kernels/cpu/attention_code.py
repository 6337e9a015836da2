"""Code of paged attention: a chunk of work is a few queries of one row and one key head.

The queries of a row that share a key head are its lines: line i of a row is query i // group, head i % group. Lines meet
KEYS keys at a time, with a running softmax (Milakov and Gimelshein 2018, arXiv 1805.02867). FEW lines, as decode has
them, read keys and values where they lie, once for all lines. More lines, as prompts have them, meet a copy of the keys
that was turned around, so that a product of vectors needs no sum over lanes.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from octavo.kernels.cpu.code import ELEMENTS, F32, FIRST, I32, I64, PTR, Code, Value

FEW = 8
"""Lines up to which keys are read where they lie."""
MANY = 48
"""Lines of a chunk where a row has more; a multiple of the rows of a tile."""
KEYS = 32
"""Keys that meet the lines at a time."""

(
    QUERIES,
    KEY_CACHE,
    VALUE_CACHE,
    TABLES,
    STARTS,
    LENGTHS,
    OUT,
    NUM_ROWS,
    KEY_HEADS,
    GROUP,
    BLOCK_SIZE,
    QUERY_TOKEN,
    QUERY_HEAD,
    KEY_BLOCK,
    KEY_TOKEN,
    KEY_HEAD,
    TABLE_ROW,
    SCALE,
    WINDOW,
    SOFTCAP,
) = range(FIRST, FIRST + 20)
"""Slots: tensors; counts; distances in elements; scale and softcap as doubles, 0 for none of window and softcap."""

_LEAST = -3.0e38
"""Instead of minus infinity, whose differences are NaN."""
_TILE = 6


def write_attention(dtype: str, head_size: int) -> Callable[[Any, int], None]:
    """Return what writes the kernel `attention` for queries and caches of a dtype."""

    def write(module: Any, width: int) -> None:
        few = _Unit(module, width, dtype, head_size, lines=FEW).write()
        many = _Unit(module, width, dtype, head_size, lines=MANY).write()
        code = Code(module, "attention", [PTR], width)
        (args,) = code.function.args
        _walk(code, args, few, many)
        code.finish()

    return write


def _walk(code: Code, args: Value, few: Any, many: Any) -> None:
    """Count through the chunks of all rows, and run those that this thread takes, which come in ascending order."""
    starts, lengths = code.pointer(args, STARTS), code.pointer(args, LENGTHS)
    key_heads, group, num_rows = (code.slot(args, slot) for slot in (KEY_HEADS, GROUP, NUM_ROWS))
    row_place, before_place = code.variable(I64, code.number(0)), code.variable(I64, code.number(0))
    with code.chunks(args) as chunk:
        head, look, skip, found = (code.function.append_basic_block() for _ in range(4))
        code.b.branch(head)
        code.b.position_at_end(head)
        row, before = code.b.load(row_place, typ=I64), code.b.load(before_place, typ=I64)
        after = code.function.append_basic_block()
        code.b.cbranch(code.less(row, num_rows), look, after)
        code.b.position_at_end(look)
        first = code.load_int(starts, row, I32)
        num_new = code.sub(code.load_int(starts, code.add(row, 1), I32), first)
        lines = code.mul(num_new, group)
        pieces = code.div(code.add(lines, MANY - 1), MANY)
        units = code.mul(pieces, key_heads)
        code.b.cbranch(code.less(chunk, code.add(before, units)), found, skip)
        code.b.position_at_end(skip)
        code.b.store(code.add(row, 1), row_place)
        code.b.store(code.add(before, units), before_place)
        code.b.branch(head)
        code.b.position_at_end(found)
        own = code.sub(chunk, before)
        # The last pieces of a prompt see the most keys: they come first.
        piece, key_head = code.sub(code.sub(pieces, 1), code.div(own, key_heads)), code.rem(own, key_heads)
        begin = code.mul(piece, MANY)
        count = code.least(code.sub(lines, begin), MANY)
        length = code.load_int(lengths, row, I32)
        arguments = [args, row, key_head, first, num_new, length, begin, count]
        with code.b.if_else(code.less(count, FEW + 1)) as (small, large):
            with small:
                code.b.call(few, arguments)
            with large:
                code.b.call(many, arguments)
        code.b.branch(after)
        code.b.position_at_end(after)


class _Unit:
    """Writes what computes one chunk."""

    def __init__(self, module: Any, width: int, dtype: str, head_size: int, lines: int) -> None:
        self._code = Code(module, f"unit_{lines}", [PTR, *[I64] * 7], width)
        self._code.function.linkage = "private"
        self._dtype, self._head_size, self._lines = dtype, head_size, lines
        self._many = lines == MANY
        code = self._code
        (self._args, self._row, self._key_head, self._first, self._num_new, self._length, self._begin, self._count) = (
            code.function.args
        )
        self._vectors = -(-head_size // width)
        self._padded = self._vectors * width
        self._q = code.variable(F32, count=lines * self._padded)
        self._sums = code.variable(F32, count=lines * self._padded)
        self._scores = code.variable(F32, count=lines * KEYS)
        self._peak = code.variable(F32, count=lines)
        self._mass = code.variable(F32, count=lines)
        self._limit = code.variable(I64, count=lines)
        self._places = code.variable(I64, count=KEYS)  # of each key's head in the cache, in elements
        self._keys = code.variable(F32, count=self._padded * KEYS) if self._many else None
        self._values = code.variable(F32, count=self._padded * KEYS) if self._many else None

    def write(self) -> Any:
        code = self._code
        window = code.slot(self._args, WINDOW)
        self._prepare()
        most = code.b.load(code.at(self._limit, code.sub(self._count, 1), I64), typ=I64)
        least = code.b.load(self._limit, typ=I64)
        has_window = code.less(0, window)
        begin = code.b.select(has_window, code.most(code.sub(least, window), 0), code.number(0))
        begin = code.mul(code.div(begin, KEYS), KEYS)
        with code.loop(begin, most, KEYS) as start:
            count = code.least(code.sub(most, start), KEYS)
            self._find(start, count)
            (self._score_many if self._many else self._score_few)(count)
            self._weigh(start, window, has_window)
            (self._add_many if self._many else self._add_few)(count)
        self._store()
        return code.finish()

    def _each_line(self) -> Any:
        return self._code.loop(0, self._count)

    def _prepare(self) -> None:
        """Copy the queries, times the scale, and clear the sums."""
        code, args = self._code, self._args
        scale, group = code.real(args, SCALE), code.slot(args, GROUP)
        zero = code.constant(0.0)
        if self._many:  # what pads the last tile
            with code.loop(0, self._lines * self._padded, code.width) as place:
                code.store(zero, self._q, place)
        with self._each_line() as line:
            index = code.add(self._begin, line)
            query, head = code.div(index, group), code.rem(index, group)
            head = code.add(code.mul(self._key_head, group), head)
            source = code.add(
                code.mul(code.add(self._first, query), code.slot(args, QUERY_TOKEN)),
                code.mul(head, code.slot(args, QUERY_HEAD)),
            )
            base = code.at(code.pointer(args, QUERIES), source, ELEMENTS[self._dtype])
            for vector, value in enumerate(self._head_vectors(base)):
                place = code.add(code.mul(line, self._padded), vector * code.width)
                code.store(code.b.fmul(value, code.splat(scale)), self._q, place)
            code.b.store(ir.Constant(F32, _LEAST), code.at(self._peak, line, F32))
            code.b.store(ir.Constant(F32, 0.0), code.at(self._mass, line, F32))
            # Query i of n sees the first length - n + i + 1 keys.
            limit = code.add(code.sub(self._length, self._num_new), query, 1)
            code.b.store(code.most(limit, 0), code.at(self._limit, line, I64))
        with code.loop(0, self._lines * self._padded, code.width) as place:
            code.store(zero, self._sums, place)

    def _head_vectors(self, base: Value) -> list[Value]:
        """Load a head; what pads its last vector is 0."""
        code, found = self._code, []
        for vector in range(self._vectors):
            first = vector * code.width
            if first + code.width <= self._head_size:
                found.append(code.load(base, first, self._dtype))
                continue
            value = code.constant(0.0)
            for lane in range(self._head_size - first):
                one = code.load(base, first + lane, self._dtype, width=1)
                value = code.b.insert_element(value, one, ir.Constant(I32, lane))
            found.append(value)
        return found

    def _find(self, start: Value, count: Value) -> None:
        """Note where the keys from `start` on lie."""
        code, args = self._code, self._args
        size = code.slot(args, BLOCK_SIZE)
        table = code.at(code.pointer(args, TABLES), code.mul(self._row, code.slot(args, TABLE_ROW)), I32)
        index, offset = code.variable(I64, code.div(start, size)), code.variable(I64, code.rem(start, size))
        with code.loop(0, count) as key:
            at, inside = code.b.load(index, typ=I64), code.b.load(offset, typ=I64)
            found = code.add(
                code.mul(code.load_int(table, at, I32), code.slot(args, KEY_BLOCK)),
                code.mul(inside, code.slot(args, KEY_TOKEN)),
                code.mul(self._key_head, code.slot(args, KEY_HEAD)),
            )
            code.b.store(found, code.at(self._places, key, I64))
            following = code.add(inside, 1)
            is_end = code.b.icmp_signed("==", following, size)
            code.b.store(code.b.select(is_end, code.number(0), following), offset)
            code.b.store(code.b.select(is_end, code.add(at, 1), at), index)
        with code.loop(count, KEYS) as key:  # what is read there counts nothing, but must exist
            code.b.store(code.b.load(self._places, typ=I64), code.at(self._places, key, I64))

    def _head_at(self, cache: int, key: Value) -> Value:
        code = self._code
        place = code.b.load(code.at(self._places, key, I64), typ=I64)
        return code.at(code.pointer(self._args, cache), place, ELEMENTS[self._dtype])

    # Few lines

    def _score_few(self, count: Value) -> None:
        """Multiply each line with a vector of keys at a time."""
        code = self._code
        with code.loop(0, count, code.width) as first, self._each_line() as line:
            query = [
                code.load(self._q, code.add(code.mul(line, self._padded), vector * code.width))
                for vector in range(self._vectors)
            ]
            products = []
            for lane in range(code.width):
                total = code.constant(0.0)
                key = self._head_vectors(self._head_at(KEY_CACHE, code.add(first, lane)))
                for own, value in zip(query, key, strict=True):
                    total = code.madd(own, value, total)
                products.append(total)
            code.store(code.totals(products), self._scores, code.add(code.mul(line, KEYS), first))

    def _add_few(self, count: Value) -> None:
        code = self._code
        kind = ir.VectorType(F32, code.width)
        with self._each_line() as line:
            first = code.mul(line, self._padded)
            places = [code.at(self._sums, code.add(first, vector * code.width), F32) for vector in range(self._vectors)]
            sums = [code.variable(kind) for _ in places]
            for place, own in zip(places, sums, strict=True):
                code.b.store(code.b.load(place, typ=kind, align=4), own)
            with code.loop(0, count) as key:
                weight = code.splat(code.load(self._scores, code.add(code.mul(line, KEYS), key), width=1))
                for own, value in zip(sums, self._head_vectors(self._head_at(VALUE_CACHE, key)), strict=True):
                    code.b.store(code.madd(weight, value, code.b.load(own, typ=kind)), own)
            for place, own in zip(places, sums, strict=True):
                code.b.store(code.b.load(own, typ=kind), place, align=4)

    # Many lines

    def _score_many(self, count: Value) -> None:
        """Turn the keys around, copy the values, and multiply tiles of lines with the keys."""
        code = self._code
        with code.loop(0, KEYS, code.width) as first:
            keys = [self._head_at(KEY_CACHE, code.add(first, lane)) for lane in range(code.width)]
            with code.loop(0, self._head_size // code.width * code.width, code.width) as place:
                self._turn([code.load(key, place, self._dtype) for key in keys], place, first)
            if self._head_size % code.width:
                place = code.number((self._vectors - 1) * code.width)
                self._turn([self._head_vectors(key)[-1] for key in keys], place, first)
        with code.loop(0, count) as key:
            for vector, value in enumerate(self._head_vectors(self._head_at(VALUE_CACHE, key))):
                code.store(value, self._values, code.add(code.mul(key, self._padded), vector * code.width))
        self._multiply(self._q, self._padded, self._padded, self._keys, KEYS, self._scores, None)

    def _turn(self, vectors: list[Value], place: Value, first: Value) -> None:
        """Store a vector of each of some keys, turned around."""
        for lane, turned in enumerate(self._code.transposed(vectors)):
            line = self._code.mul(self._code.add(place, lane), KEYS)
            self._code.store(turned, self._keys, self._code.add(line, first))

    def _add_many(self, count: Value) -> None:
        self._multiply(self._scores, KEYS, count, self._values, self._padded, self._sums, self._sums)

    def _multiply(
        self,
        left: Value,
        left_row: int,
        inner: "Value | int",
        right: Value,
        columns: int,
        out: Value,
        old: Value | None,
    ) -> None:
        """out [lines, columns] = (old +) left [lines, inner] @ right [inner, columns], in tiles of lines."""
        code = self._code
        kind = ir.VectorType(F32, code.width)
        at_once = 2 if columns % (2 * code.width) == 0 else 1
        num_tiles = code.div(code.add(self._count, _TILE - 1), _TILE)
        with code.loop(0, num_tiles) as tile, code.loop(0, columns, at_once * code.width) as column:
            line = code.mul(tile, _TILE)
            sums = [[code.variable(kind) for _ in range(at_once)] for _ in range(_TILE)]
            places = [
                [code.add(code.mul(code.add(line, row), columns), column, half * code.width) for half in range(at_once)]
                for row in range(_TILE)
            ]
            for row in range(_TILE):
                for half in range(at_once):
                    value = code.constant(0.0) if old is None else code.load(old, places[row][half])
                    code.b.store(value, sums[row][half])
            with code.loop(0, inner) as k:
                place = code.add(code.mul(k, columns), column)
                rights = [code.load(right, code.add(place, half * code.width)) for half in range(at_once)]
                for row in range(_TILE):
                    factor = code.load(left, code.add(code.mul(code.add(line, row), left_row), k), width=1)
                    wide = code.splat(factor)
                    for half in range(at_once):
                        total = code.madd(wide, rights[half], code.b.load(sums[row][half], typ=kind))
                        code.b.store(total, sums[row][half])
            for row in range(_TILE):
                for half in range(at_once):
                    code.store(code.b.load(sums[row][half], typ=kind), out, places[row][half])

    # Softmax

    def _weigh(self, start: Value, window: Value, has_window: Value) -> None:
        """Turn scores into weights, and bring the sums so far to the new maximum."""
        code = self._code
        softcap = code.real(self._args, SOFTCAP)
        is_capped = code.b.fcmp_ordered(">", softcap, ir.Constant(F32, 0.0))
        least = code.constant(_LEAST)
        with self._each_line() as line:
            scores = code.at(self._scores, code.mul(line, KEYS), F32)
            with code.when(is_capped), code.loop(0, KEYS, code.width) as place:
                code.store(self._capped(code.load(scores, place), softcap), scores, place)
            limit = code.b.load(code.at(self._limit, line, I64), typ=I64)
            lower = code.b.select(has_window, code.sub(limit, window), code.number(0))
            seen, values = [], []
            for first in range(0, KEYS, code.width):
                place = code.b.add(code.splat(code.add(start, first), I64), code.lanes(I64))
                below = code.b.icmp_signed("<", place, code.splat(limit, I64))
                above = code.b.icmp_signed(">=", place, code.splat(lower, I64))
                seen.append(code.b.and_(below, above))
                values.append(code.b.select(seen[-1], code.load(scores, first), least))
            highest = values[0]
            for value in values[1:]:
                highest = code.maximum(highest, value)
            peak, mass = code.load(self._peak, line, width=1), code.load(self._mass, line, width=1)
            new = code.maximum(code.greatest(highest), peak)
            decay = code.exp(code.b.fsub(peak, new))
            total = code.constant(0.0)
            for value, is_seen, first in zip(values, seen, range(0, KEYS, code.width), strict=True):
                weight = code.exp(code.b.fsub(value, code.splat(new)))
                weight = code.b.select(is_seen, weight, code.constant(0.0))
                code.store(weight, scores, first)
                total = code.b.fadd(total, weight)
            code.b.store(code.madd(mass, decay, code.total(total)), code.at(self._mass, line, F32))
            code.b.store(new, code.at(self._peak, line, F32))
            with code.when(code.b.fcmp_unordered("une", decay, ir.Constant(F32, 1.0))):
                for vector in range(self._vectors):
                    place = code.add(code.mul(line, self._padded), vector * code.width)
                    code.store(code.b.fmul(code.load(self._sums, place), code.splat(decay)), self._sums, place)

    def _capped(self, score: Value, softcap: Value) -> Value:
        """Return softcap * tanh(score / softcap)."""
        code = self._code
        one, wide = code.constant(1.0), code.splat(softcap)
        # tanh(u) = 1 - 2 / (1 + exp(2 u))
        power = code.exp(code.b.fmul(code.b.fdiv(score, wide), code.constant(2.0)))
        return code.b.fmul(wide, code.b.fsub(one, code.b.fdiv(code.constant(2.0), code.b.fadd(one, power))))

    def _store(self) -> None:
        """Write sums over masses, 0 where a line saw no key, to out [tokens, heads, head size]."""
        code, args = self._code, self._args
        group, key_heads = code.slot(args, GROUP), code.slot(args, KEY_HEADS)
        heads = code.mul(group, key_heads)
        with self._each_line() as line:
            index = code.add(self._begin, line)
            token = code.add(self._first, code.div(index, group))
            head = code.add(code.mul(self._key_head, group), code.rem(index, group))
            base = code.at(
                code.pointer(args, OUT),
                code.mul(code.add(code.mul(token, heads), head), self._head_size),
                ELEMENTS[self._dtype],
            )
            mass = code.load(self._mass, line, width=1)
            is_any = code.b.fcmp_ordered(">", mass, ir.Constant(F32, 0.0))
            factor = code.b.fdiv(ir.Constant(F32, 1.0), mass)
            factor = code.b.select(is_any, factor, ir.Constant(F32, 0.0))
            source = code.at(self._sums, code.mul(line, self._padded), F32)

            def scaled(
                place: Value, width: int, source: Value = source, base: Value = base, factor: Value = factor
            ) -> None:
                value = code.b.fmul(code.load(source, place, width=width), code.splat(factor, width=width))
                code.store(value, base, place, self._dtype)

            code.sweep(self._head_size, scaled)
