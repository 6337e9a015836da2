"""SqueezeLLM: codes that a table of each output translates, and outliers that are kept as they are.

Source: Kim et al. 2023, arXiv 2306.07629.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from octavo.kernels.kept import Form
from octavo.kernels.weights import SparseRows, TableWeight, Weight, pack_codes
from octavo.worker.models.targets import Placement
from octavo.worker.quantization.scheme import LinearShape, Projection
from octavo.worker.quantization.stored import (
    Outputs,
    RawTensors,
    StoredProjections,
    Tensors,
    check_multiple,
    check_plain_orientation,
    inputs_of,
    unpack_stream,
)

SQUEEZELLM_BITS = (3, 4)
_HELD_BITS = 4
_CODES = 32  # inputs that the format packs at a time, whatever the width


@dataclass(frozen=True)
class SqueezeLLMScheme:
    """Tensors of a projection, N outputs, K inputs.

    qweight [K * bits / 32, N], packed as in GPTQ, and lookup_table [N, 2 ** bits]. Where the checkpoint has outliers,
    their rows [N + 1], cols [M] and vals [M] say what is added to the table's numbers (CSR); full_rows [K, X] and
    full_row_indices [X] add whole outputs. Its startrows, a plan for the kernel's threads, says nothing new.

    Attributes:
        bits: 3 or 4.
        tensors: of the checkpoint.
    """

    bits: int
    tensors: Tensors | None = field(default=None, compare=False, repr=False)

    form: ClassVar[Form] = TableWeight

    def make(self, placement: Placement, shape: LinearShape) -> StoredProjections:
        """Allocate what the tensors of a layer are read into.

        Raises:
            ModelConfigError: a layer of this shape cannot be stored so.
        """
        return StoredProjections([_TableProjection(self, placement, shape, p) for p in shape.projections])


class _TableProjection:
    def __init__(
        self, scheme: SqueezeLLMScheme, placement: Placement, shape: LinearShape, projection: Projection
    ) -> None:
        bits, (outputs, inputs) = scheme.bits, (projection.features, shape.in_features)
        check_plain_orientation(projection.prefix, shape, "SqueezeLLM")
        check_multiple(projection.prefix, "inputs", inputs, _CODES, "SqueezeLLM")
        self._bits = bits
        self._shape = (outputs, inputs)
        self._inputs = inputs_of(shape, _CODES, projection.prefix)
        self._outputs = Outputs(projection)
        self._raw = raw = RawTensors(placement, projection.prefix, scheme.tensors)
        self.targets = raw.targets
        words = slice(self._inputs.start * bits // 32, self._inputs.stop * bits // 32)
        self._qweight = raw.add("qweight", torch.int32, (inputs * bits // 32, outputs), (words, self._outputs.read))
        dtype = raw.float_dtype("lookup_table", torch.float16)
        entries = slice(0, 2**bits)
        self._table = raw.add("lookup_table", dtype, (outputs, entries.stop), (self._outputs.read, entries))
        self._sparse = _RawOutliers(raw, outputs, inputs)

    def finish(self) -> Weight:
        packed = self._qweight.T.contiguous()
        table = self._table
        if self._bits != _HELD_BITS:
            packed = pack_codes(unpack_stream(packed, self._bits), _HELD_BITS)
            table = torch.nn.functional.pad(table, (0, 2**_HELD_BITS - 2**self._bits))
        sparse = self._sparse.finish(self._outputs.read, self._inputs, packed.device)
        return self._outputs.wanted(TableWeight(packed, _HELD_BITS, table, sparse))


class _RawOutliers:
    """The sparse part of a projection, if the checkpoint has one; read whole, it is small."""

    def __init__(self, raw: RawTensors, outputs: int, inputs: int) -> None:
        self._raw = raw
        self._shape = (outputs, inputs)
        self._rows = self._columns = self._values = self._full = self._full_index = None
        if raw.has("rows", default=False):
            count = _length(raw, "cols")
            self._rows = raw.add("rows", torch.int32, (outputs + 1,))
            self._columns = raw.add("cols", torch.int32, (count,))
            self._values = raw.add("vals", torch.float32, (count,))
        if raw.has("full_row_indices", default=False):
            count = _length(raw, "full_row_indices")
            self._full = raw.add("full_rows", torch.float32, (inputs, count))
            self._full_index = raw.add("full_row_indices", torch.int32, (count,))
        if raw.has("startrows", default=False):
            raw.add("startrows", torch.int32, (_length(raw, "startrows"),))

    def finish(self, outputs: slice, inputs: slice, device: torch.device) -> SparseRows | None:
        """Return the outliers of some outputs and inputs, row after row, one number a place.

        Raises:
            WeightsError: they lie outside of the matrix.
        """
        rows, columns, values = [], [], []
        for part in (self._csr(), self._whole_rows()):
            if part is not None:
                rows.append(part[0])
                columns.append(part[1])
                values.append(part[2])
        if not rows:
            return None
        row, column, value = torch.cat(rows), torch.cat(columns), torch.cat(values)
        inside = (row >= outputs.start) & (row < outputs.stop) & (column >= inputs.start) & (column < inputs.stop)
        row, column, value = row[inside] - outputs.start, column[inside] - inputs.start, value[inside]
        # Several numbers may belong to one place: they are added in the order in which they come.
        width = inputs.stop - inputs.start
        places, order = torch.sort(row * width + column, stable=True)
        places, group = torch.unique_consecutive(places, return_inverse=True)
        total = torch.zeros(len(places)).index_add_(0, group, value[order])
        counts = torch.bincount(places // width, minlength=outputs.stop - outputs.start)
        start = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
        return SparseRows(start.to(device), (places % width).to(torch.int32).to(device), total.to(device))

    def _csr(self) -> tuple[Tensor, Tensor, Tensor] | None:
        if self._rows is None or self._columns is None or self._values is None:
            return None
        start, column = self._rows.cpu().long(), self._columns.cpu().long()
        counts = start.diff()
        if int(start[0]) != 0 or int(start[-1]) != len(column) or bool((counts < 0).any()):
            raise self._raw.error("rows", f"expected to rise from 0 to {len(column)}, the number of outliers")
        self._check_range("cols", column, self._shape[1])
        row = torch.repeat_interleave(torch.arange(self._shape[0]), counts)
        return row, column, self._values.cpu()

    def _whole_rows(self) -> tuple[Tensor, Tensor, Tensor] | None:
        if self._full is None or self._full_index is None:
            return None
        index = self._full_index.cpu().long()
        self._check_range("full_row_indices", index, self._shape[0])
        numbers = self._full.cpu().T
        which, column = numbers.nonzero(as_tuple=True)
        return index[which], column, numbers[which, column]

    def _check_range(self, name: str, index: Tensor, end: int) -> None:
        outside = index[(index < 0) | (index >= end)]
        if len(outside):
            raise self._raw.error(name, f"holds {int(outside[0])}, expected 0 to {end - 1}")


def _length(raw: RawTensors, name: str) -> int:
    """Return the length of a tensor of one dimension, which only the checkpoint knows."""
    stored = raw.stored(name)
    if stored is None:
        return 0  # a tensor of that name is missing; the loader says so
    if len(stored.shape) != 1:
        raise raw.error(name, f"has shape {list(stored.shape)}, expected one dimension")
    return stored.shape[0]
