"""What a frontend says of itself over HTTP, on the shared port and on its private ones."""

from octavo.frontend.calls import Calls
from octavo.frontend.errors import Unavailable
from octavo.frontend.metrics_text import PLAIN
from octavo.frontend.openai.call import HttpCall
from octavo.frontend.scrapes import Scrapes

MAX_ACCEPT_CHARS = 1024
"""Of a header that says what a scraper reads."""


class Own:
    """Answers for the process.

    Args:
        calls: whether requests are taken, and what has been counted.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._scrapes = Scrapes(calls)

    async def health(self, call: HttpCall) -> None:
        """GET /health: the process lives, and its event loop answers."""
        await call.reply(b"{}")

    async def metrics(self, call: HttpCall) -> None:
        """GET /metrics: of all frontends that share the ports, and of the scheduler. One is made at a time."""
        accept = dict(call.headers).get("accept", PLAIN)[:MAX_ACCEPT_CHARS]
        body, content_type = await self._scrapes.make(accept)
        await call.reply(body, content_type=(b"content-type", content_type.encode()))

    async def ready(self, call: HttpCall) -> None:
        """GET /ready: requests can be served."""
        if not self._calls.serving:
            raise Unavailable("not serving: loading, draining, or no worker is ready")
        await call.reply(b"{}")
