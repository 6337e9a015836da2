"""The bodies of answers: from chunks and ends of streams to OpenAI's JSON."""

import time
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from octavo.frontend.choice import ChoiceEnd, Chunk
from octavo.frontend.openai.prompt_logprobs import PromptColumns, PromptLogprob, describe_prompt, prompt_columns
from octavo.frontend.openai.texts import LEAST_LOGPROB, legacy_text
from octavo.frontend.openai.turns import Delta, Turn, delta_of, turn_of
from octavo.frontend.streams import Stream
from octavo.frontend.tokenizer import ModelTokenizer
from octavo.wire.columns import unpack_floats, unpack_ints
from octavo.wire.requests import FinishReason

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}

Ids: TypeAlias = list[int] | UnsetType
PromptLogprobs: TypeAlias = list[dict[int, PromptLogprob] | None] | UnsetType


class PromptDetails(Struct):
    """What is known of the prompt's tokens."""

    cached_tokens: int


class Usage(Struct):
    """Numbers of tokens, of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TopLogprob(Struct):
    """A token that could have been drawn."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the output, with the likeliest in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Of a chat."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    """Of a completion: columns with one entry a token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct):
    """A choice of a completion, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: Ids = UNSET
    prompt_token_ids: Ids = UNSET
    prompt_logprobs: PromptLogprobs = UNSET


class ChatChoice(Struct):
    """A choice of a chat."""

    index: int
    message: Turn
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: Ids = UNSET


class ChatChunkChoice(Struct):
    """What is new of a choice of a chat."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: Ids = UNSET


class Envelope(Struct):
    """An answer, or an event of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice] | list[ChatChoice] | list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: Ids = UNSET
    prompt_logprobs: PromptLogprobs = UNSET


@dataclass
class Part:
    """One prompt's stream among those of an answer.

    Attributes:
        stream: of its choices.
        tokenizer: of the model.
        first_index: of its choices in the answer.
        prompt_top: likeliest ids that are wanted for each token of the prompt; None if it is not to be told.
        prompt_logprobs: what is told of the prompt, once `describe` has been called.
        echoed: the prompt's part of the log-probabilities where it is echoed, once `describe` has been called.
        text_offsets: for each choice, where the text of its next token with log-probabilities begins.
    """

    stream: Stream
    tokenizer: ModelTokenizer
    first_index: int
    prompt_top: int | None = None
    prompt_logprobs: PromptLogprobs = field(default=UNSET, init=False)
    echoed: PromptColumns | None = field(default=None, init=False)
    text_offsets: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.text_offsets = [0] * len(self.stream.choices)

    async def describe(self) -> None:
        """Put into words what is wanted of the prompt, once all of it has been told."""
        journal = self.stream.journal
        params = journal.call.params
        if self.prompt_top is not None and self.prompt_logprobs is UNSET:
            self.prompt_logprobs = await describe_prompt(journal, self.tokenizer, self.prompt_top)
        if params.echo and params.logprobs is not None and self.echoed is None:
            self.echoed = await prompt_columns(journal, self.tokenizer, params.logprobs)

    def new_ids(self, chunk: Chunk) -> Ids:
        """Return the ids of a chunk, if they are wanted."""
        if not self.stream.journal.call.params.token_ids:
            return UNSET
        ids = self.stream.choices[chunk.choice].ids
        return list(ids[chunk.first_token : chunk.first_token + chunk.num_tokens])

    @property
    def prompt_ids(self) -> Ids:
        """The prompt's ids, if ids are wanted."""
        call = self.stream.journal.call
        return list(unpack_ints(call.prompt_ids)) if call.params.token_ids else UNSET


