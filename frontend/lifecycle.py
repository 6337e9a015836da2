"""Where a frontend is on its way to its end, for those who ask or wait; `Frontend` moves it."""

import asyncio
from collections.abc import Awaitable, Callable


class Lifecycle:
    """Draining, drained, stopped: each once, none undone.

    Args:
        drain: makes the frontend take no new requests; sets `draining`.

    Attributes:
        draining: no new requests are taken.
        drained: nor does any run.
        service_drains: the same is meant for the other frontends.
        stopped: the process is about to end, whatever still runs.
    """

    def __init__(self, drain: Callable[[], Awaitable[None]]) -> None:
        self.draining = self.drained = self.service_drains = self.stopped = False
        self._drain = drain
        self._drained, self._stopped = asyncio.Event(), asyncio.Event()

    @property
    def state(self) -> str | None:
        """draining or drained; None before that."""
        return ("drained" if self.drained else "draining") if self.draining else None

    async def drain(self) -> None:
        """Take no new requests; once is as good as twice."""
        await self._drain()

    def set_drained(self) -> None:
        """Say that nothing runs any more, while nothing new is taken."""
        self.drained = True
        self._drained.set()

    def set_stopped(self) -> None:
        """Say that the frontend ends now."""
        self.draining = self.stopped = True
        self._drained.set()
        self._stopped.set()

    async def wait_over(self, timeout_s: float) -> None:
        """Wait until the frontend has drained, or if it has until it stops, for `timeout_s` at most."""
        over = self._stopped if self.drained else self._drained
        try:
            await asyncio.wait_for(over.wait(), timeout_s)
        except TimeoutError:
            return
