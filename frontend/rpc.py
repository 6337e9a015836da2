"""How requests are read and answered: gRPC itself would answer bytes that are no message, and whatever a method raises,
with UNKNOWN, in Python's words."""

from collections.abc import Awaitable, Callable
from typing import TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from octavo.frontend.access_log import begin_call
from octavo.frontend.errors import InvalidArgument, ServiceError, abort, internal_error
from octavo.frontend.large_messages import INLINE_BYTES, Unread, malformed
from octavo.frontend.metadata import read_request_id
from octavo.frontend.unknown_fields import check_known

M = TypeVar("M", bound=Message)
T = TypeVar("T")

Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"


Incoming: TypeAlias = M | Unread[M] | None
"""What a method gets: a message, one that is too large to parse on the event loop, or None for bytes that are none."""


def parse(kind: type[M]) -> Callable[[bytes], Incoming[M]]:
    """Return a deserializer that never fails: the method refuses what is no such message."""

    def read(data: bytes) -> Incoming[M]:
        if len(data) > INLINE_BYTES:
            return Unread(kind, data)
        try:
            return kind.FromString(data)
        except DecodeError:
            return None

    return read


def known(request: Incoming[M], kind: type[M]) -> M:
    """Return a request that is one, is not large, and has no field of its own that this version does not know.

    Raises:
        InvalidArgument: it is none, or has one.
    """
    if isinstance(request, Unread):
        raise InvalidArgument(f"{request.num_bytes} bytes, limit {INLINE_BYTES} for this method", field_path="")
    if request is None:
        raise malformed(kind)
    check_known(request, "")
    return request


async def answer(context: Context, work: Callable[[], Awaitable[T]], request_id: str | None = None) -> T:
    """Echo the call's request id (read here unless given), do its work, and turn what goes wrong into its status."""
    if request_id is None:
        request_id = read_request_id(context.invocation_metadata())
    begin_call(request_id)
    await context.send_initial_metadata((("x-request-id", request_id),))
    try:
        return await work()
    except ServiceError as raised:
        # Its traceback holds this frame, which holds the request: a cycle that would keep megabytes until the next
        # collection.
        error = raised.with_traceback(None)
    except Exception:  # noqa: BLE001 (the last resort: logged, and told as INTERNAL)
        error = internal_error(request_id)
    await abort(context, error, request_id)
