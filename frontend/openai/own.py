"""What a frontend says of itself over HTTP, on the shared port and on its private ones."""

import asyncio

from octavo.frontend.calls import Calls
from octavo.frontend.errors import Unavailable
from octavo.frontend.metrics_text import CONTENT_TYPE, render
from octavo.frontend.openai.call import HttpCall


class Own:
    """Answers for the process.

    Args:
        calls: whether requests are taken, and what has been counted.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._rendering = asyncio.Lock()

    async def health(self, call: HttpCall) -> None:
        """GET /health: the process lives, and its event loop answers."""
        await call.reply(b"{}")

    async def metrics(self, call: HttpCall) -> None:
        """GET /metrics: of all frontends that share the ports, and of the scheduler. One is made at a time."""
        report = await self._calls.status()
        metrics, model = self._calls.metrics, self._calls.config.served_model_names[0]

        def work() -> bytes:
            return render(metrics.rows(), report, model)

        async with self._rendering:
            # Not in the threads that prompts wait for.
            body = await asyncio.get_running_loop().run_in_executor(None, work)
        await call.reply(body, content_type=(b"content-type", CONTENT_TYPE.encode()))

    async def ready(self, call: HttpCall) -> None:
        """GET /ready: requests can be served."""
        if not self._calls.serving:
            raise Unavailable("not serving: loading, draining, or no worker is ready")
        await call.reply(b"{}")
