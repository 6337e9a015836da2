"""Weights that are not quantised: read straight into the fused parameter."""

from typing import ClassVar

from torch import Tensor

from octavo.kernels.kept import Form
from octavo.kernels.weights import Weight
from octavo.worker.models.targets import Placement, Target
from octavo.worker.quantization.scheme import LinearScheme, LinearShape


class PlainLinear:
    """The matrices of a layer's projections, one below the other, each in its place from the start.

    Args:
        placement: dtype and device.
        shape: of the layer.
        weight: [N, K], where they go; None: memory of their own.
    """

    def __init__(self, placement: Placement, shape: LinearShape, weight: Tensor | None = None) -> None:
        sizes = [projection.num_taken for projection in shape.projections]
        self._weight = placement.empty(sum(sizes), shape.num_inputs) if weight is None else weight
        self.targets: dict[str, Target] = {}
        start = 0
        for projection, size in zip(shape.projections, sizes, strict=True):
            full = (projection.features, shape.in_features)
            self.targets[f"{projection.prefix}.weight"] = Target(
                self._weight[start : start + size],
                full[::-1] if shape.transposed else full,
                (projection.part, shape.in_part),
                projection.order,
                shape.transposed,
            )
            start += size

    def finish(self) -> list[Weight]:
        """Return the one fused matrix [N, K]."""
        return [self._weight]


class PlainScheme:
    """Of layers that are not quantised."""

    form: ClassVar[Form] = Tensor

    def make(self, placement: Placement, shape: LinearShape) -> PlainLinear:
        """Allocate the fused matrix."""
        return PlainLinear(placement, shape)


class Unquantized:
    """Of checkpoints that are not quantised."""

    def scheme_of(self, prefix: str) -> LinearScheme:
        """Return the plain scheme, for every layer."""
        return PLAIN

    def is_ignored(self, name: str) -> bool:
        """Say that no tensor is left unread."""
        return False


PLAIN = PlainScheme()
"""It has no state: one does for all."""
