"""The prefix index: which block holds the keys and values that belong to a key (octavo.wire.prefix)."""

from collections.abc import Iterable
from typing import NamedTuple

from octavo.scheduler.errors import InvariantViolation
from octavo.wire.ids import BlockId


class Entry(NamedTuple):
    """A published block."""

    block: BlockId
    parent: bytes
    """Key of the block before it, or the root."""


class PrefixIndex:
    """Published blocks by key. Whether a block is in use is the pool's business.

    The law: a key names one block and a block has at most one key; a block is published when the plan that fills it is
    built, is never written after that, and is dropped before it is given out anew. In which stay of a sequence in the
    batch it was published is known for as long as it holds the same tokens, found or not.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}
        self._keys: dict[BlockId, bytes] = {}
        self._publishers: dict[BlockId, int] = {}
        self._children: dict[bytes, bytes | set[bytes]] = {}  # parent -> the key chained on it; a set if several are

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
        if self._entries.setdefault(key, entry := Entry(block, parent)) is not entry:
            return
        self._publishers[block] = publisher
        if self._keys.setdefault(block, key) is not key:
            raise InvariantViolation(f"block {block} is published twice, under different keys")
        children = self._children.setdefault(parent, key)
        if isinstance(children, set):
            children.add(key)
        elif children is not key:
            self._children[parent] = {children, key}

    def has(self, block: BlockId) -> bool:
        """Say whether a block can be found."""
        return block in self._keys

    def key_of(self, block: BlockId) -> bytes | None:
        """Return a block's key, None if it cannot be found."""
        return self._keys.get(block)

    def publisher_of(self, block: BlockId) -> int | None:
        """Return the stay in the batch in which a block's content was published, even if it is found no more."""
        return self._publishers.get(block)

    def publisher_of_key(self, key: bytes) -> int | None:
        """Return the stay in the batch in which a key's block was published, None if nothing is found by it."""
        entry = self._entries.get(key)
        return None if entry is None else self._publishers[entry.block]

    def drop(self, block: BlockId) -> None:
        """Forget a block that is given out anew."""
        self._publishers.pop(block, None)
        self._hide(block)

    def withdraw(self, keys: Iterable[bytes]) -> list[Entry]:
        """Drop the blocks of some keys and all that is chained on these; return them."""
        left = list(keys)
        dropped: list[Entry] = []
        while left:
            key = left.pop()
            children = self._children.get(key, ())
            left += (children,) if isinstance(children, bytes) else children
            if (found := self._entries.get(key)) is not None:
                self._hide(found.block)
                dropped.append(found)
        return dropped

    def clear(self) -> list[BlockId]:
        """Drop everything; return the blocks."""
        blocks = list(self._keys)
        self._entries.clear()
        self._keys.clear()
        self._children.clear()
        return blocks

    def check(self) -> None:
        """Prove both directions against each other.

        Raises:
            InvariantViolation: they differ.
        """
        if {key: entry.block for key, entry in self._entries.items()} != {key: b for b, key in self._keys.items()}:
            raise InvariantViolation(f"{len(self._entries)} keys and {len(self._keys)} published blocks differ")
        if not self._keys.keys() <= self._publishers.keys():
            raise InvariantViolation("a block was published by nobody")
        num_children = sum(len(c) if isinstance(c, set) else 1 for c in self._children.values())
        if num_children != len(self._entries) or any(e.parent not in self._children for e in self._entries.values()):
            raise InvariantViolation(f"{len(self._entries)} published blocks are chained, {num_children} are known so")

    def _hide(self, block: BlockId) -> None:
        if (key := self._keys.pop(block, None)) is None:
            return
        parent = self._entries.pop(key).parent
        children = self._children[parent]
        if isinstance(children, set) and len(children) > 1:
            children.remove(key)
        else:
            del self._children[parent]
