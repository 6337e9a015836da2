"""What a scheduling policy decides. To write one: docs/scheduling.md."""

from collections.abc import Sequence as Several
from typing import TypeAlias

from octavo.scheduler.sequence import Request, Sequence

Place: TypeAlias = tuple[int, ...]
"""A place among others; smaller is earlier."""


class Policy:
    """Base of all policies; it is first come, first served in all that a subclass leaves alone.

    A policy sees requests and sequences and changes nothing of them. Sequences wait in lanes. Within a lane they are
    ordered by `place`; the lane whose first sequence has the least `rank` is served next.
    """

    uses_priorities = False
    """Whether requests may have a priority; where it does nothing it is refused."""

    def lane(self, sequence: Sequence) -> str:
        """Return the lane that a sequence waits in; the same for as long as it lives."""
        return ""

    def place(self, sequence: Sequence) -> Place:
        """Return where a sequence waits in its lane: unique, and the same for as long as it waits."""
        return (sequence.request.arrival, sequence.choice)

    def rank(self, head: Sequence) -> Place:
        """Return the rank, at this moment, of the lane whose first sequence is `head`; of equals the earlier place wins."""
        return ()

    def yields_first(self, sequence: Sequence) -> Place:
        """Return a sort key for preemption: the smallest of the running sequences loses its blocks.

        Here: the least computed work; of equals, the latest.
        """
        return (sequence.num_planned, -sequence.request.arrival, -sequence.choice)

    def may_evict(self, waiting: Sequence, running: Sequence) -> bool:
        """Say whether a running sequence gives way so that the next waiting one gets blocks (never for a row alone)."""
        return False

    def on_admitted(self, request: Request) -> None:
        """Take note of a new request; its sequences have not been asked about yet."""

    def on_entered(self, sequence: Sequence) -> None:
        """Take note that a sequence has left the queue and has a row."""

    def on_planned(self, sequences: Several[Sequence], num_tokens: Several[int]) -> None:
        """Take note of the tokens that a plan, now complete, gives to each of its sequences."""

    def on_ended(self, request: Request) -> None:
        """Take note that a request has ended, however."""
