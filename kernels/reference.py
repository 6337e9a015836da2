"""What each operation is, in plain PyTorch; every other implementation is tested against this file.

It is also a backend of its own: the bits of a token's result depend neither on the batch around it, nor on how its
prompt was cut into chunks, nor on the blocks its keys lie in. Three rules give that:

* matrix products run in fixed tiles of TILE_ROWS rows, padded with zeros, so the library always sees one shape;
* sums over keys run in tiles of TILE_KEYS keys, padded with zeros, added in the order of the keys;
* functions whose vector and scalar versions differ in the last bit (silu) are spelled out through ones that do not.

tests/kernels/test_invariance.py holds torch to the assumptions behind these rules.
"""

import torch
from torch import Tensor

TILE_ROWS = 16
TILE_KEYS = 64
_MAX_TILES_AT_ONCE = 512
"""Query tiles in one batched product, which bounds the memory of a long prefill."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by a weight matrix: x W^T + b.

    Args:
        x: [num_tokens, in_features].
        weight: [out_features, in_features], same dtype.
        bias: [out_features].

    Returns:
        [num_tokens, out_features].
    """
    num_tokens, in_features = x.shape
    out = x.new_empty(num_tokens, weight.shape[0])
    for start in range(0, num_tokens, TILE_ROWS):
        rows = min(TILE_ROWS, num_tokens - start)
        tile = x[start : start + rows]
        if rows < TILE_ROWS:
            tile = torch.cat((tile, x.new_zeros(TILE_ROWS - rows, in_features)))
        out[start : start + rows] = torch.nn.functional.linear(tile, weight)[:rows]
    return out if bias is None else out.add_(bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Add the residual, then normalise: r = x + residual; r / sqrt(mean(r^2) + eps) * weight (arXiv:1910.07467).

    The arithmetic of the norm is float32; the scaled value is cast back before the weight is applied, as Llama does.

    Args:
        x: [num_tokens, hidden].
        weight: [hidden].
        eps: added to the mean square.
        residual: [num_tokens, hidden], or None for zeros.

    Returns:
        The normalised tokens and r, both [num_tokens, hidden].
    """
    summed = x if residual is None else x + residual
    wide = summed.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype), summed


def silu_and_mul(x: Tensor) -> Tensor:
    """Gate: silu(x[:, :n]) * x[:, n:], silu(g) = g / (1 + exp(-g)).

    Args:
        x: [num_tokens, 2 n], the gate first.

    Returns:
        [num_tokens, n].
    """
    gate, up = x.chunk(2, dim=-1)
    wide = gate.contiguous().float()
    return (wide / (1.0 + torch.exp(-wide))).to(x.dtype) * up


def rotary_and_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Rotate queries and keys by their positions (arXiv:2104.09864, halves as pairs) and store keys and values.

    Args:
        q: [num_tokens, num_heads, head_size].
        k: [num_tokens, num_kv_heads, head_size].
        v: [num_tokens, num_kv_heads, head_size].
        positions: [num_tokens] int64.
        cos_sin: [max_positions, head_size] float32: cosines of the head_size / 2 angles, then sines.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size], written in place.
        value_cache: as key_cache, written in place.
        slot_mapping: [num_tokens] int64: block * block_size + offset; -1 stores nothing.

    Returns:
        The rotated queries, as q.
    """
    cos, sin = cos_sin[positions].to(q.dtype)[:, None, :].chunk(2, dim=-1)
    rotated = _rotate(q, cos, sin)
    stored = slot_mapping >= 0
    slots = slot_mapping[stored]
    key_cache.flatten(0, 1).index_copy_(0, slots, _rotate(k, cos, sin)[stored])
    value_cache.flatten(0, 1).index_copy_(0, slots, v[stored])
    return rotated


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    """Attend causally to keys and values that lie in blocks (arXiv:2309.06180), many sequences of any length at once.

    out = softmax(scale q K^T) V, in float32. The queries of row r are the last of its seq_lens[r] tokens, so the i-th of
    its n queries sees seq_lens[r] - n + i + 1 keys. Slots behind a sequence's end are never read.

    Args:
        q: [num_tokens, num_heads, head_size]; num_heads is a multiple of num_kv_heads.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size].
        value_cache: as key_cache.
        block_tables: [num_rows, max_blocks] int32.
        query_start: [num_rows + 1] int32: row r owns tokens query_start[r] to query_start[r + 1].
        seq_lens: [num_rows] int32: keys that the row's last query sees; 0 gives zeros.
        scale: factor of the scores.

    Returns:
        [num_tokens, num_heads, head_size].
    """
    out = torch.zeros_like(q)
    block_size = key_cache.shape[1]
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    for row, length in enumerate(lengths):
        begin, end = starts[row], starts[row + 1]
        if length == 0 or begin == end:
            continue
        slots = _slots(block_tables[row], length, block_size)
        keys = _key_tiles(key_cache.flatten(0, 1)[slots])
        values = _key_tiles(value_cache.flatten(0, 1)[slots])
        out[begin:end] = _attend(q[begin:end], keys, values, length, scale)
    return out


def _slots(block_table: Tensor, length: int, block_size: int) -> Tensor:
    token = torch.arange(length, device=block_table.device)
    return block_table[token // block_size].long() * block_size + token % block_size


def _key_tiles(x: Tensor) -> Tensor:
    """[length, num_kv_heads, head_size] -> [num_kv_heads, num_tiles, TILE_KEYS, head_size] float32, zero-padded."""
    length, num_kv_heads, head_size = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, 0, 0, 0, 0, -length % TILE_KEYS))
    return padded.permute(1, 0, 2).reshape(num_kv_heads, -1, TILE_KEYS, head_size)


