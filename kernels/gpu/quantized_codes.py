"""Device functions that turn packed codes into numbers of the model's dtype, two at a time, in registers.

Words are int16. Code i of word j of a line is input ``i * WIDTH + j`` of the line's block of inputs, so that code i of
all words is a tile of neighbouring inputs, and no number has to change its place.

A small integer code is put into the low bits of a number whose last place counts ones (1024 in float16, 128 in
bfloat16): an ``or`` instead of a conversion, which takes four times as long. That number less its base and the zero
point is exact, and times the scale is rounded once: what ``octavo.kernels.weights.dequantized`` defines, where the
scale is a number of the model's dtype.

The inline assembly takes a register of two neighbouring words; where there is none (the interpreter, older processors)
the same numbers are computed in fp32.
"""

import torch
import triton
import triton.language as tl

GROUPED = 0
"""Integer codes of 2, 4 or 8 bits. Meta holds the bits of the scale and, above them, of -(base + zero point)."""
TABLE = 1
"""Codes of 4 bits, pairs of words interleaved, that a table of each output translates."""
FLOAT8 = 2
"""Two float8_e4m3fn a word, whose scales come later. NaN is not among them: its code counts as 480."""
FLOAT8_SCALED = 3
"""Two float8_e4m3fn a word. Meta holds the bits of an fp32 scale."""

_GROUPED = tl.constexpr(GROUPED)
_TABLE = tl.constexpr(TABLE)
_FLOAT8_SCALED = tl.constexpr(FLOAT8_SCALED)

_BASE_FP16 = tl.constexpr(1024.0)
_BASE_BF16 = tl.constexpr(128.0)


def base(dtype: torch.dtype, bits: int) -> int:
    """Return what codes stand on: where the dtype's last place counts ones; 0 where it does so for too few codes."""
    if dtype == torch.float16:
        return 1024
    return 128 if bits < 8 else 0


def _grouped_assembly(bits: int, half: str) -> str:
    """Return the assembly for codes of some bits: one register of words, two of meta -> 16 / bits registers."""
    codes = 16 // bits
    mask, shift_by = (1 << bits) - 1, 8 if half == "f16" else 4
    base, magic = (1024, 0x6400) if half == "f16" else (128, 0x4300)
    lines = [f"prmt.b32 s, ${codes + 1}, ${codes + 2}, 0x5410;", f"prmt.b32 z0, ${codes + 1}, ${codes + 2}, 0x7632;"]
    constants: dict[int, tuple[str, str]] = {}
    for raised in {place * bits % shift_by for place in range(codes)} - {0}:
        # A code that stands `raised` bits higher counts 2 ** raised times as much.
        factor, addend = _bits(2.0**-raised, half), _bits(base - base * 2.0**-raised, half)
        lines += [f"mov.b32 f{raised}, {factor};", f"mov.b32 c{raised}, {addend};"]
        lines += [f"add.rn.{half}x2 z{raised}, z0, c{raised};"]
        constants[raised] = (f"f{raised}", f"z{raised}")
    lines += [f"shr.u32 w{shift}, ${codes}, {shift};" for shift in range(shift_by, 16, shift_by)]
    for place in range(codes):
        shift, raised = place * bits // shift_by * shift_by, place * bits % shift_by
        word = f"w{shift}" if shift else f"${codes}"
        lines.append(f"lop3.b32 t, {word}, {_twice(mask << raised)}, {_twice(magic)}, 0xea;")
        if raised:
            factor, zero = constants[raised]
            lines.append(f"fma.rn.{half}x2 t, t, {factor}, {zero};")
        else:
            lines.append(f"add.rn.{half}x2 t, t, z0;")
        lines.append(f"mul.rn.{half}x2 ${place}, t, s;")
    return _block(["s", "t", *(f"{x}{i}" for x in "zfcw" for i in (0, 2, 4, 6, 8, 12))], lines)


