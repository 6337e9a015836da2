"""Layers: their parameters, which part of a checkpoint each parameter takes, and what they compute.

A layer allocates the shard of its rank and names, for every tensor of the checkpoint, the view that the tensor's part
goes to (`Target`). Plain weights stream straight into these views, so fused projections cost no copy; how others are
stored is the business of `octavo.worker.quantization`.
"""

import logging
from functools import cache

import torch
from torch import Tensor

from octavo.kernels.activations import Activation
from octavo.kernels.ops import Ops, Prepared
from octavo.worker.models.description import NormConfig
from octavo.worker.models.targets import Placement, Target, whole
from octavo.worker.quantization.layers import make_stored
from octavo.worker.quantization.plain import Unquantized
from octavo.worker.quantization.scheme import LinearShape, Projection, Quantization

logger = logging.getLogger(__name__)

_UNQUANTIZED = Unquantized()


class Linear:
    """A product with a matrix, however it is stored, and a bias."""

    def __init__(
        self, placement: Placement, shape: LinearShape, bias: Tensor | None, adds_bias: bool, quantization: Quantization
    ) -> None:
        self._stored = make_stored(quantization, placement, shape)
        self._dtype = placement.dtype
        self._weights: list[Prepared] = []  # prepared; several where they could not be joined
        self.bias = bias
        self._added = bias if adds_bias else None
        self.targets = dict(self._stored.targets)
        if bias is not None:
            views = bias.split([projection.num_taken for projection in shape.projections])
            for projection, view in zip(shape.projections, views, strict=True):
                self.targets[f"{projection.prefix}.bias"] = Target(
                    view, (projection.features,), (projection.part,), projection.order
                )

    def finish_loading(self, ops: Ops) -> None:
        """Bring the weight into the backend's form; targets are invalid from here on."""
        weights = self._stored.finish()
        while weights:
            weight = weights.pop(0)
            self._weights.append(ops.prepare_weight(weight, self._dtype))
            if isinstance(self._weights[-1], Tensor) and not isinstance(weight, Tensor):
                _say_dequantized(self._dtype)
        del self._stored
        self.targets.clear()

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """Multiply [T, K] to [T, N]."""
        if len(self._weights) == 1:
            return ops.linear(x, self._weights[0], self._added)
        product = torch.cat([ops.linear(x, weight) for weight in self._weights], dim=-1)
        return product if self._added is None else product + self._added

    def gated(self, ops: Ops, x: Tensor, activation: Activation) -> Tensor:
        """Multiply by two fused projections, gate first, to ``act(gate) * up``: [T, N / 2]."""
        if len(self._weights) == 1:
            return ops.linear_act_and_mul(x, self._weights[0], self._added, activation)
        return ops.act_and_mul(self(ops, x), activation)


@cache
def _say_dequantized(dtype: torch.dtype) -> None:
    """Log it once: the user may expect the memory and the speed of few bits."""
    logger.info("this backend has no products with weights so quantised: they are dequantised to %s", dtype)


class ColumnParallel(Linear):
    """Several projections of one input, fused; each rank computes its part of every output."""

    def __init__(
        self,
        placement: Placement,
        in_features: int,
        projections: tuple[Projection, ...],
        bias: bool,
        quantization: Quantization = _UNQUANTIZED,
        *,
        transposed: bool = False,
    ) -> None:
        """Allocate the shard.

        Args:
            placement: dtype and device.
            in_features: of the input.
            projections: of the checkpoint, with this rank's part of each.
            bias: whether the projections have one.
            quantization: how the weights are stored.
            transposed: whether the checkpoint has [inputs, outputs].
        """
        shape = LinearShape(projections, in_features, slice(0, in_features), bias, transposed)
        taken = placement.empty(sum(p.num_taken for p in projections)) if bias else None
        super().__init__(placement, shape, taken, adds_bias=True, quantization=quantization)


class RowParallel(Linear):
    """A projection whose input is split: each rank computes its share of the sum."""

    def __init__(
        self,
        placement: Placement,
        prefix: str,
        in_features: int,
        part: slice,
        out_features: int,
        bias: bool,
        quantization: Quantization = _UNQUANTIZED,
        *,
        transposed: bool = False,
    ) -> None:
        projection = Projection(prefix, out_features, slice(0, out_features))
        shape = LinearShape((projection,), in_features, part, bias, transposed)
        # The ranks' products are summed, so one of them alone may add the bias.
        super().__init__(
            placement,
            shape,
            placement.empty(out_features) if bias else None,
            adds_bias=part.start == 0,
            quantization=quantization,
        )


class Norm:
    """A norm over the last dimension, which every rank computes whole."""

    def __init__(self, placement: Placement, size: int, config: NormConfig, prefix: str) -> None:
        self.config = config
        self.weight = placement.empty(size)
        self.bias = placement.empty(size).zero_() if config.kind == "layer" else None
        self.targets = {f"{prefix}.weight": whole(self.weight)}
        if self.bias is not None and config.has_bias:
            self.targets[f"{prefix}.bias"] = whole(self.bias)

    def __call__(self, ops: Ops, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Add the residual [T, H], if any, and normalise; return the result and the sum."""
        if self.bias is not None:
            return ops.layer_norm(x, self.weight, self.bias, self.config.eps, residual)
        return ops.rms_norm(x, self.weight, self.config.eps, residual, unit_offset=self.config.unit_offset)
