"""Whether and how a process tells of its work in spans (OpenTelemetry). Nothing of OpenTelemetry is imported here.

Spans leave by OTLP over HTTP with protobuf, from each process by itself. Without an endpoint there is no tracing, and the
library is never loaded: `start_tracing` is the only way to it.
"""

import os
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from octavo.wire.tracing_export import Tracing

PROTOCOL = "http/protobuf"
"""The only one, in all processes: the scheduler must not load gRPC. It is OpenTelemetry's default as well."""

TRACES_PATH = "/v1/traces"
"""Where collectors take spans, if the endpoint names no path."""

MAX_SPAN_EVENTS = 64
"""Kept for one request in one process; of more only the first are told."""

_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_MODULES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


class TracingError(Exception):
    """Spans cannot be told as the settings say: change them, or install what is missing."""


def traces_url(endpoint: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return where spans are sent.

    Args:
        endpoint: http://HOST:PORT, with the usual path, or with a path of its own.
        environment: OTEL_* variables.

    Raises:
        TracingError: it is no such address, another protocol is asked for, or the library is not installed.
    """
    parts = urlsplit(endpoint)
    try:
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_address = False
    if not is_address:
        raise TracingError(f"{endpoint[:200]!r} is no address of a collector: http://HOST:PORT is expected")
    protocol = next((value for name in _PROTOCOL_VARIABLES if (value := environment.get(name, "").strip())), PROTOCOL)
    if protocol != PROTOCOL:
        raise TracingError(
            f"spans leave by {PROTOCOL} alone (a collector's port 4318), and {' or '.join(_PROTOCOL_VARIABLES)} asks for "
            f"{protocol[:40]!r}"
        )
    if not all(map(_is_installed, _MODULES)):
        raise TracingError("this needs opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http (octavo[otel])")
    return endpoint if parts.path not in ("", "/") else parts._replace(path=TRACES_PATH).geturl()


def start_tracing(process: str, endpoint: str | None, instance: str) -> "Tracing | None":
    """Begin to tell of this process; None without an endpoint, or where OTEL_SDK_DISABLED says no.

    Args:
        process: frontend, scheduler or worker.
        endpoint: see `traces_url`.
        instance: names this life of the process.

    Raises:
        TracingError: see `traces_url`; or an OTEL_* variable cannot be understood.
    """
    if endpoint is None or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    url = traces_url(endpoint)
    from octavo.wire.tracing_export import Tracing

    return Tracing(process, url, instance)


class SpanClock:
    """Turns monotonic times of one request into times of the day, which spans carry.

    The two clocks are read together once a request: within it times stay in order whatever is done to the wall clock.
    """

    __slots__ = ("_offset_ns",)

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def at(self, monotonic_s: float) -> int:
        """Return nanoseconds since 1970."""
        return self._offset_ns + round(monotonic_s * 1e9)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False
