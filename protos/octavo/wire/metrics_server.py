"""A process's own GET /metrics, for deployments in which its scraper reaches it alone. Off unless asked for."""

import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

CONNECTION_TIMEOUT_S = 5.0
"""How long a client may leave the server waiting."""
MAX_CONNECTIONS = 8
"""At one time, each with a thread; further ones are closed at once."""

_log = logging.getLogger(__name__)


class _Made(Collector):
    def __init__(self, make: Callable[[], Iterable[Metric]]) -> None:
        self._make = make
        self._making = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        with self._making:
            return list(self._make())


class _Handler(WSGIRequestHandler):
    timeout = CONNECTION_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: who scrapes does so every few seconds."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False  # a client that says nothing does not hold up the end

    def __init__(self, *arguments: Any) -> None:
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection a thread, if there is one left."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve it, and give the thread back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log in a line what went wrong with a connection, which is its client's matter: the library prints a traceback."""
        _log.debug("a connection for metrics broke: %s", sys.exc_info()[1])

    def server_bind(self) -> None:
        """Bind, without asking the resolver for a name of ours."""
        TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()


class MetricsServer:
    """Answers scrapes in threads of its own, until it is closed; MAX_CONNECTIONS at one time, and one is made at a time.

    Args:
        host, port: where; port 0 lets the system choose one.
        make: makes the families, in that thread.

    Raises (on construction):
        OSError: it cannot listen there.
    """

    def __init__(self, host: str, port: int, make: Callable[[], Iterable[Metric]]) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        kind = type("_Server", (_Server,), {"address_family": family})
        self._server: WSGIServer = kind(address[:2], _Handler)
        self._server.set_app(make_wsgi_app(_Made(make)))
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        _log.info("listening on %s:%d for metrics of this process", host, self.port)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
