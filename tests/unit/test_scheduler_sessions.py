"""Sessions on a channel that the test plays: time, strays, heartbeats, and how long the loop may sleep."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.errors import InvariantViolation
from octavo.scheduler.events import (
    CacheResetRequested,
    Event,
    FrontendLost,
    RequestCancelled,
    RequestSubmitted,
    WorkerLost,
    WorkerReady,
)
from octavo.scheduler.idle import CHECK_INTERVAL_S, IDLE_BEFORE_CHECK_S, IdleCheck
from octavo.scheduler.loop import Loop
from octavo.scheduler.reports import REPORT_TIMEOUT_S
from octavo.scheduler.service import Service
from octavo.scheduler.sessions import MAX_UNKNOWN_ANSWERS, Sessions
from octavo.scheduler.simulate.model import make_facts
from octavo.wire.codec import Envelope, FromPeer, FromScheduler
from octavo.wire.columns import pack_ints
from octavo.wire.errors import SessionLost
from octavo.wire.handshake import (
    PROTOCOL_VERSION,
    FrontendHello,
    FrontendWelcome,
    Goodbye,
    Heartbeat,
    Refuse,
    UnknownSession,
    Wait,
    WorkerHello,
    WorkerState,
    WorkerWelcome,
)
from octavo.wire.held_rows import HeldRow, HeldRows
from octavo.wire.ids import BootId, SessionId
from octavo.wire.requests import (
    CancelRequest,
    DrainService,
    FrontendDrains,
    ReplaceScheduler,
    ResetPrefixCache,
    ServiceDrains,
    StatusRequest,
)
from tests.support.fake_frontend import make_submit

FRONTEND_HELLO = FrontendHello(PROTOCOL_VERSION, "digest", "f", 1)
WORKER_HELLO = WorkerHello(PROTOCOL_VERSION, "digest", "w", 2, 0, make_facts())


class PlayedChannel:
    """Gives what the test puts in, keeps what is sent, fails for the identities that are gone."""

    def __init__(self) -> None:
        self.num_malformed = self.num_refused = 0
        self.waiting: list[tuple[bytes, Envelope, FromPeer]] = []
        self.sent: list[tuple[bytes, FromScheduler]] = []
        self.sessions: dict[bytes, int] = {}
        self.numbers: dict[bytes, int] = {}
        self.gone: set[bytes] = set()

    def receive(self, limit: int) -> Iterator[tuple[bytes, Envelope, FromPeer]]:
        taken, self.waiting = self.waiting[:limit], self.waiting[limit:]
        yield from taken

    def send(self, peer: bytes, message: FromScheduler, session: int = 0, number: int = 0) -> int:
        if peer in self.gone:
            raise SessionLost("the peer is gone")
        self.sent.append((peer, message))
        if isinstance(message, FrontendWelcome | WorkerWelcome):
            self.sessions[peer], self.numbers[peer] = session, 0
        return 1


LOST = "the worker is lost (the peer is gone); requests wait for the next one"


class Stage:
    """Sessions, and the peers that the test plays."""

    def __init__(self) -> None:
        self.channel = PlayedChannel()
        config = SchedulerConfig(address="ipc:///unused", config_digest="digest")
        self.sessions = Sessions(self.channel, config, BootId("s"))
        self.now = 100.0

    def hello(self, identity: bytes, hello: FromPeer) -> None:
        self.channel.waiting.append((identity, Envelope(SessionId(0), 0), hello))
        self.sessions.receive(self.now)

    def say(self, identity: bytes, message: FromPeer) -> None:
        self.channel.numbers[identity] += 1
        envelope = Envelope(SessionId(self.channel.sessions[identity]), self.channel.numbers[identity])
        self.channel.waiting.append((identity, envelope, message))
        self.sessions.receive(self.now)

    def stray(self, identity: bytes = b"stray") -> None:
        self.channel.waiting.append((identity, Envelope(SessionId(999), 1), CancelRequest(1)))
        self.sessions.receive(self.now)

    def pass_time(self, seconds: float, worker_is_busy: bool = False) -> None:
        self.now += seconds
        self.sessions.keep_alive(self.now, worker_is_busy)

    def take_sent(self) -> list[tuple[bytes, FromScheduler]]:
        sent, self.channel.sent = self.channel.sent, []
        return sent

    def session(self, identity: bytes) -> SessionId:
        return SessionId(self.channel.sessions[identity])

    def events(self) -> list[Event]:
        return self.sessions.take_events()


@pytest.fixture
def stage() -> Stage:
    """Return a stage with a worker and a frontend in session."""
    stage = Stage()
    stage.hello(b"w", WORKER_HELLO)
    stage.hello(b"f", FRONTEND_HELLO)
    assert stage.events() == [WorkerReady(stage.session(b"w"), make_facts(), BootId("w"))]
    assert [type(message) for _, message in stage.take_sent()] == [WorkerWelcome, FrontendWelcome]
    return stage


def test_a_frontend_that_came_early_is_welcomed_when_the_worker_is_ready() -> None:
    stage = Stage()
    stage.hello(b"f", FRONTEND_HELLO)
    assert stage.take_sent() == [(b"f", Wait("no worker is ready"))]
    stage.hello(b"w", WORKER_HELLO)
    assert [(peer, type(message)) for peer, message in stage.take_sent()] == [
        (b"w", WorkerWelcome),
        (b"f", FrontendWelcome),
    ]


def held(number: int) -> HeldRow:
    return HeldRow(f"f-{number}", 0, 1, bytes(32), b"", 1, pack_ints([number]))


REPORTING_HELLO = replace(WORKER_HELLO, num_held_rows=3)
REPORT = HeldRows((held(1), held(2)), is_last=False), HeldRows((held(3),), is_last=True)


def test_a_worker_with_rows_is_ready_when_its_report_is_whole() -> None:
    stage = Stage()
    stage.hello(b"f", FRONTEND_HELLO)
    stage.hello(b"w", REPORTING_HELLO)
    stage.say(b"w", REPORT[0])
    assert stage.events() == []
    assert [type(message) for _, message in stage.take_sent()] == [Wait, WorkerWelcome]
    stage.say(b"w", REPORT[1])
    rows = (held(1), held(2), held(3))
    assert stage.events() == [WorkerReady(stage.session(b"w"), make_facts(), BootId("w"), rows)]
    assert [type(message) for _, message in stage.take_sent()] == [FrontendWelcome]


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [REPORT[0]],
        [replace(REPORT[0], is_last=True)],
        [REPORT[0], REPORT[0]],
        [REPORT[0], REPORT[0], REPORT[1]],
    ],
    ids=["nothing", "not whole", "too few", "too many", "goes on"],
)
def test_a_report_that_is_not_as_announced_is_discarded(parts: list[HeldRows]) -> None:
    stage = Stage()
    stage.hello(b"w", REPORTING_HELLO)
    for part in parts:
        stage.say(b"w", part)
    stage.pass_time(REPORT_TIMEOUT_S)
    assert stage.events() == [WorkerReady(stage.session(b"w"), make_facts(), BootId("w"))]
    stage.say(b"w", REPORT[1])  # late
    assert stage.events() == []
    assert stage.sessions.peers.worker is not None


def test_a_worker_cannot_hold_more_rows_than_it_has() -> None:
    stage = Stage()
    stage.hello(b"w", replace(WORKER_HELLO, num_held_rows=10**6))
    stage.say(b"w", REPORT[0])
    assert stage.events() == [WorkerReady(stage.session(b"w"), make_facts(), BootId("w"))]


def test_a_worker_that_is_lost_while_it_reports_was_never_ready() -> None:
    stage = Stage()
    stage.hello(b"w", REPORTING_HELLO)
    stage.say(b"w", Goodbye("told to stop"))
    stage.pass_time(REPORT_TIMEOUT_S)
    assert [type(event) for event in stage.events()] == [WorkerLost]


def test_a_frontend_reports_no_rows(stage: Stage) -> None:
    stage.say(b"f", REPORT[0])
    assert stage.events() == [FrontendLost(stage.session(b"f"))]


def test_a_drain_reaches_all_frontends_and_those_that_come_later(stage: Stage) -> None:
    stage.hello(b"g", replace(FRONTEND_HELLO, boot_id="g"))
    stage.take_sent()
    stage.say(b"g", DrainService(7))
    ((asker, question),) = stage.sessions.take_questions()
    assert (asker.identity, question) == (b"g", DrainService(7))
    assert stage.sessions.take_questions() == []
    stage.sessions.begin_drain()
    assert stage.take_sent() == [(b"f", ServiceDrains()), (b"g", ServiceDrains())]
    stage.sessions.begin_drain()  # twice is as good as once
    assert stage.take_sent() == []
    stage.hello(b"h", replace(FRONTEND_HELLO, boot_id="h"))
    assert [type(message) for _, message in stage.take_sent()] == [FrontendWelcome, ServiceDrains]
    assert stage.events() == []


def test_frontends_say_how_far_they_have_drained(stage: Stage) -> None:
    (frontend,) = stage.sessions.peers.frontends
    assert frontend.state == "ready"
    for drained, state in ((False, "draining"), (True, "drained")):
        stage.say(b"f", FrontendDrains(drained))
        assert frontend.state == state


@pytest.mark.parametrize("message", [DrainService(1), FrontendDrains(True), ReplaceScheduler(1)])
def test_a_worker_cannot_drain_or_replace(stage: Stage, message: FromPeer) -> None:
    stage.say(b"w", message)
    assert isinstance(stage.events()[0], WorkerLost)
    assert not stage.sessions.is_draining


def test_heartbeats_go_out_once_an_interval_and_to_all(stage: Stage) -> None:
    stage.pass_time(0.0)
    assert stage.take_sent() == [(b"w", Heartbeat()), (b"f", Heartbeat())]
    stage.pass_time(0.9)
    assert stage.take_sent() == []
    assert stage.sessions.next_timer == stage.now - 0.9 + 1.0
    stage.pass_time(0.1)
    assert stage.take_sent() == [(b"w", Heartbeat()), (b"f", Heartbeat())]


def test_strays_do_not_put_heartbeats_off_and_are_answered_within_a_bound(stage: Stage) -> None:
    stage.pass_time(0.0)
    stage.take_sent()
    for _ in range(MAX_UNKNOWN_ANSWERS + 50):
        stage.stray()
    assert stage.take_sent() == [(b"stray", UnknownSession())] * MAX_UNKNOWN_ANSWERS
    stage.now += 1.0
    stage.stray()
    stage.sessions.keep_alive(stage.now, False)
    assert stage.take_sent() == [(b"stray", UnknownSession()), (b"w", Heartbeat()), (b"f", Heartbeat())]
    assert stage.sessions.num_strays == MAX_UNKNOWN_ANSWERS + 51


def test_silence_ends_sessions_and_the_core_is_told(stage: Stage) -> None:
    frontend, worker = stage.session(b"f"), stage.session(b"w")
    stage.pass_time(6.0)
    stage.say(b"w", Heartbeat())
    stage.take_sent()
    stage.pass_time(4.5)
    assert stage.take_sent() == [(b"w", Heartbeat()), (b"f", Goodbye("silent for 10 s"))]
    assert stage.events() == [FrontendLost(frontend)]
    stage.pass_time(20.0, worker_is_busy=True)
    assert stage.events() == []
    stage.pass_time(1.0)
    assert stage.events() == [WorkerLost(worker, "silent for 26 s")]
    assert stage.sessions.next_timer is None


def test_a_peer_that_cannot_be_reached_is_lost_at_the_next_heartbeat(stage: Stage) -> None:
    stage.channel.gone.add(b"w")
    stage.pass_time(0.0)
    assert stage.events() == [WorkerLost(stage.session(b"w"), "the peer is gone")]
    assert (b"f", WorkerState(False, LOST)) in stage.take_sent()


def test_a_second_worker_is_refused_or_waits_or_takes_over(stage: Stage) -> None:
    other = WorkerHello(PROTOCOL_VERSION, "digest", "w2", 3, 0, make_facts())
    stage.hello(b"w2", other)
    assert stage.take_sent()[-1] == (
        b"w2",
        Refuse("worker w (pid 2) serves already: one worker is supported"),
    )
    stage.now += 2.5
    stage.hello(b"w2", other)
    assert stage.take_sent()[-1] == (b"w2", Wait("worker w (pid 2) does not answer, but is not lost yet"))
    stage.channel.gone.add(b"w")
    old = stage.session(b"w")
    stage.hello(b"w2", other)
    assert stage.events() == [
        WorkerLost(old, "the peer is gone"),
        WorkerReady(stage.session(b"w2"), make_facts(), BootId("w2")),
    ]
    states = [message for _, message in stage.take_sent() if isinstance(message, WorkerState)]
    assert states == [WorkerState(False, LOST), WorkerState(True)]


def test_a_worker_that_comes_back_by_itself_takes_its_own_place(stage: Stage) -> None:
    old = stage.session(b"w")
    stage.hello(b"w.2", WORKER_HELLO)
    assert stage.events() == [
        WorkerLost(old, "it began anew"),
        WorkerReady(stage.session(b"w.2"), make_facts(), BootId("w")),
    ]


def test_a_frontend_welcomed_without_a_worker_is_told_so(stage: Stage) -> None:
    stage.say(b"w", Goodbye("test"))
    stage.take_sent()
    stage.hello(b"f2", FrontendHello(PROTOCOL_VERSION, "digest", "f2", 4))
    assert [type(message) for _, message in stage.take_sent()] == [FrontendWelcome, WorkerState]


def test_messages_after_the_end_of_a_session_are_strays(stage: Stage) -> None:
    stage.say(b"f", Goodbye("test"))
    stage.take_sent()
    stage.say(b"f", CancelRequest(1))
    assert stage.take_sent() == [(b"f", UnknownSession())]


def test_an_idle_loop_sleeps_until_something_is_due(tmp_path: Path) -> None:
    now = [50.0]
    loop = Loop(SchedulerConfig(address=f"ipc://{tmp_path}/s", config_digest="digest"), lambda: now[0])
    try:
        assert loop._poll_ms() is None, "nobody is there: only a message wakes it"
        played = PlayedChannel()
        real, loop.sessions.channel = loop.sessions.channel, played
        played.waiting.append((b"w", Envelope(SessionId(0), 0), WORKER_HELLO))
        loop.sessions.receive(now[0])
        loop.sessions.keep_alive(now[0], False)
        assert loop._poll_ms() == 1000
        loop.core.on_event(WorkerReady(SessionId(played.sessions[b"w"]), make_facts(), BootId("w")), now[0])
        loop.core.on_event(RequestSubmitted(SessionId(1), make_submit(1, [1], 5, deadline_s=0.05)), now[0])
        assert loop._poll_ms() in (50, 51), "rounded up"
        now[0] += 0.06
        assert loop._poll_ms() == 0
        loop.core.on_events((), now[0])
        assert loop._poll_ms() == 940, "nothing that was due is due for ever"
        loop.sessions.channel = real
    finally:
        loop.close()


def test_a_reset_of_the_prefix_cache_is_an_event_of_its_frontend_and_no_worker_asks_for_one(stage: Stage) -> None:
    stage.say(b"f", ResetPrefixCache(3))
    assert stage.events() == [CacheResetRequested(stage.session(b"f"), ResetPrefixCache(3))]
    worker = stage.session(b"w")
    stage.say(b"w", ResetPrefixCache(3))
    assert stage.events() == [WorkerLost(worker, "a ResetPrefixCache from worker w (pid 2)")]


# The idle check


class Proofs:
    """An IdleCheck, and when it proved."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.now = 100.0
        self.fails = False
        self.check = IdleCheck(self._prove)

    def due(self) -> float | None:
        return self.check.due

    def _prove(self) -> None:
        self.at.append(self.now)
        if self.fails:
            raise InvariantViolation("test")

    def turn(self, seconds: float, happened: bool = False, idle: bool = True) -> InvariantViolation | None:
        self.now += seconds
        return self.check.turn(self.now, happened=happened, idle=idle)


