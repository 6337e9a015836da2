"""The reference backend: plain PyTorch that defines every model operation.

Its law: the bits of one token's result depend neither on the other tokens of the step, nor on their number, nor on
the token's place among them, nor on how a prompt was cut into chunks, nor on which blocks hold its keys. Three means
give it. Matrix products run in tiles of one fixed shape, padded with zeros. Reductions run along a token's own
contiguous values. Elementwise functions are those whose vector code and scalar remainder agree in every bit
(``exp`` does; ``sigmoid`` and ``silu`` do not).

Sampling operations are the same for every backend: ``octavo.kernels.sampling``.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from octavo.kernels.activations import Activation
from octavo.kernels.experts import combine, route, stacked
from octavo.kernels.sampling import (
    apply_allowed,
    apply_logit_bias,
    apply_penalties,
    apply_token_mask,
    filter_logits,
    first_nonfinite,
    logprobs,
    sample,
)
from octavo.kernels.weights import Weight, dequantized

__all__ = [
    "act",
    "act_and_mul",
    "apply_allowed",
    "apply_logit_bias",
    "apply_penalties",
    "apply_token_mask",
    "copy_blocks",
    "experts",
    "filter_logits",
    "first_nonfinite",
    "layer_norm",
    "linear",
    "linear_act_and_mul",
    "logprobs",
    "paged_attention",
    "prepare_experts",
    "prepare_weight",
    "rms_norm",
    "rotary_and_write_kv",
    "rotary_cos_sin",
    "route",
    "sample",
    "soft_cap",
]

LINEAR_TILE_ROWS = 16
QUERY_TILE = 8
KEY_TILE = 64
FLOAT8_MAX = 448.0
_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_PI = math.sqrt(2 / math.pi)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Root-mean-square normalisation, after the residual is added.

    ``x`` and ``residual`` are [T, H], ``weight`` is [H]. Returns ``(out, residual)``, both [T, H] in ``x``'s dtype: the
    returned residual is ``x + residual``, or ``x`` itself where none came in. Arithmetic is fp32; the normalised value
    is rounded to ``x``'s dtype before it meets the weight, as Llama does. With ``unit_offset`` it is multiplied by 1 + weight
    instead, and rounded after that, as Gemma does. Source: Zhang and Sennrich 2019.
    """
    total = x if residual is None else x + residual
    wide = total.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1.0 + weight.float())).to(total.dtype), total
    return weight * normed.to(total.dtype), total


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Normalise by mean and variance, after the residual is added.

    ``x`` and ``residual`` are [T, H], ``weight`` and ``bias`` [H]. Returns ``(out, residual)``, both [T, H] in ``x``'s
    dtype, as ``rms_norm`` does. Arithmetic is fp32, rounded once. Source: Ba, Kiros and Hinton 2016, arXiv 1607.06450.
    """
    total = x if residual is None else x + residual
    wide = total.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight.float() + bias.float()).to(total.dtype), total


def prepare_weight(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return the [N, K] weight in the form in which ``linear`` of this backend wants it: here, as plain numbers."""
    return dequantized(weight, dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: x [T, K], weight [N, K] (from ``prepare_weight``), bias [N] -> [T, N]."""
    num_tokens = x.shape[0]
    padded = functional.pad(x, (0, 0, 0, -num_tokens % LINEAR_TILE_ROWS))
    out = x.new_empty(padded.shape[0], weight.shape[0])
    for start in range(0, padded.shape[0], LINEAR_TILE_ROWS):
        tile = slice(start, start + LINEAR_TILE_ROWS)
        out[tile] = functional.linear(padded[tile], weight, bias)
    return out[:num_tokens]


def act(x: Tensor, activation: Activation) -> Tensor:
    """Activation of x [T, I], arithmetic in fp32, rounded once.

    silu: ``x / (1 + exp(-x))``; gelu: ``x * (1 + erf(x / sqrt(2))) / 2``; gelu_tanh: ``x / (1 + exp(-2 u))`` with
    ``u = sqrt(2 / pi) * (x + 0.044715 * x ** 3)``, which is ``x * (1 + tanh(u)) / 2``; relu: ``max(x, 0)``.
    """
    wide = x.float()
    # Exponentials and divisions: torch's own silu and tanh round their vector remainders differently.
    if activation == "silu":
        activated = wide / (1.0 + torch.exp(-wide))
    elif activation == "gelu_tanh":
        activated = wide / (1.0 + torch.exp(-2.0 * _SQRT_2_PI * (wide + 0.044715 * wide * wide * wide)))
    elif activation == "gelu":
        activated = 0.5 * wide * (1.0 + torch.erf(wide * _SQRT_HALF))
    elif activation == "relu":
        activated = wide.clamp_min(0.0)
    else:
        raise ValueError(f"activation {activation!r} is unknown")
    return activated.to(x.dtype)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)`` of x of any shape, arithmetic in fp32, rounded once.

    By the exponential, whose bits do not depend on a value's place.
    """
    wide = x.float()
    weight = torch.exp(wide.abs() * (-2.0 / cap))  # in (0, 1]
    return (cap * torch.sign(wide) * ((1.0 - weight) / (1.0 + weight))).to(x.dtype)


def act_and_mul(x: Tensor, activation: Activation = "silu") -> Tensor:
    """Gated activation: x [T, 2I], gate in the first half -> ``act(gate) * up`` [T, I]."""
    gate, up = x.chunk(2, dim=-1)
    return act(gate, activation) * up


def linear_act_and_mul(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation = "silu"
) -> Tensor:
    """``act_and_mul(linear(x, weight, bias))``: x [T, K], weight [2I, K], gate first, bias [2I] -> [T, I]."""
    return act_and_mul(linear(x, weight, bias), activation)


def prepare_experts(weights: Tensor | Sequence[Weight], dtype: torch.dtype) -> Tensor:
    """Return experts' weights, [E, N, K] or E times [N, K], in the form in which ``experts`` wants them: plain [E, N, K]."""
    return stacked(weights, dtype)


def experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation = "silu",
) -> Tensor:
    """Gated MLPs of experts, each of its own tokens: ``sum of weight * linear(linear_act_and_mul(x, gate_up), down)``.

    x [T, H], expert_ids [T, k] int32 and expert_weights [T, k] fp32 (see ``route``), gate_up [E, 2I, H], gate first, and
    down [E, H, I] from ``prepare_experts`` -> [T, H]. Each expert's result is rounded to x's dtype; the sum over a token's
    experts is fp32, in the order of its ids, and rounded once. Source: Shazeer et al. 2017, arXiv 1701.06538.
    """

    def mlp(expert: int, rows: Tensor) -> Tensor:
        return linear(linear_act_and_mul(rows, gate_up[expert], None, activation), down[expert])

    return combine(x, expert_ids, expert_weights, mlp)


