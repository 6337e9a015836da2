"""What a block of inline assembly computes, on tensors: the few PTX instructions that the kernels' codes use.

Triton's interpreter runs no inline assembly, so the blocks are read here as they stand. Registers are int64 tensors of
32-bit values.
"""

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_HALVES = {"f16x2": torch.float16, "bf16x2": torch.bfloat16}


def run(assembly: str, outputs: int, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run a block whose outputs are $0, $1, ... and whose inputs follow them; return the outputs.

    Raises:
        ValueError: an instruction is none of those known.
    """
    registers = {f"${outputs + place}": value & _LOW for place, value in enumerate(inputs)}
    like = inputs[0]

    def read(name: str) -> Tensor:
        return registers[name] if name in registers else torch.full_like(like, int(name, 0) & _LOW)

    body = re.sub(r"\.reg[^;]*;", "", assembly.strip().strip("{}"))
    for line in filter(None, (part.strip() for part in body.split(";"))):
        operation, _, rest = line.partition(" ")
        target, *sources = (name.strip() for name in rest.split(","))
        registers[target] = _compute(operation, [read(name) for name in sources]) & _LOW
    return [registers[f"${place}"] for place in range(outputs)]


def _compute(operation: str, values: list[Tensor]) -> Tensor:
    name, kind = operation.split(".")[0], operation.split(".")[-1]
    integers: dict[str, Callable[[], Tensor]] = {
        "mov": lambda: values[0],
        "and": lambda: values[0] & values[1],
        "shr": lambda: values[0] >> values[1],
        "shl": lambda: values[0] << values[1],
        "prmt": lambda: _permute(*values),
        "lop3": lambda: _look_up(*values),
    }
    if name in integers:
        return integers[name]()
    if name == "cvt":  # the first source becomes the upper half
        half = _HALVES[operation.split(".")[2]]
        return _word(_single(values[0]).to(half)) << 16 | _word(_single(values[1]).to(half))
    if name not in ("add", "mul", "fma"):
        raise ValueError(f"no PTX instruction known here: {operation}")
    if kind == "f32":
        return _arithmetic(name, [_single(value) for value in values]).to(torch.float32).view(torch.int32).long()
    dtype = _HALVES[kind]
    low = _arithmetic(name, [_half(value, dtype) for value in values]).to(dtype)
    high = _arithmetic(name, [_half(value >> 16, dtype) for value in values]).to(dtype)
    return _word(high) << 16 | _word(low)


def _arithmetic(name: str, values: list[Tensor]) -> Tensor:
    """Compute in float64, so that the caller's rounding is the only one."""
    wide = [value.double() for value in values]
    if name == "add":
        return wide[0] + wide[1]
    product = wide[0] * wide[1]
    return product if name == "mul" else product + wide[2]


def _permute(low: Tensor, high: Tensor, selector: Tensor) -> Tensor:
    both = low | high << 32
    result = torch.zeros_like(low)
    for place in range(4):
        choice = selector >> (4 * place) & 0xF
        byte = both >> (8 * (choice & 7)) & 0xFF
        sign = torch.where(byte >= 0x80, 0xFF, 0)
        result |= torch.where(choice >= 8, sign, byte) << (8 * place)
    return result


def _look_up(a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
    result = torch.zeros_like(a)
    for row in range(8):
        if int(table.flatten()[0]) >> row & 1:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result


def _single(value: Tensor) -> Tensor:
    return torch.where(value >= 2**31, value - 2**32, value).to(torch.int32).view(torch.float32)


def _half(value: Tensor, dtype: torch.dtype) -> Tensor:
    value = value & 0xFFFF
    return torch.where(value >= 2**15, value - 2**16, value).to(torch.int16).view(dtype)


def _word(half: Tensor) -> Tensor:
    return half.view(torch.int16).long() & 0xFFFF
