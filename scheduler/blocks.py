"""The pool of KV cache blocks: who is free, in which order they are taken, how many tables name each."""

from collections.abc import Mapping

from octavo.scheduler.errors import InvariantViolation, OutOfBlocks
from octavo.wire.ids import NULL_BLOCK, BlockId

_NOT_FREE = -1


class BlockPool:
    """Reference counts and an intrusive free list; every operation is O(1).

    The law: a block is free exactly when its count is 0; the null block is neither free nor ever handed out. Free
    blocks that nobody can find again stand in front; behind them those of the prefix cache and of reported rows, least
    recently freed first.

    Args:
        num_blocks: of the KV cache, the null block included; at least 2.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self._counts = [0] * num_blocks
        # A ring through the free blocks; the null block stands for both ends.
        self._next = [*range(1, num_blocks), int(NULL_BLOCK)]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]

    def take(self) -> BlockId:
        """Take the first free block, with a count of 1.

        Raises:
            OutOfBlocks: none is free.
        """
        block = self._next[NULL_BLOCK]
        if block == NULL_BLOCK:
            raise OutOfBlocks(f"all {self.num_blocks - 1} blocks are in use")
        after = self._next[block]
        self._next[NULL_BLOCK] = after
        self._previous[after] = NULL_BLOCK
        self._next[block] = self._previous[block] = _NOT_FREE
        self._counts[block] = 1
        self.num_free -= 1
        return BlockId(block)

    def share(self, block: BlockId) -> None:
        """Count one more table that names a block: one in use, or a free one that was found again.

        Raises:
            InvariantViolation: it is the null block.
        """
        if block == NULL_BLOCK:
            raise InvariantViolation("the null block is shared")
        if self._counts[block] == 0:
            self._unlink(block)
        self._counts[block] += 1

    def free(self, block: BlockId, *, can_be_found: bool = False) -> None:
        """Count one table less; the last one gives the block back.

        Args:
            block: what to give back.
            can_be_found: it is in the prefix cache, and is taken after all that are free now; else it is taken next.

        Raises:
            InvariantViolation: the block is free already, or the null block.
        """
        if self._counts[block] == 0:
            raise InvariantViolation(f"block {block} is freed, but not in use")
        self._counts[block] -= 1
        if self._counts[block] > 0:
            return
        if can_be_found:
            self._link(block, self._previous[NULL_BLOCK])
        else:
            self._link(block, NULL_BLOCK)

    def forget(self, block: BlockId) -> None:
        """Take note that a block cannot be found any more: a free one is taken next."""
        if block != NULL_BLOCK and self._counts[block] == 0:
            self._unlink(block)
            self._link(block, NULL_BLOCK)

    def keep_for_last(self, block: BlockId) -> None:
        """Let a free block be taken after all others; one in use stays what it is."""
        if block != NULL_BLOCK and self._counts[block] == 0:
            self._unlink(block)
            self._link(block, self._previous[NULL_BLOCK])

    def count(self, block: BlockId) -> int:
        """Return how many tables name a block."""
        return self._counts[block]

    def free_blocks(self) -> list[BlockId]:
        """Return the free blocks in the order in which they will be taken."""
        found: list[BlockId] = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK and len(found) < self.num_blocks:
            found.append(BlockId(block))
            block = self._next[block]
        return found

    def check(self, references: Mapping[BlockId, int]) -> None:
        """Prove the pool against the references that tables hold.

        Raises:
            InvariantViolation: a count, the free list or the conservation of blocks is wrong.
        """
        free = self.free_blocks()
        if len(free) != self.num_free or len(set(free)) != len(free):
            raise InvariantViolation(f"free list holds {len(free)} blocks, expected {self.num_free} distinct ones")
        expected = [0] * self.num_blocks
        for block, count in references.items():
            expected[block] = count
        if self._counts != expected:
            number = next(n for n in range(self.num_blocks) if self._counts[n] != expected[n])
            raise InvariantViolation(f"block {number} has count {self._counts[number]}, {expected[number]} references")
        in_use = self.num_blocks - self._counts.count(0)
        if any(self._counts[block] for block in free) or self.num_free + in_use != self.num_blocks - 1:
            raise InvariantViolation(f"{self.num_free} free and {in_use} used blocks of {self.num_blocks - 1}")
        if self._counts[NULL_BLOCK]:
            raise InvariantViolation("the null block is in use")

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self._next[block] = self._previous[block] = _NOT_FREE
        self.num_free -= 1

    def _link(self, block: int, before: int) -> None:
        after = self._next[before]
        self._next[before] = self._previous[after] = block
        self._previous[block] = before
        self._next[block] = after
        self.num_free += 1
