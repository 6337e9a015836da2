"""The scheduler process: signals, exit code."""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.loop import Loop
from octavo.wire.errors import AddressInUse, WireError
from octavo.wire.ids import new_boot_id
from octavo.wire.live import Progress
from octavo.wire.process_stats import sample
from octavo.wire.signals import stop_signals
from octavo.wire.tracing import TracingError, start_tracing

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from octavo.wire.metrics_server import MetricsServer

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIGURATION = 2
"""Starting again would not help."""

_log = logging.getLogger(__name__)


def run(config: SchedulerConfig, progress: Progress | None = None) -> int:
    """Run the scheduler in the main thread until SIGTERM, SIGINT or SIGHUP; return the exit code.

    The first signal says Goodbye to all peers and returns 0, a second one ends the process at once.

    Args:
        config: settings.
        progress: what the loop notes of itself, for whoever watches it.
    """
    try:
        tracing = start_tracing("scheduler", config.otlp_traces_endpoint, new_boot_id())
        loop = Loop(config, progress=progress, tracing=tracing)
    except AddressInUse as error:
        _log.error("cannot start the scheduler: %s", error)
        return EXIT_FAILED  # whoever listens there may be about to leave
    except (WireError, OSError, TracingError) as error:
        _log.error("cannot start the scheduler: %s", error)
        return EXIT_CONFIGURATION
    try:
        metrics = _serve_metrics(config, loop)
    except OSError as error:
        _log.error("cannot listen on %s:%s for metrics: %s", config.metrics_host, config.metrics_port, error)
        loop.close()
        return EXIT_FAILED  # whoever listens there may be about to leave
    gc.freeze()  # modules stay: the collector need not look through them again, which would hold up a step
    received: list[int] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        if received and number == signal.SIGHUP:
            return
        if received:
            os._exit(128 + number)
        received.append(number)
        loop.stop()

    old_handlers = {number: signal.signal(number, on_signal) for number in stop_signals()}
    # A signal that arrives during the poll ends the poll, whichever thread the system hands it to.
    old_wake_fd = signal.set_wakeup_fd(loop.wake_fd, warn_on_full_buffer=False)
    try:
        loop.run()
        if received:
            _log.info("scheduler stops on %s", signal.Signals(received[0]).name)
    finally:
        signal.set_wakeup_fd(old_wake_fd)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        if metrics is not None:
            metrics.close()
        loop.close()
        if tracing is not None:
            tracing.close()
    return EXIT_OK


def _serve_metrics(config: SchedulerConfig, loop: Loop) -> "MetricsServer | None":
    """Answer scrapes from now on, if that is wanted.

    Raises:
        OSError: the port cannot be had.
    """
    if config.metrics_port is None:
        return None
    from octavo.wire.metrics_server import MetricsServer  # these two only where they are needed: they take memory
    from octavo.wire.metrics_text import process_families, scheduler_families

    def families() -> "Iterator[Metric]":
        samples = {}
        if (report := loop.ask_report()) is not None:
            yield from scheduler_families(report, config.model_name)
        if (taken := sample()) is not None:
            samples["scheduler", "scheduler"] = taken
        yield from process_families(samples)

    return MetricsServer(config.metrics_host, config.metrics_port, families)
