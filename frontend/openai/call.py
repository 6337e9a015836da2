"""One HTTP call: what its headers say, its body, its answer, and whether its client is still there."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import msgspec
from starlette.types import Message, Receive, Scope, Send

from octavo.frontend.access_log import begin_call, end_call
from octavo.frontend.budget import Share
from octavo.frontend.call_context import CallContext
from octavo.frontend.calls import Calls
from octavo.frontend.errors import ServiceError, TooManyBytes, internal_error
from octavo.frontend.metadata import read_authorization
from octavo.frontend.metrics_layout import HTTP_CLIENT_GONE
from octavo.frontend.openai.answers import error_event
from octavo.frontend.openai.bodies import INLINE_BYTES, check_values
from octavo.frontend.openai.errors import HttpError, from_msgspec, to_http
from octavo.frontend.tracing_doors import begin_http, end_http

BODY_TIMEOUT_S = 60.0
"""How long a body may take to arrive."""

_JSON = (b"content-type", b"application/json")
_EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
_CLOSE = (b"connection", b"close")

B = TypeVar("B")
Handler: TypeAlias = Callable[["HttpCall"], Awaitable[None]]


class ClientGone(Exception):
    """The client has closed its connection: there is nobody to answer."""


class Endpoint:
    """A route as an ASGI application: gives the call its context, checks its key, and answers what goes wrong.

    Args:
        calls: what requests can run on.
        handler: answers the call.
        needs_key: whether a key is asked for where the service has keys.
        route: under which name calls are counted; None: they are not.
    """

    def __init__(self, calls: Calls, handler: Handler, needs_key: bool = True, route: str | None = None) -> None:
        self._calls = calls
        self._handler = handler
        self._needs_key = needs_key
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a call, count it, and tell of it in a span where somebody wants to know."""
        tracer, route = self._calls.tracer, self._route
        trace = begin_http(tracer, scope, route) if tracer is not None and route is not None else None
        if trace is None:
            await self._call(scope, receive, send)
            return
        status = HTTP_CLIENT_GONE
        try:
            with trace.running():
                status = await self._call(scope, receive, send)
        finally:
            end_http(trace, status)

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> int:
        call = HttpCall(self._calls, scope, receive, send)
        begin_call(call.context.request_id)
        try:
            await self._answer(call)
        finally:
            if self._route is not None:
                self._calls.metrics.count_call("http", self._route, str(call.status))
                end_call("http", self._route, str(call.status))
        return call.status

    async def _answer(self, call: "HttpCall") -> None:
        try:
            if self._needs_key:
                self._calls.config.auth.check(read_authorization(call.headers))
            await self._handler(call)
            call.end()
            return
        except ClientGone:
            return
        except HttpError as raised:
            error = raised.with_traceback(None)
        except TooManyBytes as raised:
            error = to_http(raised)
            error.headers += (_CLOSE,)  # the rest of the body is not read
        except ServiceError as raised:
            error = to_http(raised)
        except Exception:  # noqa: BLE001 (the last resort: logged, and told as an internal error)
            error = to_http(internal_error(call.context.request_id))
        await call.refuse(error)


