"""The scheduler without sockets and clock: sessions, core and trace, one turn at a time.

The loop drives it over ZeroMQ on the real clock, the simulator over links of its own on a virtual one.
"""

import logging
from collections.abc import Callable

from octavo.scheduler.adoption import Adopted
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.core import Scheduler
from octavo.scheduler.events import Event, RequestSubmitted, StepCompleted
from octavo.scheduler.idle import IdleCheck
from octavo.scheduler.instructions import (
    AnswerCacheReset,
    EmitOutput,
    EndFrontendSession,
    EndWorkerSession,
    Instruction,
    SendPlan,
    TellAdopted,
)
from octavo.scheduler.metrics import SchedulerMetrics
from octavo.scheduler.peers import PeerRecord
from octavo.scheduler.replacement import Replacement
from octavo.scheduler.sessions import Channel, Question, Sessions
from octavo.scheduler.trace import PlanTrace
from octavo.scheduler.tracing import RequestTraces
from octavo.wire.channel import HEARTBEAT_INTERVAL_S
from octavo.wire.failpoints import failpoint
from octavo.wire.handshake import Heartbeat
from octavo.wire.ids import BootId, SessionId, new_session_id
from octavo.wire.process_stats import sample
from octavo.wire.requests import (
    DrainBegun,
    DrainService,
    ProcessInfo,
    QueueLimits,
    ReplaceScheduler,
    SchedulerLeaves,
    StatusReport,
    StatusRequest,
    StepOutput,
)

LOADING_SHOWN_S = 5 * HEARTBEAT_INTERVAL_S
"""A loading worker says Hello every second; one not heard for so long is reported no more."""

_log = logging.getLogger(__name__)


