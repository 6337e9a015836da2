"""What a KV cache holds of a token."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CachedHeads:
    """Keys and values of one token: as many of each, alike in every layer."""

    num_layers: int  # that attend
    num_kv_heads: int  # of a layer, over all ranks
    head_size: int
