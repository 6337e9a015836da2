"""The worker process."""

import gc
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import zmq

from octavo.wire.channel import DealerChannel
from octavo.wire.curve import load_peer_keys
from octavo.wire.errors import WireError
from octavo.wire.ids import new_boot_id
from octavo.wire.live import Progress
from octavo.wire.model_digest import model_digest
from octavo.wire.peer import Peer, PeerRefused
from octavo.wire.signals import StopSignal
from octavo.wire.step_timeout import step_timeout_s
from octavo.wire.tracing import TracingError, start_tracing
from octavo.worker.config import WorkerConfig
from octavo.worker.errors import CannotListen, DeviceHung, StartError
from octavo.worker.loading import load
from octavo.worker.loop import LoadingStopped, WorkerIdentity, WorkerLoop, keep_in_touch
from octavo.worker.metrics import WorkerMetrics
from octavo.worker.tracing import RowTraces

if TYPE_CHECKING:
    from prometheus_client.core import Metric

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIGURATION = 2
"""Starting again would not help."""


def run(config: WorkerConfig, progress: Progress | None = None) -> int:
    """Load the model and serve plans until SIGTERM, SIGINT or SIGHUP; return the exit code.

    Args:
        config: settings.
        progress: what the loop notes of itself, for whoever watches it.
    """
    try:
        with StopSignal() as stop, zmq.Context() as context:
            _serve(config, stop, context, progress or Progress())
    except CannotListen as error:
        logger.error("%s", error)
        return EXIT_FAILED
    except (StartError, PeerRefused) as error:
        logger.error("%s", error)
        return EXIT_CONFIGURATION
    except DeviceHung as error:
        logger.critical("%s; this process ends, so that another one can try", error)
        logging.shutdown()
        os._exit(EXIT_FAILED)  # an orderly end would wait for the device
    return EXIT_OK


def _serve(
    config: WorkerConfig, stop: StopSignal, context: "zmq.Context[zmq.Socket[bytes]]", progress: Progress
) -> None:
    boot_id = new_boot_id()
    try:
        digest = model_digest(config.model_path)
    except OSError as error:
        raise StartError(f"{config.model_path} is no model folder: config.json: {error.strerror}") from error
    identity = WorkerIdentity(digest, boot_id)
    try:
        tracing = start_tracing("worker", config.otlp_traces_endpoint, boot_id)
        channel = DealerChannel(context, config.address, boot_id, load_peer_keys(config.curve_keys, "worker"))
    except (WireError, TracingError) as error:
        raise StartError(str(error)) from error
    peer = Peer(channel, identity.hello, time.monotonic)
    try:
        loaded = load(config, lambda: keep_in_touch(peer, stop, progress))
        identity.facts = loaded.facts
        # What is loaded stays: the collector need not look through it again, which would hold up a step.
        gc.collect()
        gc.freeze()
        if channel.is_shut_out:
            logger.warning(
                "the model is loaded, but the scheduler at %s and this worker do not know each other's CURVE keys: it "
                "serves nothing, and goes on trying",
                config.address,
            )
        peer.reset("the model is loaded")  # so that the next Hello, with the facts, goes out at once
        metrics = WorkerMetrics(loaded.sizes, loaded.held, lambda: (peer.num_dropped, peer.channel.num_malformed))
        traces = RowTraces(tracing, loaded.facts) if tracing is not None else None
        progress.serve(step_timeout_s(config.step_timeout_s, loaded.facts.device))
        with _metrics_served(config, metrics):
            WorkerLoop(peer, identity, loaded.runner, stop, progress, traces, metrics).run()
        if traces is not None:
            traces.forget()
    except LoadingStopped:
        logger.info("told to stop while loading")
    finally:
        if tracing is not None:
            tracing.close()
        if not peer.channel.socket.closed:
            peer.channel.close()


@contextmanager
def _metrics_served(config: WorkerConfig, metrics: WorkerMetrics) -> Iterator[None]:
    """Answer scrapes meanwhile, if that is wanted.

    Raises:
        CannotListen: the port cannot be had.
    """
    if config.metrics_port is None:
        yield
        return
    from octavo.wire.metrics_server import MetricsServer  # these two only where they are needed: they take memory
    from octavo.wire.metrics_text import process_families, worker_families

    def families() -> "Iterator[Metric]":
        figures = metrics.figures()
        yield from worker_families(figures.row, config.model_name)
        yield from process_families({("worker", "worker"): figures.sample} if figures.sample is not None else {})

    try:
        server = MetricsServer(config.metrics_host, config.metrics_port, families)
    except OSError as error:
        message = f"cannot listen on {config.metrics_host}:{config.metrics_port} for metrics: {error}"
        raise CannotListen(message) from error
    try:
        yield
    finally:
        server.close()
