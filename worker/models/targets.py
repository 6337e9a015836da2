"""Where the tensors of a checkpoint go: a rank's share, and the view that each tensor's part is read into."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.worker.errors import ModelConfigError


@dataclass(frozen=True)
class ShardSpec:
    """One rank's share of a tensor-parallel group."""

    rank: int = 0
    world: int = 1

    def part(self, total: int, what: str) -> slice:
        """Return this rank's part of `total` equal things.

        Raises:
            ModelConfigError: they cannot be split evenly.
        """
        if total % self.world:
            raise ModelConfigError(f"{total} {what} cannot be split evenly over {self.world} ranks")
        size = total // self.world
        return slice(self.rank * size, (self.rank + 1) * size)


@dataclass(frozen=True)
class Target:
    """Where a tensor of the checkpoint goes."""

    view: Tensor  # into a parameter
    full_shape: tuple[int, ...]  # of the tensor in the checkpoint
    part: tuple[slice, ...]  # of it (of its transpose where `transposed`) that this rank takes; same rank as full_shape
    order: Tensor | None = None  # [n] int64: lines that are taken in place of part[0], in this order
    transposed: bool = False  # the checkpoint holds [inputs, outputs]

    def take(self, source: Any) -> Tensor:
        """Return what goes to the view of a tensor, or of a slice of safetensors, of the full shape."""
        if not self.transposed and self.order is None:
            taken: Tensor = source[self.part]
            return taken
        whole: Tensor = source[:]
        whole = whole.t() if self.transposed else whole
        lines = whole[self.part[0]] if self.order is None else whole.index_select(0, self.order)
        return lines[(slice(None), *self.part[1:])]


@dataclass(frozen=True)
class Placement:
    """How parameters are made."""

    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> Tensor:
        """Return an uninitialised parameter; the loader proves that every element is written."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


def whole(view: Tensor) -> Target:
    """Return the target of a tensor that every rank holds whole."""
    return Target(view, tuple(view.shape), tuple(slice(0, n) for n in view.shape))
