"""Weight matrices in canonical form: what a checkpoint's layout becomes at load, and what backends take.

A weight has N outputs and K inputs. `dequantized` defines which numbers each form stands for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

WORD_BITS = 32
CODE_BITS = (2, 4, 8)
_CHUNK_NUMBERS = 2**24
"""Of a weight that are dequantised at a time: bounds the memory that is needed beside the result."""

Activations: TypeAlias = Literal["none", "static", "dynamic"]


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """Integer codes with a scale and a zero point for each group of inputs, as GPTQ and AWQ make them.

    w[n, k] = scales[k // group_size, n] * (code[n, k] - zeros[k // group_size, n]), in fp32.

    Raises:
        ValueError: the parts do not fit together.
    """

    packed: Tensor  # [N, K / P] int32, P = 32 // bits codes a word along K, low bits first
    bits: int  # 2, 4 or 8; 3-bit codes are held in 4, with zeros given
    scales: Tensor  # [G, N] in the checkpoint's dtype, G = ceil(K / group_size)
    zeros: Tensor | None  # [G, N] uint8; None: 2 ** (bits - 1) everywhere
    group_size: int
    perm: Tensor | None = None  # [K] int32: input k of `packed` is input perm[k] of the layer; None: the order is kept

    def __post_init__(self) -> None:
        if self.bits not in CODE_BITS:
            raise ValueError(f"bits = {self.bits}: expected one of {CODE_BITS}")
        if self.group_size < 1:
            raise ValueError(f"group_size = {self.group_size}: expected at least 1")
        size = self.packed.shape[1] * (WORD_BITS // self.bits)
        groups = (-(-size // self.group_size), self.packed.shape[0])
        _check("scales", self.scales, groups)
        _check("zeros", self.zeros, groups)
        _check("perm", self.perm, (size,))


@dataclass(frozen=True, eq=False)
class SparseRows:
    """Numbers that are added to a few places of a matrix of N rows, row after row; no place comes twice."""

    row_start: Tensor  # [N + 1] int32: row n has the numbers row_start[n] to row_start[n + 1]
    columns: Tensor  # [M] int32
    values: Tensor  # [M]


@dataclass(frozen=True, eq=False)
class TableWeight:
    """Codes that a table of each output translates, as SqueezeLLM makes them: w[n, k] = table[n, code[n, k]] + sparse.

    Raises:
        ValueError: the parts do not fit together.
    """

    packed: Tensor  # [N, K / P] int32, as in GroupedWeight; codes of 3-bit tables are held in 4 bits
    bits: int
    table: Tensor  # [N, 2 ** bits]
    sparse: SparseRows | None = None

    def __post_init__(self) -> None:
        if self.bits not in CODE_BITS:
            raise ValueError(f"bits = {self.bits}: expected one of {CODE_BITS}")
        _check("table", self.table, (self.packed.shape[0], 2**self.bits))
        if self.sparse is not None:
            _check("row_start", self.sparse.row_start, (self.packed.shape[0] + 1,))
            _check("values", self.sparse.values, tuple(self.sparse.columns.shape))


@dataclass(frozen=True, eq=False)
class Float8Weight:
    """8-bit floating point codes in blocks of block_n x block_k, each with a scale: w = code * scale, in fp32.

    One block is a scale per tensor; blocks of 1 x K are one per channel. Blocks at the end may be smaller.

    Raises:
        ValueError: the parts do not fit together.
    """

    codes: Tensor  # [N, K] float8_e4m3fn
    scales: Tensor  # [ceil(N / block_n), ceil(K / block_k)] fp32
    input_scale: Tensor | None  # fp32 scalar; only of static activations
    activations: Activations  # how the checkpoint wants inputs quantised; a backend may leave them as they are
    block_n: int
    block_k: int

    def __post_init__(self) -> None:
        if self.block_n < 1 or self.block_k < 1:
            raise ValueError(f"blocks of {self.block_n} x {self.block_k}: expected at least 1 x 1")
        outputs, inputs = self.codes.shape
        _check("scales", self.scales, (-(-outputs // self.block_n), -(-inputs // self.block_k)))
        _check("input_scale", self.input_scale, ())


Weight: TypeAlias = Tensor | GroupedWeight | TableWeight | Float8Weight
"""One weight matrix of N outputs and K inputs; a Tensor is [N, K]."""


def _check(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack integer codes [N, K] below 2 ** bits into words: [N, K / P] int32, P = 32 // bits, low bits first.

    Raises:
        ValueError: K is no multiple of P.
    """
    per_word = WORD_BITS // bits
    outputs, inputs = codes.shape
    if inputs % per_word:
        raise ValueError(f"{inputs} inputs: expected a multiple of {per_word}")
    parts = codes.reshape(outputs, inputs // per_word, per_word)
    words = torch.zeros(parts.shape[:2], dtype=torch.int32, device=codes.device)
    for place in range(per_word):
        words |= parts[:, :, place].to(torch.int32) << (place * bits)
    return words


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Undo `pack_codes`: [N, K / P] int32 -> [N, K] uint8."""
    lines = packed.contiguous().view(torch.uint8)  # the lowest byte of a word first
    per_byte = 8 // bits
    if per_byte == 1:
        return lines
    codes = torch.empty((*lines.shape, per_byte), dtype=torch.uint8, device=packed.device)
    for place in range(per_byte):
        codes[:, :, place] = (lines >> (place * bits)) & (2**bits - 1)
    return codes.flatten(1)


def dequantized(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return the numbers that a weight stands for: [N, K], computed in fp32 and rounded once to `dtype`."""
    if isinstance(weight, Tensor):
        return weight.to(dtype)
    outputs, inputs = num_outputs(weight), num_inputs(weight)
    device = weight.codes.device if isinstance(weight, Float8Weight) else weight.packed.device
    result = torch.empty((outputs, inputs), dtype=dtype, device=device)
    step = max(1, _CHUNK_NUMBERS // max(1, inputs))
    for start in range(0, outputs, step):
        rows = slice(start, min(start + step, outputs))
        if isinstance(weight, GroupedWeight):
            result[rows] = _grouped_rows(weight, rows)
        elif isinstance(weight, TableWeight):
            result[rows] = _table_rows(weight, rows)
        else:
            result[rows] = _float8_rows(weight, rows)
    return result


def _grouped_rows(weight: GroupedWeight, rows: slice) -> Tensor:
    numbers = unpack_codes(weight.packed[rows], weight.bits).float()
    _by_group(numbers, weight.group_size, torch.Tensor.sub_, _zeros(weight)[:, rows].T.float())
    _by_group(numbers, weight.group_size, torch.Tensor.mul_, weight.scales[:, rows].T.float())
    if weight.perm is None:
        return numbers
    result = torch.empty_like(numbers)
    result[:, weight.perm.long()] = numbers
    return result


def _by_group(numbers: Tensor, group_size: int, change: Callable[[Tensor, Tensor], Tensor], operands: Tensor) -> None:
    """Change the numbers [R, K] of each group by an operand of its own [R, G], in place."""
    whole = numbers.shape[1] // group_size
    if whole:
        change(numbers[:, : whole * group_size].unflatten(1, (whole, group_size)), operands[:, :whole, None])
    if whole < operands.shape[1]:
        change(numbers[:, whole * group_size :], operands[:, whole:])


def _table_rows(weight: TableWeight, rows: slice) -> Tensor:
    codes = unpack_codes(weight.packed[rows], weight.bits).long()
    numbers = torch.gather(weight.table[rows].float(), 1, codes)
    if weight.sparse is not None:
        start = weight.sparse.row_start[rows.start : rows.stop + 1].long()
        first, last = int(start[0]), int(start[-1])
        row = torch.repeat_interleave(torch.arange(len(start) - 1, device=start.device), start.diff())
        column = weight.sparse.columns[first:last].long()
        numbers[row, column] += weight.sparse.values[first:last].float()
    return numbers


def _float8_rows(weight: Float8Weight, rows: slice) -> Tensor:
    codes = weight.codes[rows].float()
    row = torch.arange(rows.start, rows.stop, device=codes.device) // weight.block_n
    _by_group(codes, weight.block_k, torch.Tensor.mul_, weight.scales[row])
    return codes


def join(weights: Sequence[Weight]) -> Weight | None:
    """Stack weights of one input along their outputs; None where they cannot be one weight.

    They cannot where kind, width, dtype, bits, groups, order of inputs or static input scale differ.
    """
    if len(weights) == 1:
        return weights[0]
    if len({num_inputs(weight) for weight in weights}) != 1:
        return None
    if all(isinstance(weight, Tensor) for weight in weights):
        plain = [weight for weight in weights if isinstance(weight, Tensor)]
        return torch.cat(plain) if len({weight.dtype for weight in plain}) == 1 else None
    if all(isinstance(weight, GroupedWeight) for weight in weights):
        return _join_grouped([weight for weight in weights if isinstance(weight, GroupedWeight)])
    if all(isinstance(weight, TableWeight) for weight in weights):
        return _join_tables([weight for weight in weights if isinstance(weight, TableWeight)])
    if all(isinstance(weight, Float8Weight) for weight in weights):
        return _join_float8([weight for weight in weights if isinstance(weight, Float8Weight)])
    return None


def _join_grouped(weights: list[GroupedWeight]) -> GroupedWeight | None:
    first = weights[0]
    if len({(weight.bits, weight.group_size, weight.scales.dtype) for weight in weights}) != 1:
        return None
    if not all(_same(weight.perm, first.perm) for weight in weights):
        return None
    zeros: Tensor | None = None
    if any(weight.zeros is not None for weight in weights):
        zeros = torch.cat([_zeros(weight) for weight in weights], dim=1)
    return replace(
        first,
        packed=torch.cat([weight.packed for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights], dim=1),
        zeros=zeros,
    )


def _zeros(weight: GroupedWeight) -> Tensor:
    if weight.zeros is not None:
        return weight.zeros
    return torch.full_like(weight.scales, 2 ** (weight.bits - 1), dtype=torch.uint8)


def _join_tables(weights: list[TableWeight]) -> TableWeight | None:
    first = weights[0]
    if len({(weight.bits, weight.table.dtype) for weight in weights}) != 1:
        return None
    packed = torch.cat([weight.packed for weight in weights])
    table = torch.cat([weight.table for weight in weights])
    if all(weight.sparse is None for weight in weights):
        return replace(first, packed=packed, table=table)
    sparse = [_sparse(weight) for weight in weights]
    counts = torch.cat([part.row_start.diff() for part in sparse])
    if len({part.values.dtype for part in sparse if len(part.values)}) > 1:
        return None
    joined = SparseRows(
        _starts(counts),
        torch.cat([part.columns for part in sparse]),
        torch.cat([part.values for part in sparse]),
    )
    return replace(first, packed=packed, table=table, sparse=joined)


def _sparse(weight: TableWeight) -> SparseRows:
    if weight.sparse is not None:
        return weight.sparse
    start = weight.packed.new_zeros(weight.packed.shape[0] + 1)
    return SparseRows(start, start[:0], weight.table.new_zeros(0))


def _starts(counts: Tensor) -> Tensor:
    """[N] numbers in each row -> [N + 1] int32, where each row begins."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)


def _join_float8(weights: list[Float8Weight]) -> Float8Weight | None:
    first = weights[0]
    inputs = num_inputs(first)
    if len({weight.activations for weight in weights}) != 1:
        return None
    if not all(_same(weight.input_scale, first.input_scale) for weight in weights):
        return None
    whole_rows = all(weight.block_k >= inputs for weight in weights)
    if not whole_rows and len({weight.block_k for weight in weights}) != 1:
        return None
    # Blocks go on across the seam where they are cut alike; else each output has scales of its own.
    alike = len({weight.block_n for weight in weights}) == 1
    alike = alike and all(num_outputs(weight) % weight.block_n == 0 for weight in weights[:-1])
    block_n = first.block_n if alike and not whole_rows else 1
    parts = [weight.scales if block_n > 1 else _row_scales(weight) for weight in weights]
    return replace(
        first,
        codes=torch.cat([weight.codes.view(torch.uint8) for weight in weights]).view(first.codes.dtype),
        scales=torch.cat(parts),
        block_n=block_n,
        block_k=inputs if whole_rows else first.block_k,
    )


def _row_scales(weight: Float8Weight) -> Tensor:
    """Return the scales of each output: [N, B]."""
    row = torch.arange(num_outputs(weight), device=weight.scales.device) // weight.block_n
    return weight.scales[row]


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def take_outputs(weight: Weight, index: Tensor) -> Weight:
    """Return the weight whose output n is the given one's output index[n]; index [M] integer."""
    if isinstance(weight, Tensor):
        return weight[index]
    if isinstance(weight, GroupedWeight):
        zeros = None if weight.zeros is None else weight.zeros[:, index].contiguous()
        return replace(weight, packed=weight.packed[index], scales=weight.scales[:, index].contiguous(), zeros=zeros)
    if isinstance(weight, TableWeight):
        sparse = None if weight.sparse is None else _take_rows(weight.sparse, index)
        return replace(weight, packed=weight.packed[index], table=weight.table[index], sparse=sparse)
    codes = weight.codes.view(torch.uint8)[index].view(weight.codes.dtype)
    if weight.scales.shape[0] == 1:
        return replace(weight, codes=codes, block_n=max(1, len(index)))
    return replace(weight, codes=codes, scales=_row_scales(weight)[index], block_n=1)


def _take_rows(sparse: SparseRows, index: Tensor) -> SparseRows:
    counts = sparse.row_start.diff().long()[index]
    start = _starts(counts)
    # Number i of the result is so many places after the first number of its row.
    offset = sparse.row_start[:-1].long()[index] - start[:-1].long()
    place = torch.arange(int(start[-1]), device=index.device) + torch.repeat_interleave(offset, counts)
    return SparseRows(start, sparse.columns[place], sparse.values[place])


def num_outputs(weight: Weight) -> int:
    """Return N."""
    return _matrix(weight).shape[0]


def num_inputs(weight: Weight) -> int:
    """Return K."""
    width = _matrix(weight).shape[1]
    return width * (WORD_BITS // weight.bits) if isinstance(weight, GroupedWeight | TableWeight) else width


def num_bytes(weight: Weight) -> int:
    """Return the memory that all parts of a weight take."""
    return sum(part.nbytes for part in _parts(weight))


def to_device(weight: Weight, device: torch.device) -> Weight:
    """Return the weight with all its parts on a device."""
    if isinstance(weight, Tensor):
        return weight.to(device)
    if isinstance(weight, GroupedWeight):
        zeros, perm = _moved(weight.zeros, device), _moved(weight.perm, device)
        return replace(weight, packed=weight.packed.to(device), scales=weight.scales.to(device), zeros=zeros, perm=perm)
    if isinstance(weight, TableWeight):
        sparse = weight.sparse
        if sparse is not None:
            sparse = SparseRows(sparse.row_start.to(device), sparse.columns.to(device), sparse.values.to(device))
        return replace(weight, packed=weight.packed.to(device), table=weight.table.to(device), sparse=sparse)
    return replace(
        weight,
        codes=weight.codes.to(device),
        scales=weight.scales.to(device),
        input_scale=_moved(weight.input_scale, device),
    )


def _moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def _matrix(weight: Weight) -> Tensor:
    if isinstance(weight, Tensor):
        return weight
    return weight.codes if isinstance(weight, Float8Weight) else weight.packed


def _parts(weight: Weight) -> list[Tensor]:
    parts: list[Tensor | None]
    if isinstance(weight, Tensor):
        parts = [weight]
    elif isinstance(weight, GroupedWeight):
        parts = [weight.packed, weight.scales, weight.zeros, weight.perm]
    elif isinstance(weight, TableWeight):
        sparse = weight.sparse
        parts = [weight.packed, weight.table]
        parts += [] if sparse is None else [sparse.row_start, sparse.columns, sparse.values]
    else:
        parts = [weight.codes, weight.scales, weight.input_scale]
    return [part for part in parts if part is not None]
