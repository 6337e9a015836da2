"""Who runs first and who gives way: one interface, one module for each policy."""

from typing import Protocol, TypeAlias

from octavo.scheduler.sequence import Sequence

Place: TypeAlias = tuple[int, ...]
"""A place in the waiting queue; smaller is earlier."""


class Policy(Protocol):
    """What a scheduling policy decides; it sees sequences and changes nothing."""

    def place(self, sequence: Sequence) -> Place:
        """Return where a sequence waits: unique, and the same for as long as it waits."""

    def yields_first(self, sequence: Sequence) -> Place:
        """Return a sort key for preemption: the smallest of the running sequences loses its blocks."""
