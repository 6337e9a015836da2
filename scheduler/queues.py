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
    """Sequences without a row, by lane. Its bounds are kept at admission, where requests are counted (state.py)."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lanes: dict[str, list[tuple[Place, Sequence]]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for lane in self._lanes.values() for _, sequence in lane)

    @property
    def head(self) -> Sequence | None:
        """The sequence whose turn is next."""
        lanes, rank = self._lanes, self._policy.rank
        if len(lanes) <= 1:
            return next((lane[0][1] for lane in lanes.values()), None)
        return min((lane[0] for lane in lanes.values()), key=lambda entry: (rank(entry[1]), entry[0]))[1]

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in its place."""
        lane = self._lanes.setdefault(self._policy.lane(sequence), [])
        insort(lane, (self._policy.place(sequence), sequence), key=_place)
        self._size += 1

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out.

        Raises:
            InvariantViolation: it is not here.
        """
        name = self._policy.lane(sequence)
        lane = self._lanes.get(name, [])
        index = bisect_left(lane, self._policy.place(sequence), key=_place)
        if index == len(lane) or lane[index][1] is not sequence:
            raise InvariantViolation(f"{sequence.request.name}/{sequence.choice} does not wait")
        del lane[index]
        if not lane:
            del self._lanes[name]
        self._size -= 1

    def check(self) -> None:
        """Prove the order and that all wait.

        Raises:
            InvariantViolation: they do not.
        """
        if self._size != sum(map(len, self._lanes.values())):
            raise InvariantViolation(f"the waiting queue counts {self._size} sequences and holds another number")
        for lane in self._lanes.values():
            if not lane or any(a >= b for (a, _), (b, _) in pairwise(lane)):
                raise InvariantViolation("the waiting queue is out of order, or holds an empty lane")
        if any(s.status is not Status.WAITING or s.row is not None for s in self):
            raise InvariantViolation("a sequence in the waiting queue does not wait")
