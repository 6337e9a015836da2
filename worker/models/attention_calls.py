"""What modules of a transformers model ask of their attention function: read from its arguments, or refused by name.

Knows the interface alone, and imports no transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_HARMLESS = frozenset(
    {
        "cache_position",
        "layer_idx",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Arguments that models hand on to the attention function and that change nothing of its result."""
_TRAITS = {
    "s_aux": "has attention sinks",
    "sinks": "has attention sinks",
    "position_bias": "adds a bias of positions to its scores",
    "alibi": "adds biases by distance to its scores (alibi)",
    "head_mask": "masks heads",
    "indices": "chooses the keys that it attends to",
    "block_indices": "chooses the keys that it attends to",
}


class CallRefused(Exception):
    """The attention function is asked for something that paged attention does not do; the message is the trait."""


@dataclass(frozen=True)
class Options:
    """How scores are made of one layer's queries and keys."""

    scale: float
    window: int  # tokens that a query sees; 0: all; -1: the arguments say nothing
    softcap: float


def read_options(head_size: int, arguments: Mapping[str, Any]) -> Options:
    """Read the arguments of a call that follow queries, keys, values and mask.

    Raises:
        CallRefused: there is one that paged attention does not honour.
    """
    if arguments.get("dropout"):
        raise CallRefused(f"drops scores at random (dropout = {arguments['dropout']})")
    if arguments.get("is_causal") is False:
        raise CallRefused("attends to what comes later (is_causal = False)")
    scale, window, softcap = arguments.get("scaling"), arguments.get("sliding_window"), arguments.get("softcap")
    for name, value in arguments.items():
        if name in ("dropout", "is_causal", "scaling", "sliding_window", "softcap") or name in _HARMLESS:
            continue
        if value is not None and value is not False:
            raise CallRefused(_TRAITS.get(name, "passes something unknown to its attention") + f" ({name})")
    for name, value in (("scaling", scale), ("sliding_window", window), ("softcap", softcap)):
        if value is not None and not isinstance(value, int | float):
            raise CallRefused(f"has no plain number for its attention ({name} is a {type(value).__name__})")
    return Options(
        scale=head_size**-0.5 if scale is None else float(scale),
        window=-1 if window is None else int(window),
        softcap=float(softcap or 0.0),
    )


def shape_of_call(q: Tensor, k: Tensor, v: Tensor, num_tokens: int) -> tuple[int, int, int]:
    """Return query heads, KV heads and head size of queries, keys and values [1, heads, T, head size].

    Raises:
        CallRefused: they are not those of self-attention over `num_tokens` tokens that a KV cache can hold.
    """
    if k.shape[-1] != v.shape[-1] or q.shape[-1] != k.shape[-1]:
        raise CallRefused(f"has keys of {k.shape[-1]} and values of {v.shape[-1]} numbers a head")
    if any(part.dim() != 4 or part.shape[0] != 1 or part.shape[2] != num_tokens for part in (q, k, v)):
        shapes = ", ".join(str(list(part.shape)) for part in (q, k, v))
        raise CallRefused(f"attends to something else than its {num_tokens} tokens (shapes {shapes})")
    if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
        raise CallRefused(f"has {q.shape[1]} query, {k.shape[1]} key and {v.shape[1]} value heads")
    return q.shape[1], k.shape[1], q.shape[-1]


def window_of_mask(visible: Callable[..., Tensor], limit: int, device: torch.device) -> int:
    """Return how many tokens a query sees by a function that says so for pairs; 0: all before it.

    Args:
        visible: what transformers builds masks from: batch, head, query and key index -> bool, in tensors.
        limit: tokens of the longest sequence.
        device: of the tensors.

    Raises:
        CallRefused: what it says is neither causal attention nor that with a window.
    """
    zero = torch.zeros((), dtype=torch.int64, device=device)
    keys = torch.arange(limit, device=device)

    def seen_by(query: int) -> Tensor:
        try:
            return visible(zero, zero, zero + query, keys).expand(limit)
        except (IndexError, RuntimeError) as error:
            raise CallRefused("has masks that depend on more than positions") from error

    window = int(seen_by(limit - 1).sum())
    for query in {0, 1, 2, 7, window - 1, window, window + 1, limit // 3, limit // 2, limit - 2, limit - 1}:
        if 0 <= query < limit and not torch.equal(seen_by(query), (keys <= query) & (keys > query - window)):
            raise CallRefused("has masks that are neither causal nor sliding windows")
    return 0 if window >= limit else window


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Options) -> Tensor:
    """Attend as modules without a function of their own do: [1, T, heads, head size]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(2, 3) * options.scale
    weights = torch.softmax((scores if mask is None else scores + mask).float(), dim=-1).to(q.dtype)
    return (weights @ v).transpose(1, 2)
