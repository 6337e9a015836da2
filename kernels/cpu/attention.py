"""Paged attention on the CPU: decode rows together, a few at a time; prefill rows one by one.

Blocks are gathered whole (one copy a block) and in pieces that stay in the cache of the processor; rows of similar
length go together, so that little of a piece is padding.
"""

import threading
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from octavo.kernels import reference

_PIECE_BYTES = 3 << 19
"""Most bytes of keys gathered at once for decode rows (unless one row alone has more), measured: from twice as many on,
gathering and allocation leave the cache and take several times as long."""


@dataclass(frozen=True)
class _Decode:
    """Decode rows that are gathered and computed together, of n rows and at most L keys."""

    tokens: Tensor  # [n] int64: their queries
    blocks: Tensor  # [n, blocks] int64
    longest: int  # L
    behind: Tensor | None  # [m] int64: gathered places behind the ends of their rows, in [0, n * blocks * B)
    mask: Tensor | None  # [n, 1, 1, L] bool: which keys each row sees; None: all of them


@dataclass(frozen=True)
class _Prefill:
    """A row with several new tokens."""

    tokens: slice
    blocks: Tensor  # [1, blocks] int64
    length: int
    mask: Tensor | None  # [new tokens, length] bool; None: causal from the first key


@dataclass(frozen=True)
class _Plan:
    """What follows from the tables alone; the layers of one forward pass share it."""

    inputs: tuple[Tensor, Tensor, Tensor]  # copies: the caller's tensors may change in place between steps
    max_keys: int
    block_size: int
    decodes: list[_Decode]
    prefills: list[_Prefill]

    def is_of(self, inputs: tuple[Tensor, Tensor, Tensor], block_size: int, max_keys: int) -> bool:
        if (self.block_size, self.max_keys) != (block_size, max_keys):
            return False
        return all(
            mine.dtype == theirs.dtype and torch.equal(mine, theirs)
            for mine, theirs in zip(self.inputs, inputs, strict=True)
        )


class _Workspace(threading.local):
    """What calls of one thread hand to the next: the plan made last, and memory to gather keys and values into.

    The plan is compared by content. The memory holds one piece, so at most ``_PIECE_BYTES`` or one row's keys, twice;
    taken from the allocator for each call it would be given back to the system and faulted in again each time, which
    measured up to four times the time of the whole operation.
    """

    def __init__(self) -> None:
        self._plan: _Plan | None = None
        self._memory: list[Tensor] = []

    def plan(self, inputs: tuple[Tensor, Tensor, Tensor], block_size: int, max_keys: int) -> _Plan:
        plan = self._plan
        if plan is None or not plan.is_of(inputs, block_size, max_keys):
            plan = self._plan = _make_plan(inputs, block_size, max_keys)
        return plan

    def pair(self, num_elements: int, dtype: torch.dtype) -> list[Tensor]:
        """Return two tensors [num_elements] of unspecified content, valid until the next call."""
        if not self._memory or self._memory[0].dtype != dtype or self._memory[0].numel() < num_elements:
            with torch.inference_mode(False):  # an inference tensor could not be written outside of inference mode
                self._memory = [torch.empty(num_elements, dtype=dtype) for _ in range(2)]
        return [memory[:num_elements] for memory in self._memory]


