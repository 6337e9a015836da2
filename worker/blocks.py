"""What the worker knows of each block besides its content: enough to see that a plan shares blocks as it may.

The scheduler owns the pool. A mistake there would let one sequence read or overwrite what another computed, and nothing
later would show it; so the worker keeps these counts and ends the session instead.
"""

from octavo.wire.ids import NULL_BLOCK
from octavo.worker.errors import PlanError


class BlockUse:
    """Counts, for each block, the tables that name it and the slots of it that are written.

    The law: what is given out anew is in no table; a row writes only where no other row reads, except the rows that
    begin in the same plan (each layer writes all keys and values of a step before it attends); what a row takes as
    computed is written in full when the plan in which it begins has been computed.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._num_holders = [0] * num_blocks
        self._num_written = [0] * num_blocks
        self._hits: dict[int, list[int]] = {}  # block -> rows of the present plan that begin with it

    def clear(self) -> None:
        """Forget everything: what blocks hold is nobody's."""
        self._num_holders = [0] * len(self._num_holders)
        self._num_written = [0] * len(self._num_written)
        self._hits.clear()

    def keep(self, num_written: dict[int, int]) -> None:
        """Know how many slots of some blocks are written, after `clear`: their rows are gone, and may come back."""
        for block, num in num_written.items():
            self._num_written[block] = num

    def begin_plan(self) -> None:
        """From here on, rows that began earlier read what they took."""
        self._hits.clear()

    def take(self, row: int, block: int) -> None:
        """Give a block, whose content is void, to a row.

        Raises:
            PlanError: there is no such block, or a table names it.
        """
        self._check_free(row, block)
        self._num_holders[block] = 1
        self._num_written[block] = 0

    def hit(self, row: int, block: int) -> None:
        """Let a row that begins in this plan read a block; `check_hits` sees whether it holds something.

        Raises:
            PlanError: there is no such block.
        """
        self._check_exists(row, block)
        self._num_holders[block] += 1
        self._hits.setdefault(block, []).append(row)

    def go_on(self, row: int, block: int, num_read: int) -> None:
        """Let a row that begins in this plan read the first slots of a block, and write to those behind them.

        Raises:
            PlanError: there is no such block, a table names it, or less of it is written.
        """
        self._check_free(row, block)
        if self._num_written[block] < num_read:
            raise PlanError(
                f"row {row} begins with {num_read} tokens of block {block}, which has {self._num_written[block]}"
            )
        self._num_holders[block] = 1

    def copy(self, row: int, source: int, target: int) -> None:
        """Replace a block of a row by a copy of it.

        Raises:
            PlanError: there is no such target, or a table names it.
        """
        self._check_free(row, target)
        self._num_holders[source] -= 1
        self._num_holders[target] = 1
        self._num_written[target] = self._num_written[source]

    def share(self, table: list[int]) -> None:
        """Count a table whose blocks were taken from another row's."""
        for block in table:
            self._num_holders[block] += 1

    def release(self, table: list[int]) -> None:
        """Count a table that is gone; its blocks keep their content until they are taken."""
        for block in table:
            self._num_holders[block] -= 1

    def write(self, row: int, block: int, num_written: int) -> None:
        """Count slots that a row writes, up to a number of them.

        Raises:
            PlanError: another row reads the block.
        """
        num_others = self._num_holders[block] - len(self._hits.get(block, ())) - 1
        if num_others:
            raise PlanError(f"row {row} writes to block {block}, which {num_others} other rows read")
        self._num_written[block] = num_written

    def check_hits(self) -> None:
        """Check that what the plan's new rows begin with is written, by this plan at the latest.

        Raises:
            PlanError: a block is not.
        """
        for block, rows in self._hits.items():
            if self._num_written[block] != self._block_size:
                raise PlanError(
                    f"row {rows[0]} begins with block {block}, which has {self._num_written[block]} of "
                    f"{self._block_size} tokens"
                )

    def _check_exists(self, row: int, block: int) -> None:
        if not NULL_BLOCK < block < len(self._num_holders):
            raise PlanError(f"block {block} for row {row} is outside of [1, {len(self._num_holders)})")

    def _check_free(self, row: int, block: int) -> None:
        self._check_exists(row, block)
        if self._num_holders[block]:
            raise PlanError(f"block {block} is given to row {row}, but {self._num_holders[block]} tables name it")
