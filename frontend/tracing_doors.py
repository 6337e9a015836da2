"""Where calls come in and their spans begin: before the services of gRPC, and around the routes of HTTP."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from starlette.types import Scope

from octavo.frontend.call_ends import Work, our_method, surrounded, with_end
from octavo.frontend.rpc import Context
from octavo.frontend.tracing import CallTrace, CallTracer

UNTRACED_ROUTES = frozenset({"/health", "/ready", "/metrics"})
"""Asked every few seconds by machines; the health and the reflection of gRPC are left out likewise."""

_SERVER_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Statuses that OpenTelemetry counts as errors of a server."""


class GrpcTracer(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Stands before those that refuse calls, so that refused ones are told as well.

    Args:
        tracer: begins the spans.
    """

    def __init__(self, tracer: CallTracer) -> None:
        self._tracer = tracer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's handler; if the call's trace is wanted, one that tells of it."""
        handler = await continuation(handler_call_details)
        method = our_method(handler_call_details)
        if handler is None or method is None:
            return handler
        method = method[:200]
        attributes = {"rpc.system.name": "grpc", "rpc.method": method}
        trace = self._tracer.begin(method, attributes, handler_call_details.invocation_metadata)
        return handler if trace is None else surrounded(handler, lambda work: _traced(work, trace))


def _traced(work: Work, trace: CallTrace) -> Work:
    async def running(request: Any, context: Context) -> Any:
        with trace.running():
            return await work(request, context)

    def ended(code: str) -> None:
        attributes = {"rpc.response.status_code": code} | ({} if code == "OK" else {"error.type": code})
        trace.end(attributes, failed=code in _SERVER_FAULTS)

    return with_end(running, ended)


def begin_http(tracer: CallTracer, scope: Scope, route: str) -> CallTrace | None:
    """Begin to tell of a call of HTTP; None if nobody wants to know."""
    if route in UNTRACED_ROUTES:
        return None
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
    attributes = {"http.request.method": scope["method"], "http.route": route, "url.scheme": scope["scheme"]}
    return tracer.begin(f"{scope['method']} {route}", attributes, headers)


def end_http(trace: CallTrace, status: int) -> None:
    """Tell how a call of HTTP was answered."""
    attributes: dict[str, str | int] = {"http.response.status_code": status}
    if status >= 400:
        attributes["error.type"] = str(status)
    trace.end(attributes, failed=status >= 500)
