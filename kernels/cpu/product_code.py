"""Code of the matrix product: panels of outputs, along which all inputs lie one after the other.

A panel holds 2 * width outputs: for each input its weights of all of them, so that a product reads a panel from end to
end. Tiles of some rows of x meet a panel with the sums in registers; no sum is ever cut, whatever the number of inputs.
With few rows each weight is converted where it is used; with more, a panel is first converted to float32 in memory that
stays in the cache.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from octavo.kernels.cpu.code import FIRST, I8, I32, I64, PTR, THREAD, Code, Value

(X, NUM_ROWS, NUM_INPUTS, NUM_OUTPUTS, WEIGHT, SCALES, ZEROS, GROUP, BIAS, OUT, BUFFER, PANELS_AT_ONCE) = range(
    FIRST, FIRST + 12
)
"""Slots: x as tiles [tiles][inputs][rows], the weight's panels, its scales [groups][padded outputs] float32, its zeros
like these (int8 has none), inputs of a group, bias float32 or 0, out [rows][outputs] float32, memory for a panel of each
thread, panels of a chunk."""

PLAIN = ("float32", "bfloat16", "float16")
CODES = ("int8", "uint8", "uint4")


def most_rows(width: int) -> int:
    """Return the rows of the largest tile: as many as there are registers for sums."""
    return 12 if width == 16 else 6


def panel_bytes(kind: str, width: int, num_inputs: int) -> int:
    """Return the bytes of a panel."""
    per_output = {"float32": 8, "bfloat16": 4, "float16": 4, "int8": 2, "uint8": 2, "uint4": 1}[kind]
    return per_output * width * num_inputs


class _Panel:
    """Reads the weights of one kind in a panel."""

    def __init__(self, code: Code, kind: str, base: Value) -> None:
        self._code, self._kind, self._base = code, kind, base

    def __call__(self, place: Value) -> list[Value]:
        """Return the weights of the panel's outputs for one input, two vectors."""
        code, width = self._code, self._code.width
        if self._kind in PLAIN:
            first = code.mul(place, 2 * width)
            return [code.load(self._base, code.add(first, half * width), self._kind) for half in range(2)]
        if self._kind == "uint4":
            both = self._codes(code.mul(place, width))
            low = code.b.and_(both, ir.Constant(both.type, [15] * width))
            high = code.b.lshr(both, ir.Constant(both.type, [4] * width))
            return [self._floats(part, is_signed=False) for part in (low, high)]
        first = code.mul(place, 2 * width)
        halves = [self._codes(code.add(first, half * width)) for half in range(2)]
        return [self._floats(half, is_signed=self._kind == "int8") for half in halves]

    def _codes(self, first: Value) -> Value:
        code = self._code
        return code.b.load(code.at(self._base, first, I8), typ=ir.VectorType(I8, code.width), align=1)

    def _floats(self, codes: Value, *, is_signed: bool) -> Value:
        code = self._code
        wide = ir.VectorType(I32, code.width)
        whole = code.b.sext(codes, wide) if is_signed else code.b.zext(codes, wide)
        return code.b.sitofp(whole, ir.VectorType(ir.FloatType(), code.width))


def write_product(kind: str) -> Callable[[Any, int], None]:
    """Return what writes the kernel `product` for a kind of weights."""

    def write(module: Any, width: int) -> None:
        tiles = [_tile(module, width, "float32", rows) for rows in range(1, most_rows(width) + 1)]
        direct = tiles
        if kind != "float32":
            direct = [_tile(module, width, kind, rows) for rows in range(1, most_rows(width) + 1)]
        code = Code(module, "product", [PTR], width)
        _write_kernel(code, kind, direct, tiles)
        code.finish()

    return write


def _write_kernel(code: Code, kind: str, direct: list[Any], tiles: list[Any]) -> None:
    (args,) = code.function.args
    width, num_inputs, num_outputs = code.width, code.slot(args, NUM_INPUTS), code.slot(args, NUM_OUTPUTS)
    num_rows = code.slot(args, NUM_ROWS)
    num_panels = code.div(code.add(num_outputs, 2 * width - 1), 2 * width)
    at_once = code.slot(args, PANELS_AT_ONCE)
    own = code.take(args, THREAD)
    buffer = code.at(code.pointer(args, BUFFER), code.mul(code.mul(own, num_inputs), 2 * width), ir.FloatType())
    weight = code.pointer(args, WEIGHT)
    is_direct = code.less(num_rows, len(tiles) + 1)
    with code.chunks(args) as chunk:
        first = code.mul(chunk, at_once)
        with code.loop(first, code.least(code.add(first, at_once), num_panels)) as panel:
            place = code.mul(panel, code.mul(num_inputs, panel_bytes(kind, width, 1)))
            base = code.at(weight, place, I8)
            with code.b.if_else(is_direct) as (few, many):
                with few:
                    _call_tile(code, direct, [args, base, panel, code.number(0)], num_rows)
                with many:
                    ready = base
                    if kind != "float32":
                        _convert_panel(code, kind, args, base, panel, buffer)
                        ready = buffer
                    _run_tiles(code, tiles, args, ready, panel)