def _attend(q: Tensor, keys: Tensor, values: Tensor, length: int, scale: float) -> Tensor:
    num_queries, num_heads, head_size = q.shape
    num_kv_heads = keys.shape[0]
    group = num_heads // num_kv_heads
    # Each query tile holds TILE_ROWS (query, head of the group) pairs of one KV head.
    pairs = q.float().view(num_queries, num_kv_heads, group, head_size).transpose(0, 1).flatten(1, 2)
    pairs = torch.nn.functional.pad(pairs, (0, 0, 0, -pairs.shape[1] % TILE_ROWS))
    num_tiles = pairs.shape[1] // TILE_ROWS
    query = torch.arange(num_tiles * TILE_ROWS, device=q.device) // group
    visible = (length - num_queries + 1 + query).clamp(max=length).view(num_tiles, TILE_ROWS)
    out = torch.empty_like(pairs)
    for head in range(num_kv_heads):
        for start in range(0, num_tiles, _MAX_TILES_AT_ONCE):
            part = slice(start, min(num_tiles, start + _MAX_TILES_AT_ONCE))
            tiles = pairs[head].view(num_tiles, TILE_ROWS, head_size)[part]
            out[head].view(num_tiles, TILE_ROWS, head_size)[part] = _attend_tiles(
                tiles, keys[head], values[head], visible[part], scale
            )
    real = out[:, : num_queries * group].reshape(num_kv_heads, num_queries, group, head_size)
    return real.transpose(0, 1).reshape(num_queries, num_heads, head_size).to(q.dtype)


def _attend_tiles(tiles: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attend with query tiles [n, TILE_ROWS, d] to key tiles [m, TILE_KEYS, d]; visible [n, TILE_ROWS] keys of each."""
    num_tiles, num_key_tiles = tiles.shape[0], keys.shape[0]
    scores = []
    for t in range(num_key_tiles):
        place = torch.arange(t * TILE_KEYS, (t + 1) * TILE_KEYS, device=tiles.device)
        score = torch.bmm(tiles, keys[t].T.expand(num_tiles, -1, -1)) * scale
        scores.append(score.masked_fill_(place >= visible[..., None], float("-inf")))
    highest = torch.stack([s.amax(-1) for s in scores]).amax(0)[..., None]
    total = tiles.new_zeros(num_tiles, TILE_ROWS, 1)
    out = torch.zeros_like(tiles)
    for t in range(num_key_tiles):
        weight = torch.exp(scores[t] - highest)
        total += weight.sum(-1, keepdim=True)
        out += torch.bmm(weight, values[t].expand(num_tiles, -1, -1))
    return out / total


def copy_blocks(key_cache: Tensor, value_cache: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy whole blocks within the caches; no block may be both a source and a target.

    Args:
        key_cache: [num_blocks, block_size, num_kv_heads, head_size], written in place.
        value_cache: as key_cache.
        source: [n] int64 blocks.
        target: [n] int64 blocks, distinct.
    """
    key_cache[target] = key_cache[source]
    value_cache[target] = value_cache[source]
