"""Block tables by sequence, and blocks reserved for the sequences that must not be preempted any more."""

from collections import Counter
from collections.abc import Mapping, Sequence

from octavo.scheduler.blocks import BlockPool
from octavo.scheduler.errors import InvariantViolation
from octavo.wire.ids import BlockId


class BlockTables:
    """The tables of all sequences with blocks, named by sequence number.

    The law: a table has exactly the blocks that its planned tokens need; reserved blocks are free ones that only the
    sequence they are reserved for may take.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._tables: dict[int, list[BlockId]] = {}
        self._reserved: dict[int, int] = {}
        self._num_reserved = 0

    @property
    def num_available(self) -> int:
        """Free blocks that are not reserved."""
        return self._pool.num_free - self._num_reserved

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self._block_size)

    def table(self, number: int) -> Sequence[BlockId]:
        """Return the blocks of a sequence, in the order of its tokens."""
        return self._tables.get(number, ())

    def is_protected(self, number: int) -> bool:
        """Say whether blocks are reserved for a sequence, so that its growth never fails."""
        return number in self._reserved

    def can_grow(self, number: int, num_tokens: int) -> bool:
        """Say whether a sequence's table can be made to hold `num_tokens` tokens."""
        missing = self.blocks_for(num_tokens) - len(self._tables.get(number, ()))
        return missing <= 0 or missing <= self._reserved.get(number, 0) or missing <= self.num_available

    def grow(self, number: int, num_tokens: int) -> None:
        """Make a sequence's table hold `num_tokens` tokens; `can_grow` said that it can.

        Raises:
            OutOfBlocks: it cannot.
        """
        table = self._tables.setdefault(number, [])
        for _ in range(self.blocks_for(num_tokens) - len(table)):
            table.append(self._pool.take())
            if number in self._reserved:
                self._reserved[number] -= 1
                self._num_reserved -= 1

    def reserve(self, number: int, num_blocks: int) -> None:
        """Reserve blocks for a sequence that has none yet, enough for its greatest length."""
        self._reserved[number] = num_blocks
        self._num_reserved += num_blocks

    def release(self, number: int) -> None:
        """Free a sequence's blocks, the last ones first, and what was reserved for it."""
        for block in reversed(self._tables.pop(number, [])):
            self._pool.free(block)
        self._num_reserved -= self._reserved.pop(number, 0)

    def check(self, num_tokens: Mapping[int, int]) -> None:
        """Prove tables and pool against the planned tokens of the running sequences, by number.

        Raises:
            InvariantViolation: a table has the wrong length or names a block twice, or the pool disagrees.
        """
        if set(self._tables) - set(num_tokens):
            raise InvariantViolation(f"sequences {set(self._tables) - set(num_tokens)} hold blocks without a row")
        references: Counter[BlockId] = Counter()
        for number, tokens in num_tokens.items():
            table = self._tables.get(number, [])
            if len(table) != self.blocks_for(tokens):
                raise InvariantViolation(f"sequence {number}: {len(table)} blocks for {tokens} tokens")
            if len(set(table)) != len(table):
                raise InvariantViolation(f"sequence {number} names a block twice: {table}")
            references.update(table)
        self._pool.check(references)
        if self._num_reserved != sum(self._reserved.values()) or min(self._reserved.values(), default=0) < 0:
            raise InvariantViolation(f"reservations {self._reserved} do not make {self._num_reserved}")
        if not 0 <= self._num_reserved <= self._pool.num_free or set(self._reserved) - set(num_tokens):
            raise InvariantViolation(f"{self._num_reserved} blocks reserved of {self._pool.num_free} free ones")
