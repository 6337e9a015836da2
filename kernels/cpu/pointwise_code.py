"""Code of what is done to each token by itself: norm, gate, rotary embedding and the write to the cache."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from octavo.kernels.cpu.code import ELEMENTS, F32, FIRST, I64, PTR, Code, Value

TOKENS_AT_ONCE = 8
"""Of a chunk."""


def write_norm(dtype: str) -> Callable[[Any, int], None]:
    """Return what writes the kernel `norm`.

    Slots: x, residual or 0, weight, out, sum (or 0 without a residual), rows, size, distance of rows of x and of the
    residual in elements; eps, and what is added to the weight, as doubles.
    """

    def write(module: Any, width: int) -> None:
        code = Code(module, "norm", [PTR], width)
        (args,) = code.function.args
        x, residual, weight, out, summed = (code.pointer(args, FIRST + i) for i in range(5))
        num_rows, size, x_row, residual_row = (code.slot(args, FIRST + i) for i in range(5, 9))
        eps, offset = code.real(args, FIRST + 9), code.real(args, FIRST + 10)
        has_residual = code.b.icmp_signed("!=", code.slot(args, FIRST + 1), code.number(0))
        kind = ELEMENTS[dtype]
        squares, rest = code.variable(ir.VectorType(F32, width)), code.variable(F32)
        with _rows(code, args, num_rows) as row:
            source = code.at(x, code.mul(row, x_row), kind)
            added = code.at(residual, code.mul(row, residual_row), kind)
            target, total = (code.at(base, code.mul(row, size), kind) for base in (out, summed))
            with code.when(has_residual):

                def add(
                    place: Value, lanes: int, source: Value = source, added: Value = added, to: Value = total
                ) -> None:
                    value = code.b.fadd(code.load(source, place, dtype, lanes), code.load(added, place, dtype, lanes))
                    code.store(value, to, place, dtype)

                code.sweep(size, add)
            read = code.b.select(has_residual, total, source)
            code.b.store(code.constant(0.0), squares)
            code.b.store(ir.Constant(F32, 0.0), rest)

            def square(place: Value, lanes: int, read: Value = read) -> None:
                value, held = code.load(read, place, dtype, lanes), rest if lanes == 1 else squares
                code.b.store(code.madd(value, value, code.b.load(held, typ=value.type)), held)

            code.sweep(size, square)
            mass = code.b.fadd(
                code.total(code.b.load(squares, typ=ir.VectorType(F32, width))), code.b.load(rest, typ=F32)
            )
            mean = code.b.fdiv(mass, code.b.uitofp(size, F32))
            scale = code.b.fdiv(ir.Constant(F32, 1.0), code.sqrt(code.b.fadd(mean, eps)))

            def norm(
                place: Value, lanes: int, read: Value = read, target: Value = target, scale: Value = scale
            ) -> None:
                value = code.b.fmul(code.load(read, place, dtype, lanes), code.splat(scale, width=lanes))
                factor = code.b.fadd(code.load(weight, place, dtype, lanes), code.splat(offset, width=lanes))
                code.store(code.b.fmul(value, factor), target, place, dtype)

            code.sweep(size, norm)
        code.finish()

    return write


def write_silu_and_mul(dtype: str) -> Callable[[Any, int], None]:
    """Return what writes the kernel `gate`. Slots: x, out, rows, size of a half, distance of rows of x in elements."""

    def write(module: Any, width: int) -> None:
        code = Code(module, "gate", [PTR], width)
        (args,) = code.function.args
        x, out = code.pointer(args, FIRST), code.pointer(args, FIRST + 1)
        num_rows, size, x_row = (code.slot(args, FIRST + i) for i in (2, 3, 4))
        kind = ELEMENTS[dtype]
        with _rows(code, args, num_rows) as row:
            gates = code.at(x, code.mul(row, x_row), kind)
            ups, to = code.at(gates, size, kind), code.at(out, code.mul(row, size), kind)

            def gate(place: Value, lanes: int, gates: Value = gates, ups: Value = ups, to: Value = to) -> None:
                value, up = code.load(gates, place, dtype, lanes), code.load(ups, place, dtype, lanes)
                one = code.constant(1.0, lanes)
                power = code.exp(code.b.fneg(value))
                code.store(code.b.fmul(code.b.fdiv(value, code.b.fadd(one, power)), up), to, place, dtype)

            code.sweep(size, gate)
        code.finish()

    return write


def write_rotary(dtype: str) -> Callable[[Any, int], None]:
    """Return what writes the kernel `rotary`.

    Slots: q, k, v, out, positions int64, table [positions, 2 * half] float32, slots int64, caches; tokens, heads, key
    heads, head size, half, block size; distances of tokens and heads of q, k and v, and of blocks, tokens and heads of
    the caches.
    """

    def write(module: Any, width: int) -> None:
        code = Code(module, "rotary", [PTR], width)
        (args,) = code.function.args
        q, k, v, out, positions, table, slots, keys, values = (code.pointer(args, FIRST + i) for i in range(9))
        number, heads, key_heads, size, half, block = (code.slot(args, FIRST + 9 + i) for i in range(6))
        q_steps, k_steps, v_steps = ([code.slot(args, FIRST + 15 + 2 * i + j) for j in range(2)] for i in range(3))
        cache_steps = [code.slot(args, FIRST + 21 + i) for i in range(3)]
        kind = ELEMENTS[dtype]
        with _rows(code, args, number) as token:
            place = code.load_int(positions, token, I64)
            angles = code.at(table, code.mul(place, code.mul(half, 2)), F32)
            with code.loop(0, heads) as head:
                source = code.at(q, code.add(code.mul(token, q_steps[0]), code.mul(head, q_steps[1])), kind)
                to = code.at(out, code.mul(code.add(code.mul(token, heads), head), size), kind)
                _rotate(code, dtype, source, to, angles, half, size)
            slot = code.load_int(slots, token, I64)
            with code.when(code.less(-1, slot)), code.loop(0, key_heads) as head:
                to = code.add(
                    code.mul(code.div(slot, block), cache_steps[0]),
                    code.mul(code.rem(slot, block), cache_steps[1]),
                    code.mul(head, cache_steps[2]),
                )
                source = code.at(k, code.add(code.mul(token, k_steps[0]), code.mul(head, k_steps[1])), kind)
                _rotate(code, dtype, source, code.at(keys, to, kind), angles, half, size)
                source = code.at(v, code.add(code.mul(token, v_steps[0]), code.mul(head, v_steps[1])), kind)
                _copy(code, dtype, source, code.at(values, to, kind), code.number(0), size)
        code.finish()

    return write


def _rotate(code: Code, dtype: str, source: Value, to: Value, angles: Value, half: Value, size: Value) -> None:
    def turn(place: Value, lanes: int) -> None:
        other = code.add(place, half)
        first, second = code.load(source, place, dtype, lanes), code.load(source, other, dtype, lanes)
        cos, sin = code.load(angles, place, width=lanes), code.load(angles, other, width=lanes)
        code.store(code.b.fsub(code.b.fmul(first, cos), code.b.fmul(second, sin)), to, place, dtype)
        code.store(code.madd(second, cos, code.b.fmul(first, sin)), to, other, dtype)

    code.sweep(half, turn)
    _copy(code, dtype, source, to, code.mul(half, 2), size)


def _copy(code: Code, dtype: str, source: Value, to: Value, begin: Value, end: Value) -> None:
    def copy(place: Value, lanes: int) -> None:
        place = code.add(place, begin)
        code.store(code.load(source, place, dtype, lanes), to, place, dtype)

    code.sweep(code.sub(end, begin), copy)


@contextmanager
def _rows(code: Code, args: Value, number: Value) -> Iterator[Value]:
    """Loop over the rows of each chunk."""
    with code.chunks(args) as chunk:
        first = code.mul(chunk, TOKENS_AT_ONCE)
        with code.loop(first, code.least(code.add(first, TOKENS_AT_ONCE), number)) as row:
            yield row