def rotary_cos_sin(inv_freq: Tensor, max_positions: int, scaling: float = 1.0) -> Tensor:
    """Build the rotary cache [max_positions, d] in fp32 from inverse frequencies [d/2] (radians a position).

    The first half of a row holds the cosines, the second half the sines, both times ``scaling``. ``d`` is the number of
    rotated dimensions of a head. Source: Su et al. 2021, arXiv 2104.09864.
    """
    positions = torch.arange(max_positions, dtype=torch.float32, device=inv_freq.device)
    angles = torch.outer(positions, inv_freq.float())
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * scaling


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``2 * cos.shape[-1]`` dimensions of x [T, n, d] by cos and sin [T, 1, r/2]; the rest passes."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def rotary_and_write_kv(
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
    """Normalise and rotate queries and keys, then write keys and values to the cache in place.

    q [T, nq, d], k and v [T, nkv, d], positions [T] int64 or int32, cos_sin [max_positions, r] fp32 with r <= d (see
    ``rotary_cos_sin``), caches [num_blocks, B, nkv, d], slot_mapping [T] int64: block * B + offset, or -1 for a token
    that writes nothing. Slots of one step are distinct. Where q_norm or k_norm [d] is given, each head is first put
    through ``rms_norm`` with it, eps and unit_offset (Qwen3, Gemma 3). Halves are rotated against each other (NeoX
    style), in q's dtype.
    Values of a float8_e4m3fn cache are limited to its largest finite ones first. Returns the rotated queries [T, nq, d].
    """
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps, unit_offset=unit_offset)[0]
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps, unit_offset=unit_offset)[0]
    half = cos_sin.shape[-1] // 2
    rows = cos_sin[positions].to(q.dtype).unsqueeze(1)  # [T, 1, r]
    cos, sin = rows[..., :half], rows[..., half:]
    written = (slot_mapping >= 0).nonzero().squeeze(-1)
    slots = slot_mapping[written]
    # By block and offset, not through a flattened view: the cache may lie in memory in another order.
    blocks, offsets = slots // key_cache.shape[1], slots % key_cache.shape[1]
    key_cache[blocks, offsets] = _to_cache(rotate_half(k, cos, sin)[written], key_cache.dtype)
    value_cache[blocks, offsets] = _to_cache(v[written], value_cache.dtype)
    return rotate_half(q, cos, sin)


