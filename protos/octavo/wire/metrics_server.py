"""A process's own GET /metrics, for deployments in which its scraper reaches it alone. Off unless asked for."""

import logging
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

CONNECTION_TIMEOUT_S = 5.0
"""How long a client may leave the server waiting, since it is served alone."""

_log = logging.getLogger(__name__)


class _Made(Collector):
    def __init__(self, make: Callable[[], Iterable[Metric]]) -> None:
        self._make = make

    def collect(self) -> Iterable[Metric]:
        return self._make()


class _Handler(WSGIRequestHandler):
    timeout = CONNECTION_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: who scrapes does so every few seconds."""


class _Server(WSGIServer):
    def server_bind(self) -> None:
        """Bind, without asking the resolver for a name of ours."""
        TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()


class MetricsServer:
    """Answers one scrape at a time, in a thread of its own, until it is closed.

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
        """Stop listening; a scrape under way is waited for."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
