"""Formats of compressed-tensors: packed integers, plain integers, and 8-bit floating point (see `fp8`)."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from octavo.kernels.kept import Form
from octavo.kernels.weights import GroupedWeight, Weight, pack_codes
from octavo.worker.models.targets import Placement
from octavo.worker.quantization.groups import grouped_weight, order_of
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

INTEGER_BITS = (4, 8)


@dataclass(frozen=True)
class IntegerScheme:
    """Signed integers, N outputs, K inputs, G groups.

    Packed: weight_packed [N, ceil(K * bits / 32)], codes raised by 2 ** (bits - 1), weight_shape [2], and
    weight_zero_point [ceil(N * bits / 32), G], raised and packed along the outputs. Else weight [N, K] int8 and
    weight_zero_point [N, G] int8. weight_scale is [N, G], or [1] of one scale per tensor; weight_g_idx [K] the groups
    of inputs that were quantised in another order.

    Attributes:
        bits: 4 or 8.
        packed: whether codes are packed into words.
        strategy: "tensor", "channel" or "group".
        group_size: inputs of a group; None: all.
        symmetric: whether there are no zero points.
        ordered: whether there may be a weight_g_idx.
        input_tensors: names of tensors that say how inputs are quantised; read, and not used.
        tensors: of the checkpoint.
    """

    bits: int
    packed: bool
    strategy: str
    group_size: int | None
    symmetric: bool
    ordered: bool = False
    input_tensors: tuple[str, ...] = ()
    tensors: Tensors | None = field(default=None, compare=False, repr=False)

    form: ClassVar[Form] = GroupedWeight

    def make(self, placement: Placement, shape: LinearShape) -> StoredProjections:
        """Allocate what the tensors of a layer are read into.

        Raises:
            ModelConfigError: a layer of this shape cannot be stored so.
        """
        return StoredProjections([_IntegerProjection(self, placement, shape, p) for p in shape.projections])


class _IntegerProjection:
    def __init__(self, scheme: IntegerScheme, placement: Placement, shape: LinearShape, projection: Projection) -> None:
        self._scheme = scheme
        prefix, bits = projection.prefix, scheme.bits
        self._full = (projection.features, shape.in_features)
        check_plain_orientation(prefix, shape, "compressed-tensors")
        check_multiple(prefix, "inputs", shape.in_features, 32 // bits, f"{bits}-bit compressed-tensors")
        self._group_size = shape.in_features if scheme.group_size is None else scheme.group_size
        unit = 32 // bits if scheme.group_size is None else max(32 // bits, self._group_size)
        self._inputs = inputs_of(shape, unit, prefix)
        self._groups = slice(self._inputs.start // self._group_size, -(-self._inputs.stop // self._group_size))
        self._outputs = Outputs(projection)
        self._raw = RawTensors(placement, prefix, scheme.tensors)
        self.targets = self._raw.targets
        self._codes = self._add_codes()
        self._scales = self._add_scales()
        self._zeros = None if scheme.symmetric else self._add_zeros()
        self._g_idx = None
        if scheme.ordered and self._raw.has("weight_g_idx", default=False):
            self._g_idx = self._raw.add("weight_g_idx", torch.int32, (shape.in_features,))
        for name in scheme.input_tensors:
            stored = self._raw.stored(name)
            if stored is not None and stored.shape in ((), (1,)):
                self._raw.add(name, torch.int8 if stored.dtype == "I8" else torch.float32, stored.shape)

    def _add_codes(self) -> Tensor:
        bits, (outputs, inputs) = self._scheme.bits, self._full
        if not self._scheme.packed:
            return self._raw.add("weight", torch.int8, self._full, (self._outputs.read, self._inputs))
        stored = self._raw.stored("weight_shape")
        dtype = torch.int32 if stored is not None and stored.dtype == "I32" else torch.int64
        self._shape = self._raw.add("weight_shape", dtype, (2,))
        self._shape.copy_(torch.tensor(self._full))
        words = slice(self._inputs.start * bits // 32, self._inputs.stop * bits // 32)
        return self._raw.add("weight_packed", torch.int32, (outputs, inputs * bits // 32), (self._outputs.read, words))

    def _add_scales(self) -> Tensor:
        dtype = self._raw.float_dtype("weight_scale", torch.bfloat16)
        if self._scheme.strategy == "tensor":
            stored = self._raw.stored("weight_scale")
            return self._raw.add("weight_scale", dtype, () if stored is not None and stored.shape == () else (1,))
        return self._raw.add("weight_scale", dtype, self._grouped_shape(), (self._outputs.read, self._groups))

    def _add_zeros(self) -> Tensor:
        bits, outputs = self._scheme.bits, self._full[0]
        if self._scheme.strategy == "tensor":
            return self._raw.add("weight_zero_point", torch.int8, (1,))
        full = self._grouped_shape()
        if not self._scheme.packed:
            return self._raw.add("weight_zero_point", torch.int8, full, (self._outputs.read, self._groups))
        words = slice(0, -(-outputs * bits // 32))
        return self._raw.add("weight_zero_point", torch.int32, (words.stop, full[1]), (words, self._groups))

    def _grouped_shape(self) -> tuple[int, int]:
        return self._full[0], -(-self._full[1] // self._group_size)

    def finish(self) -> Weight:
        scheme, bits = self._scheme, self._scheme.bits
        if scheme.packed and self._shape.tolist() != list(self._full):
            raise self._raw.error("weight_shape", f"says {self._shape.tolist()}, expected {list(self._full)}")
        raised = 2 ** (bits - 1)
        packed = self._codes if scheme.packed else pack_codes((self._codes.to(torch.int16) + raised), bits)
        perm = None
        if self._g_idx is not None:
            perm = order_of(self._raw, "weight_g_idx", self._g_idx, self._group_size, zeros_are_none=False)
        if perm is not None and len(perm) != self._inputs.stop - self._inputs.start:
            raise self._raw.error("weight_g_idx", "inputs in another order cannot be split over ranks")
        one = scheme.strategy == "tensor"
        scales = self._scales.reshape(1, 1).expand(1, self._outputs.num_read) if one else self._scales.T
        zeros = self._raised_zeros()
        group_size = min(self._group_size, self._inputs.stop - self._inputs.start)
        return self._outputs.wanted(grouped_weight(packed, bits, scales, zeros, group_size, perm))

    def _raised_zeros(self) -> Tensor | None:
        """[G, N] uint8."""
        if self._zeros is None:
            return None
        bits, raised = self._scheme.bits, 2 ** (self._scheme.bits - 1)
        if self._zeros.dtype is torch.int8:
            zeros: Tensor = (self._zeros.to(torch.int16) + raised).to(torch.uint8)
            return (
                zeros.reshape(1, 1).expand(1, self._outputs.num_read) if self._scheme.strategy == "tensor" else zeros.T
            )
        # Packed along the outputs, so that a column is a stream of codes.
        return unpack_stream(self._zeros.T.contiguous(), bits)[:, self._outputs.read]
