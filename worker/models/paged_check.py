"""Before a model of transformers is used: that it computes with paged attention what it computes with its own.

First a probe looks at the calls of its attention; then two sequences are computed in chunks and side by side, and their
logits compared with those that each gives alone, whole, and without a cache. Imports no transformers.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from octavo.worker.models.attention_calls import CallRefused
from octavo.worker.models.cached import CachedHeads
from octavo.worker.models.interface import Batch, KVCache
from octavo.worker.models.paged_interface import PagedInterface, Probe
from octavo.worker.models.targets import Placement

_LENGTHS = (40, 19)
_STEPS = ((17, 5), (1, 13), (22, 0), (0, 1))
"""Tokens of each sequence in each step: chunks beside each other, beside a decode, and alone."""
_CALL_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Of one layer's attention, as a share of the largest number."""
_LOGITS_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
"""Of the logits of half of the tokens (in float32: of all), as a share of their length: 16 bits round in each layer."""


@dataclass(frozen=True)
class Sizes:
    """What sequences are made of."""

    vocab_size: int
    max_model_len: int
    block_size: int


class Probed(Protocol):
    """A model that can also compute without paged attention."""

    def own_logits(self, ids: Tensor) -> Tensor:
        """[T] -> [T, vocab_size], without a cache."""
        ...

    def probe(self, probe: Probe, ids: Tensor) -> None:
        """Have a probe look at a pass over [T]."""
        ...

    def forward(self, batch: Batch, caches: list[KVCache]) -> Tensor:
        """Return the logits of a step."""
        ...


def check_paged(model: Probed, interface: PagedInterface, placement: Placement, sizes: Sizes) -> CachedHeads:
    """Prove that a model computes what it should, and return what a cache has to hold of a token.

    Raises:
        CallRefused: it does not; the message is the trait that paged attention does not have.
    """
    generator = torch.Generator().manual_seed(0)
    sequences = [
        torch.randint(sizes.vocab_size, (min(length, sizes.max_model_len),), generator=generator).to(placement.device)
        for length in _LENGTHS
    ]
    own = [model.own_logits(ids) for ids in sequences]
    _require_shape(own, sequences, sizes)
    _look(model, interface, placement, sizes, sequences[0])
    cached = _cached(interface)
    ours = _compute(model, cached, placement, sizes, sequences)
    errors = torch.cat([_errors(a, b) for a, b in zip(ours, own, strict=True)])
    error = float(errors.max() if placement.dtype is torch.float32 else errors.median())
    if not error <= _LOGITS_TOLERANCE[placement.dtype]:
        raise CallRefused(
            f"computes something else in chunks and beside other sequences than alone (logits differ by {error:.2g})"
        )
    return cached


def _require_shape(own: list[Tensor], sequences: list[Tensor], sizes: Sizes) -> None:
    for logits, ids in zip(own, sequences, strict=True):
        if logits.shape != (len(ids), sizes.vocab_size):
            found = list(logits.shape)
            raise CallRefused(f"gives logits {found} of {len(ids)} tokens, with vocab_size = {sizes.vocab_size}")
        if not bool(logits.isfinite().all()):
            raise CallRefused(f"computes logits that are not finite in {logits.dtype} (--dtype float32 may help)")


def _look(model: Probed, interface: PagedInterface, placement: Placement, sizes: Sizes, ids: Tensor) -> None:
    tables = _tables([len(ids)], sizes.block_size)

    def new_cache(num_kv_heads: int, head_size: int) -> KVCache:
        return _cache(CachedHeads(1, num_kv_heads, head_size), placement, tables, sizes.block_size)

    batch = _batch([ids], [0], tables, sizes.block_size, placement)
    tolerance = _CALL_TOLERANCE[placement.dtype]
    model.probe(Probe(interface, batch, new_cache, sizes.max_model_len, tolerance), ids)