def _run_tiles(code: Code, tiles: list[Any], args: Value, base: Value, panel: Value) -> None:
    """Run all rows past a panel in tiles whose sizes differ by one at most."""
    num_rows = code.slot(args, NUM_ROWS)
    number = code.div(code.add(num_rows, len(tiles) - 1), len(tiles))
    size, larger = code.div(num_rows, number), code.rem(num_rows, number)
    with code.loop(0, number) as tile:
        rows = code.add(size, code.b.zext(code.less(tile, larger), I64))
        start = code.add(code.mul(tile, size), code.least(tile, larger))
        _call_tile(code, tiles, [args, base, panel, start], rows)


def _call_tile(code: Code, tiles: list[Any], arguments: list[Value], rows: Value) -> None:
    after = code.function.append_basic_block()
    switch = code.b.switch(rows, after)
    for number, tile in enumerate(tiles, 1):
        block = code.function.append_basic_block()
        switch.add_case(number, block)
        code.b.position_at_end(block)
        code.b.call(tile, arguments)
        code.b.branch(after)
    code.b.position_at_end(after)


def _convert_panel(code: Code, kind: str, args: Value, base: Value, panel: Value, buffer: Value) -> None:
    """Write a panel as floats, scaled."""
    width, read = code.width, _Panel(code, kind, base)

    def convert(place: Value, factors: list[Value] | None, offsets: list[Value] | None) -> None:
        for half, value in enumerate(read(place)):
            if offsets is not None:
                value = code.b.fsub(value, offsets[half])
            if factors is not None:
                value = code.b.fmul(value, factors[half])
            code.store(value, buffer, code.add(code.mul(place, 2 * width), half * width))

    if kind in PLAIN:
        with code.loop(0, code.slot(args, NUM_INPUTS)) as place:
            convert(place, None, None)
        return
    with _groups(code, kind, args, panel) as (start, stop, factors, offsets), code.loop(start, stop) as place:
        convert(place, factors, offsets)


@contextmanager
def _groups(
    code: Code, kind: str, args: Value, panel: Value
) -> Iterator[tuple[Value, Value, list[Value], list[Value] | None]]:
    """Loop over the groups of a panel; yields where each begins and ends, its scales and its zeros."""
    num_inputs, size, panel_size = code.slot(args, NUM_INPUTS), code.slot(args, GROUP), 2 * code.width
    padded = code.mul(code.div(code.add(code.slot(args, NUM_OUTPUTS), panel_size - 1), panel_size), panel_size)
    with code.loop(0, code.div(code.add(num_inputs, code.sub(size, 1)), size)) as group:
        first = code.add(code.mul(group, padded), code.mul(panel, panel_size))
        places = [code.add(first, half * code.width) for half in range(2)]
        factors = [code.load(code.pointer(args, SCALES), place) for place in places]
        offsets = None
        if kind != "int8":
            offsets = [code.load(code.pointer(args, ZEROS), place) for place in places]
        start = code.mul(group, size)
        yield start, code.least(code.add(start, size), num_inputs), factors, offsets


def _tile(module: Any, width: int, kind: str, rows: int) -> Any:
    """Write a function that multiplies some rows of x with a panel of a kind, and stores their outputs."""
    code = Code(module, f"tile_{kind}_{rows}", [PTR, PTR, I64, I64], width)
    code.function.linkage = "private"
    return _Tile(code, kind, rows).write()


