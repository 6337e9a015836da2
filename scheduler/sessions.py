"""Sessions with frontends and the worker: handshake, numbering, heartbeats, ends. What the core must know of it comes
out as events."""

import logging
from collections.abc import Callable, Iterator
from typing import NoReturn, Protocol, TypeAlias

from octavo.scheduler.config import ConfigConflict, SchedulerConfig, resolve_limits
from octavo.scheduler.events import (
    CacheResetRequested,
    ChoiceStopped,
    Event,
    FrontendLost,
    RequestCancelled,
    RequestSubmitted,
    StepCompleted,
    WorkerLost,
    WorkerReady,
)
from octavo.scheduler.metrics import SchedulerMetrics
from octavo.scheduler.peers import PeerRecord, Peers
from octavo.scheduler.reports import REPORT_TIMEOUT_S, Report
from octavo.wire.channel import HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S
from octavo.wire.codec import Envelope, FromPeer, FromScheduler
from octavo.wire.errors import SessionLost
from octavo.wire.handshake import (
    PROTOCOL_VERSION,
    FrontendHello,
    FrontendWelcome,
    Goodbye,
    Heartbeat,
    Refuse,
    ServiceFacts,
    UnknownSession,
    Wait,
    WorkerFacts,
    WorkerHello,
    WorkerState,
    WorkerWelcome,
)
from octavo.wire.held_rows import HeldRows
from octavo.wire.ids import BootId, SessionId, new_session_id
from octavo.wire.plan import StepResult
from octavo.wire.requests import (
    CancelRequest,
    DrainService,
    FinishChoice,
    FrontendDrains,
    ReplaceScheduler,
    ResetPrefixCache,
    ServiceDrains,
    StatusRequest,
    SubmitRequest,
    WorkerFigures,
)
from octavo.wire.session import Session

RECEIVE_LIMIT = 256
"""Messages taken from the socket in one turn, so that a flood cannot keep plans from being built."""

MAX_UNKNOWN_ANSWERS = 100
"""UnknownSession answers in one HEARTBEAT_INTERVAL_S; further strays are only counted."""

BUSY_WORKER_S = 2 * HEARTBEAT_INTERVAL_S
"""A worker silent for longer may be dead: a second one is told to wait rather than refused."""

NO_WORKER = "no worker is ready"

Question: TypeAlias = StatusRequest | DrainService | ReplaceScheduler
"""What the core is not asked, but whoever owns both."""

_log = logging.getLogger(__name__)


class Channel(Protocol):
    """The way to all peers: what `octavo.wire.channel.RouterChannel` does, and the simulator's links as well."""

    num_malformed: int

    @property
    def num_refused(self) -> int:
        """Connections that showed no key of a known peer."""
        ...

    def receive(self, limit: int) -> Iterator[tuple[bytes, Envelope, FromPeer]]:
        """Yield up to `limit` waiting messages with the identity of their sender."""
        ...

    def send(self, peer: bytes, message: FromScheduler, session: int = 0, number: int = 0) -> int:
        """Queue a message for a peer; return its size in bytes.

        Raises:
            SessionLost: the peer is gone or does not keep up.
        """
        ...


