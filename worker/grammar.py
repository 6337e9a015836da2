"""Matchers: which ids may come next in rows whose text must follow a grammar.

A matcher is built from a row's output when the row begins, so preemption, replay and restarts need nothing more; forks
copy it. It advances when the host knows the row's new id, and its mask is filled just before the next one is drawn.
"""

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo.wire.columns import unpack_ints
from octavo.wire.errors import MalformedMessage
from octavo.wire.grammar import load_core, tokenizer_info, unpack
from octavo.wire.plan import NewRow, StepPlan
from octavo.wire.vocabulary import VocabularyError, read_token_bytes
from octavo.worker.sampler import Sampled, TokenMask

logger = logging.getLogger(__name__)

MAX_CACHED_BYTES = 256 * 2**20
"""Of compiled grammars that no row uses at the moment, or that any does, the newest counted first."""

MAX_CACHED = 1024
_MAX_STOP_SETS = 4
"""Different sets of stop ids, each of which takes a copy of the vocabulary; one model has one."""

_BITS = 32


class Follower:
    """Where a row stands in its grammar.

    Attributes:
        is_dead: it cannot go on: each draw of the row is a fault.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.is_dead = matcher is None

    @property
    def matcher(self) -> Any:
        """Its matcher, None if it needs no mask: dead, or the text is complete and was ended."""
        return None if self.is_dead or self._matcher.is_terminated() else self._matcher

    def accept(self, token: int) -> None:
        """Go on by an id. After the end nothing changes: such a step was planned before the end was known."""
        if (matcher := self.matcher) is not None and not matcher.accept_token(token, False):
            self.is_dead = True

    def fork(self) -> "Follower":
        """Return another one that stands at the same place."""
        other = Follower(None if self._matcher is None else self._matcher.fork())
        other.is_dead = self.is_dead
        return other


@dataclass(frozen=True)
class Masks:
    """What the rows of a step may draw, of those with a grammar.

    Attributes:
        mask: of those that go on.
        dead: places of those that cannot.
    """

    mask: TokenMask
    dead: list[int]


class Grammars:
    """The followers of one worker's rows; none at the start of each session. Compiled grammars outlive sessions.

    Args:
        folder: the model's folder; None if it has no tokenizer: then a row with a grammar is dead from the start.
    """

    def __init__(self, folder: Path | None) -> None:
        self._followers: dict[int, Follower] = {}
        self._infos: dict[tuple[int, ...], Any] = {}
        self._compiled: OrderedDict[bytes, tuple[Any, tuple[int, ...]]] = OrderedDict()
        self._num_cached_bytes = 0
        self._core: Any = None
        self._token_bytes: list[bytes] = []
        if folder is None:
            return
        try:
            self._token_bytes = read_token_bytes(folder)
            self._core = load_core()
            self._batch = self._core.BatchGrammarMatcher("auto")
        except (VocabularyError, ImportError) as error:
            logger.warning("structured output is not possible: %s", error)

    def clear(self) -> None:
        """Forget every row: the session is over."""
        self._followers.clear()

    @property
    def num_rows(self) -> int:
        """Rows that follow a grammar."""
        return len(self._followers)

    def apply(self, plan: StepPlan) -> None:
        """Let go of the rows that a plan frees, and begin those that it begins."""
        if self._followers:
            for row in unpack_ints(plan.freed_rows):
                self._followers.pop(row, None)
        for new in plan.new_rows:
            if new.grammar:
                self._followers[new.row] = self._begin(new, plan.grammars[new.grammar - 1])

    def has_any(self, rows: Sequence[int]) -> bool:
        """Say whether one of the rows has a grammar."""
        return bool(self._followers) and not self._followers.keys().isdisjoint(rows)

    def of_step(self, plan: StepPlan, rows: Sequence[int]) -> list[tuple[int, Follower]]:
        """Fork what a plan forks, and return the followers of the rows that sample, with the places of these.

        All ids that were drawn before are known to the followers.
        """
        if not self._followers:
            return []
        for source, target in zip(unpack_ints(plan.fork_src), unpack_ints(plan.fork_dst), strict=True):
            if (follower := self._followers.get(source)) is not None:
                self._followers[target] = follower.fork()
        found = ((place, self._followers.get(row)) for place, row in enumerate(rows))
        return [(place, follower) for place, follower in found if follower is not None]

    def masks(self, followers: list[tuple[int, Follower]]) -> Masks | None:
        """Return what may be drawn next, None if no row has a grammar. Who finds nothing is dead from now on."""
        if not followers:
            return None
        live = [
            (place, follower, matcher) for place, follower in followers if (matcher := follower.matcher) is not None
        ]
        words = np.zeros((len(live), -(-len(self._token_bytes) // _BITS)), dtype=np.int32)
        if live:
            self._batch.batch_fill_next_token_bitmask([matcher for _, _, matcher in live], words, None, False)
        for line, (_, follower, _) in enumerate(live):
            follower.is_dead = not words[line].any()
        dead = [place for place, follower in followers if follower.is_dead]
        return Masks(TokenMask([place for place, _, _ in live], words), dead)

    def _begin(self, new: NewRow, body: bytes) -> Follower:
        try:
            compiled, stop_ids = self._load(body)
        except (MalformedMessage, RuntimeError, ValueError) as error:
            logger.error("the grammar of %s/%d cannot be used: %s", new.request, new.choice, error)
            return Follower(None)
        follower = Follower(self._core.GrammarMatcher(compiled, list(stop_ids), False, -1, None))
        for token in unpack_ints(new.token_ids)[new.num_prompt_tokens :]:
            follower.accept(token)
        return follower

    def _load(self, body: bytes) -> tuple[Any, tuple[int, ...]]:
        """Return a compiled grammar and its stop ids.

        Raises:
            MalformedMessage: the bytes are no grammar, or there is no tokenizer for it.
            RuntimeError: xgrammar refuses it.
        """
        key = hashlib.sha256(body).digest()
        if key in self._compiled:
            self._compiled.move_to_end(key)
            return self._compiled[key]
        if self._core is None:
            raise MalformedMessage("this worker has no tokenizer whose ids can be turned into bytes one by one")
        text, stop_ids = unpack(body)
        if not all(0 <= one < len(self._token_bytes) for one in stop_ids):
            raise MalformedMessage(f"stop ids {stop_ids} lie outside of the vocabulary")
        compiled = self._core.CompiledGrammar.deserialize_json(text, self._info(stop_ids))
        self._compiled[key] = compiled, stop_ids
        self._num_cached_bytes += compiled.memory_size_bytes()
        while len(self._compiled) > 1 and (
            self._num_cached_bytes > MAX_CACHED_BYTES or len(self._compiled) > MAX_CACHED
        ):
            _, (oldest, _) = self._compiled.popitem(last=False)
            self._num_cached_bytes -= oldest.memory_size_bytes()
        return compiled, stop_ids

    def _info(self, stop_ids: tuple[int, ...]) -> Any:
        if stop_ids not in self._infos:
            while len(self._infos) >= _MAX_STOP_SETS:
                del self._infos[next(iter(self._infos))]
            self._infos[stop_ids] = tokenizer_info(self._core, self._token_bytes, stop_ids)
        return self._infos[stop_ids]


def settle(followers: list[tuple[int, Follower]], masks: Masks | None, sampled: list[Sampled]) -> list[Sampled]:
    """Let followers go on by what their rows drew; return it, with dead ends marked."""
    if masks is None:
        return sampled
    settled = list(sampled)
    for place in masks.dead:
        settled[place] = replace(settled[place], token=None, dead_end=True, logprobs=None)
    for place, follower in followers:
        if (token := settled[place].token) is not None:
            follower.accept(token)
    return settled