def _to_cache(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is torch.float8_e4m3fn:
        x = x.clamp(-FLOAT8_MAX, FLOAT8_MAX)  # versions of torch differ in what the conversion makes of larger values
    return x.to(dtype)


def copy_blocks(key_cache: Tensor, value_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy whole blocks in place: caches [num_blocks, ...], src and dst [n] int64; all reads precede all writes."""
    key_cache[dst] = key_cache[src]
    value_cache[dst] = value_cache[src]


def paged_attention(
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
    """Causal attention of a mixed batch over paged keys and values.

    q [T, nq, d]; caches [num_blocks, B, nkv, d]; block_tables [R, max_blocks] int32; query_start [R + 1] int32: row r
    owns the queries ``query_start[r] : query_start[r + 1]``; seq_lens [R] int32: keys visible to the row's last query
    (computed before plus new). Query i of the n of a row sees the first ``seq_len - n + i + 1`` keys, and of these only
    the last ``window`` where window > 0. ``nq`` is a multiple of ``nkv``; head h reads key head ``h // (nq / nkv)``.
    Scores are ``q . k * scale``, or ``softcap * tanh(q . k * scale / softcap)`` where softcap > 0. Slots at or behind a
    row's seq_len are never read. Caches may have another dtype than q (fp8): their values count as they stand.
    Returns [T, nq, d]; queries that see no key, and tokens of no row, give zeros.

    ``num_decodes`` says that so many rows come first that have exactly one query each: query i of row i is token i. Rows
    of padding among them have a seq_len of 0 and may own no query, their tokens then belong to later rows or to none.
    It is a hint and changes no result.

    Each query is computed in a tile of 8 queries against tiles of 64 keys in ascending order with a running softmax
    (Milakov and Gimelshein 2018, arXiv 1805.02867); a tile that a query does not see leaves its bits as they were.
    """
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads = key_cache.shape[2]
    group = num_heads // num_kv_heads
    rows, tokens, limits = _query_tiles(query_start, seq_lens, num_tokens)
    out = q.new_zeros(num_tokens + 1, num_heads, head_size)  # the last line takes what the padding computes
    if rows.numel() == 0:
        return out[:num_tokens]
    padded = functional.pad(q, (0, 0, 0, 0, 0, 1))
    tiles = padded[tokens].view(-1, QUERY_TILE, num_kv_heads, group, head_size)
    tiles = tiles.transpose(1, 2).reshape(-1, num_kv_heads, QUERY_TILE * group, head_size).float()
    visible = limits.repeat_interleave(group, dim=1)  # [tiles, 8 * group]
    tables = block_tables[rows].long()
    attended = _attend_tiles(tiles, visible, key_cache, value_cache, tables, scale, window, softcap)
    attended = attended.view(-1, num_kv_heads, QUERY_TILE, group, head_size).transpose(1, 2).flatten(2, 3)
    out[tokens] = attended.to(q.dtype)
    return out[:num_tokens]


def _query_tiles(query_start: Tensor, seq_lens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut every row's queries into tiles of ``QUERY_TILE``.

    Returns the row of each tile [tiles], its token places [tiles, 8] (``num_tokens`` for padding) and the number of
    keys each query sees [tiles, 8] (0 for padding), tiles with the most keys first.
    """
    starts, lens = query_start.tolist(), seq_lens.tolist()
    found: list[tuple[int, int, int, int]] = []  # most keys, row, first token, first limit
    for row, seq_len in enumerate(lens):
        start, end = starts[row], starts[row + 1]
        if seq_len == 0:
            continue
        for first in range(start, end, QUERY_TILE):
            last = min(first + QUERY_TILE, end) - 1
            found.append((seq_len - (end - 1 - last), row, first, seq_len - (end - 1 - first)))
    found.sort(key=lambda tile: -tile[0])
    columns = torch.tensor(found, dtype=torch.int64, device=query_start.device).reshape(-1, 4)
    most, rows, first_token, first_limit = columns.unbind(1)
    lane = torch.arange(QUERY_TILE, device=query_start.device)
    limits = first_limit[:, None] + lane
    inside = limits <= most[:, None]
    tokens = torch.where(inside, first_token[:, None] + lane, num_tokens)
    return rows, tokens, torch.where(inside, limits, 0).clamp_min(0)


def _attend_tiles(
    q: Tensor,
    visible: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tables: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Attend q [tiles, nkv, M, d] fp32, whose line m sees ``visible`` [tiles, M] keys of its table [tiles, blocks].

    Tiles come with the most keys first, so those that still have keys are always a prefix. Of its visible keys a line
    sees only the last ``window`` where that is > 0.
    """
    num_tiles, num_kv_heads, lines, _ = q.shape
    block_size = key_cache.shape[1]
    most = visible.amax(dim=1)  # [tiles], descending
    peak = q.new_full((num_tiles, num_kv_heads, lines, 1), float("-inf"))
    mass = torch.zeros_like(peak)
    acc = torch.zeros_like(q)
    lane = torch.arange(KEY_TILE, device=q.device)
    for start in range(0, int(most[0]), KEY_TILE):
        active = int((most > start).sum())
        place = start + lane  # [64]
        exists = place < most[:active, None]  # [active, 64]
        # Keys that do not exist are read from the row's own first slot and then zeroed, so no foreign slot is touched.
        place = torch.where(exists, place, 0)
        # By block and offset, not through a flattened view: the cache may lie in memory in another order.
        slots = tables[:active].gather(1, place // block_size), place % block_size
        gone = ~exists[:, None, :, None]
        k = key_cache[slots].transpose(1, 2).float().masked_fill(gone, 0.0)  # [active, nkv, 64, d]
        v = value_cache[slots].transpose(1, 2).float().masked_fill(gone, 0.0)
        limit = visible[:active, None, :, None]
        hidden = (start + lane) >= limit  # [active, 1, M, 64]
        if window > 0:
            hidden = hidden | ((start + lane) < limit - window)
        scores = torch.matmul(q[:active], k.transpose(2, 3)) * scale
        if softcap > 0:
            scores = soft_cap(scores, softcap)
        scores = scores.masked_fill(hidden, float("-inf"))
        old = peak[:active]
        new = torch.maximum(old, scores.amax(dim=-1, keepdim=True))
        # A line that has seen no key yet keeps a peak of -inf; 0 in its place avoids inf - inf.
        base = new.masked_fill(new == float("-inf"), 0.0)
        weights = torch.exp(scores - base)
        decay = torch.exp(old - base)
        mass[:active] = mass[:active] * decay + weights.sum(dim=-1, keepdim=True)
        acc[:active] = acc[:active] * decay + torch.matmul(weights, v)
        peak[:active] = new
    return torch.where(mass > 0, acc / mass, 0.0)
