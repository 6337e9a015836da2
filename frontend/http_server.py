"""The HTTP server: uvicorn in the frontend's own event loop, with bounds on what clients may send before they ask."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from octavo.frontend.config import FrontendConfig
from octavo.frontend.file_limit import max_http_connections, max_new_http_connections
from octavo.frontend.http_protocol import BoundedProtocol, Connections
from octavo.frontend.listeners import BACKLOG

KEEP_ALIVE_S = 75
"""How long a connection may rest between requests."""

CONNECTIONS_PER_STREAM = 2
"""Connections at one time, for each stream that the frontend may hold."""


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


def _uvicorn_config(config: FrontendConfig, app: ASGIApp, stop_grace_s: float, has_tls: bool) -> uvicorn.Config:
    tls: dict[str, Any] = {}
    if config.tls is not None and has_tls:
        tls = {"ssl_certfile": str(config.tls.certfile), "ssl_keyfile": str(config.tls.keyfile)}
        if config.tls.ca_certs is not None:
            tls |= {"ssl_ca_certs": str(config.tls.ca_certs), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return uvicorn.Config(
        app,
        http=partial(BoundedProtocol, Connections(_max_connections(config))),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="error",  # what clients do wrong must not fill the log
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(stop_grace_s)),
        backlog=max_new_http_connections(BACKLOG),
        **tls,
    )


def _max_connections(config: FrontendConfig) -> int:
    return min(CONNECTIONS_PER_STREAM * config.max_streams, max_http_connections())