class Answer:
    """One answer: its name, its time, its model.

    Args:
        kind: chat.completion or text_completion.
        answer_id: its id.
        model: name of the model.
        include_usage: whether a stream's last event has the usage; then the others say that they have none.
    """

    def __init__(self, kind: str, answer_id: str, model: str, include_usage: bool = False) -> None:
        self.kind = kind
        self._id = answer_id
        self._created = int(time.time())
        self._model = model
        self._include_usage = include_usage

    @property
    def is_chat(self) -> bool:
        """Whether it is a chat."""
        return self.kind == "chat.completion"

    def whole(self, parts: list[Part]) -> bytes:
        """Return the answer of streams that have ended well and of which nothing was taken."""
        usage = usage_of(parts)
        if self.is_chat:
            (part,) = parts
            chat = [_whole_chat(part, index) for index in range(len(part.stream.choices))]
            ids = part.prompt_ids
            return msgspec.json.encode(
                Envelope(self._id, self.kind, self._created, self._model, chat, usage, ids, part.prompt_logprobs)
            )
        texts = [_whole_text(part, index) for part in parts for index in range(len(part.stream.choices))]
        return msgspec.json.encode(Envelope(self._id, self.kind, self._created, self._model, texts, usage))

    def begun(self, part: Part) -> bytes:
        """Return the first events of a prompt's choices: chats name their role, and ids of prompts come here."""
        if self.is_chat:
            opening = Delta(role="assistant", content="")
            chat = [ChatChunkChoice(part.first_index + i, opening) for i in range(len(part.stream.choices))]
            return self._event(chat, part.prompt_ids)
        if (ids := part.prompt_ids) is UNSET:
            return b""
        indexes = range(part.first_index, part.first_index + len(part.stream.choices))
        return self._event([CompletionChoice(index, "", prompt_token_ids=ids) for index in indexes])

    def chunk(self, part: Part, chunk: Chunk) -> bytes:
        """Return what is new of a choice as an event."""
        index, ids = part.first_index + chunk.choice, part.new_ids(chunk)
        if self.is_chat:
            chat = ChatChunkChoice(index, delta_of(chunk), _chat_logprobs(part, chunk), token_ids=ids)
            return self._event([chat])
        return self._event([CompletionChoice(index, chunk.text, _text_logprobs(part, chunk), token_ids=ids)])

    def ended(self, part: Part, choice: int, end: ChoiceEnd) -> bytes:
        """Return the end of a choice as an event."""
        index, reason = part.first_index + choice, _finish_reason(end)
        if self.is_chat:
            return self._event([ChatChunkChoice(index, Delta(), None, reason, _stop_reason(end))])
        return self._event([CompletionChoice(index, "", None, reason, _stop_reason(end))])

    def usage(self, parts: list[Part]) -> bytes:
        """Return the event with the usage."""
        envelope = Envelope(self._id, self._event_kind, self._created, self._model, [], usage_of(parts))
        return _sse(msgspec.json.encode(envelope))

    @property
    def _event_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else self.kind

    def _event(self, choices: list[CompletionChoice] | list[ChatChunkChoice], prompt_ids: Ids = UNSET) -> bytes:
        usage = None if self._include_usage else UNSET
        envelope = Envelope(self._id, self._event_kind, self._created, self._model, choices, usage, prompt_ids)
        return _sse(msgspec.json.encode(envelope))


LAST_EVENT = b"data: [DONE]\n\n"


def error_event(body: bytes) -> bytes:
    """Return an error as an event."""
    return _sse(body)


def usage_of(parts: list[Part]) -> Usage:
    """Return the usage of all prompts together."""
    num_prompt = sum(part.stream.journal.call.num_prompt_tokens for part in parts)
    num_completion = sum(part.stream.journal.num_completion_tokens for part in parts)
    cached = PromptDetails(sum(part.stream.num_cached_tokens for part in parts))
    return Usage(num_prompt, num_completion, num_prompt + num_completion, cached)


def _whole_text(part: Part, choice: int) -> CompletionChoice:
    end, chunk = _take_whole(part, choice)
    return CompletionChoice(
        part.first_index + choice,
        chunk.text,
        _text_logprobs(part, chunk),
        _finish_reason(end),
        _stop_reason(end),
        part.new_ids(chunk),
        part.prompt_ids,
        part.prompt_logprobs,
    )