def _bits(value: float, half: str) -> str:
    """Return two copies of a number in a register, as hexadecimal; it is a power of two or a sum of two."""
    mantissa, bias = (10, 15) if half == "f16" else (7, 127)
    exponent = 0
    while 2.0 ** (exponent + 1) <= value:
        exponent += 1
    while 2.0**exponent > value:
        exponent -= 1
    return _twice(((exponent + bias) << mantissa) + round((value / 2.0**exponent - 1) * 2**mantissa))


def _twice(half_word: int) -> str:
    return f"{half_word | half_word << 16:#010x}"


def _block(names: list[str], lines: list[str]) -> str:
    return "{\n.reg .b32 " + ", ".join(names) + ";\n" + "\n".join(lines) + "\n}"


def _bytes_assembly_bf16() -> str:
    """8-bit codes in bfloat16, whose last place counts ones only up to 256: through fp32, whose does up to 2 ** 24."""
    lines = [
        "shl.b32 s0, $3, 16;",
        "shl.b32 s1, $4, 16;",
        "and.b32 z0, $3, 0xffff0000;",
        "and.b32 z1, $4, 0xffff0000;",
        "mov.b32 m, 0x4b000000;",
        "mov.b32 c, 0xcb000000;",  # -2 ** 23
    ]
    lines += ["add.rn.f32 z0, z0, c;", "add.rn.f32 z1, z1, c;"]
    for place, (first, second) in enumerate((("0x7650", "0x7652"), ("0x7651", "0x7653"))):
        lines += [
            f"prmt.b32 t0, $2, m, {first};",
            f"prmt.b32 t1, $2, m, {second};",
            "add.rn.f32 t0, t0, z0;",
            "add.rn.f32 t1, t1, z1;",
            "mul.rn.f32 t0, t0, s0;",
            "mul.rn.f32 t1, t1, s1;",
            f"cvt.rn.bf16x2.f32 ${place}, t1, t0;",
        ]
    return _block(["s0", "s1", "z0", "z1", "m", "c", "t0", "t1"], lines)


def _float8_assembly(half: str, outputs: tuple[str, str], word: str) -> list[str]:
    """float8_e4m3fn has the exponents of the 16-bit dtypes less an offset, which a product makes good."""
    shift, mask, factor = (1, 0x3F80, 0x5C00) if half == "f16" else (4, 0x07F0, 0x7B80)  # 2 ** 8, 2 ** 120
    lines = [f"mov.b32 f, {_twice(factor)};", f"shl.b32 lo, {word}, 8;"]
    for output, source in zip(outputs, ("lo", word), strict=True):
        lines += [
            f"shr.u32 t, {source}, {shift};",
            f"and.b32 u, {source}, 0x80008000;",
            f"lop3.b32 t, t, {_twice(mask)}, u, 0xea;",
            f"mul.rn.{half}x2 {output}, t, f;",
        ]
    return lines


def _float8_scaled_assembly(half: str) -> str:
    lines = _float8_assembly("bf16", ("a0", "a1"), "$2")
    for place in range(2):
        lines += [
            f"shl.b32 t, a{place}, 16;",
            f"and.b32 u, a{place}, 0xffff0000;",
            "mul.rn.f32 t, t, $3;",
            "mul.rn.f32 u, u, $4;",
            f"cvt.rn.{half}x2.f32 ${place}, u, t;",
        ]
    return _block(["f", "lo", "t", "u", "a0", "a1"], lines)


def _table_assembly() -> str:
    """Look up bytes by bytes: the four selectors of a ``prmt`` choose among eight, two of them among sixteen."""
    lines = [
        "and.b32 s0, $4, 0x77777777;",
        "shr.u32 t0, $4, 1;",
        "lop3.b32 t0, t0, 0x44444444, 0x32103210, 0xea;",
        "shr.u32 s1, s0, 16;",
        "shr.u32 t1, t0, 16;",
    ]
    for half in range(2):
        for part, first in (("l", 5), ("h", 13)):
            # Arguments come in pairs, one for each of the two words, and both are of one output.
            a, b, c, d = (f"${first + 2 * i}" for i in range(4))
            lines += [
                f"prmt.b32 p, {a}, {b}, s{half};",
                f"prmt.b32 q, {c}, {d}, s{half};",
                f"prmt.b32 {part}, p, q, t{half};",
            ]
        lines += [f"prmt.b32 ${2 * half}, l, h, 0x5140;", f"prmt.b32 ${2 * half + 1}, l, h, 0x7362;"]
    return _block(["s0", "s1", "t0", "t1", "p", "q", "l", "h"], lines)


