"""All metrics as text, for whichever door asks."""

import asyncio

from octavo.frontend.calls import Calls
from octavo.frontend.metrics_text import PLAIN, render


class Scrapes:
    """Makes one at a time.

    Args:
        calls: what has been counted, and who asks the scheduler.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._rendering = asyncio.Lock()

    async def make(self, accept: str = PLAIN) -> tuple[bytes, str]:
        """Return the metrics of all frontends that share the ports, of scheduler and worker, and their content type.

        Args:
            accept: what the scraper reads, as a header of HTTP.
        """
        report = await self._calls.status(with_metrics=True)
        metrics, config = self._calls.metrics, self._calls.config

        def work() -> tuple[bytes, str]:
            return render(metrics.rows(), report, config.served_model_names[0], accept, config.vllm_metric_names)

        async with self._rendering:
            # Not in the threads that prompts wait for.
            return await asyncio.get_running_loop().run_in_executor(None, work)