class _Tile:
    """Writes a tile. Its parameters: the kernel's argument, the panel's place and number, the first row."""

    def __init__(self, code: Code, kind: str, rows: int) -> None:
        self._code, self._kind, self._rows = code, kind, rows
        self._args, base, self._panel, self._start = code.function.args
        self._num_inputs = code.slot(self._args, NUM_INPUTS)
        self._x = code.at(code.pointer(self._args, X), code.mul(self._start, self._num_inputs), ir.FloatType())
        self._read = _Panel(code, kind, base)
        self._vector = ir.VectorType(ir.FloatType(), code.width)
        self._phases = max(
            1, 4 // rows
        )  # sums of every so manieth input, so that few rows need not wait for their last
        self._sums = [self._zeros() for _ in range(self._phases)]

    def write(self) -> Any:
        code, zero = self._code, self._code.constant(0.0)
        if self._kind in PLAIN:
            self._accumulate(code.number(0), self._num_inputs, None)
            self._store([[self._sum(row, half) for half in range(2)] for row in range(self._rows)])
            return code.finish()
        scaled = self._zeros()
        with _groups(code, self._kind, self._args, self._panel) as (begin, end, factors, offsets):
            for place in (place for phase in self._sums for row in phase for place in row):
                code.b.store(zero, place)
            self._accumulate(begin, end, offsets)
            for row in range(self._rows):
                for half in range(2):
                    old = code.b.load(scaled[row][half], typ=self._vector)
                    code.b.store(code.madd(self._sum(row, half), factors[half], old), scaled[row][half])
        self._store([[code.b.load(place, typ=self._vector) for place in row] for row in scaled])
        return code.finish()

    def _zeros(self) -> list[list[Value]]:
        zero = self._code.constant(0.0)
        return [[self._code.variable(self._vector, zero) for _ in range(2)] for _ in range(self._rows)]

    def _accumulate(self, begin: Value, end: Value, offsets: list[Value] | None) -> None:
        code, phases = self._code, self._phases
        whole = code.add(begin, code.mul(code.div(code.sub(end, begin), phases), phases))
        with code.loop(begin, whole, phases) as place:
            for phase in range(phases):
                self._add(code.add(place, phase), phase, offsets)
        if phases > 1:
            with code.loop(whole, end) as place:
                self._add(place, 0, offsets)

    def _add(self, place: Value, phase: int, offsets: list[Value] | None) -> None:
        code = self._code
        weights = self._read(place)
        if offsets is not None:
            weights = [code.b.fsub(one, offset) for one, offset in zip(weights, offsets, strict=True)]
        for row in range(self._rows):
            value = code.splat(code.load(self._x, code.add(code.mul(place, self._rows), row), width=1))
            for half in range(2):
                held = self._sums[phase][row][half]
                code.b.store(code.madd(value, weights[half], code.b.load(held, typ=self._vector)), held)

    def _sum(self, row: int, half: int) -> Value:
        total = self._code.b.load(self._sums[0][row][half], typ=self._vector)
        for phase in self._sums[1:]:
            total = self._code.b.fadd(total, self._code.b.load(phase[row][half], typ=self._vector))
        return total

    def _store(self, results: list[list[Value]]) -> None:
        code, args, width = self._code, self._args, self._code.width
        out, num_outputs = code.pointer(args, OUT), code.slot(args, NUM_OUTPUTS)
        has_bias = code.b.icmp_signed("!=", code.slot(args, BIAS), code.number(0))
        for half in range(2):
            first = code.add(code.mul(self._panel, 2 * width), half * width)
            left = code.sub(num_outputs, first)
            added = code.variable(self._vector, code.constant(0.0))
            with code.when(has_bias):  # padded to whole panels
                code.b.store(code.load(code.pointer(args, BIAS), first), added)
            offset = code.b.load(added, typ=self._vector)
            for row, values in enumerate(results):
                place = code.add(code.mul(code.add(self._start, row), num_outputs), first)
                code.store_some(code.b.fadd(values[half], offset), out, place, left)


def write_arrange(module: Any, width: int) -> None:
    """Write the kernel `arrange`: rows of x into tiles, one tile a chunk.

    Slots: x float32, rows, inputs, elements from one row of x to the next, out.
    """
    code = Code(module, "arrange", [PTR], width)
    (args,) = code.function.args
    x, out = code.pointer(args, FIRST), code.pointer(args, FIRST + 4)
    num_rows, num_inputs, stride = (code.slot(args, FIRST + i) for i in (1, 2, 3))
    number = code.slot(args, 2)
    size, larger = code.div(num_rows, number), code.rem(num_rows, number)
    with code.chunks(args) as tile:
        rows = code.add(size, code.b.zext(code.less(tile, larger), I64))
        start = code.add(code.mul(tile, size), code.least(tile, larger))
        to = code.at(out, code.mul(start, num_inputs), ir.FloatType())
        with code.loop(0, rows) as row:
            line = code.at(x, code.mul(code.add(start, row), stride), ir.FloatType())
            with code.loop(0, num_inputs) as place:
                value = code.load(line, place, width=1)
                code.store(value, to, code.add(code.mul(place, rows), row))
    code.finish()
