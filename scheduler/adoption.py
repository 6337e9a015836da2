"""What a worker has reported of rows that an earlier session left behind, and which sequences go on from their blocks.

A reported row is a hint, like an entry of the prefix cache: its blocks are free ones, which are taken after all others, and
it is worth as much as the blocks from its first on that nobody has been given since. A sequence goes on from them if its
request has the row's name (the boot id of its frontend, and its handle), prompt and first output ids.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import NamedTuple

from octavo.scheduler.blocks import BlockPool
from octavo.scheduler.errors import InvariantViolation
from octavo.scheduler.prefix import PrefixIndex
from octavo.scheduler.sequence import Sequence
from octavo.wire.columns import unpack_ints
from octavo.wire.held_rows import HeldRow, check_report, prompt_digest
from octavo.wire.ids import BlockId

GRACE_S = 1.0
"""For so long after a report, sequences that go on from no row are not given the blocks of reported ones: frontends
submit their requests again one after the other, and the first must not take what the second would go on from."""

HOLD_S = 10.0
"""After that nobody goes on from a reported row any more: frontends that have not come back by then have lost their
sessions."""


class Start(NamedTuple):
    """Where a sequence that enters begins: blocks that hold its first tokens, and how many tokens these are."""

    blocks: list[BlockId]
    num_tokens: int
    is_adopted: bool = False


class Adopted(NamedTuple):
    """What came of a report."""

    num_reported: int
    num_rows: int
    """That sequences went on from."""
    num_tokens: int
    """That need not be computed again because of that."""
    discarded: str
    """Why the rows that were left, perhaps all, were not to be trusted; '' if they were."""


@dataclass(slots=True, eq=False)
class _Row:
    num_prompt: int
    digest: bytes
    output: Several[int]
    num_computed: int
    table: list[BlockId]
    num_blocks: int
    """Of the table, from the first on, that nobody has been given since."""
    is_checked: bool = False
    """Its request has come and is the one that it names."""


class Adoption:
    """The reported rows of one epoch.

    The law: a row's first `num_blocks` blocks are not written after the report, but by the one sequence that goes on from
    that row.

    Args:
        pool: of the worker.
        index: of its prefix cache.
        block_size: tokens of a block.
    """

    def __init__(self, pool: BlockPool, index: PrefixIndex, block_size: int) -> None:
        self.num_rows = 0
        self.num_tokens = 0
        self._pool = pool
        self._index = index
        self._block_size = block_size
        self._rows: dict[tuple[str, int], _Row] = {}
        self._places: dict[BlockId, list[tuple[_Row, int]]] = {}
        self._publishes = True
        self._num_reported = 0
        self._discarded = ""
        self._grace_end: float | None = None
        self._end: float | None = None

    def __len__(self) -> int:
        """Return how many rows nobody has gone on from."""
        return len(self._rows)

    @property
    def due(self) -> float | None:
        """When `expire` must be called at the latest."""
        return self._end if self._grace_end is None else self._grace_end

    @property
    def is_grace(self) -> bool:
        """Whether requests that would go on from rows are still expected."""
        return self._grace_end is not None and bool(self._rows)

    def begin(self, rows: Several[HeldRow], vocab_size: int, now: float) -> None:
        """Take a report in, if it is consistent; no block has been given out yet."""
        if not rows:
            return
        self._num_reported = len(rows)
        self._grace_end, self._end = now + GRACE_S, now + HOLD_S
        if (wrong := check_report(rows, self._pool.num_blocks, self._block_size, vocab_size)) is not None:
            self._discard(wrong)
            return
        for held in rows:
            table = [BlockId(block) for block in unpack_ints(held.block_table)]
            row = _Row(
                held.num_prompt_tokens,
                held.prompt_digest,
                unpack_ints(held.output_ids),
                held.num_computed_tokens,
                table,
                len(table),
            )
            self._rows[held.request, held.choice] = row
            for place, block in enumerate(table):
                self._places.setdefault(block, []).append((row, place))
        for row in reversed(self._rows.values()):
            for block in reversed(row.table):
                self._pool.keep_for_last(block)

    def find(self, sequence: Sequence) -> Start | None:
        """Return from where a sequence that enters can go on; None if there is nothing for it."""
        request = sequence.request
        # Nobody goes on before the prompt has been told; that takes computing it.
        if not self._rows or not sequence.uses_cache or request.tells_prompt or request.group is not None:
            return None
        if (row := self._rows.get((request.name, sequence.choice))) is None:
            return None
        if (wrong := self._contradiction(row, sequence)) is not None:
            self._discard(f"{request.name}/{sequence.choice}: {wrong}")
            return None
        size = self._block_size
        # At least one known token is left over, as with hits: something must be computed to draw from.
        count = min(row.num_computed, row.num_blocks * size, sequence.num_known - 1, sequence.plan_limit - 1)
        if count > 0 and count % size and not self._is_private(row.table[count // size]):
            count -= count % size
        if count <= 0:
            return None
        return Start(row.table[: -(-count // size)], count, is_adopted=True)

    def take(self, sequence: Sequence, start: Start) -> None:
        """Take note that a sequence enters from somewhere: nobody else goes on from its row."""
        row = self._rows.pop((sequence.request.name, sequence.choice), None) if self._rows else None
        if row is None:
            return
        if not start.is_adopted:
            self._forget(row)
            return
        self.num_rows += 1
        self.num_tokens += start.num_tokens
        sequence.num_furthest = max(sequence.num_furthest, min(row.num_computed, sequence.num_known))
        sequence.publishes = sequence.publishes and self._publishes
        self._forget(row)
        if start.num_tokens % self._block_size:
            self.cut(start.blocks[-1])  # it will be written to

    def has(self, block: BlockId) -> bool:
        """Say whether a row names a block."""
        return block in self._places

    def cut(self, block: BlockId) -> None:
        """Take note that a block will be written: rows that name it are worth what stands before it."""
        for row, place in list(self._places.get(block, ())):
            if place < row.num_blocks:
                self._forget(row, place)
                row.num_blocks = place

    def num_free_blocks(self) -> int:
        """Return how many free blocks the rows name."""
        return sum(self._pool.count(block) == 0 for block in self._places)

    def unpublish(self) -> None:
        """Let nobody publish what was computed before now: the prefix cache has been reset."""
        self._publishes = False

    def drop(self, blocks: Iterable[BlockId]) -> None:
        """Let nobody go on from blocks whose values may be broken."""
        for block in blocks:
            self.cut(block)

    def expire(self, now: float) -> Adopted | None:
        """Let go of what has been held for long enough; return what came of the report when nothing is held any more."""
        if self._grace_end is not None and now >= self._grace_end:
            self._grace_end = None
        if self._end is None or self._grace_end is not None or (self._rows and now < self._end):
            return None
        self._end = None
        self._clear()
        return Adopted(self._num_reported, self.num_rows, self.num_tokens, self._discarded)

    def check(self) -> None:
        """Prove rows and blocks against each other.

        Raises:
            InvariantViolation: they contradict.
        """
        expected: dict[BlockId, set[tuple[int, int]]] = {}
        for row in self._rows.values():
            for place, block in enumerate(row.table[: row.num_blocks]):
                expected.setdefault(block, set()).add((id(row), place))
        held = {block: {(id(row), place) for row, place in found} for block, found in self._places.items()}
        if held != expected:
            raise InvariantViolation(f"{len(held)} blocks are held for reported rows, which name {len(expected)}")

    def _is_private(self, block: BlockId) -> bool:
        return self._pool.count(block) == 0 and not self._index.has(block)

    def _contradiction(self, row: _Row, sequence: Sequence) -> str | None:
        request = sequence.request
        if not row.is_checked:
            if row.num_prompt != request.num_prompt_tokens or row.digest != prompt_digest(request.prompt_ids):
                return "the row has another prompt than the request"
            row.is_checked = True
        if list(row.output[: len(sequence.output_ids)]) != sequence.output_ids:
            return "the row has other output than the request"
        keys = sequence.keys
        for place, block in enumerate(row.table[: min(row.num_blocks, sequence.num_known // self._block_size)]):
            if (key := self._index.key_of(block)) is None:
                continue
            while len(keys) <= place and request.prefix_root:
                keys.append(sequence.hash_block(len(keys), self._block_size))
            if len(keys) <= place or keys[place] != key:
                return f"block {block} holds another request's tokens"
        return None

    def _forget(self, row: _Row, begin: int = 0) -> None:
        """Hold a row's blocks from a place on for it no more."""
        for block in row.table[begin : row.num_blocks]:
            left = [found for found in self._places[block] if found[0] is not row]
            if left:
                self._places[block] = left
            else:
                self._places.pop(block, None)

    def _discard(self, reason: str) -> None:
        self._discarded = reason
        self._clear()

    def _clear(self) -> None:
        self._rows.clear()
        self._places.clear()
