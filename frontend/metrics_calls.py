"""Counts the calls of gRPC by method and status."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from octavo.frontend.access_log import end_call
from octavo.frontend.call_ends import our_method, surrounded, with_end
from octavo.frontend.metrics import Metrics
from octavo.frontend.metrics_layout import GRPC_METHODS, OTHER

_METHODS = frozenset(GRPC_METHODS)


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
        method = our_method(handler_call_details)
        if handler is None or method is None:
            return handler
        known = method if method in _METHODS else OTHER

        def ended(code: str) -> None:
            self._metrics.count_call("grpc", known, code)
            end_call("grpc", known, code)

        return surrounded(handler, lambda work: with_end(work, ended))
