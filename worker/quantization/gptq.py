"""GPTQ: codes packed along the inputs, zero points along the outputs, and the group of each input.

Source: Frantar et al. 2022, arXiv 2210.17323; the layout is that of AutoGPTQ and GPTQModel.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from octavo.kernels.kept import Form
from octavo.kernels.weights import GroupedWeight, Weight, pack_codes
from octavo.worker.errors import ModelConfigError
from octavo.worker.models.targets import Placement
from octavo.worker.quantization.groups import grouped_weight, order_of
from octavo.worker.quantization.scheme import LinearShape, Projection
from octavo.worker.quantization.stored import (
    Outputs,
    RawTensors,
    StoredProjections,
    Tensors,
    check_multiple,
    inputs_of,
    unpack_stream,
)

GPTQ_BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class GPTQScheme:
    """Tensors of a projection: qweight [K * bits / 32, N], qzeros [G, N * bits / 32], scales [G, N], g_idx [K].

    Attributes:
        bits: 2, 3, 4 or 8.
        group_size: inputs of a group; None: all.
        desc_act: whether inputs were quantised in another order than their own.
        zero_offset: what was taken from zero points before they were stored: 1 in the first version, 0 in the second.
        tensors: of the checkpoint.
    """

    bits: int
    group_size: int | None
    desc_act: bool
    zero_offset: int
    tensors: Tensors | None = field(default=None, compare=False, repr=False)

    form: ClassVar[Form] = GroupedWeight

    def make(self, placement: Placement, shape: LinearShape) -> StoredProjections:
        """Allocate what the tensors of a layer are read into.

        Raises:
            ModelConfigError: a layer of this shape cannot be stored so.
        """
        return StoredProjections([_GPTQProjection(self, placement, shape, p) for p in shape.projections])


class _GPTQProjection:
    def __init__(self, scheme: GPTQScheme, placement: Placement, shape: LinearShape, projection: Projection) -> None:
        bits, (outputs, inputs) = scheme.bits, (projection.features, shape.in_features)
        unit = 32 if bits == 3 else 32 // bits
        self._scheme = scheme
        self._group_size = inputs if scheme.group_size is None else scheme.group_size
        check_multiple(projection.prefix, "inputs", inputs, unit, f"{bits}-bit GPTQ")
        check_multiple(projection.prefix, "outputs", outputs, unit, f"{bits}-bit GPTQ")
        self._inputs = _inputs(scheme, shape, projection.prefix, self._group_size, unit)
        self._outputs = Outputs(projection)
        groups = slice(self._inputs.start // self._group_size, -(-self._inputs.stop // self._group_size))
        num_groups = -(-inputs // self._group_size)
        words = slice(self._inputs.start * bits // 32, self._inputs.stop * bits // 32)
        self._raw = RawTensors(placement, projection.prefix, scheme.tensors)
        self.targets = self._raw.targets
        self._qweight = self._raw.add(
            "qweight", torch.int32, (inputs * bits // 32, outputs), (words, self._outputs.read)
        )
        zero_words = slice(0, outputs * bits // 32)
        self._qzeros = self._raw.add("qzeros", torch.int32, (num_groups, zero_words.stop), (groups, zero_words))
        self._scales = self._raw.add(
            "scales",
            self._raw.float_dtype("scales", torch.float16),
            (num_groups, outputs),
            (groups, self._outputs.read),
        )
        self._g_idx = None
        # Where inputs have an order of their own it must be told: without it every number would belong to a wrong group.
        if self._raw.has("g_idx", default=True) or (scheme.desc_act and num_groups > 1):
            self._g_idx = self._raw.add("g_idx", torch.int32, (inputs,))
            # Valid from the start: random weights leave integers of one dimension as they are.
            self._g_idx.copy_(_some_groups(inputs, self._group_size, scheme.desc_act))
        # Old tools gave every layer a bias; of a layer that has none it is zero.
        extra_bias = not shape.bias and self._raw.has("bias", default=False)
        self._bias = self._raw.add("bias", torch.float32, (outputs,)) if extra_bias else None

    def finish(self) -> Weight:
        scheme, bits = self._scheme, self._scheme.bits
        if self._bias is not None and bool(self._bias.any()):
            raise self._raw.error("bias", "is not zero, but the model has no bias there")
        perm = None
        if self._g_idx is not None:
            perm = order_of(self._raw, "g_idx", self._g_idx, self._group_size, zeros_are_none=not scheme.desc_act)
            if perm is not None and len(self._g_idx) != self._inputs.stop - self._inputs.start:
                raise _split_order(self._raw.prefix)
        packed = self._qweight.T.contiguous()  # of 2, 4 and 8 bits it is the canonical form already
        if bits == 3:
            packed = pack_codes(unpack_stream(packed, bits), 4)
        zeros = (unpack_stream(self._qzeros, bits)[:, self._outputs.read] + scheme.zero_offset) & (2**bits - 1)
        group_size = min(self._group_size, self._inputs.stop - self._inputs.start)
        return self._outputs.wanted(grouped_weight(packed, bits, self._scales, zeros, group_size, perm))


def _inputs(scheme: GPTQScheme, shape: LinearShape, prefix: str, group_size: int, unit: int) -> slice:
    whole = slice(0, shape.in_features)
    if shape.in_part != whole and scheme.desc_act and scheme.group_size is not None:
        raise _split_order(prefix)
    if shape.in_part != whole and scheme.group_size is None:
        return inputs_of(shape, unit, prefix)
    return inputs_of(shape, max(unit, group_size), prefix)


def _split_order(prefix: str) -> ModelConfigError:
    return ModelConfigError(
        f"{prefix}: inputs in another order (desc_act) cannot be split over ranks; choose --tensor-parallel-size 1"
    )


def _some_groups(inputs: int, group_size: int, desc_act: bool) -> Tensor:
    """Return a group for each input, in some order where inputs have one; of one width it is always the same order."""
    order = torch.arange(inputs)
    if desc_act:
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(0))
    return order // group_size
