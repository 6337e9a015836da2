"""What a frontend tells of its calls in spans: one a call, and below it the prompt's way in and each request's stream.

No span holds text of a prompt or an answer, nor words of an error, which may quote them.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from octavo.frontend.errors import ServiceError
from octavo.frontend.streams import Stream
from octavo.v1 import generation_pb2 as pb
from octavo.wire.tracing import MAX_SPAN_EVENTS, SpanClock

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from octavo.wire.tracing_export import Attributes, Tracing

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]] | None

MAX_FINISH_REASONS = 128
"""Of one call: one for each choice, as far as there is room."""

_current: "ContextVar[CallTrace | None]" = ContextVar("octavo_call_trace", default=None)


def current_trace() -> "CallTrace | None":
    """Return what tells of the call that the running task answers; None: nobody wants to know."""
    return _current.get()


@dataclass(slots=True)
class Usage:
    """What one or several requests took."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: tuple[str, ...] = ()

    def add(self, other: "Usage") -> None:
        """Count another request in."""
        self.input_tokens += other.input_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens
        self.finish_reasons = (self.finish_reasons + other.finish_reasons)[:MAX_FINISH_REASONS]

    def attributes(self) -> "dict[str, str | bool | int | float | tuple[str, ...]]":
        """Return it in the words of OpenTelemetry's conventions for generative AI."""
        return {
            "gen_ai.usage.input_tokens": self.input_tokens,
            "gen_ai.usage.cache_read.input_tokens": self.cached_tokens,
            "gen_ai.usage.output_tokens": self.output_tokens,
            "gen_ai.response.finish_reasons": self.finish_reasons,
        }


class CallTracer:
    """Begins the spans of calls.

    Args:
        tracing: makes spans.
        model: name that answers carry.
    """

    def __init__(self, tracing: "Tracing", model: str) -> None:
        self._tracing = tracing
        self._model = model

    def begin(self, name: str, attributes: "Attributes", metadata: Metadata) -> "CallTrace | None":
        """Begin to tell of a call; None if its trace is not sampled.

        Args:
            name: of the gRPC method or the HTTP route.
            attributes: what the door knows of it.
            metadata: gRPC's, or the headers of HTTP, with lower-case names: the caller's span is read from them.
        """
        parents = _values(metadata, "traceparent")
        parent = self._tracing.remote(
            parents[0] if len(parents) == 1 else "", ",".join(_values(metadata, "tracestate"))
        )
        clock = SpanClock()
        span = self._tracing.start(name, parent, attributes, clock.at(time.monotonic()), is_server=True)
        return CallTrace(self._tracing, span, clock, self._model) if span is not None else None


