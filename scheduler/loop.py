"""The loop around the core: poll, receive, let the core decide, send. All I/O of the scheduler is here and in
sessions.py, in one thread."""

import logging
import math
import os
import socket
import time
from collections.abc import Callable

import zmq

from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.core import Scheduler
from octavo.scheduler.events import Event, StepCompleted
from octavo.scheduler.instructions import EmitOutput, EndFrontendSession, EndWorkerSession, Instruction, SendPlan
from octavo.scheduler.peers import PeerRecord
from octavo.scheduler.sessions import Sessions
from octavo.scheduler.trace import PlanTrace
from octavo.wire.channel import HEARTBEAT_INTERVAL_S, RouterChannel
from octavo.wire.ids import SessionId, new_boot_id
from octavo.wire.requests import ProcessInfo, StatusReport, StatusRequest

GOODBYE_LINGER_MS = 100
"""How long the leaving scheduler waits at most for its Goodbyes to be written."""

LOADING_SHOWN_S = 5 * HEARTBEAT_INTERVAL_S
"""A loading worker says Hello every second; one not heard for so long is reported no more."""

_log = logging.getLogger(__name__)


class Loop:
    """The scheduler process's only thread.

    Args:
        config: settings.
        clock: monotonic seconds.

    Raises (on construction):
        AddressInUse: another scheduler listens there.
        WireError: the address is malformed.
        OSError: the trace file cannot be opened.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.core = Scheduler(config)
        self._boot_id = new_boot_id()
        self._clock = clock
        self._is_stopping = False
        self._trace = PlanTrace(config.trace_plans) if config.trace_plans else None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            channel = RouterChannel(self._context, config.address)
        except Exception:
            self._context.term()
            raise
        self.sessions = Sessions(channel, config, self._boot_id)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(channel.socket, zmq.POLLIN)
        self._poller.register(self._wake_receiver.fileno(), zmq.POLLIN)
        _log.info("scheduler %s listens on %s", self._boot_id, config.address)

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
        """Serve until `stop`, then say Goodbye to all peers."""
        while not self._is_stopping:
            self._poller.poll(self._poll_ms())
            self._drain_wake()
            now = self._clock()
            self.sessions.receive(now)
            self.sessions.keep_alive(now, self.core.has_outstanding_plans)
            self._settle()
            for peer, request in self.sessions.take_status_requests():
                self._report(peer, request)
        self.sessions.leave("the scheduler stops")

    def close(self) -> None:
        """Close everything; `run` has returned, or was never called."""
        self.sessions.channel.close(GOODBYE_LINGER_MS)
        self._context.term()
        self._wake_receiver.close()
        self._wake_sender.close()
        if self._trace is not None:
            self._trace.close()

    def _poll_ms(self) -> int | None:
        timers = [t for t in (self.sessions.next_timer, self.core.next_timer) if t is not None]
        if not timers:
            return None
        return max(0, math.ceil((min(timers) - self._clock()) * 1000))

    def _drain_wake(self) -> None:
        try:
            self._wake_receiver.recv(4096)
        except BlockingIOError:
            return

    def _settle(self) -> None:
        """Tell the core what has happened until nothing new comes of it: each round after the first ended a session."""
        events = self.sessions.take_events()
        while True:
            now = self._clock()
            self._trace_results(events, now)
            self._perform(self.core.on_events(events, now), now)
            events = self.sessions.take_events()
            if not events:
                return

    def _trace_results(self, events: list[Event], now: float) -> None:
        if self._trace is None:
            return
        for event in events:
            if isinstance(event, StepCompleted):
                self._trace.result(event.result, now)

    def _perform(self, instructions: list[Instruction], now: float) -> None:
        for instruction in instructions:
            match instruction:
                case SendPlan(plan):
                    if self._trace is not None:
                        self._trace.plan(plan, self.core.figures, now)
                    if (peer := self._peer(plan.epoch)) is not None:
                        self.sessions.send(peer, plan)
                case EmitOutput(frontend, output):
                    if (peer := self._peer(frontend)) is not None:
                        self.sessions.send(peer, output)
                case EndWorkerSession(session, reason) | EndFrontendSession(session, reason):
                    if (peer := self._peer(session)) is not None:
                        self.sessions.end(peer, reason)

    def _peer(self, session: int) -> PeerRecord | None:
        return self.sessions.peers.by_session(SessionId(session))

    def _report(self, peer: PeerRecord, request: StatusRequest) -> None:
        figures = self.core.figures
        report = StatusReport(
            tag_id=request.tag_id,
            processes=tuple(self._processes()),
            running=figures.num_running,
            waiting=figures.num_waiting,
            total_blocks=figures.num_blocks,
            free_blocks=figures.num_free_blocks,
            block_size=figures.block_size,
            steps=figures.num_steps,
            preemptions=figures.num_preemptions,
        )
        self.sessions.send(peer, report)

    def _processes(self) -> list[ProcessInfo]:
        sessions = self.sessions
        worker = sessions.peers.worker
        state = "ready" if worker is not None else "connecting"
        found = [ProcessInfo("scheduler", os.getpid(), self._boot_id, worker.session.id if worker else 0, state)]
        for peer in sessions.peers:
            role = "worker" if peer.is_worker else "frontend"
            found.append(ProcessInfo(role, peer.hello.pid, peer.hello.boot_id, peer.session.id, "ready"))
        if worker is None and (loading := sessions.loading) and self._clock() - loading[1] < LOADING_SHOWN_S:
            found.append(ProcessInfo("worker", loading[0].pid, loading[0].boot_id, 0, "loading"))
        elif worker is None and (lost := sessions.last_worker) is not None:
            found.append(ProcessInfo("worker", lost.pid, lost.boot_id, 0, "lost"))
        return found