def test_nothing_is_proven_while_nothing_has_happened() -> None:
    proofs = Proofs()
    proofs.turn(0.0)
    proofs.turn(100.0)
    assert proofs.at == []
    assert proofs.due() is None


def test_an_idle_period_is_proven_once_and_a_second_after_it_began() -> None:
    proofs = Proofs()
    proofs.turn(0.0, happened=True, idle=False)
    proofs.turn(50.0, idle=False)
    assert proofs.due() is None, "plans are under way"
    proofs.turn(0.0, happened=True)
    assert proofs.due() == 150.0 + IDLE_BEFORE_CHECK_S
    proofs.turn(0.6)
    proofs.turn(0.3, happened=True)
    assert proofs.due() == 150.9 + IDLE_BEFORE_CHECK_S, "it began anew"
    proofs.turn(0.9)
    assert proofs.at == []
    proofs.turn(0.1)
    assert proofs.at == [proofs.now]
    assert proofs.due() is None, "an idle service sleeps"
    proofs.turn(1000.0)
    assert len(proofs.at) == 1


def test_proofs_are_at_least_an_interval_apart() -> None:
    proofs = Proofs()
    for _ in range(100):
        proofs.turn(0.1, happened=True, idle=False)
        proofs.turn(0.1, happened=True)
        proofs.turn(1.1)
    gaps = [later - earlier for earlier, later in pairwise(proofs.at)]
    assert len(gaps) > 5
    assert min(gaps) >= CHECK_INTERVAL_S


