"""Counts the calls of gRPC by method and status."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from octavo.frontend.access_log import end_call
from octavo.frontend.metrics import Metrics
from octavo.frontend.metrics_layout import GRPC_METHODS, OTHER
from octavo.frontend.rpc import Context

_METHODS = frozenset(GRPC_METHODS)
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}
_OURS = "octavo.v1."
_EARLY_S = 0.1
"""A client whose deadline passes cancels the call, and says so before our own timer, which began when the call came."""


class CallCounter(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Stands before all others, so that refused calls count too; health and reflection do not.

    Args:
        metrics: where they count.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's handler, which counts its end."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.removeprefix("/")
        if handler is None or not method.startswith(_OURS):
            return handler
        known = method if method in _METHODS else OTHER
        for kind in ("unary_unary", "unary_stream", "stream_stream"):
            if (work := getattr(handler, kind)) is not None:
                make = getattr(grpc, f"{kind}_rpc_method_handler")
                return make(self._counted(work, known), handler.request_deserializer, handler.response_serializer)
        return handler

    def _counted(self, work: Callable[[Any, Context], Awaitable[Any]], method: str) -> Any:
        async def counted(request: Any, context: Context) -> Any:
            code = grpc.StatusCode.UNKNOWN.name
            try:
                answer = await work(request, context)
                code = grpc.StatusCode.OK.name
                return answer
            except asyncio.CancelledError:
                left = context.time_remaining()
                late = left is not None and left <= _EARLY_S
                code = (grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED).name
                raise
            except grpc.aio.AbortError:
                code = _name(context.code())
                raise
            finally:
                self._metrics.count_call("grpc", method, code)
                end_call("grpc", method, code)

        return counted


def _name(code: Any) -> str:
    """Return the name of a status, which gRPC tells as a number or as one of its own."""
    return code.name if isinstance(code, grpc.StatusCode) else _CODES.get(code, grpc.StatusCode.UNKNOWN.name)
