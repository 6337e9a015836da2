"""The MLP of a layer."""

import torch
from torch import Tensor

from octavo.kernels.ops import Ops
from octavo.worker.models.description import MlpConfig, ModelConfig
from octavo.worker.models.layers import ColumnParallel, RowParallel
from octavo.worker.models.targets import Placement, ShardSpec
from octavo.worker.quantization.scheme import Projection, Quantization


class Mlp:
    """``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` where it is not gated."""

    def __init__(
        self,
        config: ModelConfig,
        mlp: MlpConfig,
        placement: Placement,
        shard: ShardSpec,
        prefix: str,
        quantization: Quantization,
        names: tuple[tuple[str, ...], str] | None = None,
    ) -> None:
        """Allocate the shard of a rank; `names` are those of the way up and the way down, the MLP's own by default."""
        inner = shard.part(mlp.size, "features of the MLP")
        up_names, down_name = (config.names.up, config.names.down) if names is None else names
        self._activation, self._is_gated = mlp.activation, mlp.is_gated
        self._up = ColumnParallel(
            placement,
            config.hidden_size,
            _up_projections(prefix, up_names, mlp, inner, shard),
            mlp.has_bias,
            quantization,
            transposed=config.transposed,
        )
        self._down = RowParallel(
            placement,
            f"{prefix}.{down_name}",
            mlp.size,
            inner,
            config.hidden_size,
            mlp.has_bias,
            quantization,
            transposed=config.transposed,
        )
        self.targets = self._up.targets | self._down.targets

    def finish_loading(self, ops: Ops) -> None:
        """Bring the weights into the backend's form; targets are invalid from here on."""
        self._up.finish_loading(ops)
        self._down.finish_loading(ops)
        self.targets.clear()

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """[T, hidden_size] -> this rank's share of the sum [T, hidden_size]."""
        if self._is_gated:
            return self._down(ops, self._up.gated(ops, x, self._activation))
        return self._down(ops, ops.act(self._up(ops, x), self._activation))


def _up_projections(
    prefix: str, names: tuple[str, ...], mlp: MlpConfig, inner: slice, shard: ShardSpec
) -> tuple[Projection, ...]:
    if mlp.is_gated and len(names) == 1:  # the checkpoint has them fused, the gate first
        return (stacked(f"{prefix}.{names[0]}", [mlp.size, mlp.size], [inner, inner], shard),)
    return tuple(Projection(f"{prefix}.{name}", mlp.size, inner) for name in names)


def stacked(prefix: str, sizes: list[int], parts: list[slice], shard: ShardSpec) -> Projection:
    """Return what a rank takes of a matrix that holds several projections, one below the other."""
    total = sum(sizes)
    if shard.world == 1:
        return Projection(prefix, total, slice(0, total))
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    rows = [begin + i for begin, part in zip(begins, parts, strict=True) for i in range(part.start, part.stop)]
    return Projection(prefix, total, slice(0, total), torch.tensor(rows))
