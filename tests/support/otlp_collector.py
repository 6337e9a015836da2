"""A collector of OpenTelemetry spans: takes OTLP over HTTP, and keeps what comes."""

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import NamedTuple, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

WAIT_S = 30.0
"""Bound of every wait in here: longer means that the test has failed."""


class Told(NamedTuple):
    """A span, with the process that told of it."""

    process: str
    span: trace_pb2.Span

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def attributes(self) -> dict[str, object]:
        return {pair.key: _value(pair.value) for pair in self.span.attributes}

    @property
    def events(self) -> list[str]:
        return [event.name for event in self.span.events]


class Collector:
    """Listens on a port of its own from `with` on.

    Args:
        status: what it answers; 200 takes the spans.
    """

    def __init__(self, status: int = 200) -> None:
        self.spans: list[Told] = []
        self.bodies: list[bytes] = []
        self.paths: set[str] = set()
        self.num_calls = 0
        self._changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector._take(self.path, body, status)
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.die()

    def die(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def of(self, trace_id: str) -> list[Told]:
        """Return what has come of a trace."""
        with self._changed:
            return [told for told in self.spans if told.span.trace_id.hex() == trace_id]

    def wait(self, trace_id: str, names: set[str]) -> list[Told]:
        """Return a trace once spans of all these names have come."""
        self.until(lambda: names <= {told.name for told in self.of(trace_id)})
        return self.of(trace_id)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so that only a message can make so."""
        deadline = time.monotonic() + WAIT_S
        with self._changed:
            while not condition():
                left = deadline - time.monotonic()
                assert left > 0, f"after {WAIT_S} s only {sorted(told.name for told in self.spans)}"
                self._changed.wait(left)

    def _take(self, path: str, body: bytes, status: int) -> None:
        with self._changed:
            self.num_calls += 1
            self.paths.add(path)
            if status == 200:
                self.bodies.append(body)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    pairs: dict[str, KeyValue] = {pair.key: pair for pair in resource.resource.attributes}
                    process = pairs["octavo.process"].value.string_value
                    self.spans += [Told(process, span) for scope in resource.scope_spans for span in scope.spans]
            self._changed.notify_all()


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind) if kind is not None else None
