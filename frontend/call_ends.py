"""How a call of gRPC of ours ended, for those who stand around it: one rule for metrics, log and traces."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from octavo.frontend.rpc import Context

Work: TypeAlias = Callable[[Any, Context], Awaitable[Any]]

_OURS = "octavo.v1."
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}
_EARLY_S = 0.1
"""A client whose deadline passes cancels the call, and says so before our own timer, which began when the call came."""


def our_method(details: grpc.HandlerCallDetails) -> str | None:
    """Return the name of a method of ours, without the first slash; None for health, reflection and what there is not."""
    method = details.method.removeprefix("/")
    return method if method.startswith(_OURS) else None


def surrounded(handler: Any, surround: Callable[[Work], Work]) -> Any:
    """Return a method's handler with its work surrounded."""
    for kind in ("unary_unary", "unary_stream", "stream_stream"):
        if (work := getattr(handler, kind)) is not None:
            make = getattr(grpc, f"{kind}_rpc_method_handler")
            return make(surround(work), handler.request_deserializer, handler.response_serializer)
    return handler


def with_end(work: Work, ended: Callable[[str], None]) -> Work:
    """Return work that tells the name of its status at its end, whatever ends it."""

    async def told(request: Any, context: Context) -> Any:
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
            ended(code)

    return told


def _name(code: Any) -> str:
    """Return the name of a status, which gRPC tells as a number or as one of its own."""
    return code.name if isinstance(code, grpc.StatusCode) else _CODES.get(code, grpc.StatusCode.UNKNOWN.name)
