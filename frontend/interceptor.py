"""Before every call of gRPC: has it a key that opens what it asks for?"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from octavo.frontend.admin import ADMIN_SERVICE
from octavo.frontend.auth import Authenticator
from octavo.frontend.errors import Unauthenticated, abort
from octavo.frontend.metadata import read_authorization, read_request_id

HEALTH_SERVICE = "grpc.health.v1.Health"

_log = logging.getLogger(__name__)


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Lets calls pass that hold a key; health needs none, so that load balancers can ask.

    It stands before all services, reflection and methods that do not exist: what is added later is closed as well.

    Args:
        auth: knows the keys.
    """

    def __init__(self, auth: Authenticator) -> None:
        self._auth = auth

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's handler, or one that refuses before it has read a message."""
        service = handler_call_details.method.removeprefix("/").partition("/")[0]
        if service != HEALTH_SERVICE:
            check = self._auth.check_admin if service == ADMIN_SERVICE else self._auth.check
            try:
                check(read_authorization(handler_call_details.invocation_metadata))
            except Unauthenticated as refusal:
                return _refuse(refusal.with_traceback(None))
        return await continuation(handler_call_details)


def _refuse(refusal: Unauthenticated) -> Any:
    async def refuse(_requests: object, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        request_id = read_request_id(context.invocation_metadata())
        _log.debug("call %s of %s has no right key", request_id, context.peer())
        await context.send_initial_metadata((("x-request-id", request_id),))
        await abort(context, refusal, request_id)

    # A stream both ways fits methods of all four kinds: nothing is read or written.
    return grpc.stream_stream_rpc_method_handler(refuse)
