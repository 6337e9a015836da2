"""Layers: their parameters, which part of a checkpoint each parameter takes, and what they compute.

A layer allocates the shard of its rank and names, for every tensor of the checkpoint, the view that the tensor's part
goes to (`Target`). Weights stream straight into these views, so fused projections cost no copy.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.ops import Ops
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
    part: tuple[slice, ...]  # of it that this rank takes; same rank as full_shape


@dataclass(frozen=True)
class Placement:
    """How parameters are made."""

    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> Tensor:
        """Return an uninitialised parameter; the loader proves that every element is written."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class ColumnParallel:
    """Several projections of one input, fused; each rank computes its part of every output."""

    def __init__(
        self, placement: Placement, in_features: int, outputs: dict[str, tuple[int, slice]], bias: bool
    ) -> None:
        """Allocate the shard.

        Args:
            placement: dtype and device.
            in_features: of the input.
            outputs: checkpoint prefix of each projection -> its full number of features and this rank's part of them.
            bias: whether the projections have one.
        """
        sizes = [part.stop - part.start for _, part in outputs.values()]
        self.sizes = sizes
        self.weight = placement.empty(sum(sizes), in_features)
        self.bias = placement.empty(sum(sizes)) if bias else None
        self.targets: dict[str, Target] = {}
        start = 0
        for (prefix, (full, part)), size in zip(outputs.items(), sizes, strict=True):
            view = self.weight[start : start + size]
            self.targets[f"{prefix}.weight"] = Target(view, (full, in_features), (part, slice(0, in_features)))
            if self.bias is not None:
                self.targets[f"{prefix}.bias"] = Target(self.bias[start : start + size], (full,), (part,))
            start += size

    def finish_loading(self, ops: Ops) -> None:
        """Bring the weight into the backend's form; targets are invalid from here on."""
        self.weight = ops.prepare_weight(self.weight)
        self.targets.clear()

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """Project [num_tokens, in_features] to [num_tokens, sum of this rank's features]."""
        return ops.linear(x, self.weight, self.bias)

    def gated(self, ops: Ops, x: Tensor) -> Tensor:
        """Project two fused projections, gate first, to ``silu(gate) * up``: [num_tokens, half of the features]."""
        return ops.linear_silu_and_mul(x, self.weight, self.bias)


class RowParallel:
    """A projection whose input is split: each rank computes its share of the sum."""

    def __init__(
        self, placement: Placement, prefix: str, in_features: int, part: slice, out_features: int, bias: bool
    ) -> None:
        self.weight = placement.empty(out_features, part.stop - part.start)
        self.bias = placement.empty(out_features) if bias else None
        # The ranks' products are summed, so one of them alone may add the bias.
        self._adds_bias = part.start == 0
        self.targets = {
            f"{prefix}.weight": Target(self.weight, (out_features, in_features), (slice(0, out_features), part))
        }
        if self.bias is not None:
            self.targets[f"{prefix}.bias"] = Target(self.bias, (out_features,), (slice(0, out_features),))

    def finish_loading(self, ops: Ops) -> None:
        """Bring the weight into the backend's form; targets are invalid from here on."""
        self.weight = ops.prepare_weight(self.weight)
        self.targets.clear()

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """Project [num_tokens, this rank's in_features] to this rank's share of the sum: [num_tokens, out_features]."""
        return ops.linear(x, self.weight, self.bias if self._adds_bias else None)


def whole(view: Tensor) -> Target:
    """Return the target of a tensor that every rank holds whole."""
    return Target(view, tuple(view.shape), tuple(slice(0, n) for n in view.shape))
