"""Where calls come in and their spans begin: before the services of gRPC, and around the routes of HTTP."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from starlette.types import Scope

from octavo.frontend.rpc import Context
from octavo.frontend.tracing import CallTrace, CallTracer

UNTRACED_ROUTES = frozenset({"/health", "/ready", "/metrics"})
"""Asked every few seconds by machines; the health and the reflection of gRPC are left out likewise."""

_OURS = "octavo.v1."
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}
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
        method = handler_call_details.method.removeprefix("/")
        if handler is None or not method.startswith(_OURS):
            return handler
        method = method[:200]
        attributes = {"rpc.system.name": "grpc", "rpc.method": method}
        trace = self._tracer.begin(method, attributes, handler_call_details.invocation_metadata)
        if trace is None:
            return handler
        for kind in ("unary_unary", "unary_stream", "stream_stream"):
            if (work := getattr(handler, kind)) is not None:
                make = getattr(grpc, f"{kind}_rpc_method_handler")
                return make(_traced(work, trace), handler.request_deserializer, handler.response_serializer)
        return handler


def _traced(work: Callable[[Any, Context], Awaitable[Any]], trace: CallTrace) -> Any:
    async def traced(request: Any, context: Context) -> Any:
        code = "UNKNOWN"
        try:
            with trace.running():
                answer = await work(request, context)
            code = "OK"
            return answer
        except asyncio.CancelledError:
            left = context.time_remaining()
            code = "DEADLINE_EXCEEDED" if left is not None and left <= 0 else "CANCELLED"
            raise
        except grpc.aio.AbortError:
            told = context.code()
            code = told.name if isinstance(told, grpc.StatusCode) else _CODES.get(told, code)
            raise
        finally:
            attributes = {"rpc.response.status_code": code} | ({} if code == "OK" else {"error.type": code})
            trace.end(attributes, failed=code in _SERVER_FAULTS)

    return traced


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