_GROUPED_2_FP16 = tl.constexpr(_grouped_assembly(2, "f16"))
_GROUPED_4_FP16 = tl.constexpr(_grouped_assembly(4, "f16"))
_GROUPED_8_FP16 = tl.constexpr(_grouped_assembly(8, "f16"))
_GROUPED_2_BF16 = tl.constexpr(_grouped_assembly(2, "bf16"))
_GROUPED_4_BF16 = tl.constexpr(_grouped_assembly(4, "bf16"))
_GROUPED_8_BF16 = tl.constexpr(_bytes_assembly_bf16())
_FLOAT8_FP16 = tl.constexpr(_block(["f", "lo", "t", "u"], _float8_assembly("f16", ("$0", "$1"), "$2")))
_FLOAT8_BF16 = tl.constexpr(_block(["f", "lo", "t", "u"], _float8_assembly("bf16", ("$0", "$1"), "$2")))
_FLOAT8_SCALED_FP16 = tl.constexpr(_float8_scaled_assembly("f16"))
_FLOAT8_SCALED_BF16 = tl.constexpr(_float8_scaled_assembly("bf16"))
_TABLE_ANY = tl.constexpr(_table_assembly())


@triton.jit
def numbers(w, meta, KIND: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Words of int16 and meta of the same shape -> a tuple of 16 / BITS tensors of that shape, code 0 first.

    Meta is an int32 tensor, or of TABLE a tuple of eight; of FLOAT8 it is not looked at.
    """
    if KIND == _TABLE:
        return _from_table(w, meta, DTYPE, ASSEMBLY)
    elif not ASSEMBLY:
        return _plain(w, meta, KIND, BITS, DTYPE)
    elif KIND == _GROUPED:
        return _grouped(w, meta, BITS, DTYPE)
    else:
        return _float8(w, meta, KIND, DTYPE)


@triton.jit
def _grouped(w, meta, BITS: tl.constexpr, DTYPE: tl.constexpr):
    HALF: tl.constexpr = tl.float16 == DTYPE
    if BITS == 2:
        return tl.inline_asm_elementwise(
            _GROUPED_2_FP16 if HALF else _GROUPED_2_BF16,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r",
            [w, meta],
            dtype=(
                DTYPE.value,
                DTYPE.value,
                DTYPE.value,
                DTYPE.value,
                DTYPE.value,
                DTYPE.value,
                DTYPE.value,
                DTYPE.value,
            ),
            is_pure=True,
            pack=2,
        )
    elif BITS == 4:
        return tl.inline_asm_elementwise(
            _GROUPED_4_FP16 if HALF else _GROUPED_4_BF16,
            "=r,=r,=r,=r,r,r,r",
            [w, meta],
            dtype=(DTYPE.value, DTYPE.value, DTYPE.value, DTYPE.value),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            _GROUPED_8_FP16 if HALF else _GROUPED_8_BF16,
            "=r,=r,r,r,r",
            [w, meta],
            dtype=(DTYPE.value, DTYPE.value),
            is_pure=True,
            pack=2,
        )


@triton.jit
def _float8(w, meta, KIND: tl.constexpr, DTYPE: tl.constexpr):
    HALF: tl.constexpr = tl.float16 == DTYPE
    if KIND == _FLOAT8_SCALED:
        return tl.inline_asm_elementwise(
            _FLOAT8_SCALED_FP16 if HALF else _FLOAT8_SCALED_BF16,
            "=r,=r,r,r,r",
            [w, meta],
            dtype=(DTYPE.value, DTYPE.value),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            _FLOAT8_FP16 if HALF else _FLOAT8_BF16,
            "=r,=r,r",
            [w],
            dtype=(DTYPE.value, DTYPE.value),
            is_pure=True,
            pack=2,
        )


@triton.jit
def _from_table(w, table, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Table holds the low bytes of its sixteen 16-bit entries in four words of each output, then the high bytes."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            _TABLE_ANY,
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [w, table[0], table[1], table[2], table[3], table[4], table[5], table[6], table[7]],
            dtype=(DTYPE.value, DTYPE.value, DTYPE.value, DTYPE.value),
            is_pure=True,
            pack=2,
        )
    else:
        # Code i of both words of a pair stands in bits 8 i to 8 i + 7 of the two together.
        even, odd = tl.split(tl.reshape(w.to(tl.int32), [w.shape[0], w.shape[1], w.shape[2] // 2, 2]))
        both = (even & 0xFFFF) | (odd << 16)
        return (
            _look_up(both, table, DTYPE, w.shape),
            _look_up(both >> 8, table, DTYPE, w.shape),
            _look_up(both >> 16, table, DTYPE, w.shape),
            _look_up(both >> 24, table, DTYPE, w.shape),
        )


@triton.jit
def _look_up(pairs, table, DTYPE: tl.constexpr, SHAPE: tl.constexpr):
    code = tl.reshape(tl.join(pairs & 15, (pairs >> 4) & 15), SHAPE)
    bits = tl.zeros(SHAPE, tl.int32)
    for entry in tl.static_range(16):
        low = (table[entry // 4] >> (8 * (entry % 4))) & 0xFF
        high = (table[4 + entry // 4] >> (8 * (entry % 4))) & 0xFF
        bits = tl.where(code == entry, low | (high << 8), bits)
    return low_number(bits, DTYPE).to(DTYPE)


@triton.jit
def low_number(bits, DTYPE: tl.constexpr):
    """Return the 16-bit number in the low half of each int32 as fp32."""
    if tl.bfloat16 == DTYPE:
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _plain(w, meta, KIND: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    if BITS == 2:
        return (
            _one(w, meta, 0, KIND, BITS, DTYPE),
            _one(w, meta, 1, KIND, BITS, DTYPE),
            _one(w, meta, 2, KIND, BITS, DTYPE),
            _one(w, meta, 3, KIND, BITS, DTYPE),
            _one(w, meta, 4, KIND, BITS, DTYPE),
            _one(w, meta, 5, KIND, BITS, DTYPE),
            _one(w, meta, 6, KIND, BITS, DTYPE),
            _one(w, meta, 7, KIND, BITS, DTYPE),
        )
    elif BITS == 4:
        return (
            _one(w, meta, 0, KIND, BITS, DTYPE),
            _one(w, meta, 1, KIND, BITS, DTYPE),
            _one(w, meta, 2, KIND, BITS, DTYPE),
            _one(w, meta, 3, KIND, BITS, DTYPE),
        )
    else:
        return _one(w, meta, 0, KIND, BITS, DTYPE), _one(w, meta, 1, KIND, BITS, DTYPE)


@triton.jit
def _one(w, meta, PLACE: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    code = (w.to(tl.int32) >> (PLACE * BITS)) & ((1 << BITS) - 1)
    if KIND == _GROUPED:
        BASE: tl.constexpr = _BASE_FP16 if tl.float16 == DTYPE else (_BASE_BF16 if BITS < 8 else 0.0)
        number = code.to(tl.float32) + (low_number(meta >> 16, DTYPE) + BASE)
        return (number * low_number(meta, DTYPE)).to(DTYPE)
    else:
        # The exponent stands for 120 less in fp32.
        raw = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
        number = raw.to(tl.float32, bitcast=True) * 1.329227995784916e36
        if KIND == _FLOAT8_SCALED:
            number = number * meta.to(tl.float32, bitcast=True)
        return number.to(DTYPE)
