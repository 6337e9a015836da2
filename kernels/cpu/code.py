"""A thin layer over LLVM's IR builder, in which the kernels of this folder are written.

Values are vectors of `width` floats, counts and places are int64, memory is read and written in float32, bfloat16 or
float16 and computed on in float32. A kernel is a function of one argument, an array of 8-byte slots: slot 0 counts the
chunks of work that were taken, slot 1 the threads that have come, slot 2 says how many chunks there are.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

Value = Any  # of llvmlite: its classes have no types

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32, F64, PTR = ir.HalfType(), ir.FloatType(), ir.DoubleType(), ir.PointerType()

ELEMENTS = {"float32": F32, "bfloat16": I16, "float16": F16}
"""Types in memory by dtype."""

CHUNK, THREAD, NUM_CHUNKS, FIRST = 0, 1, 2, 3
"""Slots of a kernel's argument; its own begin at FIRST."""

_LOG2E = 1.4426950408889634
_EXP2 = (1.0, 0.6931471805599453, 0.24022650695910072, 0.055504108664821576, 0.009618129107628477)
_EXP2_REST = (0.0013333558146428443, 0.00015403530393381608)


class Code:
    """Writes one function.

    Args:
        module: that gets the function.
        name: of it.
        parameters: types of its parameters.
        width: floats in a vector.
    """

    def __init__(self, module: Any, name: str, parameters: Sequence[Any], width: int) -> None:
        self.module = module
        self.width = width
        self.function = ir.Function(module, ir.FunctionType(ir.VoidType(), list(parameters)), name)
        self.function.attributes.add("nounwind")
        self._entry = self.function.append_basic_block("entry")
        self.b = ir.IRBuilder(self.function.append_basic_block("body"))
        self._allocas = ir.IRBuilder(self._entry)
        self._body = self.b.block

    def finish(self) -> Any:
        """End the function; return it."""
        self.b.ret_void()
        self._allocas.branch(self._body)
        return self.function

    # Numbers

    def number(self, value: int) -> Value:
        """Return a constant int64."""
        return ir.Constant(I64, value)

    def _whole(self, value: "Value | int") -> Value:
        return self.number(value) if isinstance(value, int) else value

    def add(self, *values: "Value | int") -> Value:
        """Return the sum of int64s."""
        total = self._whole(values[0])
        for value in values[1:]:
            total = self.b.add(total, self._whole(value))
        return total

    def sub(self, a: "Value | int", b: "Value | int") -> Value:
        """Return a - b, int64."""
        return self.b.sub(self._whole(a), self._whole(b))

    def mul(self, a: "Value | int", b: "Value | int") -> Value:
        """Return a * b, int64."""
        return self.b.mul(self._whole(a), self._whole(b))

    def div(self, a: "Value | int", b: "Value | int") -> Value:
        """Return a // b of int64s that are not negative."""
        return self.b.udiv(self._whole(a), self._whole(b))

    def rem(self, a: "Value | int", b: "Value | int") -> Value:
        """Return a % b of int64s that are not negative."""
        return self.b.urem(self._whole(a), self._whole(b))

    def less(self, a: "Value | int", b: "Value | int") -> Value:
        """Return a < b, signed int64s."""
        return self.b.icmp_signed("<", self._whole(a), self._whole(b))

    def least(self, a: "Value | int", b: "Value | int") -> Value:
        """Return the lesser int64."""
        return self.b.select(self.less(a, b), self._whole(a), self._whole(b))

    def most(self, a: "Value | int", b: "Value | int") -> Value:
        """Return the greater int64."""
        return self.b.select(self.less(a, b), self._whole(b), self._whole(a))

    # Control

    @contextmanager
    def loop(self, start: "Value | int", stop: "Value | int", step: int = 1) -> Iterator[Value]:
        """Run the body for start, start + step ... below stop; yields the int64."""
        counter = self.variable(I64, self._whole(start))
        head, body, after = (self.function.append_basic_block() for _ in range(3))
        stop = self._whole(stop)
        self.b.branch(head)
        self.b.position_at_end(head)
        index = self.b.load(counter, typ=I64)
        self.b.cbranch(self.less(index, stop), body, after)
        self.b.position_at_end(body)
        yield index
        self.b.store(self.add(index, step), counter)
        self.b.branch(head)
        self.b.position_at_end(after)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Run the body if a condition holds."""
        with self.b.if_then(condition):
            yield

    @contextmanager
    def chunks(self, args: Value) -> Iterator[Value]:
        """Run the body for each chunk that this thread takes; yields its number."""
        head, body, after = (self.function.append_basic_block() for _ in range(3))
        number = self.slot(args, NUM_CHUNKS)
        self.b.branch(head)
        self.b.position_at_end(head)
        taken = self.take(args, CHUNK)
        self.b.cbranch(self.less(taken, number), body, after)
        self.b.position_at_end(body)
        yield taken
        self.b.branch(head)
        self.b.position_at_end(after)

    # Memory

    def variable(self, kind: Any, value: Value = None, count: int = 1) -> Value:
        """Return the place of a local variable, or of so many."""
        place = self._allocas.alloca(kind, count)
        place.align = 64
        place.type = PTR  # llvmlite still gives typed pointers here
        if value is not None:
            self.b.store(value, place)
        return place

    def slot(self, args: Value, index: int) -> Value:
        """Return a slot of the argument, as int64."""
        return self.b.load(self.b.gep(args, [self.number(index)], source_etype=I64), typ=I64)

    def pointer(self, args: Value, index: int) -> Value:
        """Return a slot of the argument, as a pointer."""
        return self.b.inttoptr(self.slot(args, index), PTR)

    def real(self, args: Value, index: int) -> Value:
        """Return a slot of the argument that holds a double, as float."""
        return self.b.fptrunc(self.b.bitcast(self.slot(args, index), F64), F32)

    def take(self, args: Value, index: int) -> Value:
        """Return a slot of the argument and add 1 to it, at once for all threads."""
        place = self.b.gep(args, [self.number(index)], source_etype=I64)
        return self.b.atomic_rmw("add", place, self.number(1), "monotonic")

    def at(self, base: Value, index: "Value | int", kind: Any) -> Value:
        """Return the place of an element."""
        return self.b.gep(base, [self._whole(index)], source_etype=kind)

    def load_int(self, base: Value, index: "Value | int", kind: Any) -> Value:
        """Return an integer element as int64."""
        value = self.b.load(self.at(base, index, kind), typ=kind)
        return value if kind is I64 else self.b.sext(value, I64)

    def load(self, base: Value, index: "Value | int", dtype: str = "float32", width: int | None = None) -> Value:
        """Return `width` consecutive elements as floats; a width of 1 is a scalar."""
        width = self.width if width is None else width
        kind = ELEMENTS[dtype]
        raw = self.b.load(self.at(base, index, kind), typ=_vector(kind, width), align=kind_bytes(dtype))
        if dtype == "bfloat16":
            wide = self.b.zext(raw, _vector(I32, width))
            return self.b.bitcast(self.b.shl(wide, self.splat_int(16, width)), _vector(F32, width))
        return self.b.fpext(raw, _vector(F32, width)) if dtype == "float16" else raw

    def store(self, value: Value, base: Value, index: "Value | int", dtype: str = "float32") -> None:
        """Write floats, rounded to the dtype."""
        place = self.at(base, index, ELEMENTS[dtype])
        self.b.store(self._rounded(value, dtype), place, align=kind_bytes(dtype))

    def store_some(self, value: Value, base: Value, index: "Value | int", count: Value) -> None:
        """Write the first `count` of a vector of floats; all where there are more."""
        lanes = self.b.icmp_signed("<", self.lanes(I64), self.splat(count, I64))
        kind = _vector(F32, self.width)
        name = f"llvm.masked.store.v{self.width}f32.p0"
        types = [kind, PTR, I32, _vector(I1, self.width)]
        function = self.intrinsic(name, ir.VoidType(), types)
        self.b.call(function, [value, self.at(base, index, F32), ir.Constant(I32, 4), lanes])

    def _rounded(self, value: Value, dtype: str) -> Value:
        width = _width(value)
        if dtype == "float16":
            return self.b.fptrunc(value, _vector(F16, width))
        if dtype != "bfloat16":
            return value
        bits = self.b.bitcast(value, _vector(I32, width))
        odd = self.b.and_(self.b.lshr(bits, self.splat_int(16, width)), self.splat_int(1, width))
        rounded = self.b.add(bits, self.b.add(odd, self.splat_int(0x7FFF, width)))
        # A NaN must not be rounded to an infinity.
        kept = self.b.or_(bits, self.splat_int(0x400000, width))
        chosen = self.b.select(self.b.fcmp_unordered("uno", value, value), kept, rounded)
        return self.b.trunc(self.b.lshr(chosen, self.splat_int(16, width)), _vector(I16, width))

    # Vectors

    def splat(self, value: Value, kind: Any = F32, width: int | None = None) -> Value:
        """Return a vector of one value."""
        width = self.width if width is None else width
        if width == 1:
            return value
        one = self.b.insert_element(ir.Constant(_vector(kind, width), ir.Undefined), value, ir.Constant(I32, 0))
        zeros = ir.Constant(_vector(I32, width), [0] * width)
        return self.b.shuffle_vector(one, ir.Constant(_vector(kind, width), ir.Undefined), zeros)

    def splat_int(self, value: int, width: int) -> Value:
        """Return a constant vector of int32s; a scalar where the width is 1."""
        return ir.Constant(I32, value) if width == 1 else ir.Constant(_vector(I32, width), [value] * width)

    def constant(self, value: float, width: int | None = None) -> Value:
        """Return a constant vector of floats; a scalar where the width is 1."""
        width = self.width if width is None else width
        return ir.Constant(F32, value) if width == 1 else ir.Constant(_vector(F32, width), [value] * width)

    def lanes(self, kind: Any) -> Value:
        """Return 0, 1, 2 ..."""
        return ir.Constant(_vector(kind, self.width), list(range(self.width)))

    def madd(self, a: Value, b: Value, c: Value) -> Value:
        """Return a * b + c, fused where the processor does it."""
        return self._float_call("fmuladd", [a, b, c])

    def total(self, vector: Value) -> Value:
        """Return the sum of a vector."""
        function = self.intrinsic(f"llvm.vector.reduce.fadd.v{self.width}f32", F32, [F32, vector.type])
        return self.b.call(function, [ir.Constant(F32, -0.0), vector], fastmath=("reassoc",))

    def greatest(self, vector: Value) -> Value:
        """Return the maximum of a vector."""
        function = self.intrinsic(f"llvm.vector.reduce.fmax.v{self.width}f32", F32, [vector.type])
        return self.b.call(function, [vector], fastmath=("nnan", "nsz"))

    def maximum(self, a: Value, b: Value) -> Value:
        """Return the greater of two floats, of vectors lane by lane; b where one is NaN."""
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def sqrt(self, value: Value) -> Value:
        """Return the square root."""
        return self._float_call("sqrt", [value])

    def exp(self, value: Value) -> Value:
        """Return e to a power: within 2 units in the last place; below -87.3, 0; above 88, infinity or nearly so."""
        width = _width(value)
        power = self.b.fmul(value, self.constant(_LOG2E, width))
        least, most = self.constant(-126.0, width), self.constant(128.0, width)
        limited = self.b.select(self.b.fcmp_ordered("<", power, most), power, most)
        limited = self.maximum(limited, least)
        whole = self._float_call("rint", [limited])
        # value - whole * ln 2 in two steps, which rounds less than the fraction of the power would
        rest = self.madd(whole, self.constant(-0.693145751953125, width), value)
        rest = self.madd(whole, self.constant(-1.42860682030941723212e-6, width), rest)
        fraction = self.b.fmul(rest, self.constant(_LOG2E, width))
        result = self.constant(_EXP2_REST[1], width)
        for factor in (_EXP2_REST[0], *reversed(_EXP2)):
            result = self.madd(result, fraction, self.constant(factor, width))
        # 2 ** whole in two factors, so that 2 ** 128 does not overflow before the product does
        bits = self.b.fptosi(whole, _vector(I32, width))
        half = self.b.ashr(bits, self.splat_int(1, width))
        for exponent in (half, self.b.sub(bits, half)):
            shifted = self.b.shl(self.b.add(exponent, self.splat_int(127, width)), self.splat_int(23, width))
            result = self.b.fmul(result, self.b.bitcast(shifted, _vector(F32, width)))
        tiny = self.b.fcmp_ordered("<", power, least)
        result = self.b.select(tiny, self.constant(0.0, width), result)
        return self.b.select(self.b.fcmp_unordered("uno", value, value), value, result)

    def transposed(self, vectors: list[Value]) -> list[Value]:
        """Return `width` vectors as the columns of themselves."""
        stride, rows = 1, list(vectors)
        while stride < self.width:
            for i in range(self.width):
                if not i & stride:
                    rows[i], rows[i | stride] = self._exchanged(rows[i], rows[i | stride], stride)
            stride *= 2
        return rows

    def totals(self, vectors: list[Value]) -> Value:
        """Return the sums of `width` vectors as one."""
        stride, rows = 1, list(vectors)
        while len(rows) > 1:
            rows = [self.b.fadd(*self._exchanged(a, b, stride)) for a, b in zip(rows[::2], rows[1::2], strict=True)]
            stride *= 2
        return rows[0]

    def _exchanged(self, a: Value, b: Value, stride: int) -> tuple[Value, Value]:
        """Return two vectors between which the lanes at odd multiples of the stride in a and at even in b changed place."""
        lower = [i if not i & stride else self.width + i - stride for i in range(self.width)]
        upper = [i + stride if not i & stride else self.width + i for i in range(self.width)]
        masks = [ir.Constant(_vector(I32, self.width), lanes) for lanes in (lower, upper)]
        return self.b.shuffle_vector(a, b, masks[0]), self.b.shuffle_vector(a, b, masks[1])

    def sweep(self, count: "Value | int", body: Callable[[Value, int], None]) -> None:
        """Run a body (place, width) over `count` elements, first in vectors, then one by one."""
        whole = self.mul(self.div(count, self.width), self.width)
        with self.loop(0, whole, self.width) as place:
            body(place, self.width)
        with self.loop(whole, count) as place:
            body(place, 1)

    # Calls

    def intrinsic(self, name: str, result: Any, parameters: Sequence[Any]) -> Any:
        """Return a function of LLVM."""
        if name in self.module.globals:
            return self.module.globals[name]
        return ir.Function(self.module, ir.FunctionType(result, list(parameters)), name)

    def _float_call(self, name: str, values: list[Value]) -> Value:
        width, kind = _width(values[0]), values[0].type
        suffix = "f32" if width == 1 else f"v{width}f32"
        return self.b.call(self.intrinsic(f"llvm.{name}.{suffix}", kind, [kind] * len(values)), values)


def kind_bytes(dtype: str) -> int:
    """Return the bytes of an element."""
    return 4 if dtype == "float32" else 2


def _vector(kind: Any, width: int) -> Any:
    return kind if width == 1 else ir.VectorType(kind, width)


def _width(value: Value) -> int:
    return value.type.count if isinstance(value.type, ir.VectorType) else 1
