"""AWQ: 4-bit codes in the layouts of AutoAWQ's two kernels.

Source: Lin et al. 2023, arXiv 2306.00978.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from octavo.kernels.kept import Form
from octavo.kernels.weights import GroupedWeight, Weight, pack_codes
from octavo.worker.models.targets import Placement
from octavo.worker.quantization.groups import grouped_weight
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

AWQ_BITS = 4
_CODES = 32 // AWQ_BITS  # in a word
_GEMM_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which four bits of its word each of eight neighbouring outputs lies."""


@dataclass(frozen=True)
class AWQScheme:
    """Tensors of a projection, N outputs, K inputs, G groups.

    gemm: qweight [K, N / 8], qzeros [G, N / 8], scales [G, N], the codes of eight outputs in the order of the kernel.
    gemv: qweight [N, K / 8], qzeros [N, Z], scales [N, 8 Z], codes in their own order, Z words padded for the kernel.

    Attributes:
        layout: "gemm" or "gemv".
        group_size: inputs of a group; None: all.
        tensors: of the checkpoint.
    """

    layout: str
    group_size: int | None
    tensors: Tensors | None = field(default=None, compare=False, repr=False)

    form: ClassVar[Form] = GroupedWeight

    def make(self, placement: Placement, shape: LinearShape) -> StoredProjections:
        """Allocate what the tensors of a layer are read into.

        Raises:
            ModelConfigError: a layer of this shape cannot be stored so.
        """
        kind = _GemmProjection if self.layout == "gemm" else _GemvProjection
        return StoredProjections([kind(self, placement, shape, projection) for projection in shape.projections])


class _Sizes:
    """Sizes and parts that both layouts have."""

    def __init__(self, scheme: AWQScheme, shape: LinearShape, projection: Projection) -> None:
        prefix = projection.prefix
        check_plain_orientation(prefix, shape, "AWQ")
        self.outputs, self.inputs = projection.features, shape.in_features
        self.group_size = self.inputs if scheme.group_size is None else scheme.group_size
        check_multiple(prefix, "inputs", self.inputs, self.group_size, "AWQ with groups of that size")
        check_multiple(prefix, "inputs", self.inputs, _CODES, "AWQ")
        check_multiple(prefix, "outputs", self.outputs, _CODES, "AWQ")
        self.num_groups = self.inputs // self.group_size
        self.gemv_words = _gemv_width(self.num_groups, self.group_size)
        unit = _CODES if scheme.group_size is None else max(_CODES, self.group_size)
        self.in_part = inputs_of(shape, unit, prefix)
        self.groups = slice(self.in_part.start // self.group_size, -(-self.in_part.stop // self.group_size))
        self.group_size = min(self.group_size, self.in_part.stop - self.in_part.start)


class _GemmProjection:
    def __init__(self, scheme: AWQScheme, placement: Placement, shape: LinearShape, projection: Projection) -> None:
        sizes = self._sizes = _Sizes(scheme, shape, projection)
        self._outputs = Outputs(projection, _CODES)
        read = self._outputs.read
        words, all_words = slice(read.start // _CODES, read.stop // _CODES), sizes.outputs // _CODES
        self._raw = RawTensors(placement, projection.prefix, scheme.tensors)
        self.targets = self._raw.targets
        self._qweight = self._raw.add("qweight", torch.int32, (sizes.inputs, all_words), (sizes.in_part, words))
        self._qzeros = self._raw.add("qzeros", torch.int32, (sizes.num_groups, all_words), (sizes.groups, words))
        dtype = self._raw.float_dtype("scales", torch.float16)
        self._scales = self._raw.add("scales", dtype, (sizes.num_groups, sizes.outputs), (sizes.groups, read))

    def finish(self) -> Weight:
        packed = pack_codes(_gemm_codes(self._qweight).T, AWQ_BITS)
        zeros = _gemm_codes(self._qzeros)
        return self._outputs.wanted(grouped_weight(packed, AWQ_BITS, self._scales, zeros, self._sizes.group_size))


class _GemvProjection:
    def __init__(self, scheme: AWQScheme, placement: Placement, shape: LinearShape, projection: Projection) -> None:
        sizes = self._sizes = _Sizes(scheme, shape, projection)
        self._outputs = Outputs(projection)
        read = self._outputs.read
        part = sizes.in_part
        width = sizes.gemv_words
        self._raw = RawTensors(placement, projection.prefix, scheme.tensors)
        self.targets = self._raw.targets
        words = slice(part.start // _CODES, part.stop // _CODES)
        self._qweight = self._raw.add("qweight", torch.int32, (sizes.outputs, sizes.inputs // _CODES), (read, words))
        self._qzeros = self._raw.add("qzeros", torch.int32, (sizes.outputs, width), (read, slice(0, width)))
        dtype = self._raw.float_dtype("scales", torch.float16)
        self._scales = self._raw.add("scales", dtype, (sizes.outputs, width * _CODES), (read, slice(0, width * _CODES)))

    def finish(self) -> Weight:
        groups = self._sizes.groups
        zeros = unpack_stream(self._qzeros, AWQ_BITS)[:, groups].T
        scales = self._scales[:, groups].T
        return self._outputs.wanted(grouped_weight(self._qweight, AWQ_BITS, scales, zeros, self._sizes.group_size))


def _gemm_codes(words: Tensor) -> Tensor:
    """[R, W] int32 -> [R, 8 W] uint8, the eight codes of a word put in order."""
    rows, width = words.shape
    codes = torch.empty((rows, width, _CODES), dtype=torch.uint8, device=words.device)
    for output, place in enumerate(_GEMM_PLACES):
        codes[:, :, output] = (words >> (place * AWQ_BITS)) & 15
    return codes.flatten(1)


def _gemv_width(num_groups: int, group_size: int) -> int:
    """Return the words that an output's zero points take: as many as the kernel of AutoAWQ reads at once."""
    at_once = 1 if group_size >= 128 else 2 if group_size >= 64 else 4
    words = -(-num_groups // _CODES)
    return -(-words // at_once) * at_once
