"""Paged attention on the CPU: decode rows together in one padded call, prefill rows one by one, both without copies of q."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    """Attend causally to keys and values in blocks; see octavo.kernels.reference.paged_attention."""
    out = torch.zeros_like(q)
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    decode = [r for r, n in enumerate(lengths) if n > 0 and starts[r + 1] - starts[r] == 1]
    if decode:
        rows = torch.tensor(decode, device=q.device)
        tokens = query_start[rows].long()
        longest = max(lengths[r] for r in decode)
        out[tokens] = _decode(q[tokens], key_cache, value_cache, block_tables[rows], seq_lens[rows], longest, scale)
    for row, length in enumerate(lengths):
        begin, end = starts[row], starts[row + 1]
        if length > 0 and end - begin > 1:
            out[begin:end] = _prefill(q[begin:end], key_cache, value_cache, block_tables[row], length, scale)
    return out


def _decode(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    longest: int,
    scale: float,
) -> Tensor:
    """One query a row: q [num_rows, num_heads, head_size]; the heads of a group are the queries of its KV head."""
    num_rows, num_heads, head_size = q.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    place = torch.arange(longest, device=q.device)
    visible = place < seq_lens[:, None]  # [num_rows, longest]
    slots = block_tables[:, place // block_size].long() * block_size + place % block_size
    # Places behind a row's end read its first slot instead: what lies in an unwritten slot may be a NaN, and 0 * NaN is
    # no 0.
    slots = torch.where(visible, slots, slots[:, :1])
    keys = key_cache.flatten(0, 1)[slots].transpose(1, 2)  # [num_rows, num_kv_heads, longest, head_size]
    values = value_cache.flatten(0, 1)[slots].transpose(1, 2)
    grouped = q.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_size)
    mask = visible[:, None, None, :]
    return scaled_dot_product_attention(grouped, keys, values, mask, scale=scale).reshape(q.shape)


def _prefill(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, length: int, scale: float
) -> Tensor:
    num_queries = q.shape[0]
    block_size = key_cache.shape[1]
    place = torch.arange(length, device=q.device)
    slots = block_table[place // block_size].long() * block_size + place % block_size
    keys = key_cache.flatten(0, 1)[slots].transpose(0, 1)[None]  # [1, num_kv_heads, length, head_size]
    values = value_cache.flatten(0, 1)[slots].transpose(0, 1)[None]
    queries = q.transpose(0, 1)[None]
    if num_queries == length:
        out = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    else:
        mask = place <= place[length - num_queries :, None]
        out = scaled_dot_product_attention(queries, keys, values, mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
