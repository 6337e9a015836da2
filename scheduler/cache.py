"""The prefix cache of one worker: what a sequence finds when it enters, and what it leaves to be found."""

from collections.abc import Collection, Iterable
from itertools import islice

from octavo.scheduler.blocks import BlockPool
from octavo.scheduler.errors import InvariantViolation
from octavo.scheduler.prefix import PrefixIndex
from octavo.scheduler.sequence import Sequence
from octavo.scheduler.tables import BlockTables
from octavo.wire.ids import BlockId
from octavo.wire.prefix import block_key

MAX_HASHES_PER_STEP = 256
"""Blocks of generated tokens that are hashed in one step; the keys of prompts come from the frontends."""


class PrefixCache:
    """Finds and publishes full blocks by the keys of their tokens.

    The law: what is published was, is or will be written by a plan that is sent no later than the first one that names
    it: plans run in order, and within one each layer writes before it attends.
    """

    def __init__(self, index: PrefixIndex, pool: BlockPool, tables: BlockTables, block_size: int) -> None:
        self._index = index
        self._pool = pool
        self._tables = tables
        self._block_size = block_size
        self._num_hashes_left = MAX_HASHES_PER_STEP

    def __len__(self) -> int:
        """Return the number of blocks that can be found."""
        return len(self._index)

    def begin_step(self) -> None:
        """Renew what may be hashed."""
        self._num_hashes_left = MAX_HASHES_PER_STEP

    def find(self, sequence: Sequence) -> list[BlockId]:
        """Return the blocks that hold a sequence's first tokens already; its last known token is always left over.

        What it has to tell of its prompt comes of computing it: then nothing is found.
        """
        if sequence.tells_prompt:
            return []
        if not sequence.uses_cache or not sequence.request.prefix_root:
            return []
        if not sequence.keys:
            sequence.load_keys()
        return self._index.find(islice(sequence.keys, (sequence.num_known - 1) // self._block_size))

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Let a sequence's full blocks be found, as far as `num_tokens` reach and their ids are known."""
        if not sequence.publishes or not sequence.request.prefix_root:
            return
        end = min(num_tokens, sequence.num_known) // self._block_size
        if sequence.num_published >= end:
            return
        table, keys = self._tables.table(sequence.number), sequence.keys
        for index in range(sequence.num_published, end):
            if index == len(keys):
                if self._num_hashes_left == 0:
                    return  # later: whatever grows a table comes back here
                self._num_hashes_left -= 1
                keys.append(sequence.hash_block(index, self._block_size))
            parent = keys[index - 1] if index else sequence.request.prefix_root
            self._index.publish(table[index], keys[index], parent, sequence.residency)
            sequence.num_published = index + 1

    def withdraw(self, faulty: Collection[tuple[Sequence, int]], suspects: Collection[Sequence]) -> set[BlockId]:
        """Let nothing be found any more that some sequences computed, nor what is chained on it.

        Args:
            faulty: sequences and their stays in the batch (residencies) in which their values broke.
            suspects: those of them that may have found broken blocks: what they found is dropped as well.

        Returns:
            The blocks that the faulty ones computed, and those chained on them: who holds one must be recomputed.
        """
        if not faulty:
            return set()
        index, stays = self._index, {residency for _, residency in faulty}
        suspect = {block for block in self._tables.blocks_in_use() if index.publisher_of(block) in stays}
        for s, residency in faulty:
            if s.residency == residency:
                suspect.update(self._tables.table(s.number)[s.num_cached // self._block_size :])
        published = [key for s, _ in faulty for key in s.keys if index.publisher_of_key(key) in stays]
        published += [key for block in suspect if (key := index.key_of(block)) is not None]
        suspect.update(entry.block for entry in index.withdraw(published))
        found = index.withdraw(key for s in suspects for key in s.keys)
        for block in suspect | {entry.block for entry in found}:
            self._pool.forget(block)
        return suspect

    def clear(self, running: Iterable[Sequence]) -> int:
        """Let nothing be found that was computed until now; return how many blocks could be."""
        for sequence in running:
            sequence.publishes = False
        blocks = self._index.clear()
        for block in blocks:
            self._pool.forget(block)
        return len(blocks)

    def check(self, running: Iterable[Sequence]) -> None:
        """Prove that published blocks in use hold the very tokens that their keys name.

        Raises:
            InvariantViolation: a key is not that of the tokens.
        """
        size = self._block_size
        for s in running:
            parent = s.request.prefix_root
            ids = s.token_ids()
            table = self._tables.table(s.number)
            for index in range(min(len(table), s.num_known // size)):
                if not parent:
                    break
                key = block_key(parent, ids[4 * index * size : 4 * (index + 1) * size])
                known = s.keys[index] if index < len(s.keys) else key
                if key != known or self._index.key_of(table[index]) not in (None, key):
                    raise InvariantViolation(
                        f"{s.request.name}/{s.choice}: block {table[index]} can be found by a key of other tokens"
                    )
                parent = key