def _whole_chat(part: Part, choice: int) -> ChatChoice:
    end, chunk = _take_whole(part, choice)
    return ChatChoice(
        part.first_index + choice,
        turn_of(chunk),
        _chat_logprobs(part, chunk),
        _finish_reason(end),
        _stop_reason(end),
        part.new_ids(chunk),
    )


def _take_whole(part: Part, choice: int) -> tuple[ChoiceEnd, Chunk]:
    """Return a choice's end, and its text as one chunk."""
    output = part.stream.choices[choice]
    if output.end is None:
        raise RuntimeError(f"choice {choice} has not ended")
    chunks = list(output.take(max(1, part.stream.journal.call.max_tokens)))
    logprobs = [entry for chunk in chunks for entry in chunk.logprobs]
    text, reasoning = "".join(chunk.text for chunk in chunks), "".join(chunk.reasoning for chunk in chunks)
    calls = tuple(call for chunk in chunks for call in chunk.calls)
    # Only now its end says whether calls were made.
    has_echo = any(chunk.is_echo for chunk in chunks)
    return output.end, Chunk(choice, 0, len(output.ids), text, logprobs, reasoning, calls, has_echo)


def _finish_reason(end: ChoiceEnd) -> str:
    return "tool_calls" if end.by_calls else _REASONS[end.reason]


def _stop_reason(end: ChoiceEnd) -> str | int | None:
    return end.stop_string if end.stop_string is not None else end.stop_token_id


def _chat_logprobs(part: Part, chunk: Chunk) -> ChatLogprobs | None:
    if part.stream.journal.call.params.logprobs is None:
        return None
    ids = part.stream.choices[chunk.choice].ids
    content = []
    for entry in chunk.logprobs:
        top_logprobs = [
            TopLogprob(*_token(part.tokenizer, top_id, logprob))
            for top_id, logprob in zip(unpack_ints(entry.top_ids), unpack_floats(entry.top_logprobs))
        ]
        content.append(TokenLogprob(*_token(part.tokenizer, ids[entry.position], entry.logprob), top_logprobs))
    return ChatLogprobs(content)


def _text_logprobs(part: Part, chunk: Chunk) -> CompletionLogprobs | None:
    if part.stream.journal.call.params.logprobs is None:
        return None
    ids, tokenizer = part.stream.choices[chunk.choice].ids, part.tokenizer
    found = CompletionLogprobs([], [], [], [])
    if chunk.is_echo and (echoed := part.echoed) is not None:
        offsets = [0, *accumulate(echoed.lengths)]
        part.text_offsets[chunk.choice] = offsets.pop()
        found = CompletionLogprobs(offsets, list(echoed.logprobs), list(echoed.tokens), list(echoed.top))
    for entry in chunk.logprobs:
        raw = tokenizer.token_bytes(ids[entry.position])
        text = legacy_text(raw)
        found.tokens.append(text)
        drawn = max(entry.logprob, LEAST_LOGPROB)
        found.token_logprobs.append(drawn)
        top = zip(unpack_ints(entry.top_ids), unpack_floats(entry.top_logprobs))
        likeliest = {legacy_text(tokenizer.token_bytes(i)): max(logprob, LEAST_LOGPROB) for i, logprob in top}
        # As OpenAI has it, the token that was drawn is always among them.
        found.top_logprobs.append(likeliest | {text: drawn})
        found.text_offset.append(part.text_offsets[chunk.choice])
        part.text_offsets[chunk.choice] += len(raw.decode("utf-8", "replace"))
    return found


def _token(tokenizer: ModelTokenizer, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
    raw = tokenizer.token_bytes(token_id)
    return raw.decode("utf-8", "replace"), max(logprob, LEAST_LOGPROB), list(raw)


def _sse(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