class HttpCall:
    """A call. It is answered once, whole or as a stream of events.

    Attributes:
        headers: names in lower case.
        context: what both doors know of a call.
        path_params: what the route's pattern found in the path.
        body_bytes: size of the body that has been read.
        status: what became of it; 499 until it has been answered whole.
    """

    def __init__(self, calls: Calls, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        self.context: CallContext = calls.context(self.headers, _peer(scope), None)
        self.path_params: dict[str, Any] = scope.get("path_params", {})
        self.body_bytes = 0
        self.status = HTTP_CLIENT_GONE
        self._calls = calls
        self._max_body_bytes = calls.config.max_message_bytes
        self._receive = receive
        self._send = send
        self._started = False

    async def read(self, decoder: "msgspec.json.Decoder[B]") -> B:
        """Return the body, which must be JSON of the decoder's type.

        Raises:
            HttpError: it is not, or it is too large or takes too long.
            TooManyBytes: others are sending as much as may be held.
            ClientGone: the connection was closed.
        """
        return await self.read_as(decoder.decode)

    async def read_as(self, decode: Callable[[bytes], B]) -> B:
        """Return what a function makes of the body; in a thread if it is large.

        Raises:
            HttpError: as `read`, or what the function raises.
            TooManyBytes: others are sending as much as may be held.
            ClientGone: the connection was closed.
        """

        def work() -> B:
            check_values(body)
            return decode(body)

        with self._calls.budget.share() as share:
            body = await self._read_json(share)
            self.body_bytes = len(body)
            try:
                return await self.do(work)
            except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
                raise from_msgspec(error) from None

    async def do(self, work: Callable[[], B]) -> B:
        """Do some work with the body; in a thread if it is large."""
        if self.body_bytes <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._calls.executor, work)

    async def _read_json(self, share: Share) -> bytes:
        """Return the body, which says that it is JSON."""
        headers = dict(self.headers)
        kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HttpError(
                415, f"content-type is {kind[:80]!r}, expected application/json", code="invalid_content_type"
            )
        if headers.get("content-encoding", "identity") != "identity":
            raise HttpError(415, "the body must not be compressed", code="invalid_content_encoding")
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_body_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._read_body(share)
        except TimeoutError:
            message = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
            raise HttpError(408, message, code="timeout", headers=(_CLOSE,)) from None

    def end(self, status: int = 200) -> None:
        """Say that it has been answered whole."""
        self.status = status

    async def reply(
        self,
        body: bytes,
        status: int = 200,
        headers: tuple[tuple[bytes, bytes], ...] = (),
        content_type: tuple[bytes, bytes] = _JSON,
    ) -> None:
        """Answer with JSON, or with another type."""
        self._started = True
        length = (b"content-length", b"%d" % len(body))
        await self._start(status, (content_type, length, *headers))
        await self._send({"type": "http.response.body", "body": body})

    async def send_events(self, data: bytes, last: bool = False) -> None:
        """Send server-sent events; waits while the client leaves too much unread."""
        if not self._started:
            self._started = True
            await self._start(200, _EVENTS)
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def refuse(self, error: HttpError) -> None:
        """Answer with an error; a stream that has begun ends with it."""
        if self._started:
            await self.send_events(error_event(error.body()), last=True)
        else:
            await self.reply(error.body(), error.status, error.headers)
        self.end(error.status)

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Interrupt the work inside when the client goes away.

        Raises:
            ClientGone: it has gone away.
        """
        task = asyncio.current_task()
        watcher = asyncio.create_task(self._gone())
        gone = False

        def on_gone(done: "asyncio.Task[None]") -> None:
            nonlocal gone
            if not done.cancelled() and task is not None:
                gone = True
                task.cancel()

        watcher.add_done_callback(on_gone)
        try:
            yield
        except asyncio.CancelledError:
            if not gone or task is None:
                raise
            task.uncancel()
            raise ClientGone from None
        finally:
            watcher.remove_done_callback(on_gone)
            watcher.cancel()

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _read_body(self, share: Share) -> bytes:
        pieces: list[bytes] = []
        num_bytes = 0
        while True:
            message: Message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            pieces.append(message.get("body", b""))
            num_bytes += len(pieces[-1])
            if num_bytes > self._max_body_bytes:
                raise self._too_large()
            share.grow(num_bytes)
            if not message.get("more_body", False):
                return b"".join(pieces)

    def _too_large(self) -> HttpError:
        message = f"the body has more than {self._max_body_bytes} bytes, the limit (--max-message-bytes)"
        return HttpError(413, message, code="request_too_large", headers=(_CLOSE,))

    async def _start(self, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        request_id = (b"x-request-id", self.context.request_id.encode("ascii"))
        await self._send({"type": "http.response.start", "status": status, "headers": [request_id, *headers]})


def _peer(scope: Scope) -> str:
    """Return where a call comes from, as gRPC writes it."""
    client = scope.get("client")
    if not client:
        return "unix:"
    host, port = client
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
