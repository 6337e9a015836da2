"""A policy that is watched: what it answers is checked at once, so that a mistake is named where it is made."""

from collections.abc import Sequence as Several
from typing import TypeGuard

from octavo.scheduler.policy import Place, Policy
from octavo.scheduler.sequence import Request, Sequence, Status
from octavo.scheduler.simulate.traffic_setup import BadPolicy


class WatchedPolicy(Policy):
    """Passes every question on, and checks the answer; it costs little, so that it is always done.

    Args:
        policy: to be asked; it may be one of Octavo's own.

    Raises:
        BadPolicy: by each method, where an answer breaks what `Policy` demands. The message names the class and the
            answer.
    """

    def __init__(self, policy: Policy) -> None:
        self.uses_priorities = policy.uses_priorities
        self._policy = policy
        # Of the sequences of live requests, by number: the lane, and the place with the residency that it was given for.
        self._lanes: dict[int, str] = {}
        self._places: dict[int, tuple[int, Place]] = {}
        self._owners: dict[tuple[str, Place], Sequence] = {}

    def lane(self, sequence: Sequence) -> str:
        """Return the policy's lane: a string, always the same."""
        lane = self._policy.lane(sequence)
        if not isinstance(lane, str):
            raise self._mistake("lane", lane, "expected a string")
        if (known := self._lanes.setdefault(sequence.number, lane)) != lane:
            raise self._mistake("lane", lane, f"it was {known!r} for the same sequence, and may not change")
        return lane

    def place(self, sequence: Sequence) -> Place:
        """Return the policy's place: integers, unique in the lane, and the same for as long as the sequence waits."""
        place = self._policy.place(sequence)
        self._check("place", place)
        residency, known = self._places.setdefault(sequence.number, (sequence.residency, place))
        if residency == sequence.residency and known != place:
            raise self._mistake("place", place, f"it was {known!r} for the same sequence, which still waits")
        lane = self._lanes[sequence.number] if sequence.number in self._lanes else self.lane(sequence)
        other = self._owners.get((lane, place))
        if other is not None and other is not sequence and other.status is Status.WAITING:
            others = f"{other.request.name}/{other.choice} and {sequence.request.name}/{sequence.choice}"
            raise self._mistake("place", place, f"{others} wait in lane {lane!r} with equal places: make them unique")
        if known != place:
            self._owners.pop((lane, known), None)
        self._places[sequence.number] = (sequence.residency, place)
        self._owners[lane, place] = sequence
        return place

    def rank(self, head: Sequence) -> Place:
        """Return the policy's rank: integers."""
        return self._check("rank", self._policy.rank(head))

    def yields_first(self, sequence: Sequence) -> Place:
        """Return the policy's key: integers."""
        return self._check("yields_first", self._policy.yields_first(sequence))

    def may_evict(self, waiting: Sequence, running: Sequence) -> bool:
        """Return the policy's word: a truth value."""
        answer = self._policy.may_evict(waiting, running)
        if not isinstance(answer, bool):
            raise self._mistake("may_evict", answer, "expected True or False")
        return answer

    def on_admitted(self, request: Request) -> None:
        """Tell the policy."""
        self._policy.on_admitted(request)

    def on_entered(self, sequence: Sequence) -> None:
        """Tell the policy."""
        self._policy.on_entered(sequence)

    def on_planned(self, sequences: Several[Sequence], num_tokens: Several[int]) -> None:
        """Tell the policy."""
        self._policy.on_planned(sequences, num_tokens)

    def on_ended(self, request: Request) -> None:
        """Tell the policy, and forget the request."""
        self._policy.on_ended(request)
        for sequence in request.sequences:
            lane = self._lanes.pop(sequence.number, "")
            if (entry := self._places.pop(sequence.number, None)) is None:
                continue
            if self._owners.get((lane, entry[1])) is sequence:
                del self._owners[lane, entry[1]]

    def _check(self, method: str, answer: object) -> Place:
        if _is_place(answer):
            return answer
        raise self._mistake(method, answer, "expected a tuple of integers")

    def _mistake(self, method: str, answer: object, words: str) -> BadPolicy:
        return BadPolicy(f"policy {type(self._policy).__name__}: {method}() returned {answer!r}: {words}")


def _is_place(answer: object) -> TypeGuard[Place]:
    return isinstance(answer, tuple) and all(isinstance(number, int) for number in answer)
