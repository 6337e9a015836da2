"""A choice whose text says more than text: calls of tools, and what was thought."""

from array import array
from collections.abc import Iterator
from dataclasses import replace

from octavo.frontend.choice import ChoiceOutput, Chunk
from octavo.frontend.detokenizer import Detokenizer
from octavo.frontend.tools.parser import OutputParser
from octavo.frontend.tools.sink import Parsed
from octavo.frontend.validation import GenerationParams


class ParsedChoice(ChoiceOutput):
    """A ChoiceOutput whose chunks have been read. Its text is read when it is taken; when all of it has been taken, its
    end says whether calls were made.

    Args:
        index: which choice.
        ids: its journal.
        params: the request's parameters.
        detokenizer: makes its text.
        parser: reads it.
        echo: text of the prompt, which comes first, unread; None if it is not wanted.
    """

    __slots__ = ("_first_held", "_is_read", "_parser")

    def __init__(
        self,
        index: int,
        ids: "array[int]",
        params: GenerationParams,
        detokenizer: Detokenizer,
        parser: OutputParser,
        echo: str | None = None,
    ) -> None:
        super().__init__(index, ids, params, detokenizer, echo)
        self._parser = parser
        self._first_held: int | None = None  # the first token of which no chunk has told
        self._is_read = False

    def take(self, limit: int) -> Iterator[Chunk]:
        """Yield what is new, at most `limit` tokens a chunk, beside those of which there was nothing to tell before."""
        for chunk in super().take(limit):
            if chunk.is_echo:
                yield chunk
                continue
            yield from self._told(chunk, self._parser.feed(chunk.text))
        if self.end is not None and not self.num_unsent and not self._is_read:
            self._is_read = True
            parsed = self._parser.finish()
            # A stop string within a call's arguments leaves no call that could be made.
            cut = self.end.stop_string is not None and self._parser.in_arguments
            if self._parser.num_calls and not cut:
                self.end = replace(self.end, made_calls=True)
            yield from self._told(Chunk(self._index, self.num_taken, 0, "", []), parsed)

    def _told(self, chunk: Chunk, parsed: Parsed) -> Iterator[Chunk]:
        says_nothing = not (parsed.text or parsed.reasoning or parsed.calls)
        if says_nothing and (not self._wants_tokens or not chunk.num_tokens):
            if chunk.num_tokens and self._first_held is None:
                self._first_held = chunk.first_token
            return
        first, num_tokens = chunk.first_token, chunk.num_tokens
        if self._first_held is not None:
            num_tokens += first - self._first_held
            first, self._first_held = self._first_held, None
        yield Chunk(chunk.choice, first, num_tokens, parsed.text, chunk.logprobs, parsed.reasoning, parsed.calls)