def _cached(interface: PagedInterface) -> CachedHeads:
    kinds = {(layer.num_kv_heads, layer.head_size) for layer in interface.layers}
    if not kinds:
        raise CallRefused("does not attend through transformers' attention interface (AttentionInterface)")
    if len(kinds) > 1:
        shown = ", ".join(f"{heads} heads of {size}" for heads, size in sorted(kinds))
        raise CallRefused(f"has other keys and values in some layers than in others ({shown})")
    num_kv_heads, head_size = kinds.pop()
    return CachedHeads(len(interface.layers), num_kv_heads, head_size)


def _compute(
    model: Probed, cached: CachedHeads, placement: Placement, sizes: Sizes, sequences: list[Tensor]
) -> list[Tensor]:
    """Return the logits of all tokens of the sequences, computed in steps over a cache."""
    tables = _tables([len(ids) for ids in sequences], sizes.block_size)
    caches = [_cache(cached, placement, tables, sizes.block_size) for _ in range(cached.num_layers)]
    begun = [0] * len(sequences)
    parts: list[list[Tensor]] = [[] for _ in sequences]
    for counts in _STEPS:
        step = [ids[begin : begin + count] for ids, begin, count in zip(sequences, begun, counts, strict=True)]
        rows = [row for row, ids in enumerate(step) if len(ids)]
        if not rows:
            continue
        batch = _batch(
            [step[row] for row in rows],
            [begun[row] for row in rows],
            [tables[row] for row in rows],
            sizes.block_size,
            placement,
        )
        logits = model.forward(batch, caches).split([len(step[row]) for row in rows])
        for row, part in zip(rows, logits, strict=True):
            parts[row].append(part)
            begun[row] += len(part)
    return [torch.cat(part) for part in parts]


def _errors(ours: Tensor, own: Tensor) -> Tensor:
    """Return for each token how far its logits are from the model's own, as a share of their length."""
    distance: Tensor = torch.linalg.vector_norm(ours.float() - own.float(), dim=-1)
    length: Tensor = torch.linalg.vector_norm(own.float(), dim=-1)
    return distance / length.clamp_min(torch.finfo(torch.float32).tiny)


def _tables(lengths: list[int], block_size: int) -> list[list[int]]:
    """Deal blocks out, the last first, so that tables matter; block 0 is the null block."""
    tables: list[list[int]] = []
    first = 1
    for length in lengths:
        last = first + -(-length // block_size)
        tables.append(list(range(first, last))[::-1])
        first = last
    return tables


def _cache(cached: CachedHeads, placement: Placement, tables: list[list[int]], block_size: int) -> KVCache:
    num_blocks = 1 + sum(map(len, tables))
    shape = (num_blocks, cached.num_kv_heads, block_size, cached.head_size)  # in memory as fast attention wants it
    keys, values = (torch.zeros(shape, dtype=placement.dtype, device=placement.device) for _ in range(2))
    return KVCache(keys.transpose(1, 2), values.transpose(1, 2))


def _batch(
    step: list[Tensor], begun: list[int], tables: list[list[int]], block_size: int, placement: Placement
) -> Batch:
    """Return the pass over the next ids of some sequences, so many tokens of each of which are in the cache."""
    longest = max(map(len, tables))
    positions = [list(range(begin, begin + len(ids))) for ids, begin in zip(step, begun, strict=True)]
    slots = [
        table[position // block_size] * block_size + position % block_size
        for table, row in zip(tables, positions, strict=True)
        for position in row
    ]
    starts = [sum(len(ids) for ids in step[:row]) for row in range(len(step) + 1)]
    ends = [row[-1] + 1 for row in positions]

    def column(values: list[int] | list[list[int]], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=placement.device)

    return Batch(
        input_ids=torch.cat(step),
        positions=column([position for row in positions for position in row], torch.int64),
        slot_mapping=column(slots, torch.int64),
        block_tables=column([table + [0] * (longest - len(table)) for table in tables]),
        query_start=column(starts),
        seq_lens=column(ends),
        logits_index=None,
    )