class Sessions:
    """All peers of the scheduler, over one channel that nobody else sends on.

    The law: every session that begins is told to the core if the core holds anything for it (WorkerReady), and every
    one that ends, by whatever cause, exactly once (FrontendLost, WorkerLost).
    """

    def __init__(
        self,
        channel: Channel,
        config: SchedulerConfig,
        boot_id: BootId,
        metrics: SchedulerMetrics | None = None,
        new_session: Callable[[], SessionId] = new_session_id,
    ) -> None:
        self.channel = channel
        self._metrics = metrics or SchedulerMetrics()
        self.peers = Peers()
        self.facts: ServiceFacts | None = None
        self.loading: tuple[WorkerHello, float] | None = None  # a worker that was told to wait, and when
        self.last_worker: WorkerHello | None = None  # of the newest worker session, over or not
        self.is_draining = False  # no frontend is to take new requests, those that come later included
        self._is_leaving = False
        self.num_duplicate_hellos = 0
        self.num_strays = 0  # messages of sessions that do not exist
        self._config = config
        self._boot_id = boot_id
        self._new_session = new_session
        self._events: list[Event] = []
        self._questions: list[tuple[PeerRecord, Question]] = []
        self._stall = ""  # why the service is not ready although there is a worker
        self._early_frontends: dict[bytes, FrontendHello] = {}  # told to wait until the first worker is ready
        self._report: Report | None = None  # of a worker that is not ready before it is whole
        self._next_heartbeat = 0.0
        self._unknown_answers_left = MAX_UNKNOWN_ANSWERS
        self._unknown_answers_renewed_at = 0.0

    @property
    def next_timer(self) -> float | None:
        """When `keep_alive` is due; None while there is nobody to keep alive."""
        if self._report is not None:
            return min(self._next_heartbeat, self._report.due)
        return self._next_heartbeat if len(self.peers) else None

    def take_events(self) -> list[Event]:
        """Take what the core has not been told yet."""
        events, self._events = self._events, []
        return events

    def take_questions(self) -> list[tuple[PeerRecord, Question]]:
        """Take what has been asked and not answered."""
        questions, self._questions = self._questions, []
        return questions

    def begin_drain(self) -> None:
        """Tell all frontends to take no new requests, now and when they come."""
        if not self.is_draining:
            self.is_draining = True
            _log.info("the service drains; frontends that are told: %d", len(self.peers.frontends))
            for frontend in self.peers.frontends:
                self.send(frontend, ServiceDrains())

    def tell_stall(self, reason: str) -> bool:
        """Tell all frontends that the service is not ready although there is a worker, or, with '', that it is again.

        Returns whether that is news; sessions of those who could not be told have ended by it.
        """
        if reason == self._stall:
            return False
        self._stall = reason
        if reason:
            _log.warning("not ready: %s", reason)
        if self.peers.worker is not None:
            for frontend in self.peers.frontends:
                self.send(frontend, WorkerState(not reason, reason))
        return True

    def receive(self, now: float) -> None:
        """Handle the messages that wait, up to RECEIVE_LIMIT."""
        for identity, envelope, message in self.channel.receive(RECEIVE_LIMIT):
            if isinstance(message, FrontendHello | WorkerHello):
                self._on_hello(identity, message, now)
                continue
            peer = self.peers.by_identity(identity)
            if peer is None or not peer.session.is_current(envelope):
                self._on_stray(identity, now)
                continue
            try:
                self._on_message(peer, envelope, message, now)
            except SessionLost as error:
                self.end(peer, str(error), "protocol")

    def send(self, peer: PeerRecord, message: FromScheduler) -> int:
        """Send a message of a session; return its size in bytes, 0 if the session ended by this."""
        if isinstance(message, Heartbeat):
            peer.num_unread += 1
        try:
            return self.channel.send(peer.identity, message, peer.session.id, peer.session.next_number())
        except SessionLost as error:
            self._forget(peer, str(error), "unreachable")
            return 0

    def end(self, peer: PeerRecord, reason: str, cause: str) -> None:
        """End a session from this side: the peer is told, if it can be, and begins a new one.

        Args:
            peer: whose session.
            reason: in words.
            cause: one of `octavo.wire.metrics_catalogue.CAUSES`.
        """
        if self.peers.by_session(peer.session.id) is peer and self.send(peer, Goodbye(reason)):
            self._forget(peer, reason, cause)

    def keep_alive(self, now: float, worker_is_busy: bool) -> None:
        """Send heartbeats when due, and end the sessions of peers that have been silent for too long.

        Args:
            now: monotonic seconds.
            worker_is_busy: plans are outstanding: the step timeout of the core watches the worker.
        """
        if self._report is not None and now >= self._report.due:
            self._end_report(self._report, now)
        if now < self._next_heartbeat:
            return
        self._next_heartbeat = now + HEARTBEAT_INTERVAL_S
        for peer in self.peers:
            if now - peer.last_heard > HEARTBEAT_TIMEOUT_S and not (peer.is_worker and worker_is_busy):
                self.end(peer, f"silent for {now - peer.last_heard:.0f} s", "silent")
            else:
                self.send(peer, Heartbeat())

    def leave(self, reason: str) -> None:
        """Say Goodbye to all."""
        self._is_leaving = True
        for peer in self.peers:
            self.end(peer, reason, "scheduler_left")

    # Handshake

    def _on_hello(self, identity: bytes, hello: FrontendHello | WorkerHello, now: float) -> None:
        if self.peers.by_identity(identity) is not None:
            self.num_duplicate_hellos += 1  # said again before the Welcome came
            return
        if (old := self.peers.by_boot_id(hello.boot_id)) is not None:
            self.end(old, "it began anew", "began_anew")
        if (refused := self._refusal(hello)) is not None:
            self._answer(identity, Refuse(refused))
            self._metrics.hello_refused(_role(hello))
            _log.warning("refused %s (pid %d): %s", _role(hello), hello.pid, refused)
        elif isinstance(hello, FrontendHello):
            self._on_frontend_hello(identity, hello, now)
        else:
            self._on_worker_hello(identity, hello, now)

    def _refusal(self, hello: FrontendHello | WorkerHello) -> str | None:
        if hello.protocol_version != PROTOCOL_VERSION:
            return (
                f"the {_role(hello)} speaks protocol version {hello.protocol_version}, "
                f"the scheduler speaks {PROTOCOL_VERSION}"
            )
        if hello.config_digest != self._config.config_digest:
            return (
                f"the {_role(hello)} serves the model with digest {hello.config_digest}, "
                f"the scheduler the one with {self._config.config_digest}"
            )
        return None

    def _on_frontend_hello(self, identity: bytes, hello: FrontendHello, now: float) -> None:
        if self.facts is None:
            self._answer(identity, Wait(NO_WORKER))
            if len(self._early_frontends) < self._config.max_frontends:
                self._early_frontends[identity] = hello
        elif len(self.peers.frontends) >= self._config.max_frontends:
            self._answer(identity, Wait(f"{self._config.max_frontends} frontends are connected, the limit"))
        else:
            peer = self._welcome(identity, hello, FrontendWelcome(self._boot_id, self.facts), now)
            if peer is not None and self.is_draining:
                self.send(peer, ServiceDrains())
            if peer is not None and (reason := NO_WORKER if self.peers.worker is None else self._stall):
                self.send(peer, WorkerState(False, reason))

    def _on_worker_hello(self, identity: bytes, hello: WorkerHello, now: float) -> None:
        if hello.rank != 0:
            self._answer(identity, Refuse(f"rank {hello.rank}: tensor parallelism is not supported"))
            return
        if (other := self.peers.worker) is not None and self.send(other, Heartbeat()):
            if now - other.last_heard > BUSY_WORKER_S:
                self._answer(identity, Wait(f"{other.label} does not answer, but is not lost yet"))
            else:
                self._answer(identity, Refuse(f"{other.label} serves already: one worker is supported"))
            return
        if hello.facts is None:
            self.loading = (hello, now)
            self._answer(identity, Wait("the worker is loading"))
            return
        try:
            facts = resolve_limits(self._config, hello.facts).service_facts
        except ConfigConflict as error:
            self._answer(identity, Refuse(str(error)))
            self._metrics.hello_refused("worker")
            _log.error("refused worker %s (pid %d): %s", hello.boot_id, hello.pid, error)
            return
        self._begin_worker(identity, hello, hello.facts, facts, now)

    def _begin_worker(
        self, identity: bytes, hello: WorkerHello, worker_facts: WorkerFacts, facts: ServiceFacts, now: float
    ) -> None:
        peer = self._welcome(identity, hello, WorkerWelcome(self._boot_id), now)
        if peer is None:
            return
        self.loading = None
        self.last_worker = hello
        num_held = hello.num_held_rows if hello.num_held_rows <= worker_facts.max_num_seqs else 0
        report = Report(peer, worker_facts, facts, num_held, now + REPORT_TIMEOUT_S)
        if hello.num_held_rows:
            self._report = report
        else:
            self._end_report(report, now)

    def _end_report(self, report: Report, now: float) -> None:
        """Let a worker be ready, with the rows of its report or without; frontends are welcomed from here on."""
        self._report, worker_facts, facts = None, report.worker_facts, report.facts
        if self.facts is not None and self.facts != facts:
            for frontend in self.peers.frontends:
                self.end(frontend, "the new worker has other limits", "other_limits")
        self.facts = facts
        ready = WorkerReady(report.peer.session.id, worker_facts, BootId(report.peer.hello.boot_id), report.whole())
        self._events.append(ready)
        for frontend in self.peers.frontends:
            self.send(frontend, WorkerState(not self._stall, self._stall))
        # These would be welcomed at their next Hello, up to HEARTBEAT_INTERVAL_S from now.
        early, self._early_frontends = self._early_frontends, {}
        for early_identity, early_hello in early.items():
            self._on_frontend_hello(early_identity, early_hello, now)

    def _welcome(
        self,
        identity: bytes,
        hello: FrontendHello | WorkerHello,
        welcome: FrontendWelcome | WorkerWelcome,
        now: float,
    ) -> PeerRecord | None:
        peer = PeerRecord(identity, Session(self._new_session()), hello, now)
        try:
            self.channel.send(identity, welcome, peer.session.id)
        except SessionLost as error:
            _log.warning("%s was gone before it could be welcomed: %s", peer.label, error)
            return None
        self.peers.add(peer)
        self._metrics.session_began(peer.role)
        _log.info("session %016x begun with %s", peer.session.id, peer.label)
        return peer

    def _answer(self, identity: bytes, message: Wait | Refuse | UnknownSession) -> None:
        try:
            self.channel.send(identity, message)
        except SessionLost as error:
            _log.debug("a peer without a session was not answered: %s", error)

    # Messages

    def _on_stray(self, identity: bytes, now: float) -> None:
        self.num_strays += 1
        if now >= self._unknown_answers_renewed_at + HEARTBEAT_INTERVAL_S:
            self._unknown_answers_renewed_at = now
            self._unknown_answers_left = MAX_UNKNOWN_ANSWERS
        if self._unknown_answers_left > 0:
            self._unknown_answers_left -= 1
            self._answer(identity, UnknownSession())

    def _on_message(self, peer: PeerRecord, envelope: Envelope, message: FromPeer, now: float) -> None:
        peer.session.accept(envelope)
        peer.last_heard = now
        match message:
            case Heartbeat():
                peer.num_unread = max(0, peer.num_unread - 1)
            case Goodbye(reason):
                self._forget(peer, f"it left: {reason}", "left")
            case HeldRows() if peer.is_worker:
                if self._report is not None and self._report.take(message):  # else it comes too late, or is too long
                    self._end_report(self._report, now)
            case WorkerFigures() if peer.is_worker:
                peer.figures = message
            case StepResult() if peer.is_worker:
                self._events.append(StepCompleted(message))
            case SubmitRequest() if not peer.is_worker:
                self._events.append(RequestSubmitted(peer.session.id, message, peer.hello.boot_id))
            case CancelRequest() if not peer.is_worker:
                self._events.append(RequestCancelled(peer.session.id, message))
            case FinishChoice() if not peer.is_worker:
                self._events.append(ChoiceStopped(peer.session.id, message))
            case ResetPrefixCache() if not peer.is_worker:
                self._events.append(CacheResetRequested(peer.session.id, message))
            case StatusRequest() | DrainService() | ReplaceScheduler() if not peer.is_worker:
                self._questions.append((peer, message))
            case FrontendDrains(drained) if not peer.is_worker:
                peer.state = "drained" if drained else "draining"
            case _:
                _break_contract(peer, message)

    def _forget(self, peer: PeerRecord, reason: str, cause: str) -> None:
        if self.peers.by_session(peer.session.id) is not peer:
            return
        self.peers.remove(peer)
        self._metrics.session_ended(peer.role, cause)
        is_expected = self._is_leaving or cause == "left"
        level = logging.WARNING if peer.is_worker and not is_expected else logging.INFO
        _log.log(level, "session %016x with %s ended: %s", peer.session.id, peer.label, reason)
        if not peer.is_worker:
            self._events.append(FrontendLost(peer.session.id))
            return
        self._report = None
        self._events.append(WorkerLost(peer.session.id, reason, is_orderly=cause == "left"))
        for frontend in self.peers.frontends:
            self.send(frontend, WorkerState(False, f"the worker is lost ({reason}); requests wait for the next one"))


def _role(hello: FrontendHello | WorkerHello) -> str:
    return "worker" if isinstance(hello, WorkerHello) else "frontend"


def _break_contract(peer: PeerRecord, message: FromPeer) -> NoReturn:
    raise SessionLost(f"a {type(message).__name__} from {peer.label}")
