"""The HTTP server: uvicorn in the frontend's own event loop, with bounds on what clients may send before they ask."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.frontend.config import FrontendConfig
from octavo.frontend.listeners import BACKLOG

MAX_HEADER_BYTES = 65536
"""Of a request's line and headers; what one read of the socket brings beyond it is still taken."""

HEADER_TIMEOUT_S = 30.0
"""How long a connection may take to send a request's headers."""

KEEP_ALIVE_S = 75
"""How long a connection may rest between requests."""

MAX_OVERHEAD_A_BODY_BYTE = 16
"""Bytes of chunk framing for each byte of a body, beside MAX_HEADER_BYTES for trailers: more is no request but a flood."""

CONNECTIONS_PER_STREAM = 2
"""Connections at one time, for each stream that the frontend may hold; more are answered 503."""


class HttpServer:
    """Serves an ASGI application: `start`, in the end `stop`.

    Args:
        config: limits and certificates.
        app: what answers.
        stop_grace_s: how long calls may take to end in `stop`.
        has_tls: whether it speaks TLS where the frontend has certificates.
    """

    def __init__(self, config: FrontendConfig, app: ASGIApp, stop_grace_s: float, has_tls: bool = True) -> None:
        self._server = _Server(_uvicorn_config(config, app, stop_grace_s, has_tls))
        self._task: asyncio.Task[None] | None = None

    def start(self, listener: socket.socket) -> None:
        """Serve what connects to a listening socket, which is this object's from now on."""
        self._task = asyncio.create_task(self._server.serve([listener]))

    async def stop(self) -> None:
        """Take no connections, let calls end for a moment, close everything."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task


class _Server(uvicorn.Server):
    """A server that leaves the process's signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class BoundedProtocol(HttpToolsProtocol):
    """A connection whose requests must begin in time, with headers of bounded size."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_headers = False
        self._is_pipelined = (
            False  # more came before the answer: it is not read, and the connection ends with the answer
        )
        self._num_header_bytes = self._num_body_bytes = self._num_other_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, then see how much of a request's headers, or of what is neither headers nor body, has come."""
        if self._is_pipelined:
            return
        num_body_bytes, was_in_headers = self._num_body_bytes, self._in_headers
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not (was_in_headers or self._in_headers):
            self._num_other_bytes += len(data) - (self._num_body_bytes - num_body_bytes)
            if self._num_other_bytes > MAX_HEADER_BYTES + MAX_OVERHEAD_A_BODY_BYTE * self._num_body_bytes:
                self.transport.close()
                return
        if self._in_headers:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self.send_400_response("The headers are too large.")
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
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body."""
        if not self._is_pipelined:
            self._num_body_bytes += len(body)
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


def _uvicorn_config(config: FrontendConfig, app: ASGIApp, stop_grace_s: float, has_tls: bool) -> uvicorn.Config:
    tls: dict[str, Any] = {}
    if config.tls is not None and has_tls:
        tls = {"ssl_certfile": str(config.tls.certfile), "ssl_keyfile": str(config.tls.keyfile)}
        if config.tls.ca_certs is not None:
            tls |= {"ssl_ca_certs": str(config.tls.ca_certs), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="error",  # what clients do wrong must not fill the log
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=CONNECTIONS_PER_STREAM * config.max_streams,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(stop_grace_s)),
        backlog=BACKLOG,
        **tls,
    )
