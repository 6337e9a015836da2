"""What the cache still holds of rows whose session is over: told to the next scheduler, and checked when it comes back.

The scheduler decides who goes on from what. That a row begins with the very ids whose keys and values its blocks hold is
checked here once more, since nothing later would show it.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.wire.columns import pack_ints
from octavo.wire.held_rows import MAX_REPORT_BYTES, HeldRow, prompt_digest
from octavo.worker.errors import PlanError


@dataclass(frozen=True)
class LeftRow:
    """A row at the end of its session.

    Attributes:
        request: as the plan named it in which the row began.
        choice: index among the choices.
        ids: all that are known of it, drawn ones included.
        num_prompt: of these, the prompt.
        num_computed: tokens whose keys and values are in the cache.
        table: the blocks that hold them.
    """

    request: str
    choice: int
    ids: "array[int]"
    num_prompt: int
    num_computed: int
    table: tuple[int, ...]

    def told(self) -> HeldRow:
        """Return it as a scheduler is told."""
        return HeldRow(
            self.request,
            self.choice,
            self.num_prompt,
            prompt_digest(pack_ints(self.ids[: self.num_prompt])),
            pack_ints(self.ids[self.num_prompt :]),
            self.num_computed,
            pack_ints(self.table),
        )


class HeldBlocks:
    """Whose keys and values blocks hold, of rows whose session is over.

    The law: an entry is dropped before its block is written.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._left: dict[int, LeftRow] = {}

    def __len__(self) -> int:
        """Return how many blocks are known."""
        return len(self._left)

    def clear(self) -> None:
        """Know nothing of any block."""
        self._left.clear()

    def keep(self, rows: Iterable[LeftRow]) -> dict[int, int]:
        """Know the blocks of some rows, and nothing else; return how many tokens each block holds."""
        self.clear()
        num_written: dict[int, int] = {}
        for row in rows:
            for place, block in enumerate(row.table):
                tokens = min(self._block_size, row.num_computed - place * self._block_size)
                if tokens > num_written.get(block, 0):
                    num_written[block], self._left[block] = tokens, row
        return num_written

    def has(self, block: int) -> bool:
        """Say whether it is known what a block holds."""
        return block in self._left

    def drop(self, block: int) -> None:
        """Take note that a block will be written."""
        self._left.pop(block, None)

    def check(self, name: str, ids: Sequence[int], table: Sequence[int], num_computed: int) -> None:
        """Check that a row begins with the ids that its blocks hold, as far as that is known.

        Raises:
            PlanError: it does not.
        """
        ends: dict[int, tuple[LeftRow, int]] = {}
        for place, block in enumerate(table):
            if (left := self._left.get(block)) is None:
                continue
            if place >= len(left.table) or left.table[place] != block:
                raise PlanError(
                    f"{name} has block {block} at place {place} of its table, where {left.request} had another"
                )
            ends[id(left)] = (left, min((place + 1) * self._block_size, num_computed))
        for left, end in ends.values():
            if end > left.num_computed or left.ids[:end] != array("i", ids[:end]):
                raise PlanError(f"{name} begins with {end} computed tokens that are not those of {left.request}")


def bounded(rows: Iterable[LeftRow]) -> tuple[list[LeftRow], list[HeldRow]]:
    """Return the rows, from the first on, that are told of, and what is told: MAX_REPORT_BYTES at most."""
    kept: list[LeftRow] = []
    told: list[HeldRow] = []
    num_left = MAX_REPORT_BYTES
    for row in rows:
        held = row.told()
        if held.num_bytes > num_left:
            break
        num_left -= held.num_bytes
        kept.append(row)
        told.append(held)
    return kept, told
