"""The operations of a backend as one value, so that models name operations and never implementations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cpu import attention, dense


class RmsNorm(Protocol):
    """See octavo.kernels.reference.rms_norm."""

    def __call__(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, /
    ) -> tuple[Tensor, Tensor]:
        """Return the normalised tokens and the new residual."""
        ...


class Linear(Protocol):
    """See octavo.kernels.reference.linear."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor:
        """Return x W^T + b."""
        ...


@dataclass(frozen=True)
class Ops:
    """Implementations of all operations that a model runs; octavo.kernels.reference defines each."""

    name: str
    linear: Linear
    rms_norm: RmsNorm
    silu_and_mul: Callable[[Tensor], Tensor]
    rotary_and_write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    paged_attention: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]
    copy_blocks: Callable[[Tensor, Tensor, Tensor, Tensor], None]


_BACKENDS = {
    "reference": Ops(
        name="reference",
        linear=reference.linear,
        rms_norm=reference.rms_norm,
        silu_and_mul=reference.silu_and_mul,
        rotary_and_write_kv=reference.rotary_and_write_kv,
        paged_attention=reference.paged_attention,
        copy_blocks=reference.copy_blocks,
    ),
    "cpu": Ops(
        name="cpu",
        linear=dense.linear,
        rms_norm=dense.rms_norm,
        silu_and_mul=dense.silu_and_mul,
        rotary_and_write_kv=reference.rotary_and_write_kv,
        paged_attention=attention.paged_attention,
        copy_blocks=reference.copy_blocks,
    ),
}

BACKENDS = tuple(_BACKENDS)
"""Names of the backends."""


def get_ops(backend: str) -> Ops:
    """Return the operations of a backend.

    Raises:
        ValueError: there is none of that name.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown; there are {', '.join(BACKENDS)}")
    return _BACKENDS[backend]
