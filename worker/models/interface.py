"""What runners ask of a model, and what they give it."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from octavo.worker.models.cached import CachedHeads


@dataclass(frozen=True)
class Batch:
    """One forward pass over rows of any length; T tokens, R rows, S of which want logits."""

    input_ids: Tensor  # [T] integer
    positions: Tensor  # [T] integer
    slot_mapping: Tensor  # [T] int64: where each token's keys and values go; -1: nowhere
    block_tables: Tensor  # [R, max_blocks] int32
    query_start: Tensor  # [R + 1] int32
    seq_lens: Tensor  # [R] int32
    logits_index: Tensor | None  # [S] integer: tokens whose logits are wanted; None: all
    num_decodes: int = 0  # so many rows come first that have one token each, or none where they are padding


@dataclass(frozen=True)
class KVCache:
    """Keys and values of one layer: [num_blocks, block_size, num_kv_heads, head_size] each."""

    keys: Tensor
    values: Tensor


class Hidden(NamedTuple):
    """What the layers made of T tokens: their last output [T, hidden_size], and the residual that it is added to."""

    x: Tensor
    residual: Tensor | None


class Model(Protocol):
    """A causal language model over paged keys and values."""

    def empty_logits(self, num_rows: int) -> Tensor:
        """Return memory for logits: [num_rows, vocab_size] in the dtype of `forward`."""
        ...

    def forward(self, batch: Batch, caches: list[KVCache]) -> Tensor:
        """Compute the batch's tokens, store their keys and values, and return logits.

        Returns:
            [S, vocab_size] in the model's dtype.
        """
        ...

    def hidden(self, batch: Batch, caches: list[KVCache]) -> Hidden:
        """Compute the batch's tokens and store their keys and values; return what logits are made of."""
        ...

    def logits(self, hidden: Hidden, wanted: Tensor | None) -> Tensor:
        """Return the logits of some tokens of a batch.

        Args:
            hidden: of the batch.
            wanted: [S] integer: which tokens; None: all.

        Returns:
            [S, vocab_size] in the model's dtype.
        """
        ...


@dataclass(frozen=True)
class LoadedModel:
    """A model whose weights are there."""

    model: Model
    cached: CachedHeads
    num_bytes: int  # of the weights
