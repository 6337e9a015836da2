"""All requests that this frontend holds; each is given its part of the scheduler's messages."""

import asyncio
from collections.abc import Callable, Iterator

from octavo.frontend.errors import (
    CallerLimitExceeded,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    QueueFull,
    ServiceError,
    Unavailable,
)
from octavo.frontend.pacing import Pacer
from octavo.frontend.streams import Stream
from octavo.wire.columns import unpack_ints
from octavo.wire.ids import MAX_HANDLE
from octavo.wire.requests import FailureCode, RequestFailed, StepOutput

FAILURES: dict[FailureCode, Callable[[RequestFailed], ServiceError]] = {
    FailureCode.INVALID: lambda e: InvalidArgument(e.message, field_path="input"),
    FailureCode.QUEUE_FULL: lambda e: QueueFull(e.message, retry_after_s=e.retry_after_s),
    FailureCode.UNAVAILABLE: lambda e: Unavailable(e.message, retry_after_s=e.retry_after_s),
    FailureCode.DEADLINE: lambda e: DeadlineExceeded(e.message),
    FailureCode.INTERNAL: lambda e: InternalError(e.message),
    FailureCode.CALLER_LIMIT: lambda e: CallerLimitExceeded(
        e.message, retry_after_s=e.retry_after_s, metadata={name: str(value) for name, value in e.figures}
    ),
}
"""What a caller is told of a failure at the scheduler."""


class StreamTable:
    """All streams of this frontend, by handle. Handles are not used again while a stream has them.

    Args:
        loop: on which they are woken.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._pacer = Pacer(loop)
        self.num_unknown = 0  # tokens of requests that are gone: cancels cross with outputs
        self._streams: dict[int, Stream] = {}
        self._next_handle = 0

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        return iter(list(self._streams.values()))

    def new_handle(self) -> int:
        """Draw a handle."""
        handle = self._next_handle
        while handle in self._streams:
            handle = handle + 1 if handle < MAX_HANDLE else 0
        self._next_handle = handle + 1 if handle < MAX_HANDLE else 0
        return handle

    def add(self, stream: Stream) -> None:
        """Hold a stream."""
        self._streams[stream.handle] = stream

    def remove(self, stream: Stream) -> None:
        """Let go of a stream."""
        self._streams.pop(stream.handle, None)

    def watch(self, event: str, attributes: dict[str, str]) -> None:
        """Tell who watches streams that something has happened to all of them."""
        for stream in self._streams.values():
            if stream.watcher is not None and not stream.ended:
                stream.watcher.event(event, attributes)

    def apply(self, output: StepOutput) -> None:
        """Give each stream its part of a message; parts of streams that are gone are dropped.

        Raises:
            PositionGap: ids are missing.
        """
        streams = self._streams
        for started in output.started:
            if (stream := streams.get(started.handle)) is not None:
                stream.on_started(started)
        for told in output.prompt_logprobs:
            if (stream := streams.get(told.of)) is not None:
                stream.on_told(told)
        columns = map(unpack_ints, (output.handle, output.choice, output.position, output.token))
        fed: dict[int, Stream] = {}
        for handle, choice, position, token_id in zip(*columns, strict=True):
            if (stream := streams.get(handle)) is None:
                self.num_unknown += 1
            elif stream.on_token(choice, position, token_id):
                fed[handle] = stream
        if fed:
            self._pacer.wake(list(fed.values()))
        for logprobs in output.logprobs:
            if (stream := streams.get(logprobs.handle)) is not None and logprobs.choice < len(stream.choices):
                stream.choices[logprobs.choice].push_logprobs(logprobs)
        for finished in output.finished:
            if (stream := streams.get(finished.handle)) is not None:
                stream.on_finished(finished)
        for failed in output.failed:
            if (stream := streams.get(failed.handle)) is not None:
                stream.on_failed(FAILURES[failed.code](failed))