def test_what_a_proof_finds_is_counted_and_returned_and_the_next_one_is_not_put_off() -> None:
    proofs = Proofs()
    proofs.fails = True
    proofs.turn(0.0, happened=True)
    assert str(proofs.turn(1.0)) == "test"
    assert proofs.check.num_failed == 1
    assert proofs.turn(20.0) is None
    proofs.turn(0.0, happened=True)
    assert str(proofs.turn(1.0)) == "test"
    assert proofs.check.num_failed == 2


def test_an_idle_loop_wakes_for_its_proof_and_sleeps_afterwards(tmp_path: Path) -> None:
    now = [50.0]
    loop = Loop(SchedulerConfig(address=f"ipc://{tmp_path}/s", config_digest="digest"), lambda: now[0])
    try:
        service = loop.service
        service.turn(now[0])
        service.sessions._events.append(RequestCancelled(SessionId(1), CancelRequest(1)))
        service.turn(now[0])
        assert loop._poll_ms() == 1000
        now[0] += 1.0
        service.turn(now[0])
        assert loop._poll_ms() is None
        assert service.num_failed_checks == 0
    finally:
        loop.close()


def test_who_is_gone_when_its_report_is_sent_takes_its_requests_along_in_the_same_turn() -> None:
    channel = PlayedChannel()
    service = Service(channel, SchedulerConfig(address="ipc:///unused", config_digest="digest"), BootId("s"), 1)
    channel.waiting += [
        (b"w", Envelope(SessionId(0), 0), WORKER_HELLO),
        (b"f", Envelope(SessionId(0), 0), FRONTEND_HELLO),
    ]
    service.turn(100.0)
    session = SessionId(channel.sessions[b"f"])
    channel.waiting.append((b"f", Envelope(session, 1), make_submit(1, [1], 5)))
    service.turn(100.1)
    assert service.core.figures.num_requests == 1
    channel.waiting.append((b"f", Envelope(session, 2), StatusRequest(1)))
    channel.gone.add(b"f")
    service.turn(100.2)
    assert service.sessions.peers.by_session(session) is None
    assert service.core.figures.num_requests == 0


def test_frontends_are_told_of_a_stall_and_of_its_end_whatever_worker_comes(stage: Stage) -> None:
    stage.sessions.tell_stall("stuck")
    stage.sessions.tell_stall("stuck")
    assert stage.take_sent() == [(b"f", WorkerState(False, "stuck"))]
    stage.hello(b"g", replace(FRONTEND_HELLO, boot_id="g"))
    assert stage.take_sent()[-1] == (b"g", WorkerState(False, "stuck"))
    stage.hello(b"w.2", WORKER_HELLO)
    states = [message for _, message in stage.take_sent() if isinstance(message, WorkerState)]
    assert states[-2:] == [WorkerState(False, "stuck")] * 2, "a new worker alone makes nothing ready"
    stage.sessions.tell_stall("")
    assert stage.take_sent() == [(b"f", WorkerState(True)), (b"g", WorkerState(True))]
