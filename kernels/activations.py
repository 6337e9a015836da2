"""Names of activations: silu, gelu (by the error function), gelu_tanh (its approximation by tanh), relu."""

from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
