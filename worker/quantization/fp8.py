"""Weights of 8-bit floating point with scales: per tensor, per channel or per block.

Source: Micikevicius et al. 2022, arXiv 2209.05433.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from octavo.kernels.kept import Form
from octavo.kernels.weights import Activations, Float8Weight, Weight
from octavo.worker.models.targets import Placement
from octavo.worker.quantization.scheme import LinearShape, Projection
from octavo.worker.quantization.stored import (
    Outputs,
    RawTensors,
    StoredProjections,
    Tensors,
    check_plain_orientation,
    inputs_of,
)

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = torch.finfo(FLOAT8).max
_LEAST_SCALE = 1.0 / (FLOAT8_MAX * 512.0)
"""Of weights that are quantised here: a row of zeros has a scale, too."""


@dataclass(frozen=True)
class Float8Scheme:
    """Tensors of a projection: weight [N, K], its scales, and input_scale where activations are static.

    Attributes:
        block: outputs and inputs of a block that has a scale; None: the shape of the scales says whether each output
            has one ([N] or [N, 1]) or the whole matrix ([] or [1]).
        activations: how inputs were meant to be quantised.
        scale_name: of the scales, unless the checkpoint uses the other name.
        tensors: of the checkpoint.
    """

    block: tuple[int, int] | None
    activations: Activations
    scale_name: str = "weight_scale"
    tensors: Tensors | None = field(default=None, compare=False, repr=False)

    form: ClassVar[Form] = Float8Weight

    def make(self, placement: Placement, shape: LinearShape) -> StoredProjections:
        """Allocate what the tensors of a layer are read into.

        Raises:
            ModelConfigError: a layer of this shape cannot be stored so.
        """
        return StoredProjections([_Float8Projection(self, placement, shape, p) for p in shape.projections])


class _Float8Projection:
    def __init__(self, scheme: Float8Scheme, placement: Placement, shape: LinearShape, projection: Projection) -> None:
        outputs, inputs = projection.features, shape.in_features
        check_plain_orientation(projection.prefix, shape, "fp8")
        self._scheme = scheme
        self._raw = raw = RawTensors(placement, projection.prefix, scheme.tensors)
        self.targets = raw.targets
        name = _scale_name(raw, scheme.scale_name)
        block_n, block_k = scheme.block or (outputs, inputs)
        self._inputs = inputs_of(shape, block_k if scheme.block else 1, projection.prefix)
        self._outputs = Outputs(projection, block_n if scheme.block else 1)
        read = self._outputs.read
        self._weight = raw.add("weight", FLOAT8, (outputs, inputs), (read, self._inputs))
        if scheme.block is None:
            self._scales, self._block = self._add_scales(name, outputs)
        else:
            rows = slice(read.start // block_n, -(-read.stop // block_n))
            columns = slice(self._inputs.start // block_k, -(-self._inputs.stop // block_k))
            shape_of_scales = (-(-outputs // block_n), -(-inputs // block_k))
            self._scales = raw.add(name, torch.float32, shape_of_scales, (rows, columns))
            self._block = scheme.block
        self._input_scale = None
        if scheme.activations == "static":
            self._input_scale = raw.add("input_scale", torch.float32, _shape_of_scalar(raw, "input_scale"))

    def _add_scales(self, name: str, outputs: int) -> tuple[Tensor, tuple[int, int]]:
        """Expect one scale for each output, or one for all; return their memory and the block of each."""
        inputs = self._inputs.stop - self._inputs.start
        stored = self._raw.stored(name)
        if stored is not None and outputs > 1 and stored.shape in ((outputs,), (outputs, 1)):
            part = (self._outputs.read, slice(0, 1))[: len(stored.shape)]
            return self._raw.add(name, torch.float32, stored.shape, part), (1, inputs)
        scales = self._raw.add(name, torch.float32, _shape_of_scalar(self._raw, name))
        return scales, (self._outputs.num_read, inputs)

    def finish(self) -> Weight:
        block_n, block_k = self._block
        rows = -(-self._outputs.num_read // block_n)
        weight = Float8Weight(
            codes=self._weight,
            scales=self._scales.reshape(rows, -1),
            input_scale=None if self._input_scale is None else self._input_scale.reshape(()),
            activations=self._scheme.activations,
            block_n=block_n,
            block_k=block_k,
        )
        return self._outputs.wanted(weight)


def _shape_of_scalar(raw: RawTensors, name: str) -> tuple[int, ...]:
    """Return how the checkpoint writes a single number; what is none, the loader refuses."""
    stored = raw.stored(name)
    return stored.shape if stored is not None and stored.shape in ((1,), (1, 1)) else ()


def _scale_name(raw: RawTensors, name: str) -> str:
    for other in ("weight_scale", "weight_scale_inv"):
        if raw.stored(name) is None and raw.stored(other) is not None:
            return other
    return name


def quantized_float8(weight: Tensor) -> Float8Weight:
    """Quantise a plain weight [N, K], each output with a scale of its own; activations are dynamic."""
    wide = weight.float()
    scales = (wide.abs().amax(dim=1, keepdim=True) / FLOAT8_MAX).clamp_min(_LEAST_SCALE)
    codes = (wide / scales).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)
    return Float8Weight(codes, scales, None, "dynamic", 1, weight.shape[1])
