"""The prefix index: which block holds the keys and values that belong to a key (octavo.wire.prefix)."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from octavo.scheduler.errors import InvariantViolation
from octavo.wire.ids import BlockId


class Entry(NamedTuple):
    """A published block."""

    block: BlockId
    parent: bytes
    """Key of the block before it, or the root."""
    publisher: int
    """Number of the sequence that computed it."""


class PrefixIndex:
    """Published blocks by key. Whether a block is in use is the pool's business.

    The law: a key names one block and a block has at most one key; a block is published when the plan that fills it is
    built, is never written after that, and is dropped before it is given out anew.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}
        self._keys: dict[BlockId, bytes] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, keys: Iterable[bytes]) -> list[BlockId]:
        """Return the blocks of the longest run of keys, from the first on, that are all here."""
        found: list[BlockId] = []
        entries = self._entries
        for key in keys:
            if (entry := entries.get(key)) is None:
                break
            found.append(entry.block)
        return found

    def publish(self, block: BlockId, key: bytes, parent: bytes, publisher: int) -> None:
        """Let a block be found, unless another one with the same key can be found already.

        Raises:
            InvariantViolation: the block has another key.
        """
        if self._entries.setdefault(key, entry := Entry(block, parent, publisher)) is not entry:
            return
        if self._keys.setdefault(block, key) is not key:
            raise InvariantViolation(f"block {block} is published twice, under different keys")

    def has(self, block: BlockId) -> bool:
        """Say whether a block can be found."""
        return block in self._keys

    def key_of(self, block: BlockId) -> bytes | None:
        """Return a block's key, None if it cannot be found."""
        return self._keys.get(block)

    def publisher_of(self, key: bytes) -> int | None:
        """Return the number of the sequence that published a key's block, None if there is none."""
        entry = self._entries.get(key)
        return entry.publisher if entry is not None else None

    def drop(self, block: BlockId) -> None:
        """Let a block be found no more, if it was."""
        if (key := self._keys.pop(block, None)) is not None:
            del self._entries[key]

    def withdraw(self, keys: Iterable[bytes]) -> list[Entry]:
        """Drop the blocks of some keys and all that is chained on these; return them.

        Costs a walk over the whole index: it is for the rare row whose values are broken.
        """
        children: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for key, entry in self._entries.items():
            children[entry.parent].append(key)
        left = list(keys)
        dropped: list[Entry] = []
        while left:
            key = left.pop()
            left += children.pop(key, ())
            if (found := self._entries.get(key)) is not None:
                self.drop(found.block)
                dropped.append(found)
        return dropped

    def clear(self) -> list[BlockId]:
        """Drop everything; return the blocks."""
        blocks = list(self._keys)
        self._entries.clear()
        self._keys.clear()
        return blocks

    def check(self) -> None:
        """Prove both directions against each other.

        Raises:
            InvariantViolation: they differ.
        """
        if {key: entry.block for key, entry in self._entries.items()} != {key: b for b, key in self._keys.items()}:
            raise InvariantViolation(f"{len(self._entries)} keys and {len(self._keys)} published blocks differ")
