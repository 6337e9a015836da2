"""The mixture of experts of a layer, in place of its MLP."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.ops import Ops, Prepared
from octavo.kernels.weights import Weight, dequantized
from octavo.worker.models.description import ExpertsConfig, MlpConfig, ModelConfig
from octavo.worker.models.layers import Linear
from octavo.worker.models.mlp import Mlp
from octavo.worker.models.targets import Placement, ShardSpec, Target
from octavo.worker.quantization.layers import make_stored
from octavo.worker.quantization.plain import PlainLinear, PlainScheme, Unquantized
from octavo.worker.quantization.scheme import LinearShape, Projection, Quantization, StoredLinear


class Experts:
    """A router, the MLPs of all experts, and a shared one where the model has it.

    Ranks share the features of each expert: every rank has its part of all of them.
    """

    def __init__(
        self,
        config: ModelConfig,
        experts: ExpertsConfig,
        placement: Placement,
        shard: ShardSpec,
        prefix: str,
        quantization: Quantization,
    ) -> None:
        names, hidden = config.names, slice(0, config.hidden_size)
        inner = shard.part(experts.size, "features of an expert")
        prefixes = [f"{prefix}.{names.expert.format(i)}" for i in range(experts.num_experts)]
        self._experts = experts
        self._router = _small(config, placement, f"{prefix}.{names.router}", experts.num_experts)
        self._gate_up = _Stack(
            placement,
            [
                LinearShape(
                    tuple(Projection(f"{expert}.{name}", experts.size, inner) for name in names.expert_up),
                    config.hidden_size,
                    hidden,
                )
                for expert in prefixes
            ],
            quantization,
        )
        self._down = _Stack(
            placement,
            [
                LinearShape(
                    (Projection(f"{expert}.{names.expert_down}", config.hidden_size, hidden),), experts.size, inner
                )
                for expert in prefixes
            ],
            quantization,
        )
        self._shared = (
            _Shared(config, experts.shared, placement, shard, prefix, quantization) if experts.shared else None
        )
        self.targets = self._router.targets | self._gate_up.targets | self._down.targets
        self.targets |= self._shared.targets if self._shared else {}

    def finish_loading(self, ops: Ops) -> None:
        """Bring the weights into the backend's form; targets are invalid from here on."""
        self.targets.clear()
        self._router.finish_loading(ops)
        self._gate_up.finish_loading(ops)
        self._down.finish_loading(ops)
        if self._shared is not None:
            self._shared.finish_loading(ops)

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """[T, hidden_size] -> this rank's share of the sum [T, hidden_size]."""
        experts = self._experts
        ids, weights = ops.route(self._router(ops, x), experts.top_k, renormalize=experts.renormalize)
        routed = ops.experts(x, ids, weights, self._gate_up.prepared, self._down.prepared, experts.activation)
        return routed if self._shared is None else routed + self._shared(ops, x)


class _Shared:
    """The expert that takes all tokens, each times a weight of its own."""

    def __init__(
        self,
        config: ModelConfig,
        mlp: MlpConfig,
        placement: Placement,
        shard: ShardSpec,
        prefix: str,
        quantization: Quantization,
    ) -> None:
        names = config.names
        self._mlp = Mlp(config, mlp, placement, shard, prefix, quantization, (names.shared_up, names.shared_down))
        self._gate = _small(config, placement, f"{prefix}.{names.shared_gate}", 1)
        self.targets = self._mlp.targets | self._gate.targets

    def finish_loading(self, ops: Ops) -> None:
        self._mlp.finish_loading(ops)
        self._gate.finish_loading(ops)
        self.targets.clear()

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        # By the exponential: the bits of torch's own sigmoid depend on a value's place.
        weight = 1.0 / (1.0 + torch.exp(-self._gate(ops, x).float()))  # [T, 1]
        return (self._mlp(ops, x).float() * weight).to(x.dtype)


class _Stack:
    """The same layer of all experts: plain weights are read into their places in one stack."""

    def __init__(self, placement: Placement, shapes: Sequence[LinearShape], quantization: Quantization) -> None:
        prefixes = [projection.prefix for shape in shapes for projection in shape.projections]
        self._dtype = placement.dtype
        self._plain: Tensor | None = None  # [E, N, K]
        self._stored: list[StoredLinear] = []
        if all(isinstance(quantization.scheme_of(prefix), PlainScheme) for prefix in prefixes):
            outputs = sum(projection.num_taken for projection in shapes[0].projections)
            self._plain = placement.empty(len(shapes), outputs, shapes[0].num_inputs)
            self._stored += [
                PlainLinear(placement, shape, part) for shape, part in zip(shapes, self._plain, strict=True)
            ]
        else:
            self._stored += [make_stored(quantization, placement, shape) for shape in shapes]
        self.targets: dict[str, Target] = {}
        for stored in self._stored:
            self.targets |= stored.targets
        self.prepared: Prepared = None

    def finish_loading(self, ops: Ops) -> None:
        self.targets.clear()
        plain, stored = self._plain, self._stored
        self._plain, self._stored = None, []
        self.prepared = ops.prepare_experts(
            [_one(part.finish(), self._dtype) for part in stored] if plain is None else plain, self._dtype
        )


def _one(weights: list[Weight], dtype: torch.dtype) -> Weight:
    """Return gate and up as one weight, as plain numbers where their formats cannot be joined."""
    return weights[0] if len(weights) == 1 else torch.cat([dequantized(weight, dtype) for weight in weights])


def _small(config: ModelConfig, placement: Placement, prefix: str, outputs: int) -> Linear:
    """Return a router or a gate: every rank has it whole, and checkpoints leave it as it is when they are quantised."""
    shape = LinearShape(
        (Projection(prefix, outputs, slice(0, outputs)),), config.hidden_size, slice(0, config.hidden_size)
    )
    return Linear(placement, shape, None, adds_bias=False, quantization=Unquantized())
