"""The worker's loop: plans in, results out, over one session at a time."""

import logging
import os
import time

import zmq

from octavo.wire.channel import HEARTBEAT_INTERVAL_S
from octavo.wire.failpoints import failpoint
from octavo.wire.handshake import PROTOCOL_VERSION, WorkerFacts, WorkerHello
from octavo.wire.held_rows import HeldRow, split_report
from octavo.wire.ids import BootId
from octavo.wire.live import Progress
from octavo.wire.peer import Peer, SessionBegan, SessionEnded
from octavo.wire.plan import StepPlan
from octavo.wire.signals import StopSignal
from octavo.worker.errors import PlanError
from octavo.worker.interface import LOOK_INTERVAL_S, Runner
from octavo.worker.metrics import TELL_INTERVAL_S, WorkerMetrics
from octavo.worker.tracing import RowTraces

logger = logging.getLogger(__name__)


class WorkerIdentity:
    """Builds the Hello; `facts` are set once the model is loaded, `num_held_rows` when a session has ended."""

    def __init__(self, config_digest: str, boot_id: BootId) -> None:
        self.facts: WorkerFacts | None = None
        self.num_held_rows = 0
        self._config_digest = config_digest
        self._boot_id = boot_id

    def hello(self) -> WorkerHello:
        """Return the Hello as of now."""
        return WorkerHello(
            PROTOCOL_VERSION,
            self._config_digest,
            self._boot_id,
            os.getpid(),
            facts=self.facts,
            num_held_rows=self.num_held_rows,
        )


class LoadingStopped(Exception):
    """The process was told to stop while it loaded."""


def keep_in_touch(peer: Peer, stop: StopSignal, progress: Progress) -> None:
    """Say Hello when it is due, while the loop does not run yet: the scheduler then knows that a worker is loading.

    Raises:
        LoadingStopped: the stop signal came.
        PeerRefused: the scheduler will not have this worker.
    """
    progress.move()
    if stop.requested():
        raise LoadingStopped
    for event in peer.step():
        if isinstance(event, SessionBegan):
            # Nobody can be welcomed without facts. What ends here is this session, not the worker.
            peer.reset("welcomed while loading")
            return


class WorkerLoop:
    """Executes the plans of the current session in order; a new session starts with no rows.

    Weights stay, and so does what the cache holds: the scheduler is told of the rows that the session before has left, and
    may let new ones go on from there.
    """

    def __init__(
        self,
        peer: Peer,
        identity: WorkerIdentity,
        runner: Runner,
        stop: StopSignal,
        progress: Progress | None = None,
        traces: RowTraces | None = None,
        metrics: WorkerMetrics | None = None,
    ) -> None:
        self._peer = peer
        self._identity = identity
        self._runner = runner
        self._stop = stop
        self._progress = progress or Progress()
        self._traces = traces
        self._metrics = metrics or WorkerMetrics()
        self._tell_at = 0.0
        self._last_step = 0
        self._held: list[HeldRow] = []  # left by the newest session that had plans
        self._poller = zmq.Poller()
        self._polled: zmq.Socket[bytes] | None = None

    def run(self) -> None:
        """Serve until the stop signal.

        Raises:
            PeerRefused: the scheduler will not have this worker.
        """
        self._runner.clear()  # it may have been rehearsed with
        self._progress.serve()
        while not self._stop.requested():
            self._send_results()
            if not self._runner.num_in_flight:
                self._progress.move()  # else a turn alone is none: the device may have hung
            self._tell()
            self._wait()
            if self._traces is not None:
                self._traces.rest()
            failpoint("worker.before_receive")
            for event in self._peer.step():
                if self._stop.requested():
                    break
                match event:
                    case SessionBegan():
                        logger.info("session %016x with the scheduler began", event.session)
                        self._progress.is_ready = True
                        self._metrics.session_began()
                        self._report()
                    case SessionEnded():
                        self._progress.is_ready = False
                        level = logging.INFO if event.is_orderly else logging.WARNING
                        logger.log(level, "session with the scheduler ended: %s", event.reason)
                        self._hold()
                    case StepPlan() if not (self._launch(event) and self._send_results()):
                        break
        self._peer.leave("the worker was told to stop")

    def _wait(self) -> None:
        poller = self._current_poller()
        if self._runner.num_in_flight:
            # Nothing wakes a thread when a GPU has come so far: while it works, look often.
            if not poller.poll(0):
                time.sleep(LOOK_INTERVAL_S)
            return
        # Without a session a Hello may be due earlier than a heartbeat.
        wait_s = HEARTBEAT_INTERVAL_S if self._peer.session_id is not None else HEARTBEAT_INTERVAL_S / 10
        poller.poll(int(wait_s * 1000))

    def _current_poller(self) -> zmq.Poller:
        """Return a poller of the channel's present socket: a new session may have a new one."""
        channel = self._peer.channel
        if self._polled is not channel.socket:
            self._polled = channel.socket
            self._poller = zmq.Poller()
            self._poller.register(channel.socket, zmq.POLLIN)
            self._poller.register(channel.monitor, zmq.POLLIN)
            self._poller.register(self._stop.fileno(), zmq.POLLIN)
        return self._poller

    def _launch(self, plan: StepPlan) -> bool:
        """Start what a plan asks for; False if this ended the session."""
        failpoint("worker.after_receive")
        try:
            if plan.epoch != self._peer.session_id or plan.step != self._last_step + 1:
                raise PlanError(f"step {plan.step} of epoch {plan.epoch:x} came after step {self._last_step}")
            self._runner.launch(plan)
        except PlanError as error:
            logger.error("plan refused, the session ends: %s", error)
            self._metrics.plan_refused()
            self._forget()
            self._peer.reset(str(error))
            return False
        self._last_step = plan.step
        if plan.new_rows and logger.isEnabledFor(logging.DEBUG):
            for new in plan.new_rows:
                fields = {"request": new.request, "epoch": f"{plan.epoch:016x}"}
                logger.debug("row %d is %s, choice %d", new.row, new.request, new.choice, extra={"fields": fields})
        if self._traces is not None:
            self._traces.launched(plan)
        return True

    def _send_results(self) -> bool:
        """Send the results that are there; False if this ended the session."""
        if results := self._runner.take_results():
            self._progress.move()
            failpoint("worker.after_compute")
        for result in results:
            self._metrics.step_done(result)
            failpoint("worker.before_reply")
            if not self._peer.send(result):
                return False
            failpoint("worker.after_reply")
            if self._traces is not None:
                self._traces.completed(result)
        return True

    def _tell(self) -> None:
        """Tell the scheduler what is counted here, when it is due."""
        if (now := time.monotonic()) >= self._tell_at and self._peer.session_id is not None:
            self._tell_at = now + TELL_INTERVAL_S
            self._peer.send(self._metrics.figures())

    def _hold(self) -> None:
        """Remember what the session leaves behind; if it had no plans, what an earlier one has left is there still."""
        if self._last_step:
            self._set_held(self._runner.hold())
            logger.info("rows that the next scheduler can go on from: %d", len(self._held))
        self._end_rows()

    def _report(self) -> None:
        """Tell what is there, as the Hello announced it."""
        if self._held:
            for part in split_report(self._held):
                if not self._peer.send(part):
                    return

    def _forget(self) -> None:
        self._runner.clear()
        self._set_held([])
        self._end_rows()

    def _end_rows(self) -> None:
        self._last_step = 0
        if self._traces is not None:
            self._traces.forget()

    def _set_held(self, held: list[HeldRow]) -> None:
        self._held = held
        self._identity.num_held_rows = len(held)
