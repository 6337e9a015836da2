"""The loop around the service: poll, look at the clock, let it take its turn. One thread."""

import logging
import math
import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.core import Scheduler
from octavo.scheduler.service import Service
from octavo.scheduler.sessions import Sessions
from octavo.scheduler.trace import PlanTrace
from octavo.scheduler.tracing import RequestTraces
from octavo.wire.channel import RouterChannel
from octavo.wire.curve import load_scheduler_keys
from octavo.wire.ids import new_boot_id
from octavo.wire.live import Progress
from octavo.wire.mailbox import Mailbox
from octavo.wire.requests import StatusReport

if TYPE_CHECKING:
    from octavo.wire.tracing_export import Tracing

GOODBYE_LINGER_MS = 100
"""How long the leaving scheduler waits at most for its Goodbyes to be written."""

_log = logging.getLogger(__name__)


class Loop:
    """The scheduler process's thread that does its work; no other one touches what it owns.

    Args:
        config: settings.
        clock: monotonic seconds.
        progress: what the loop notes of itself, for whoever watches it.
        tracing: where it tells of requests in spans; None: nowhere. Its owner closes it.

    Raises (on construction):
        AddressInUse: another scheduler listens there.
        WireError: the address is malformed, or its CURVE keys cannot be used.
        OSError: the trace file cannot be opened.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.monotonic,
        progress: Progress | None = None,
        tracing: "Tracing | None" = None,
    ) -> None:
        self._clock = clock
        self._progress = progress or Progress()
        self._is_stopping = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._channel = RouterChannel(self._context, config.address, load_scheduler_keys(config.curve_keys))
        except Exception:
            self._context.term()
            raise
        try:
            self._trace = PlanTrace(config.trace_plans) if config.trace_plans else None
        except OSError:
            self._channel.close()
            self._context.term()
            raise
        boot_id = new_boot_id()
        traces = RequestTraces(tracing) if tracing is not None else None
        self.service = Service(self._channel, config, boot_id, os.getpid(), self._trace, traces=traces)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._channel.socket, zmq.POLLIN)
        self._poller.register(self._wake_receiver.fileno(), zmq.POLLIN)
        self._reports: Mailbox[StatusReport] = Mailbox(self.wake)
        _log.info("scheduler %s listens on %s", boot_id, config.address)

    def ask_report(self) -> StatusReport | None:
        """Return what the scheduler holds, from any other thread; None if the loop does not come to it in time."""
        return self._reports.ask()

    @property
    def core(self) -> Scheduler:
        """The service's core."""
        return self.service.core

    @property
    def sessions(self) -> Sessions:
        """The service's sessions."""
        return self.service.sessions

    @property
    def wake_fd(self) -> int:
        """Write end of the pipe that wakes the loop, for signal.set_wakeup_fd."""
        return self._wake_sender.fileno()

    def stop(self) -> None:
        """Let `run` return soon; safe from any thread and from signal handlers."""
        self._is_stopping = True
        self.wake()

    def wake(self) -> None:
        """Let the loop look at the clock; safe from any thread."""
        try:
            self._wake_sender.send(b"w")
        except BlockingIOError:
            _log.debug("the loop is being woken already")

    def run(self) -> None:
        """Serve until `stop` or until a frontend asks for the next scheduler, then say Goodbye to all peers."""
        self._progress.serve()
        self._progress.is_ready = True
        while not (self._is_stopping or self.service.is_replaced):
            self._progress.rest()
            self._poller.poll(self._poll_ms())
            self._progress.move()
            self._drain_wake()
            self.service.turn(self._clock())
            if self._reports.is_asked:
                self._reports.answer(self.service.report(self._clock()))
        self.service.leave("the next one takes its place" if self.service.is_replaced else "the scheduler stops")

    def close(self) -> None:
        """Close everything; `run` has returned, or was never called."""
        self._channel.close(GOODBYE_LINGER_MS)
        self._context.term()
        self._wake_receiver.close()
        self._wake_sender.close()
        if self._trace is not None:
            self._trace.close()

    def _poll_ms(self) -> int | None:
        if (timer := self.service.next_timer) is None:
            return None
        return max(0, math.ceil((timer - self._clock()) * 1000))

    def _drain_wake(self) -> None:
        try:
            self._wake_receiver.recv(4096)
        except BlockingIOError:
            return
