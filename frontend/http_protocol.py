"""A connection of the HTTP door, as uvicorn's, with bounds on what clients may send before they ask, and on their number."""

import asyncio
import logging
import time
from typing import Any

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from octavo.frontend.openai.errors import HttpError

MAX_HEADER_BYTES = 65536
"""Of a request's line and headers; what one read of the socket brings beyond it is still taken."""

HEADER_TIMEOUT_S = 30.0
"""How long a connection may take to send a request's headers."""

MAX_OVERHEAD_A_BODY_BYTE = 16
"""Bytes of chunk framing for each byte of a body, beside MAX_HEADER_BYTES for trailers: more is no request but a flood."""

ALWAYS_ANSWERED = (b"/health", b"/ready")
"""Paths for which there is room when there is none for others."""

ROOM_FOR_HEALTH = 64
"""Connections beyond the limit, which can ask for nothing else."""

LOG_INTERVAL_S = 60.0
"""Being full is told at most so often."""

_log = logging.getLogger(__name__)


class Connections:
    """All connections of a server.

    The law: at most `limit` may ask for anything, and ROOM_FOR_HEALTH more for health alone, until there is a place for
    them. A new one takes the place of the one that has rested longest: those rest that run no request, whether they never
    asked or have their answer.

    Args:
        limit: most connections.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._placed: set[BoundedProtocol] = set()
        self._late: dict[BoundedProtocol, None] = {}  # for health alone
        self._resting: dict[BoundedProtocol, None] = {}  # of those with a place; who has rested longest comes first
        self._next_log = time.monotonic()

    @property
    def num_busy(self) -> int:
        """How many that have a place run a request."""
        return len(self._placed) - len(self._resting)

    def add(self, connection: "BoundedProtocol") -> None:
        """Count a new connection; close another one, or this one, if there is no room."""
        if len(self._placed) >= self.limit:
            self._tell()
            if self._resting:
                self._close(next(iter(self._resting)))
            else:
                self._late[connection] = None
                if len(self._late) > ROOM_FOR_HEALTH:
                    self._close(next(iter(self._late)))
                return
        self._placed.add(connection)
        self._resting[connection] = None

    def remove(self, connection: "BoundedProtocol") -> None:
        """Forget a connection; it may be forgotten already."""
        self._placed.discard(connection)
        self._late.pop(connection, None)
        self._resting.pop(connection, None)

    def wake(self, connection: "BoundedProtocol") -> bool:
        """It runs a request from now on; say whether that may be any."""
        if connection in self._late and len(self._placed) < self.limit:
            del self._late[connection]
            self._placed.add(connection)
        self._resting.pop(connection, None)
        return connection not in self._late

    def rest(self, connection: "BoundedProtocol") -> None:
        """It has its answer."""
        if connection in self._placed:
            self._resting[connection] = None

    def _close(self, connection: "BoundedProtocol") -> None:
        self.remove(connection)
        connection.close()

    def _tell(self) -> None:
        if (now := time.monotonic()) >= self._next_log:
            self._next_log = now + LOG_INTERVAL_S
            _log.warning("%d HTTP connections, the limit: those that rest are closed, others refused", self.limit)


async def _busy(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a call for which there is no room."""
    error = HttpError(503, "too many connections are open here", "server_error", "too_many_connections")
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": error.body()})


class BoundedProtocol(HttpToolsProtocol):
    """A connection whose requests must begin in time, with headers of bounded size."""

    def __init__(self, connections: Connections, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connections = connections
        self._served = self.app
        self._in_headers = False
        self._is_pipelined = (
            False  # more came before the answer: it is not read, and the connection ends with the answer
        )
        self._num_header_bytes = self._num_body_bytes = self._num_other_bytes = 0  # of one request
        self._num_body_bytes_seen = 0  # of all requests
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
        super().connection_made(transport)
        self._connections.add(self)
        if not transport.is_closing():
            self._await_headers()

    def close(self) -> None:
        """Close the connection, which runs no request; one that its client begins in this very moment is lost."""
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._stop_timer()
        self._connections.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, then see how much of a request's headers, or of what is neither headers nor body, has come."""
        if self._is_pipelined:
            return
        num_seen, was_in_headers = self._num_body_bytes_seen, self._in_headers
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not (was_in_headers or self._in_headers):
            self._num_other_bytes += len(data) - (self._num_body_bytes_seen - num_seen)
            if self._num_other_bytes > MAX_HEADER_BYTES + MAX_OVERHEAD_A_BODY_BYTE * self._num_body_bytes:
                self.transport.close()
                return
        if self._in_headers:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self._refuse(431, "headers_too_large", f"line and headers have more than {MAX_HEADER_BYTES} bytes")
                return
        if self._timer is None and (self._in_headers or self._is_idle()):
            self._await_headers()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_headers = True
        if self._is_idle():
            self._num_header_bytes = self._num_body_bytes = self._num_other_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; trailers are dropped."""
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Its headers are there."""
        self._in_headers = False
        if not self._is_idle():
            # uvicorn would stop reading, and so not see that the client of the running request goes away.
            self._is_pipelined = True
            self.cycle.keep_alive = False
            return
        self._stop_timer()
        may_ask = self._connections.wake(self) or httptools.parse_url(self.url).path in ALWAYS_ANSWERED
        self.app = self._served if may_ask else _busy
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """The answer has been sent."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._connections.rest(self)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP; uvicorn says so in plain text."""
        self._refuse(400, "invalid_http", msg)

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Say what is wrong before the connection is closed; not into an answer that is being sent."""
        if self._is_idle():
            body = HttpError(status, message, code=code).body()
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head.encode("ascii") + body)
        self.transport.close()

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body."""
        if not self._is_pipelined:
            self._num_body_bytes += len(body)
            self._num_body_bytes_seen += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is there whole."""
        if not self._is_pipelined:
            super().on_message_complete()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_headers(self) -> None:
        self._timer = self.loop.call_later(HEADER_TIMEOUT_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._in_headers or self._is_idle():
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
