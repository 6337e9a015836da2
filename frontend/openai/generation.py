"""POST /v1/completions and POST /v1/chat/completions, whole and as streams."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import msgspec

from octavo.frontend.calls import DEFAULT_CHUNK_TOKENS, Calls, Checked
from octavo.frontend.choice import Chunk
from octavo.frontend.errors import InvalidArgument, ServiceError
from octavo.frontend.openai.answers import LAST_EVENT, Answer, Part
from octavo.frontend.openai.call import HttpCall
from octavo.frontend.openai.errors import HttpError, from_msgspec, to_http
from octavo.frontend.openai.schema import ChatBody, CompletionBody, GenerationBody
from octavo.frontend.openai.translate import (
    Translation,
    refuse_stream_options,
    translate_chat,
    translate_completion,
)
from octavo.frontend.streams import Writing

EVENT_COST_S = 25e-6
"""CPU time of an event of a stream, about (benchmarks/frontend_cpu.py)."""

_COMPLETIONS = msgspec.json.Decoder(CompletionBody)
_CHATS = msgspec.json.Decoder(ChatBody)


class Generation:
    """Both kinds of completions, on one path.

    Args:
        calls: checks requests and holds their streams.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def complete(self, call: HttpCall) -> None:
        """POST /v1/completions."""
        body = await call.read(_COMPLETIONS)
        translation = await _translated(call, lambda: translate_completion(body, self._calls.config))
        await self._answer(call, body, translation, "cmpl")

    async def chat(self, call: HttpCall) -> None:
        """POST /v1/chat/completions."""
        body = await call.read(_CHATS)
        await self._answer(call, body, await _translated(call, lambda: translate_chat(body)), "chatcmpl")

    async def _answer(self, call: HttpCall, body: GenerationBody, translation: Translation, prefix: str) -> None:
        refuse_stream_options(body)
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        kind = "chat.completion" if prefix == "chatcmpl" else "text_completion"
        model = self._calls.config.served_model_names[0]
        answer = Answer(kind, f"{prefix}-{call.context.request_id}", model, include_usage)
        with self._calls.counted(len(translation)):
            async with call.watched():
                # All are checked before the first begins.
                checked = [await self._check(call, translation, index) for index in range(len(translation))]
                unsent = self._calls.config.max_unsent_tokens if body.stream else None
                with ExitStack() as streams:
                    parts = self._begin(call, checked, streams, unsent, body.prompt_logprobs)
                    if not body.stream:
                        await _each(parts, _wait)
                        for part in parts:
                            await part.describe()
                        await call.reply(answer.whole(parts))
                        return
                    await _each(parts, lambda part: _send_all(part, answer, call))
                    tail = answer.usage(parts) if include_usage else b""
                    await call.send_events(tail + LAST_EVENT, last=True)

    async def _check(self, call: HttpCall, translation: Translation, index: int) -> Checked:
        try:
            return await self._calls.check(translation.input(index), call.context, translation.echo)
        except UnicodeError as error:
            raise from_msgspec(error) from None
        except InvalidArgument as error:
            raise to_http(error, translation.param(error.field_path, index)) from None

    def _begin(
        self, call: HttpCall, checked: list[Checked], streams: ExitStack, unsent: int | None, prompt_top: int | None
    ) -> list[Part]:
        parts: list[Part] = []
        num_choices = 0
        for one in checked:
            stream = streams.enter_context(self._calls.begun(one, call.context, unsent, EVENT_COST_S))
            parts.append(Part(stream, one.model.tokenizer, num_choices, prompt_top))
            num_choices += len(stream.choices)
        return parts


async def _translated(call: HttpCall, translate: Callable[[], Translation]) -> Translation:
    try:
        return await call.do(translate)
    except UnicodeError as error:
        raise from_msgspec(error) from None


async def _each(parts: list[Part], work: Callable[[Part], Awaitable[None]]) -> None:
    """Do the work for every prompt; the first that fails ends the others."""
    if len(parts) == 1:
        await work(parts[0])
        return

    async def one(part: Part) -> None:
        await work(part)

    try:
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(one(part))
    except* (ServiceError, HttpError) as errors:
        failure = errors.exceptions[0]
    else:
        return
    raise failure


async def _wait(part: Part) -> None:
    stream = part.stream
    while not stream.ended:
        await stream.changed()
    if stream.error is not None:
        raise stream.error


async def _send_all(part: Part, answer: Answer, call: HttpCall) -> None:
    """Send what is new of one prompt's choices until all of them have ended; one event carries all of a choice."""
    stream, writing = part.stream, Writing(part.stream)
    num_running = len(stream.choices)
    started = False
    while num_running:
        await stream.changed()
        with writing:
            events = b""
            if not started and stream.started:
                started = True
                events = answer.begun(part)
            if (prompt := stream.journal.prompt) is not None and (prompt.is_whole or stream.ended):
                await part.describe()
            for item in stream.take(DEFAULT_CHUNK_TOKENS):
                if isinstance(item, Chunk):
                    events += answer.chunk(part, item)
                else:
                    num_running -= 1
                    events += answer.ended(part, *item)
            if events:
                await call.send_events(events)
        if stream.error is not None:
            raise stream.error
