"""Block tables by sequence, and blocks reserved for the sequences that must not be preempted any more."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from octavo.scheduler.adoption import Adoption
from octavo.scheduler.blocks import BlockPool
from octavo.scheduler.errors import InvariantViolation
from octavo.scheduler.prefix import PrefixIndex
from octavo.wire.ids import BlockId


class BlockTables:
    """The tables of all sequences with blocks, named by sequence number.

    The law: a table has exactly the blocks that its planned tokens need; a block that several tables name or that can
    be found is never written; reserved blocks are free ones that only the sequence they are reserved for may take.
    """

    def __init__(self, pool: BlockPool, index: PrefixIndex, block_size: int, adoption: Adoption | None = None) -> None:
        self._pool = pool
        self._index = index
        self._adoption = Adoption(pool, index, block_size) if adoption is None else adoption
        self._block_size = block_size
        self._tables: dict[int, list[BlockId]] = {}
        self._reserved: dict[int, int] = {}
        self._num_reserved = 0
        self._accounts: dict[int, int] = {}  # beams -> the first of their group, by whose number blocks are reserved
        self._pinned: list[BlockId] = []

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

    def blocks_in_use(self) -> set[BlockId]:
        """Return the blocks that tables name."""
        return set().union(*self._tables.values())

    def is_protected(self, number: int) -> bool:
        """Say whether blocks are reserved for a sequence, so that its growth never fails."""
        return self._accounts.get(number, number) in self._reserved

    def num_wanted(self, num_blocks: int, hits: Sequence[BlockId]) -> int:
        """Return how many free blocks `num_blocks` would take, found ones that nobody uses among them."""
        return num_blocks - sum(self._pool.count(block) > 0 for block in hits)

    def gains(self, numbers: Sequence[int], hits: Sequence[BlockId]) -> Iterator[int]:
        """Yield, for each of some sequences, the blocks that are free if it is released after those before it.

        Args:
            numbers: of the sequences, in order.
            hits: blocks that are to be found again, and do not count.
        """
        kept, left = set(hits), Counter[BlockId]()
        for number in numbers:
            gained = 0
            for block in self._tables[number]:
                left[block] += 1
                gained += left[block] == self._pool.count(block) and block not in kept
            yield gained

    def begin(self, number: int, hits: Sequence[BlockId], num_reserved: int | None = None) -> None:
        """Begin a sequence's table with blocks that were found.

        Args:
            number: of a sequence without a table.
            hits: its first blocks.
            num_reserved: further blocks to reserve, enough for its greatest length; None: it can be preempted.
        """
        for block in hits:
            self._pool.share(block)
        self._tables[number] = list(hits)
        if num_reserved is not None:
            self._reserved[number] = num_reserved
            self._num_reserved += num_reserved

    def begin_group(self, first: int) -> None:
        """Let a sequence with a table begin a group: what is reserved for it is for all beams that go on from it."""
        self._accounts[first] = first

    def end_group(self, first: int) -> None:
        """Give back what is reserved for a group, whose tables are released."""
        self._num_reserved -= self._reserved.pop(first, 0)

    def can_have(self, number: int, num_blocks: int) -> bool:
        """Say whether a sequence, or its group, can be given so many more blocks."""
        return num_blocks <= max(self._reserved.get(self._accounts.get(number, number), 0), self.num_available)

    def must_copy(self, number: int, begin: int) -> bool:
        """Say whether the block that holds position `begin` must be copied before it is written there."""
        if begin % self._block_size == 0:
            return False
        last = self._tables[number][-1]
        # Who has copied it in this very plan still counts until `unpin`, but does not name it any more.
        return self._pool.count(last) - self._pinned.count(last) > 1 or self._index.has(last)

    def can_grow(self, number: int, begin: int, end: int) -> bool:
        """Say whether positions `begin` to `end` can be given blocks, a copy of a shared one among them."""
        table = self._tables[number]
        missing = self.blocks_for(end) - len(table)
        if table and self.must_copy(number, begin):
            missing += 1
        return missing <= 0 or self.can_have(number, missing)

    def grow(self, number: int, num_tokens: int) -> None:
        """Make a sequence's table hold `num_tokens` tokens; `can_grow` said that it can.

        Raises:
            OutOfBlocks: it cannot.
        """
        table = self._tables[number]
        for _ in range(self.blocks_for(num_tokens) - len(table)):
            table.append(self._take(number))

    def add_block(self, number: int) -> bool:
        """Give a sequence one more block; False if none is to be had for it."""
        if self._pool.num_free == self._num_reserved and not self._reserved.get(number):
            return False
        self._tables[number].append(self._take(number))
        return True

    def copy_last(self, number: int) -> tuple[BlockId, BlockId]:
        """Replace a table's last block by one of its own; return the block to copy from and the one to copy to.

        The source stays as it is until `unpin`: nobody can take it for a target within the same plan.

        Raises:
            OutOfBlocks: none is free; `can_grow` was not asked.
        """
        source = self._tables[number][-1]
        target = self._take(number)
        self._tables[number][-1] = target
        self._pinned.append(source)
        return source, target

    def unpin(self) -> None:
        """Let go of the sources of copies: the plan that copies them is complete."""
        for block in self._pinned:
            self._free(block)
        self._pinned.clear()

    def fork(self, source: int, target: int) -> None:
        """Let a sequence without a table begin with all blocks of another one."""
        self.begin(target, self._tables[source])
        if source in self._accounts:
            self._accounts[target] = self._accounts[source]

    def release(self, number: int) -> None:
        """Free a sequence's blocks, the last ones first, and what was reserved for it; a group keeps what it has."""
        num_free = self._pool.num_free
        for block in reversed(self._tables.pop(number, [])):
            self._free(block)
        if (first := self._accounts.pop(number, None)) is None:
            self._num_reserved -= self._reserved.pop(number, 0)
        elif first in self._reserved:
            self._reserved[first] += self._pool.num_free - num_free
            self._num_reserved += self._pool.num_free - num_free

    def check(self, num_tokens: Mapping[int, int]) -> None:
        """Prove tables, index and pool against the planned tokens of the running sequences, by number.

        Raises:
            InvariantViolation: a table has the wrong length or names a block twice, or the pool disagrees.
        """
        if set(self._tables) != set(num_tokens):
            raise InvariantViolation(
                f"sequences {set(self._tables) ^ set(num_tokens)} hold blocks or run, but not both"
            )
        references: Counter[BlockId] = Counter()
        for number, tokens in num_tokens.items():
            table = self._tables[number]
            if len(table) != self.blocks_for(tokens):
                raise InvariantViolation(f"sequence {number}: {len(table)} blocks for {tokens} tokens")
            if len(set(table)) != len(table):
                raise InvariantViolation(f"sequence {number} names a block twice: {table}")
            references.update(table)
        self._pool.check(references)
        self._index.check()
        if self._pinned:
            raise InvariantViolation(f"blocks {self._pinned} are pinned between plans")
        if self._num_reserved != sum(self._reserved.values()) or min(self._reserved.values(), default=0) < 0:
            raise InvariantViolation(f"reservations {self._reserved} do not make {self._num_reserved}")
        owners = (set(num_tokens) - set(self._accounts)) | set(self._accounts.values())
        if not 0 <= self._num_reserved <= self._pool.num_free or set(self._reserved) - owners:
            raise InvariantViolation(f"{self._num_reserved} blocks reserved of {self._pool.num_free} free ones")

    def _take(self, number: int) -> BlockId:
        block = self._pool.take()
        self._index.drop(block)
        if self._adoption:
            self._adoption.cut(block)
        if self._reserved and (owner := self._accounts.get(number, number)) in self._reserved:
            self._reserved[owner] -= 1
            self._num_reserved -= 1
        return block

    def _free(self, block: BlockId) -> None:
        self._pool.free(block, can_be_found=self._index.has(block) or self._adoption.has(block))