class Service:
    """Everything of the scheduler but its I/O. Whoever drives it calls `turn` when a message waits or a timer is due.

    Args:
        channel: the way to the peers; the driver closes it.
        config: settings.
        boot_id: identity of this life of the process.
        pid: of the process, for reports.
        trace: gets plans and results; the driver closes it.
        traces: tells of requests in spans; None: nobody wants to know.
        new_session: draws the identities of sessions.

    Attributes:
        is_replaced: somebody asked for the next scheduler, and knows that this one leaves; the driver calls `leave` and no
            `turn` any more.
    """

    def __init__(
        self,
        channel: Channel,
        config: SchedulerConfig,
        boot_id: BootId,
        pid: int,
        trace: PlanTrace | None = None,
        new_session: Callable[[], SessionId] = new_session_id,
        traces: RequestTraces | None = None,
    ) -> None:
        self.core = Scheduler(config)
        self.metrics = SchedulerMetrics()
        self.sessions = Sessions(channel, config, boot_id, self.metrics, new_session)
        self._limits = QueueLimits(
            config.max_waiting_requests,
            config.max_waiting_tokens,
            config.max_requests_per_caller,
            config.max_waiting_tokens_per_caller,
        )
        self._boot_id = boot_id
        self._pid = pid
        self._trace = trace
        self._traces = traces
        self._idle_check = IdleCheck(self.core.check)
        self._replacement = Replacement()
        self.is_replaced = False

    @property
    def next_timer(self) -> float | None:
        """When `turn` must be called again at the latest; None while only a message can change anything."""
        timers = (self.sessions.next_timer, self.core.next_timer, self._idle_check.due, self._replacement.due)
        return min((timer for timer in timers if timer is not None), default=None)

    @property
    def num_failed_checks(self) -> int:
        """Times that the idle state contradicted itself."""
        return self._idle_check.num_failed

    def turn(self, now: float) -> None:
        """Receive what waits, do what is due, let the core decide, send.

        Args:
            now: monotonic seconds.
        """
        failpoint("scheduler.before_receive")
        self.sessions.receive(now)
        self.sessions.keep_alive(now, self.core.has_outstanding_plans)
        happened = self._settle(now)
        if questions := self.sessions.take_questions():
            for peer, question in questions:
                self._answer(peer, question, now)
            happened = self._settle(now) or happened  # an asker that could not be answered has lost its session
        if self.sessions.tell_stall(self.core.stall):
            happened = self._settle(now) or happened  # so has one that could not be told
        self._check_when_idle(now, happened)
        self.is_replaced = self._replacement.is_settled(self.sessions.peers, now)

    def decide(self, events: list[Event], now: float) -> list[Instruction]:
        """Tell the core what has happened; return what is to be done. A seam for those who watch."""
        return self.core.on_events(events, now)

    def leave(self, reason: str) -> None:
        """Say Goodbye to all peers."""
        self.sessions.leave(reason)

    def _settle(self, now: float) -> bool:
        """Tell the core what has happened until nothing new comes of it: each round after the first ended a session.

        Returns whether anything had happened.
        """
        events = self.sessions.take_events()
        if happened := bool(events):
            failpoint("scheduler.after_receive")
        while True:
            self._note(events, now)
            instructions = self.decide(events, now)
            if instructions:
                self._perform(instructions, now)
            if self._traces is not None:
                self._traces.observe(events, instructions, now)
            happened = happened or bool(instructions)
            events = self.sessions.take_events()
            if not events:
                return happened

    def _note(self, events: list[Event], now: float) -> None:
        for event in events:
            if isinstance(event, StepCompleted):
                self.metrics.step_completed(event.result, now)
                if self._trace is not None:
                    self._trace.result(event.result, now)
            elif isinstance(event, RequestSubmitted):
                self.metrics.submitted(event.message)
                if _log.isEnabledFor(logging.DEBUG):
                    _log_submitted(event)

    def _perform(self, instructions: list[Instruction], now: float) -> None:
        failpoint("scheduler.after_compute")
        for instruction in instructions:
            match instruction:
                case SendPlan(plan):
                    if self._trace is not None:
                        self._trace.plan(plan, self.core.figures, now)
                    if (peer := self._peer(plan.epoch)) is not None and (size := self.sessions.send(peer, plan)):
                        self.metrics.plan_sent(plan, size, now)
                case EmitOutput(frontend, message) | AnswerCacheReset(frontend, message):
                    failpoint("scheduler.before_reply")
                    if isinstance(message, StepOutput) and message.failed:
                        self.metrics.failed(message.failed)
                    if (peer := self._peer(frontend)) is not None:
                        self.sessions.send(peer, message)
                case TellAdopted(adopted, num_recomputed):
                    _tell_adopted(adopted, num_recomputed)
                case EndWorkerSession(session, reason, cause) | EndFrontendSession(session, reason, cause):
                    if (peer := self._peer(session)) is not None:
                        self.sessions.end(peer, reason, cause)
        failpoint("scheduler.after_reply")

    def _peer(self, session: int) -> PeerRecord | None:
        return self.sessions.peers.by_session(SessionId(session))

    def _check_when_idle(self, now: float, happened: bool) -> None:
        is_idle = self.core.is_idle
        violation = self._idle_check.turn(now, happened=happened, idle=is_idle)
        if violation is not None:
            _log.error("the idle scheduler contradicts itself: %s", violation)

    def _answer(self, peer: PeerRecord, question: Question, now: float) -> None:
        match question:
            case StatusRequest():
                self.sessions.send(peer, self.report(now, question.tag_id, question.with_metrics))
            case DrainService():
                self._drain(peer, question)
            case ReplaceScheduler(tag_id):
                _log.info("%s asks for the next scheduler: this one leaves", peer.label)
                self.sessions.send(peer, SchedulerLeaves(tag_id, self.core.figures.num_requests))
                self.sessions.send(peer, Heartbeat())
                self._replacement.asked(peer, now)

    def _drain(self, peer: PeerRecord, question: DrainService) -> None:
        self.sessions.begin_drain()
        if question.tag_id is not None:
            self.sessions.send(peer, DrainBegun(question.tag_id, self.core.figures.num_requests))

    def report(self, now: float, tag_id: int = 0, with_metrics: bool = True) -> StatusReport:
        """Return what the scheduler holds now; with metrics it takes some 100 us."""
        figures, sessions = self.core.figures, self.sessions
        worker = sessions.peers.worker
        row, told = None, worker.figures if worker is not None and with_metrics else None
        if with_metrics:
            dropped = (sessions.num_strays, sessions.channel.num_malformed, sessions.channel.num_refused)
            row = self.metrics.row(figures, len(sessions.peers.frontends), dropped)
        return StatusReport(
            tag_id=tag_id,
            processes=tuple(self._processes(now, with_metrics)),
            running=figures.num_running,
            waiting=figures.num_waiting,
            total_blocks=figures.num_blocks,
            free_blocks=figures.num_free_blocks,
            block_size=figures.block_size,
            steps=figures.num_steps,
            preemptions=figures.num_preemptions,
            cached_blocks=figures.num_cached_blocks,
            prompt_tokens=figures.num_prompt_tokens,
            cached_prompt_tokens=figures.num_cached_prompt_tokens,
            recomputed_tokens=figures.num_recomputed_tokens,
            failed_checks=self.num_failed_checks,
            waiting_reason=figures.waiting_reason,
            limits=self._limits,
            waiting_tokens=figures.num_waiting_tokens,
            row=row,
            worker_row=told.row if told is not None else None,
            adopted_rows=figures.num_adopted_rows,
            adopted_tokens=figures.num_adopted_tokens,
        )

    def _processes(self, now: float, with_samples: bool) -> list[ProcessInfo]:
        sessions = self.sessions
        worker = sessions.peers.worker
        state = "ready" if worker is not None else "connecting"
        own, epoch = sample() if with_samples else None, worker.session.id if worker else 0
        found = [ProcessInfo("scheduler", self._pid, self._boot_id, epoch, state, own)]
        for peer in sessions.peers:
            role = "worker" if peer.is_worker else "frontend"
            taken = peer.figures.sample if with_samples and peer.figures is not None else None
            found.append(ProcessInfo(role, peer.hello.pid, peer.hello.boot_id, peer.session.id, peer.state, taken))
        if worker is None and (loading := sessions.loading) and now - loading[1] < LOADING_SHOWN_S:
            found.append(ProcessInfo("worker", loading[0].pid, loading[0].boot_id, 0, "loading"))
        elif worker is None and (lost := sessions.last_worker) is not None:
            found.append(ProcessInfo("worker", lost.pid, lost.boot_id, 0, "lost"))
        return found


def _log_submitted(event: RequestSubmitted) -> None:
    message, name = event.message, f"{event.owner}-{event.message.handle}"  # as in NewRow.request
    fields = {"request_id": message.request_id, "request": name, "session": f"{event.frontend:016x}"}
    num_prompt, num_replayed = len(message.prompt_ids) // 4, sum(map(len, message.output_ids)) // 4
    _log.debug(
        "request %s is the call %s: prompt %d tokens, %d choices, %d ids known already",
        *(name, message.request_id, num_prompt, message.num_choices, num_replayed),
        extra={"fields": fields},
    )


def _tell_adopted(adopted: Adopted, num_recomputed: int) -> None:
    _log.info(
        "adopted %d of the %d rows that the worker had, %d tokens; recomputed %d",
        adopted.num_rows,
        adopted.num_reported,
        adopted.num_tokens,
        num_recomputed,
    )
    if adopted.discarded:
        _log.warning("rows that the worker had were discarded: %s", adopted.discarded)
