"""Mixture of experts on the CPU: one product an expert that has tokens; ``octavo.kernels.reference`` says what it is."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.activations import Activation
from octavo.kernels.cpu.dense import linear, linear_act_and_mul, prepare_weight
from octavo.kernels.cpu.panels import Panels
from octavo.kernels.experts import combine
from octavo.kernels.weights import Weight


def prepare_experts(weights: Tensor | Sequence[Weight], dtype: torch.dtype) -> list[Panels]:
    """Bring each expert's weight into the form of this backend's ``linear``."""
    return [prepare_weight(weight, dtype) for weight in weights]


def experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: list[Panels],
    down: list[Panels],
    activation: Activation = "silu",
) -> Tensor:
    """Run the experts that have tokens, one after the other; see ``octavo.kernels.reference.experts``."""

    def mlp(expert: int, rows: Tensor) -> Tensor:
        return linear(linear_act_and_mul(rows, gate_up[expert], None, activation), down[expert])

    return combine(x, expert_ids, expert_weights, mlp)
