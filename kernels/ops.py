"""The operations a backend offers, and the choice of one by name."""

import importlib
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.activations import Activation
from octavo.kernels.weights import Weight

Prepared = Any
"""A weight matrix in a backend's own form, from its `prepare_weight`: opaque to everybody else."""


class Ops(Protocol):
    """One signature for each operation; ``octavo.kernels.reference`` and ``sampling`` define what they do.

    A backend is a module with these functions. T: tokens of the step over all rows, R: rows of the step, S: sampling
    rows, P: rows with penalties, H: hidden size, nq and nkv: query and key heads, d: head size, B: block size, V:
    vocabulary size, E: experts.
    """

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, unit_offset: bool = False
    ) -> tuple[Tensor, Tensor]:
        """[T, H], [H] -> normalised [T, H] and the new residual [T, H]."""
        ...

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """[T, H], [H], [H] -> normalised [T, H] and the new residual [T, H]."""
        ...

    def prepare_weight(self, weight: Weight, dtype: torch.dtype) -> Prepared:
        """[N, K] -> what this backend's ``linear`` takes for x of that dtype; called once, after loading."""
        ...

    def linear(self, x: Tensor, weight: Prepared, bias: Tensor | None = None) -> Tensor:
        """[T, K], prepared [N, K], [N] -> [T, N]."""
        ...

    def linear_act_and_mul(
        self, x: Tensor, weight: Prepared, bias: Tensor | None = None, activation: Activation = "silu"
    ) -> Tensor:
        """[T, K], prepared [2I, K], gate first, [2I] -> [T, I]."""
        ...

    def route(self, logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
        """[T, E] -> ids [T, top_k] int32 and weights [T, top_k] fp32 of the experts with the highest logits."""
        ...

    def prepare_experts(self, weights: Tensor | Sequence[Weight], dtype: torch.dtype) -> Prepared:
        """[E, N, K], or E weights [N, K] -> what this backend's ``experts`` takes; called once, after loading."""
        ...

    def experts(
        self,
        x: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        gate_up: Prepared,
        down: Prepared,
        activation: Activation = "silu",
    ) -> Tensor:
        """[T, H], ids [T, k] int32, weights [T, k] fp32, prepared E [2I, H], gate first, and E [H, I] -> [T, H]."""
        ...

    def act(self, x: Tensor, activation: Activation) -> Tensor:
        """[T, I] -> [T, I]."""
        ...

    def act_and_mul(self, x: Tensor, activation: Activation = "silu") -> Tensor:
        """[T, 2I], gate first -> [T, I]."""
        ...

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """[S, V] -> [S, V], each value within -cap .. cap."""
        ...

    def rotary_cos_sin(self, inv_freq: Tensor, max_positions: int, scaling: float = 1.0) -> Tensor:
        """[r/2] -> [max_positions, r] fp32."""
        ...

    def rotary_and_write_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
        *,
        unit_offset: bool = False,
    ) -> Tensor:
        """Norm (where weights [d] are given) and rotate q and k, write k and v into the caches [num_blocks, B, nkv, d].

        -> rotated q [T, nq, d].
        """
        ...

    def paged_attention(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        scale: float,
        *,
        num_decodes: int = 0,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor:
        """[T, nq, d], caches, tables [R, max_blocks] int32, [R + 1] int32, [R] int32 -> [T, nq, d].

        `num_decodes` says how many rows with at most one token come first; it changes no result.
        """
        ...

    def copy_blocks(self, key_cache: Tensor, value_cache: Tensor, src: Tensor, dst: Tensor) -> None:
        """Copy blocks src [n] to dst [n] in both caches, in place."""
        ...

    def apply_allowed(self, logits: Tensor, rows: Tensor, ids: Tensor) -> None:
        """Forbid every id of the named rows that no pair (row, id) names, in place."""
        ...

    def apply_token_mask(self, logits: Tensor, rows: Tensor, words: Tensor) -> None:
        """Forbid in rows [G] every id whose bit of words [G, W] int32 is not set, in place."""
        ...

    def apply_logit_bias(self, logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
        """Add values at (row, id) pairs, in place."""
        ...

    def apply_penalties(
        self,
        logits: Tensor,
        rows: Tensor,
        prompt_mask: Tensor,
        output_counts: Tensor,
        presence: Tensor,
        frequency: Tensor,
        repetition: Tensor,
    ) -> None:
        """Penalise what occurred in the rows [P] named, in place."""
        ...

    def filter_logits(self, logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> None:
        """Mask to -inf what min-p, top-k and top-p leave out, in place; logits stay unscaled."""
        ...

    def sample(
        self, logits: Tensor, temperature: Tensor, seeds: Tensor, choice_index: Tensor, positions: Tensor
    ) -> Tensor:
        """Draw one id a row -> [S] int64; -1 where nothing is left."""
        ...

    def logprobs(self, raw_logits: Tensor, ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """-> logprob [S], rank [S], top_ids [S, k], top_logprobs [S, k]."""
        ...

    def first_nonfinite(self, logits: Tensor) -> Tensor:
        """-> [S] bool: the row's raw logits hold NaN or +inf, or nothing finite."""
        ...


_MODULES = {
    "cpu": "octavo.kernels.cpu",  # imported when asked for: a worker on a GPU needs no compiler of its own
    "reference": reference.__name__,
    "triton": "octavo.kernels.gpu",  # imported when asked for: not every platform has Triton
}
_BATCH_INVARIANT = {"reference": reference.__name__, "triton": "octavo.kernels.gpu.invariant"}

BACKENDS = tuple(_MODULES)
"""Names of the backends."""


def get_ops(backend: str, *, batch_invariant: bool = False) -> Ops:
    """Return the operations of a backend.

    Args:
        backend: one of BACKENDS.
        batch_invariant: whether the bits of a row must not depend on the other rows, nor on how it is cut into chunks.

    Raises:
        ValueError: there is no backend of that name, or it cannot do that.
        ImportError: the backend is "triton" and Triton is not installed.
    """
    if backend not in _MODULES:
        raise ValueError(f"unknown kernel backend {backend!r}; known: {', '.join(BACKENDS)}")
    if batch_invariant and backend not in _BATCH_INVARIANT:
        raise ValueError(f"kernel backend {backend!r} is not batch-invariant; those are {', '.join(_BATCH_INVARIANT)}")
    modules = _BATCH_INVARIANT if batch_invariant else _MODULES
    return cast(Ops, importlib.import_module(modules[backend]))
