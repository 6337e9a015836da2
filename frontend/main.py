"""The frontend process: from its configuration to its exit status."""

import asyncio
import gc
import logging
import signal
import sys

from octavo.frontend.auth import exposure
from octavo.frontend.config import FrontendConfig
from octavo.frontend.file_limit import raise_file_limit
from octavo.frontend.listeners import CannotListen
from octavo.frontend.metrics import MetricsError
from octavo.frontend.server import Frontend
from octavo.frontend.tls import TlsError
from octavo.frontend.tokenizer import ModelFilesError
from octavo.wire.errors import WireError
from octavo.wire.ids import new_boot_id
from octavo.wire.signals import stop_signals
from octavo.wire.tracing import TracingError, start_tracing

SWITCH_INTERVAL_S = 0.001
"""How long the event loop may keep the interpreter from a thread that has tokenised; Python's default is 5 ms."""

EXIT_OK = 0
EXIT_FAILED = 1
"""The port is taken, say: a later start may succeed."""
EXIT_CONFIGURATION = 2
"""Starting again would not help."""

_log = logging.getLogger(__name__)


def run(config: FrontendConfig) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP (drains; a second one stops at once); return the exit status.

    EXIT_OK after a stop by signal; EXIT_FAILED if it cannot listen; EXIT_CONFIGURATION if certificates or model folder are
    not as they should be or the scheduler refuses this frontend. The log says why.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    raise_file_limit()
    return asyncio.run(_serve(config))


async def _serve(config: FrontendConfig) -> int:
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if not stop.is_set():
            stop.set()
        elif number != signal.SIGHUP:
            stop_now.set()

    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, on_signal, number)
    try:
        tracing = start_tracing("frontend", config.otlp_traces_endpoint, new_boot_id())
        frontend = Frontend(config, tracing)
    except (MetricsError, TracingError) as error:
        _log.error("%s", error)
        return EXIT_CONFIGURATION
    try:
        return await _run(frontend, config, stop, stop_now)
    finally:
        if tracing is not None:
            await loop.run_in_executor(None, tracing.close)


async def _run(frontend: Frontend, config: FrontendConfig, stop: asyncio.Event, stop_now: asyncio.Event) -> int:
    """Serve until a signal, then drain."""
    try:
        await frontend.start()
        _log.info("listening on %s:%d", config.host, frontend.port)
        if warning := exposure(config.host, config.auth, has_tls=config.tls is not None):
            _log.warning("%s", warning)
        if frontend.http_port is not None:
            _log.info("listening on %s:%d for HTTP", config.host, frontend.http_port)
        if frontend.health_port is not None:
            _log.info("listening on %s:%d for health and metrics of this process", config.host, frontend.health_port)
        await frontend.load()
    except (CannotListen, TlsError, ModelFilesError, WireError) as error:
        _log.error("%s", error)
        await frontend.stop()
        return EXIT_FAILED if isinstance(error, CannotListen) else EXIT_CONFIGURATION
    # What has been loaded stays: to look through it again, the collector would hold up every stream for 50 ms.
    gc.collect()
    gc.freeze()
    reason = await _wait_for_end(frontend, stop)
    if reason is not None:
        _log.error("cannot work with the scheduler: %s", reason)
        await frontend.stop()
        return EXIT_CONFIGURATION
    drain, second = asyncio.create_task(frontend.drain()), asyncio.create_task(stop_now.wait())
    await asyncio.wait({drain, second}, return_when=asyncio.FIRST_COMPLETED)
    drain.cancel()
    second.cancel()
    await frontend.stop()
    return EXIT_OK


async def _wait_for_end(frontend: Frontend, stop: asyncio.Event) -> str | None:
    """Wait for a signal (None) or for the scheduler's refusal (its reason)."""
    if frontend.client is None:
        return None
    refused = frontend.client.refused
    waiter = asyncio.create_task(stop.wait())
    refused.add_done_callback(lambda _: waiter.cancel())
    await asyncio.wait({waiter})
    return refused.result() if refused.done() else None