class CallTrace:
    """The span of one call, from its first moment to its last."""

    def __init__(self, tracing: "Tracing", span: "Span", clock: SpanClock, model: str) -> None:
        self._tracing = tracing
        self._span = span
        self._clock = clock
        self._model = model
        self._context = tracing.within(span)
        self._usage = Usage()
        self._latencies: list[dict[str, float]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Be what `current_trace` finds."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    @contextmanager
    def tokenising(self, request: pb.GenerationInput, request_id: str) -> Iterator[None]:
        """Tell of a request's checks: template, tokenizer, grammar."""
        self._span.set_attributes({**self._asked(request), "gen_ai.request.id": request_id})
        begun, attributes = time.monotonic(), dict[str, str | int]()
        try:
            yield
        except ServiceError as error:
            attributes["error.type"] = type(error).__name__
            raise
        finally:
            at, end = self._clock.at(begun), self._clock.at(time.monotonic())
            self._tracing.record("octavo.tokenize", self._context, at, end, attributes)

    def begin_stream(self, stream: Stream, arrived_at: float) -> "StreamTrace":
        """Tell of a request from its submission on."""
        return StreamTrace(self, self._tracing, stream, arrived_at)

    def add(self, usage: Usage, latencies: dict[str, float]) -> None:
        """Take what a stream that has ended took."""
        self._usage.add(usage)
        self._latencies.append(latencies)

    def end(self, attributes: "Attributes", failed: bool) -> None:
        """End the span.

        Args:
            attributes: how the door answered.
            failed: whether the service is to blame.
        """
        span = self._span
        span.set_attributes(attributes)
        if self._latencies:
            span.set_attributes(self._usage.attributes())
        if len(self._latencies) == 1:  # of several prompts, each has its own
            span.set_attributes(self._latencies[0])
        if failed:
            self._tracing.set_failed(span)
        span.end(self._clock.at(time.monotonic()))

    def start_child(self, name: str, attributes: "Attributes") -> "Span | None":
        """Begin a span below this one."""
        return self._tracing.start(name, self._context, attributes, self.now())

    def now(self) -> int:
        """Return the time as spans have it."""
        return self._clock.at(time.monotonic())

    def at(self, loop_time: float) -> int:
        """Return a moment of the event loop's clock, which is the monotonic one, as spans have it."""
        return self._clock.at(loop_time)

    def _asked(self, request: pb.GenerationInput) -> "dict[str, str | int | float]":
        is_chat = request.WhichOneof("prompt") == "chat"
        asked: dict[str, str | int | float] = {
            "gen_ai.operation.name": "chat" if is_chat else "text_completion",
            "gen_ai.provider.name": "octavo",
            "gen_ai.request.model": request.model[:200] or self._model,
            "gen_ai.response.model": self._model,
        }
        for field, value in request.sampling.ListFields():
            if field.name in _SAMPLING:
                asked[f"gen_ai.request.{_SAMPLING[field.name]}"] = value
        if request.stopping.HasField("max_tokens"):
            asked["gen_ai.request.max_tokens"] = request.stopping.max_tokens
        return asked


class StreamTrace:
    """The span of one request's stream: queue and generation, with pauses and replays.

    Attributes:
        traceparent: names the span to scheduler and worker.
    """

    def __init__(self, call: CallTrace, tracing: "Tracing", stream: Stream, arrived_at: float) -> None:
        params = stream.journal.call.params
        attributes = {"octavo.num_choices": params.num_choices, "octavo.num_prompt_tokens": _num_prompt(stream)}
        self._call = call
        self._tracing = tracing
        self._stream = stream
        self._arrived_at = arrived_at
        self._span = call.start_child("octavo.generate", attributes)
        self._num_events = 0
        self._num_begun = 0
        self.traceparent = tracing.traceparent_of(self._span) if self._span is not None else ""

    def event(self, name: str, attributes: "Attributes") -> None:
        """Tell of something that happens now."""
        if self._span is not None and self._num_events < MAX_SPAN_EVENTS:
            self._num_events += 1
            self._span.add_event(name, attributes, self._call.now())

    def on_begin(self) -> None:
        """The request is submitted; if it was before, that session is over."""
        if self._num_begun:
            self.event("octavo.replay", {"octavo.num_output_tokens": self._stream.journal.num_completion_tokens})
        self._num_begun += 1

    def end(self) -> None:
        """End the span with what the stream has come to."""
        stream, span = self._stream, self._span
        usage, latencies = self._usage(), self._latencies()
        self._call.add(usage, latencies)
        if span is None:
            return
        span.set_attributes({**usage.attributes(), **latencies})
        if (first := stream.first_token_at) is not None:
            span.add_event("octavo.first_token", {}, self._call.at(first))
        if stream.error is not None:
            span.set_attribute("error.type", type(stream.error).__name__)
            self._tracing.set_failed(span)
        how = "failed" if stream.error is not None else "finished" if stream.ended else "cancelled"
        span.add_event("octavo.end", {"octavo.outcome": how}, self._call.now())
        span.end(self._call.now())

    def _usage(self) -> Usage:
        stream = self._stream
        ends = [choice.end for choice in stream.choices if choice.end is not None][:MAX_FINISH_REASONS]
        reasons = tuple("tool_calls" if end.by_calls else end.reason.name.lower() for end in ends)
        return Usage(_num_prompt(stream), stream.num_cached_tokens, stream.journal.num_completion_tokens, reasons)

    def _latencies(self) -> dict[str, float]:
        """Return seconds under the names that vLLM gives them."""
        stream, timings = self._stream, self._stream.timings
        found = {"e2e": time.monotonic() - self._arrived_at}
        if stream.started:
            found["time_in_queue"] = timings.queue_s
        if (first := stream.first_token_at) is not None:
            found["time_to_first_token"] = first - self._arrived_at
            found["time_in_model_prefill"] = timings.prefill_s
            found["time_in_model_decode"] = timings.decode_s
            found["time_in_model_inference"] = timings.prefill_s + timings.decode_s
        return {f"gen_ai.latency.{name}": seconds for name, seconds in found.items()}


_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "n": "choice.count",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Fields of a request's sampling, and what OpenTelemetry calls them."""


def _num_prompt(stream: Stream) -> int:
    return stream.journal.call.num_prompt_tokens


def _values(metadata: Metadata, key: str) -> list[str]:
    return [value for name, value in metadata or () if name == key and isinstance(value, str)]
