"""How the weights of linear layers are stored in a checkpoint: the seam between layers and formats."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from octavo.kernels.kept import Form
from octavo.kernels.weights import Weight
from octavo.worker.models.targets import Placement, Target


@dataclass(frozen=True)
class Projection:
    """One linear layer of the checkpoint, and which of its outputs this rank takes."""

    prefix: str  # of its tensors: model.layers.0.self_attn.q_proj
    features: int  # outputs in the checkpoint
    part: slice  # of them
    order: Tensor | None = None  # [n] int64: the same as an index, where they are not taken as they lie

    @property
    def num_taken(self) -> int:
        """Outputs that this rank takes."""
        return self.part.stop - self.part.start if self.order is None else len(self.order)


@dataclass(frozen=True)
class LinearShape:
    """A layer: projections of one input, fused, and the part of the input that this rank takes."""

    projections: tuple[Projection, ...]
    in_features: int  # in the checkpoint
    in_part: slice
    bias: bool = False
    transposed: bool = False  # the checkpoint has [inputs, outputs]; only plain weights may

    @property
    def num_inputs(self) -> int:
        """Inputs that this rank takes."""
        return int(self.in_part.stop - self.in_part.start)


class StoredLinear(Protocol):
    """The tensors of one layer while they are read."""

    @property
    def targets(self) -> dict[str, Target]:
        """Full name of each tensor in the checkpoint -> where it goes."""
        ...

    def finish(self) -> list[Weight]:
        """Return canonical weights once all targets are filled: one, or several that could not be joined.

        Raises:
            WeightsError: what was read contradicts itself.
        """
        ...


class LinearScheme(Protocol):
    """A format of linear weights."""

    @property
    def form(self) -> Form:
        """The canonical form that its weights are in once they are read."""
        ...

    def make(self, placement: Placement, shape: LinearShape) -> StoredLinear:
        """Allocate what the tensors of a layer are read into.

        Raises:
            ModelConfigError: a layer of this shape cannot be stored so.
        """
        ...


class Quantization(Protocol):
    """What config.json says of the formats of all linear layers."""

    def scheme_of(self, prefix: str) -> LinearScheme:
        """Return the format of the linear layer with this prefix in the checkpoint."""
        ...

    def is_ignored(self, name: str) -> bool:
        """Say whether the format has a tensor of this name that nobody reads."""
        ...
