"""Beam search: which continuations of one prompt are followed, which have ended, and when no better one can come.

Pure: from the candidates of a step to the beams of the next. The rules are those of transformers: a continuation is ranked
by its log-probability divided by its length to the power of `length_penalty`, its end included; only what is among the
`width` likeliest of a step when it ends is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Optional

from octavo.wire.requests import BeamParams, FinishReason, num_candidates

Candidates = Sequence[tuple[int, float]]
"""Ids that one beam may go on with and their log-probabilities, likeliest first; `num_candidates` of them suffice."""


class Child(NamedTuple):
    """A beam of the next step: which of the present ones it goes on from, and with which id."""

    parent: int
    token: int


class Hypothesis(NamedTuple):
    """A continuation that may be an answer."""

    ids: list[int]
    logprob: float
    """Sum over the ids."""
    score: float
    reason: FinishReason


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """A continuation: its last id, and the continuation before it. They share their beginnings."""

    parent: Optional["_Node"]
    token: int
    logprob: float

    def ids(self) -> list[int]:
        found: list[int] = []
        node = self
        while node.parent is not None:
            found.append(node.token)
            node = node.parent
        return found[::-1]


_ROOT = _Node(None, -1, 0.0)


class _Ended(NamedTuple):
    score: float
    node: _Node
    reason: FinishReason


class BeamSearch:
    """The search for one request.

    Args:
        params: width and ranking.
        max_tokens: most ids of a continuation.
        min_tokens: no end before.
        stop_ids: ids that end a continuation, and belong to it.

    Attributes:
        is_over: nothing is followed any more.
    """

    def __init__(self, params: BeamParams, max_tokens: int, min_tokens: int, stop_ids: frozenset[int]) -> None:
        self.params = params
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._stop_ids = stop_ids
        self.restart()

    @property
    def num_beams(self) -> int:
        """Continuations that are followed; one at the start."""
        return len(self._open)

    @property
    def num_candidates(self) -> int:
        """Candidates that each of them needs."""
        return num_candidates(self.params, len(self._stop_ids))

    def restart(self) -> None:
        """Begin anew."""
        self.is_over = False
        self._length = 0
        self._open = [_ROOT]
        self._ended: list[_Ended] = []  # best first, at most `width`

    def step(self, candidates: Sequence[Candidates]) -> list[Child]:
        """Go one id further; return the beams of the next step, likeliest first, none if the search is over.

        Args:
            candidates: of each beam, in the order in which they were returned.
        """
        width = self.params.width
        self._length += 1
        is_last = self._length >= self._max_tokens
        may_end = self._length > self._min_tokens
        ranked = [
            (beam.logprob + logprob, place, token)
            for place, (beam, own) in enumerate(zip(self._open, candidates, strict=True))
            for token, logprob in own
            if logprob > -inf and (may_end or token not in self._stop_ids)
        ]
        ranked.sort(key=lambda entry: -entry[0])  # stable: of equals, the one of the likelier beam
        children: list[Child] = []
        going: list[_Node] = []
        for rank, (logprob, place, token) in enumerate(ranked):
            if rank >= width and len(going) == width:
                break
            is_end = token in self._stop_ids
            node = _Node(self._open[place], token, logprob)
            if (is_end or is_last) and rank < width:
                self._ended.append(self._rank(node, FinishReason.STOP if is_end else FinishReason.LENGTH))
            elif not (is_end or is_last) and len(going) < width:
                going.append(node)
                children.append(Child(place, token))
        self._ended = _best(self._ended, width)
        if not going or not self._can_improve(going[0]):
            self.is_over = True
            going, children = [], []
        self._open = going
        return children

    def best(self, count: int, cut: FinishReason | None = None) -> list[Hypothesis]:
        """Return the best continuations.

        Args:
            count: how many, at most `width`; fewer come if there are no more.
            cut: let those that are followed count as well, as ended for this reason, and empty ones where these are few.
        """
        ended = self._ended
        if cut is not None and not self.is_over:
            ended = _best(ended + [self._rank(node, cut) for node in self._open], count)
            ended += [_Ended(0.0, _ROOT, cut)] * (count - len(ended))
        return [Hypothesis(e.node.ids(), e.node.logprob, e.score, e.reason) for e in ended[:count]]

    def _can_improve(self, likeliest: _Node) -> bool:
        """Say whether one that goes on may still displace one that has ended, as far as its present length tells."""
        if len(self._ended) < self.params.width:
            return True
        return not self.params.early_stopping and self._score(likeliest) > self._ended[-1].score

    def _rank(self, node: _Node, reason: FinishReason) -> _Ended:
        return _Ended(self._score(node), node, reason)

    def _score(self, node: _Node) -> float:
        """Return the score of a continuation of the present length."""
        return node.logprob / self._length**self.params.length_penalty if self._length else 0.0


def _best(ended: list[_Ended], count: int) -> list[_Ended]:
    return sorted(ended, key=lambda entry: -entry.score)[:count]
