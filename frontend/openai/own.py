"""What a frontend says of itself over HTTP, on the shared port and on its private ones."""

from octavo.frontend.calls import Calls
from octavo.frontend.errors import Unavailable
from octavo.frontend.openai.call import HttpCall


class Own:
    """Answers for the process.

    Args:
        calls: whether requests are taken.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def health(self, call: HttpCall) -> None:
        """GET /health: the process lives, and its event loop answers."""
        await call.reply(b"{}")

    async def ready(self, call: HttpCall) -> None:
        """GET /ready: requests can be served."""
        if not self._calls.serving:
            raise Unavailable("not serving: loading, draining, or no worker is ready")
        await call.reply(b"{}")
