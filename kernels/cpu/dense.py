"""Matrix product, norms and activations on the CPU; ``octavo.kernels.reference`` says what each of them is."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from octavo.kernels.activations import Activation
from octavo.kernels.cpu.panels import Panels, in_panels
from octavo.kernels.cpu.pointwise import silu_and_mul
from octavo.kernels.cpu.product import product
from octavo.kernels.weights import Weight


def prepare_weight(weight: Weight, dtype: torch.dtype) -> Panels:
    """Bring a [N, K] weight into panels, once. The result is opaque: only ``linear`` reads it."""
    return in_panels(weight, dtype)


def linear(x: Tensor, weight: Panels, bias: Tensor | None = None) -> Tensor:
    """Multiply by a weight in panels; see ``octavo.kernels.reference.linear``."""
    return product(x, weight, bias)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Add the residual, then normalise; see ``octavo.kernels.reference.layer_norm``."""
    summed = x if residual is None else x + residual
    return functional.layer_norm(summed, weight.shape, weight, bias, eps), summed


def act(x: Tensor, activation: Activation) -> Tensor:
    """Activate; see ``octavo.kernels.reference.act``."""
    return _ACTIVATIONS[activation](x)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Keep within a cap; see ``octavo.kernels.reference.soft_cap``."""
    return (x.float() / cap).tanh_().mul_(cap).to(x.dtype)


def act_and_mul(x: Tensor, activation: Activation = "silu") -> Tensor:
    """Gate; see ``octavo.kernels.reference.act_and_mul``."""
    if activation == "silu":
        return silu_and_mul(x)
    gate, up = x.chunk(2, dim=-1)
    return act(gate, activation) * up


def linear_act_and_mul(
    x: Tensor, weight: Panels, bias: Tensor | None = None, activation: Activation = "silu"
) -> Tensor:
    """Multiply, then gate; see ``octavo.kernels.reference.linear_act_and_mul``."""
    return act_and_mul(linear(x, weight, bias), activation)


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}
