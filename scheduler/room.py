"""Whether blocks suffice for who is to enter, beside what the running sequences still need."""

from collections.abc import Iterable

from octavo.scheduler.batch import Batch
from octavo.scheduler.groups import most_blocks
from octavo.scheduler.sequence import Sequence
from octavo.scheduler.tables import BlockTables
from octavo.wire.ids import BlockId


class Room:
    """Counts blocks and changes nothing.

    Args:
        batch: the running sequences.
        tables: what they have.
        block_size: tokens of a block.
        max_preemptions: after so many a sequence is protected.
    """

    def __init__(self, batch: Batch, tables: BlockTables, block_size: int, max_preemptions: int) -> None:
        self._batch = batch
        self._tables = tables
        self._block_size = block_size
        self._max_preemptions = max_preemptions

    def num_missing(self, sequence: Sequence, hits: list[BlockId], num_owed: int) -> int:
        """Return how many blocks too few there are to admit a sequence; not above 0 if there are enough."""
        is_protected = self.needs_protection(sequence)
        wanted = self.most_blocks(sequence) if is_protected else self._tables.blocks_for(sequence.num_known)
        return self._tables.num_wanted(wanted, hits) + num_owed - self._tables.num_available

    def most_blocks(self, sequence: Sequence) -> int:
        """Return the most blocks that a sequence that is to enter, or its group, will ever have."""
        request = sequence.request
        if request.group is None:
            return self._tables.blocks_for(sequence.plan_limit)
        width = request.group.search.params.width
        return most_blocks(request.num_prompt_tokens, request.max_output_tokens, width, self._block_size)

    def needs_protection(self, sequence: Sequence) -> bool:
        """Whether a sequence has lost its blocks so often that it must not lose them again."""
        return sequence.num_preemptions >= self._max_preemptions

    def num_owed(self, sequences: Iterable[Sequence] | None = None) -> int:
        """Return the blocks that running sequences need for tokens they know: admitted prompts are not squeezed out."""
        owed = 0
        for s in self._batch if sequences is None else sequences:
            if s.num_planned < s.num_known and not self._tables.is_protected(s.number):
                owed += self._tables.blocks_for(s.num_known) - len(self._tables.table(s.number))
        return owed
