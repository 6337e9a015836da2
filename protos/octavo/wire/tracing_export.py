"""Spans of one process, and their way to the collector. Imports OpenTelemetry: only `start_tracing` loads this."""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import TypeAlias

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from octavo.wire.tracing import TracingError

MAX_QUEUE_SPANS = 2048
"""Spans that wait for the collector, or are on their way to it; more are lost. OTEL_BSP_MAX_QUEUE_SIZE."""

MAX_BATCH_SPANS = 256
"""Spans of one message. OTEL_BSP_MAX_EXPORT_BATCH_SIZE."""

SCHEDULE_DELAY_MS = 2000
"""How long spans wait for others to go with: a message costs two milliseconds of CPU time. OTEL_BSP_SCHEDULE_DELAY."""

CLOSE_S = 2.0
"""How long a process that ends waits at most for its last spans to leave."""

COMPLAIN_EVERY_S = 60.0
"""Between two lines of the log about lost spans."""

SWITCH_INTERVAL_S = 0.001
"""How long the thread that sends may keep the interpreter from the one that works; Python's default is 5 ms."""

MAX_TRACESTATE_CHARS = 512

Attributes: TypeAlias = Mapping[str, str | bool | int | float | Sequence[str]]
Events: TypeAlias = Iterable[tuple[str, int, Attributes]]
"""Name, time (ns since 1970) and attributes of each."""

_log = logging.getLogger(__name__)


class Tracing:
    """Makes spans, and sends them from a thread of its own.

    The law: nothing here waits for the collector, and what waits for it is bounded; spans that find no room, or that it
    does not take, are lost and counted. Spans are ended in one thread.

    Args:
        process: frontend, scheduler or worker.
        url: where spans are sent.
        instance: names this life of the process.

    Raises (on construction):
        TracingError: an OTEL_* variable cannot be understood.
    """

    def __init__(self, process: str, url: str, instance: str) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        words = _LastWords()
        exporter = _CountingExporter(OTLPSpanExporter(endpoint=url), words)
        self._processor = _BoundedProcessor(exporter)
        told = {SERVICE_VERSION: version("octavo"), SERVICE_INSTANCE_ID: instance, "octavo.process": process}
        if not _is_service_named():
            told[SERVICE_NAME] = f"octavo-{process}"
        resource = Resource.create(told)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("octavo", version("octavo"))
        self._propagator = TraceContextTextMapPropagator()
        if words.text:
            _log.warning("OpenTelemetry: %s", words.text)

    @property
    def num_lost(self) -> int:
        """Spans that found no room or that the collector did not take."""
        return self._processor.num_lost

    def remote(self, traceparent: str, tracestate: str = "") -> Context:
        """Return where a span stands whose parent is elsewhere; what is no traceparent is ignored."""
        if not traceparent:
            return Context()
        carrier = {"traceparent": traceparent}
        if tracestate and len(tracestate) <= MAX_TRACESTATE_CHARS:
            carrier["tracestate"] = tracestate
        return self._propagator.extract(carrier, Context())

    def start(
        self, name: str, parent: Context, attributes: Attributes, start_ns: int, *, is_server: bool = False
    ) -> Span | None:
        """Begin a span; None if its trace is not wanted (it is not sampled)."""
        kind = SpanKind.SERVER if is_server else SpanKind.INTERNAL
        span = self._tracer.start_span(name, parent, kind, dict(attributes), start_time=start_ns)
        return span if span.get_span_context().trace_flags.sampled else None

    def record(
        self, name: str, parent: Context, start_ns: int, end_ns: int, attributes: Attributes, events: Events = ()
    ) -> None:
        """Tell of something that has ended."""
        if (span := self.start(name, parent, attributes, start_ns)) is None:
            return
        for event, at_ns, details in events:
            span.add_event(event, dict(details), at_ns)
        span.end(end_ns)

    @staticmethod
    def within(span: Span) -> Context:
        """Return where a child of a span stands."""
        return set_span_in_context(span, Context())

    @staticmethod
    def traceparent_of(span: Span) -> str:
        """Return a sampled span as W3C Trace Context writes it."""
        context = span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    @staticmethod
    def set_failed(span: Span) -> None:
        """Say that the work of a span failed. Words of errors are left out: they may quote a request."""
        span.set_status(Status(StatusCode.ERROR))

    def close(self) -> None:
        """Send what waits, for `CLOSE_S` at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        self._processor.complain(is_last=True)


class _BoundedProcessor(SpanProcessor):
    """Hands spans to the batch processor while there is room.

    `_num_ended` is written by the thread that ends spans, what the exporter has done with them by the exporter's.
    """

    def __init__(self, exporter: "_CountingExporter") -> None:
        self._max_waiting = _positive_int("OTEL_BSP_MAX_QUEUE_SIZE", MAX_QUEUE_SPANS)
        self._exporter = exporter
        self._num_ended = self._num_dropped = 0
        self._complaint_due = 0.0
        self._num_told = 0
        try:
            self._batches = BatchSpanProcessor(
                exporter,
                max_queue_size=self._max_waiting,
                schedule_delay_millis=_positive_int("OTEL_BSP_SCHEDULE_DELAY", SCHEDULE_DELAY_MS),
                max_export_batch_size=_positive_int("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", MAX_BATCH_SPANS),
            )
        except ValueError as error:
            raise TracingError(f"OTEL_BSP_*: {error}") from error

    @property
    def num_lost(self) -> int:
        return self._num_dropped + self._exporter.num_refused

    def on_end(self, span: ReadableSpan) -> None:
        if self._num_ended - self._exporter.num_done >= self._max_waiting:
            self._num_dropped += 1
        else:
            self._num_ended += 1
            self._batches.on_end(span)
        self.complain()

    def shutdown(self) -> None:
        self._batches.shutdown()

    def force_flush(self, timeout_millis: int | None = None) -> bool:
        return self._batches.force_flush(timeout_millis)

    def complain(self, is_last: bool = False) -> None:
        """Say in the log how many spans were lost, now and then."""
        left = self._num_ended - self._exporter.num_done if is_last else 0
        num_new = self.num_lost + left - self._num_told
        if num_new <= 0 or (not is_last and time.monotonic() < self._complaint_due):
            return
        self._num_told += num_new
        self._complaint_due = time.monotonic() + COMPLAIN_EVERY_S
        _log.warning("spans that the collector did not take: %d; %s", num_new, self._exporter.words.text or "no room")


class _CountingExporter(SpanExporter):
    """Sends batches, one after the other, in the batch processor's thread."""

    def __init__(self, exporter: SpanExporter, words: "_LastWords") -> None:
        self.words = words
        self.num_done = self.num_refused = 0
        self._exporter = exporter

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self.num_refused += len(spans) if result is not SpanExportResult.SUCCESS else 0
            self.num_done += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _LastWords(logging.Handler):
    """Keeps the newest warning of OpenTelemetry, which would log each failed attempt."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        logger = logging.getLogger("opentelemetry")
        logger.handlers = [self]
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()[:300]


def _is_service_named() -> bool:
    resource = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return bool(os.environ.get("OTEL_SERVICE_NAME")) or any(
        pair.partition("=")[0].strip() == SERVICE_NAME for pair in resource.split(",")
    )


def _positive_int(name: str, default: int) -> int:
    """Return a number from the environment.

    Raises:
        TracingError: it is none.
    """
    text = os.environ.get(name, "").strip() or str(default)
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise TracingError(f"{name} is {text[:40]!r}: a positive number is expected")
    return int(text)
