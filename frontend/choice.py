"""One choice of a request: from the ids that come to the pieces of text that go out."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from octavo.frontend.detokenizer import Detokenizer
from octavo.frontend.positions import PositionGap
from octavo.frontend.stops import StopMatch, StopMatcher
from octavo.frontend.tools.sink import CallDelta
from octavo.frontend.validation import GenerationParams
from octavo.wire.requests import ChoiceLogprobs, FinishReason


@dataclass(frozen=True)
class ChoiceEnd:
    """How a choice ended; at most one of the matches is set."""

    reason: FinishReason
    num_tokens: int
    stop_string: str | None = None
    stop_token_id: int | None = None
    made_calls: bool = False
    cumulative_logprob: float | None = None
    """Of beams."""

    @property
    def by_calls(self) -> bool:
        """Whether the choice ended by itself, having called tools."""
        return self.made_calls and self.reason is FinishReason.STOP


class Chunk(NamedTuple):
    """What is new of a choice: the tokens from `first_token` on that it covers, with what their text says."""

    choice: int
    first_token: int
    num_tokens: int
    text: str
    logprobs: list[ChoiceLogprobs]
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    is_echo: bool = False  # the prompt's text, before all else


class ChoiceOutput:
    """Ids in, chunks of text out.

    The law: `ids` grows by one at the next position or not at all; each token is covered by exactly one chunk, in
    order; the texts of all chunks together are the text of all ids, up to the stop that ended them.

    Args:
        index: which choice.
        ids: its journal, empty or with what was received before.
        params: the request's parameters.
        detokenizer: None if no text is made.
        echo: text of the prompt, which comes first; None if it is not wanted.
    """

    __slots__ = (
        "_detokenizer",
        "_echo",
        "_hidden_stop_ids",
        "_index",
        "_logprobs",
        "_matcher",
        "_min_tokens",
        "_num_logprobs",
        "_pieces",
        "_stop_ids",
        "_tail",
        "_wants_tokens",
        "end",
        "ids",
        "num_taken",
    )

    def __init__(
        self,
        index: int,
        ids: "array[int]",
        params: GenerationParams,
        detokenizer: Detokenizer | None,
        echo: str | None = None,
    ) -> None:
        self.ids = ids
        self.end: ChoiceEnd | None = None
        self.num_taken = 0
        self._index = index
        self._detokenizer = detokenizer
        self._echo = echo
        stops = params.stop_strings
        self._matcher = StopMatcher(stops, params.include_stop_string) if stops else None
        self._min_tokens = params.min_tokens
        self._stop_ids = params.caller_stop_ids
        self._hidden_stop_ids = frozenset() if params.include_stop_string else params.caller_stop_ids
        self._wants_tokens = params.token_ids or params.logprobs is not None
        self._pieces: list[str] = []
        self._tail = ""
        self._logprobs: list[ChoiceLogprobs] = []
        self._num_logprobs = 0

    @property
    def num_unsent(self) -> int:
        """Number of tokens that the client is to get and that have not been taken.

        Tokens that wait only because there is nothing to send of them are not among them: no client can read those.
        """
        return len(self._pieces) if self._wants_tokens or any(self._pieces) else 0

    def push(self, position: int, token_id: int) -> bool:
        """Take an id; say whether a stop string ended the choice by it. Ids at earlier positions are repetitions.

        Raises:
            PositionGap: ids before it are missing.
        """
        ids = self.ids
        if position != len(ids):
            if position > len(ids):
                raise PositionGap(f"token {position} of choice {self._index} came after {len(ids)} tokens")
            return False
        ids.append(token_id)
        if self._detokenizer is None or token_id in self._hidden_stop_ids:
            self._pieces.append("")
            return False
        piece = self._detokenizer.push(token_id)
        if self._matcher is not None and piece:
            shown = self._matcher.feed(piece, len(ids) >= self._min_tokens)
            if isinstance(shown, StopMatch):
                self._pieces.append(shown.text)
                self._end_by_string(shown)
                return True
            piece = shown
        self._pieces.append(piece)
        return False

    def push_logprobs(self, logprobs: ChoiceLogprobs) -> None:
        """Take the log-probabilities of the id at their position; those of repeated or dropped ids are dropped."""
        if logprobs.position == self._num_logprobs and logprobs.position < len(self.ids):
            self._num_logprobs += 1
            self._logprobs.append(logprobs)

    def finish(self, reason: FinishReason, num_tokens: int, cumulative_logprob: float | None = None) -> None:
        """End the choice because the scheduler says so.

        Raises:
            PositionGap: fewer ids have come than the scheduler sent.
        """
        if num_tokens != len(self.ids):
            raise PositionGap(f"choice {self._index} ended after {num_tokens} tokens, {len(self.ids)} came")
        tail = self._detokenizer.flush() if self._detokenizer is not None else ""
        if self._matcher is not None:
            match = self._matcher.feed(tail, num_tokens >= self._min_tokens)
            if isinstance(match, StopMatch):
                self._end_by_string(match)
                self._add_tail(match.text)
                return
            tail = match + self._matcher.flush()
        last = self.ids[-1] if num_tokens else None
        by_id = reason is FinishReason.STOP and last in self._stop_ids
        stop_id = last if by_id else None
        self.end = ChoiceEnd(reason, num_tokens, stop_token_id=stop_id, cumulative_logprob=cumulative_logprob)
        self._add_tail(tail)

    def take(self, limit: int) -> Iterator[Chunk]:
        """Yield what is new, at most `limit` tokens a chunk. Tokens without text wait for text, unless ids are wanted.

        Each chunk counts as taken when it is yielded.
        """
        if self._echo is not None:
            text, self._echo = self._echo, None
            yield Chunk(self._index, 0, 0, text, [], is_echo=True)
        pieces = self._pieces
        while pieces or self._tail:
            count = min(limit, len(pieces))
            text = "".join(pieces[:count])
            if count == len(pieces):
                text += self._tail
                if not text and not self._wants_tokens and (self.end is not None or count < limit):
                    return
                self._tail = ""
            first = self.num_taken
            self.num_taken += count
            del pieces[:count]
            logprobs = self._logprobs[:count]
            del self._logprobs[:count]
            yield Chunk(self._index, first, count, text, logprobs)

    def _end_by_string(self, match: StopMatch) -> None:
        self.end = ChoiceEnd(FinishReason.STOP, len(self.ids), stop_string=match.stop_string)

    def _add_tail(self, tail: str) -> None:
        if self._pieces:
            self._pieces[-1] += tail
        else:
            self._tail = tail