_workspace = _Workspace()


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
    """Attend causally to keys and values in blocks; see ``octavo.kernels.reference.paged_attention``.

    What is rare here, a window, a soft cap or a cache of another dtype than q, is left to the reference.
    """
    if window > 0 or softcap > 0 or key_cache.dtype != q.dtype:
        return reference.paged_attention(
            q, key_cache, value_cache, block_tables, query_start, seq_lens, scale, window=window, softcap=softcap
        )
    key_bytes = key_cache.shape[2] * key_cache.shape[3] * key_cache.element_size()
    inputs = (block_tables, query_start, seq_lens)
    plan = _workspace.plan(inputs, key_cache.shape[1], max(1, _PIECE_BYTES // key_bytes))
    out = torch.zeros_like(q)
    for prefill in plan.prefills:
        out[prefill.tokens] = _attend_prefill(q[prefill.tokens], key_cache, value_cache, prefill, scale)
    for decode in plan.decodes:
        attended = _attend_decode(q.index_select(0, decode.tokens), key_cache, value_cache, decode, scale)
        out.index_copy_(0, decode.tokens, attended)
    return out


def _make_plan(inputs: tuple[Tensor, Tensor, Tensor], block_size: int, max_keys: int) -> _Plan:
    block_tables, query_start, seq_lens = (tensor.clone() for tensor in inputs)
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    single: list[tuple[int, int]] = []  # length, row
    prefills: list[_Prefill] = []
    for row, length in enumerate(lengths):
        num_new = starts[row + 1] - starts[row]
        if length == 0 or num_new == 0:
            continue
        if num_new == 1:
            single.append((length, row))
            continue
        blocks = block_tables[row : row + 1, : -(-length // block_size)].long()
        place = torch.arange(length)
        mask = None if num_new == length else place <= place[length - num_new :, None]
        prefills.append(_Prefill(slice(starts[row], starts[row + 1]), blocks, length, mask))
    decodes = [_plan_decode(rows, starts, block_tables, block_size) for rows in _similar(single, block_size, max_keys)]
    return _Plan((block_tables, query_start, seq_lens), max_keys, block_size, decodes, prefills)


def _similar(decode: list[tuple[int, int]], block_size: int, max_keys: int) -> list[list[tuple[int, int]]]:
    """Cut (length, row) pairs into pieces of rows of similar length, of at most ``max_keys`` padded keys or one row."""
    pieces: list[list[tuple[int, int]]] = []
    padded = 0
    for length, row in sorted(decode, reverse=True):
        if not pieces or (len(pieces[-1]) + 1) * padded > max_keys:
            pieces.append([])
            padded = -(-length // block_size) * block_size
        pieces[-1].append((length, row))
    return pieces


def _plan_decode(rows: list[tuple[int, int]], starts: list[int], block_tables: Tensor, block_size: int) -> _Decode:
    lengths, indices = [length for length, _ in rows], [row for _, row in rows]
    longest = lengths[0]
    num_blocks = -(-longest // block_size)
    ends = torch.tensor(lengths)[:, None]
    blocks = block_tables[torch.tensor(indices), :num_blocks].long()
    # Tables may hold anything behind a row's last block: read its first block there, which exists.
    blocks = torch.where(torch.arange(0, longest, block_size) < ends, blocks, blocks[:, :1])
    visible = torch.arange(num_blocks * block_size) < ends
    is_even = lengths[-1] == longest
    behind = None if is_even else (~visible).flatten().nonzero().squeeze(1)
    mask = None if is_even else visible[:, None, None, :longest]
    return _Decode(torch.tensor([starts[row] for row in indices]), blocks, longest, behind, mask)


def _attend_decode(q: Tensor, key_cache: Tensor, value_cache: Tensor, decode: _Decode, scale: float) -> Tensor:
    """One query a row: q [n, nq, d] -> [n, nq, d]; the heads of a group are the queries of their key head."""
    num_rows, num_heads, head_size = q.shape
    num_kv_heads = key_cache.shape[2]
    keys, values = _gather(key_cache, value_cache, decode.blocks, decode.longest, decode.behind)
    grouped = q.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_size)
    return scaled_dot_product_attention(grouped, keys, values, decode.mask, scale=scale).flatten(1, 2)


def _gather(
    key_cache: Tensor, value_cache: Tensor, blocks: Tensor, longest: int, behind: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gather the blocks [n, blocks] of n rows: keys and values [n, nkv, longest, d], valid until the next call.

    The places ``behind`` a row's end are zeroed: an unwritten slot may hold NaN, and 0 * NaN is NaN.
    """
    num_blocks, block_size, num_kv_heads, head_size = key_cache.shape
    width, flat = block_size * num_kv_heads * head_size, blocks.flatten()
    both = []
    for cache, memory in zip(
        (key_cache, value_cache), _workspace.pair(flat.numel() * width, key_cache.dtype), strict=True
    ):
        torch.index_select(cache.view(num_blocks, width), 0, flat, out=memory.view(-1, width))
        if behind is not None:
            memory.view(-1, num_kv_heads * head_size).index_fill_(0, behind, 0.0)
        both.append(memory.view(blocks.shape[0], -1, num_kv_heads, head_size)[:, :longest].transpose(1, 2))
    return both[0], both[1]


def _attend_prefill(q: Tensor, key_cache: Tensor, value_cache: Tensor, prefill: _Prefill, scale: float) -> Tensor:
    """q [n, nq, d] -> [n, nq, d]."""
    keys, values = _gather(key_cache, value_cache, prefill.blocks, prefill.length, None)
    queries = q.transpose(0, 1)[None]
    is_causal = prefill.mask is None
    out = scaled_dot_product_attention(
        queries, keys, values, prefill.mask, is_causal=is_causal, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)
