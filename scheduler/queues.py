"""The waiting queue, in the order of the policy."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import pairwise
from operator import itemgetter

from octavo.scheduler.errors import InvariantViolation
from octavo.scheduler.policy import Place, Policy
from octavo.scheduler.sequence import Sequence, Status

_place = itemgetter(0)


class WaitingQueue:
    """Sequences without a row. Its bounds are kept at admission, where requests are counted (state.py)."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._entries: list[tuple[Place, Sequence]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._entries)

    @property
    def head(self) -> Sequence | None:
        """The sequence whose turn is next."""
        return self._entries[0][1] if self._entries else None

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in its place."""
        insort(self._entries, (self._policy.place(sequence), sequence), key=_place)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out.

        Raises:
            InvariantViolation: it is not here.
        """
        index = bisect_left(self._entries, self._policy.place(sequence), key=_place)
        if index == len(self._entries) or self._entries[index][1] is not sequence:
            raise InvariantViolation(f"{sequence.request.name}/{sequence.choice} does not wait")
        del self._entries[index]

    def check(self) -> None:
        """Prove the order and that all wait.

        Raises:
            InvariantViolation: they do not.
        """
        places = [place for place, _ in self._entries]
        if any(a >= b for a, b in pairwise(places)):
            raise InvariantViolation("the waiting queue is out of order")
        if any(s.status is not Status.WAITING or s.row is not None for s in self):
            raise InvariantViolation("a sequence in the waiting queue does not wait")
