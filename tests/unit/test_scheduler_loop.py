"""The loop over real sockets: sessions begin and end by name, bad peers are turned away, nothing is lost."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.errors import InvariantViolation
from octavo.scheduler.loop import Loop
from octavo.scheduler.main import EXIT_FAILED, run
from octavo.scheduler.simulate.model import make_facts
from octavo.wire.codec import encode
from octavo.wire.columns import pack_ints
from octavo.wire.errors import AddressInUse
from octavo.wire.handshake import PROTOCOL_VERSION, Goodbye, Heartbeat, ServiceFacts, WorkerState
from octavo.wire.ids import BootId
from octavo.wire.metrics_catalogue import SCHEDULER
from octavo.wire.metrics_text import cells_of
from octavo.wire.peer import PeerRefused, SessionBegan, SessionEnded, Waiting
from octavo.wire.plan import StepResult
from octavo.wire.prefix import prompt_keys, root_key
from octavo.wire.requests import (
    CancelRequest,
    FailureCode,
    FinishChoice,
    FinishReason,
    PrefixCacheReset,
    ReplaceScheduler,
    ResetPrefixCache,
    SchedulerLeaves,
    StatusReport,
    StatusRequest,
    SubmitRequest,
)
from tests.support.fake_frontend import FakeFrontend, LoopThread, make_submit
from tests.support.fake_worker import FakeWorker

DIGEST = "digest"


class Clock:
    """The real clock, which a test can set forward."""

    def __init__(self) -> None:
        self.offset = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.offset


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


@pytest.fixture
def config(address: str) -> SchedulerConfig:
    return SchedulerConfig(address=address, config_digest=DIGEST)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def loop(config: SchedulerConfig, clock: Clock) -> Iterator[Loop]:
    with LoopThread(config, clock) as loop:
        yield loop
    loop.core.check()


@pytest.fixture
def worker(loop: Loop, address: str) -> Iterator[FakeWorker]:
    with FakeWorker(address, DIGEST, make_facts()) as worker:
        yield worker


@pytest.fixture
def frontend(context: "zmq.Context[zmq.Socket[bytes]]", address: str, worker: FakeWorker) -> Iterator[FakeFrontend]:
    with FakeFrontend(context, address, DIGEST) as frontend:
        frontend.connect()
        yield frontend


def status(frontend: FakeFrontend) -> StatusReport:
    """Ask for a report; when it comes, all that was sent before has been handled."""
    frontend.send(StatusRequest(1))
    frontend.until_event(StatusReport)
    return next(event for event in reversed(frontend.events) if isinstance(event, StatusReport))


# Sessions begin


def test_a_frontend_waits_for_the_worker_and_learns_the_facts(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, loop: Loop
) -> None:
    with FakeFrontend(context, address, DIGEST) as frontend:
        frontend.until_event(Waiting)
        assert frontend.events == [Waiting("no worker is ready")]
        with FakeWorker(address, DIGEST, None) as loading:
            loading.wait_until(lambda: bool(loading.waits))
            assert loading.waits[0] == "the worker is loading"
            loading.facts = make_facts()
            began = frontend.connect()
    assert began.welcome.facts == ServiceFacts(1000, 512, 16, 16, "fcfs", True)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("digest", "version", "reason"),
    [
        ("other", PROTOCOL_VERSION, "serves the model with digest other, the scheduler the one with digest"),
        (DIGEST, 1, f"speaks protocol version 1, the scheduler speaks {PROTOCOL_VERSION}"),
    ],
)
def test_another_model_or_version_is_refused_with_both_names(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, loop: Loop, digest: str, version: int, reason: str
) -> None:
    with FakeFrontend(context, address, digest, version) as frontend, pytest.raises(PeerRefused) as refused:
        frontend.connect()
    assert str(refused.value) == f"the frontend {reason}"
    with FakeWorker(address, digest, make_facts(), protocol_version=version) as worker:
        with pytest.raises(PeerRefused) as refused:
            worker.wait_until(lambda: False)
        assert str(refused.value) == f"the worker {reason}"


def test_a_second_worker_is_refused_by_the_name_of_the_first(address: str, worker: FakeWorker) -> None:
    worker.wait_until(lambda: bool(worker.epochs))
    with FakeWorker(address, DIGEST, make_facts()) as second, pytest.raises(PeerRefused) as refused:
        second.wait_until(lambda: False)
    assert str(refused.value) == (
        f"worker {worker.boot_id} (pid {os.getpid()}) serves already: one worker is supported"
    )


def test_a_second_rank_is_refused(address: str, loop: Loop) -> None:
    with FakeWorker(address, DIGEST, make_facts(), rank=1) as worker, pytest.raises(PeerRefused, match="rank 1: "):
        worker.wait_until(lambda: False)


def test_a_worker_too_small_for_the_configuration_is_refused(address: str) -> None:
    config = SchedulerConfig(address=address, config_digest=DIGEST, max_model_len=500)
    expected = pytest.raises(PeerRefused, match="max_model_len 500 needs 32 blocks of 16 tokens, the pool has 10")
    with LoopThread(config), FakeWorker(address, DIGEST, make_facts(num_blocks=11)) as worker, expected:
        worker.wait_until(lambda: False)


def test_any_thread_can_have_a_report_of_the_loop(loop: Loop, frontend: FakeFrontend) -> None:
    report = loop.ask_report()
    assert report is not None
    cells = cells_of(report.row, SCHEDULER)
    assert cells is not None
    assert [cells[SCHEDULER.begun.cell(role)] for role in ("frontend", "worker")] == [1, 1]
    assert cells[SCHEDULER.frontends.first] == 1
    assert report.processes[0].sample is not None


def test_one_frontend_too_many_waits(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
    config = SchedulerConfig(address=address, config_digest=DIGEST, max_frontends=1)
    with LoopThread(config), FakeWorker(address, DIGEST, make_facts()), FakeFrontend(context, address, DIGEST) as first:
        first.connect()
        with FakeFrontend(context, address, DIGEST) as second:
            second.until_event(Waiting)
            assert second.events == [Waiting("1 frontends are connected, the limit")]
            first.close()
            second.connect()


def test_two_schedulers_on_one_path_are_a_clear_error(config: SchedulerConfig, loop: Loop) -> None:
    with pytest.raises(AddressInUse, match="another process listens on"):
        Loop(config)
    assert run(config) == EXIT_FAILED


# Streams


def test_streams_count_upwards_and_everything_is_free_afterwards(loop: Loop, frontend: FakeFrontend) -> None:
    for handle in range(12):
        frontend.send(make_submit(handle, [handle * 50], 1 + 7 * handle, num_choices=1 + handle % 3))
    frontend.send(make_submit(12, [1], 40, stop_ids=[5]))
    received = frontend.received
    frontend.until(lambda: len(received.finished) == 25)
    for (handle, choice), finished in received.finished.items():
        if handle < 12:
            first = handle * 50 + 1
            assert received.tokens[handle, choice] == list(range(first, first + 1 + 7 * handle))
            assert finished.reason is FinishReason.LENGTH
    assert received.tokens[12, 0] == [2, 3, 4, 5]
    assert received.finished[12, 0].reason is FinishReason.STOP
    report = status(frontend)
    assert (report.running, report.waiting, report.free_blocks, report.total_blocks) == (0, 0, 64, 64)
    assert report.steps >= 78


def test_the_news_of_one_turn_is_one_message(worker: FakeWorker, frontend: FakeFrontend) -> None:
    worker.hold()
    for handle in range(5):
        frontend.send(make_submit(handle, [1], 3))
    status(frontend)
    frontend.events.clear()
    worker.release()
    frontend.until(lambda: len(frontend.received.finished) == 5)
    assert len(frontend.events) <= 8, "a message for each result and not for each request"


def test_cancel_and_finish_end_work(worker: FakeWorker, frontend: FakeFrontend) -> None:
    worker.hold()
    frontend.send(make_submit(1, [1], 400))
    frontend.send(make_submit(2, [1], 400, num_choices=2))
    worker.wait_for_plans(2)
    frontend.send(CancelRequest(1))
    frontend.send(FinishChoice(2, 0, 0))
    report = status(frontend)
    assert report.running + report.waiting == 1
    frontend.send(FinishChoice(2, 1, 0))
    report = status(frontend)
    assert (report.running, report.waiting, report.free_blocks) == (0, 0, 64)
    worker.release()


def test_the_status_names_every_process(loop: Loop, worker: FakeWorker, frontend: FakeFrontend) -> None:
    scheduler, first, second = status(frontend).processes
    pid = os.getpid()
    assert (scheduler.role, scheduler.pid, scheduler.epoch, scheduler.state) == (
        "scheduler",
        pid,
        worker.epochs[0],
        "ready",
    )
    assert (first.role, first.boot_id, first.epoch, first.state) == (
        "worker",
        worker.boot_id,
        worker.epochs[0],
        "ready",
    )
    assert (second.role, second.boot_id, second.state) == ("frontend", frontend.boot_id, "ready")


def test_a_reset_of_the_prefix_cache_is_answered_and_reported(frontend: FakeFrontend) -> None:
    ids = list(range(40))
    for handle, cached in ((1, 0), (2, 32)):
        frontend.send(make_cached(handle, ids))
        frontend.until(lambda: len(frontend.received.finished) == handle)  # noqa: B023  called in this round only
        assert frontend.received.started[handle].num_cached_tokens == cached
    report = status(frontend)
    assert (report.cached_blocks, report.prompt_tokens, report.cached_prompt_tokens) == (2, 80, 32)
    frontend.send(ResetPrefixCache(7))
    frontend.until_event(PrefixCacheReset)
    assert PrefixCacheReset(7, 2) in frontend.events
    frontend.send(make_cached(3, ids))
    frontend.until(lambda: len(frontend.received.finished) == 3)
    assert frontend.received.started[3].num_cached_tokens == 0
    assert status(frontend).free_blocks == 64


def make_cached(handle: int, ids: list[int]) -> SubmitRequest:
    """Return a request for one token that takes part in the prefix cache."""
    root = root_key(DIGEST)
    keys = prompt_keys(root, pack_ints(ids), 16)
    return msgspec.structs.replace(make_submit(handle, ids, 1), prefix_root=root, prefix_keys=keys)


def test_an_idle_service_proves_its_state_and_serves_on_if_it_is_wrong(
    loop: Loop, frontend: FakeFrontend, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise InvariantViolation("two and two are five")

    frontend.send(make_submit(1, [1], 3))
    frontend.until(lambda: bool(frontend.received.finished))
    real = loop.service._idle_check._check
    monkeypatch.setattr(loop.service._idle_check, "_check", fail)
    with caplog.at_level(logging.ERROR, "octavo.scheduler"):
        while status(frontend).failed_checks == 0:
            clock.offset += 0.2
    assert [r.getMessage() for r in caplog.records] == ["the idle scheduler contradicts itself: two and two are five"]
    monkeypatch.setattr(loop.service._idle_check, "_check", real)
    frontend.send(make_submit(2, [1], 3))
    frontend.until(lambda: len(frontend.received.finished) == 2)
    assert status(frontend).failed_checks == 1


# Sessions end


@pytest.mark.parametrize("is_polite", [True, False])
def test_a_frontend_that_goes_takes_its_requests_along(
    context: "zmq.Context[zmq.Socket[bytes]]",
    address: str,
    worker: FakeWorker,
    frontend: FakeFrontend,
    clock: Clock,
    loop: Loop,
    is_polite: bool,
) -> None:
    with FakeFrontend(context, address, DIGEST) as other:
        other.connect()
        worker.hold()
        other.send(make_submit(1, [1], 400))
        worker.wait_for_plans(2)
        if is_polite:
            other.send(Goodbye("test"))
    while status(frontend).running:
        clock.offset += 1.0  # the next heartbeat finds nobody
    assert status(frontend).free_blocks == 64
    worker.release()


@pytest.mark.parametrize("is_polite", [True, False])
def test_streams_go_on_when_a_new_worker_comes(
    address: str, loop: Loop, context: "zmq.Context[zmq.Socket[bytes]]", clock: Clock, is_polite: bool
) -> None:
    first = FakeWorker(address, DIGEST, make_facts()).start()
    with FakeFrontend(context, address, DIGEST) as frontend:
        frontend.connect()
        first.hold()
        frontend.send(make_submit(1, [1], 30))
        first.wait_for_plans(2)
        first.release(10)
        frontend.until(lambda: len(frontend.received.tokens[1, 0]) == 10)
        if is_polite:
            first.stop()
        else:
            first.kill()
        frontend.until(lambda: len(frontend.states) == 1)
        assert not frontend.states[0].ready
        assert "lost" in {process.state for process in status(frontend).processes}
        with FakeWorker(address, DIGEST, make_facts()) as second:
            frontend.until(lambda: len(frontend.received.finished) == 1)
            assert frontend.states[1:] == [WorkerState(True)]
            assert second.epochs[0] != first.epochs[0]
        assert frontend.received.tokens[1, 0] == list(range(2, 32))


def test_a_worker_with_other_limits_begins_new_sessions_with_frontends(
    address: str, loop: Loop, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    first = FakeWorker(address, DIGEST, make_facts()).start()
    with FakeFrontend(context, address, DIGEST) as frontend:
        frontend.connect()
        first.stop()
        with FakeWorker(address, DIGEST, make_facts(max_model_len=100)):
            frontend.until_event(SessionEnded)
            assert SessionEnded("the scheduler left: the new worker has other limits") in frontend.events
            welcome = frontend.connect().welcome
    assert welcome.facts.max_model_len == 100  # type: ignore[union-attr]


def test_an_idle_worker_that_falls_silent_is_lost_and_a_busy_one_is_not(
    address: str, loop: Loop, context: "zmq.Context[zmq.Socket[bytes]]", clock: Clock
) -> None:
    with FakeFrontend(context, address, DIGEST) as frontend, FakeWorker(address, DIGEST, make_facts()) as worker:
        frontend.connect()
        worker.hold()
        frontend.send(make_submit(1, [1], 2))
        worker.wait_for_plans(2)
        clock.offset += 11.0  # silent, as everybody now is: but it computes
        loop.wake()
        frontend.until_event(SessionEnded)
        assert worker.endings == []
        clock.offset += 300.0
        loop.wake()
        worker.wait_until(lambda: bool(worker.endings))
        assert worker.endings == ["the scheduler left: no step finished for 300 s"]
        worker.wait_until(lambda: len(worker.epochs) == 2)
        clock.offset += 11.0
        loop.wake()
        worker.wait_until(lambda: len(worker.endings) == 2)
        assert worker.endings[1].startswith("the scheduler left: silent for 1")


def test_heartbeats_keep_a_session_alive(loop: Loop, frontend: FakeFrontend, worker: FakeWorker, clock: Clock) -> None:
    for _ in range(5):
        clock.offset += 4.0
        status(frontend)  # heard from
        worker.wait_until(lambda: True)
    assert not any(isinstance(event, SessionEnded) for event in frontend.events)


def test_a_deadline_fires_without_any_message(worker: FakeWorker, frontend: FakeFrontend) -> None:
    worker.hold()
    frontend.send(make_submit(1, [1], 2, deadline_s=0.05))
    frontend.until(lambda: bool(frontend.received.failed))
    assert frontend.received.failed[1].code is FailureCode.DEADLINE
    worker.release()


def test_stopping_says_goodbye(
    config: SchedulerConfig, context: "zmq.Context[zmq.Socket[bytes]]", address: str
) -> None:
    thread = LoopThread(config)
    with (
        FakeWorker(address, DIGEST, make_facts()) as worker,
        FakeFrontend(context, address, DIGEST) as frontend,
        thread,
    ):
        frontend.connect()
        thread.stop()  # the socket is open still, so that what it says is certain to arrive
        frontend.until_event(SessionEnded)
        worker.wait_until(lambda: bool(worker.endings))
    assert SessionEnded("the scheduler left: the scheduler stops") in frontend.events
    assert worker.endings == ["the scheduler left: the scheduler stops"]


# Bad peers


def test_garbage_is_dropped_and_counted_and_others_are_served(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, loop: Loop, frontend: FakeFrontend
) -> None:
    frames: list[list[bytes]] = [
        [b""],
        [b"\0" * 100],
        [os.urandom(1000)],
        [encode(Heartbeat(), 1, 1)[:-1]],
        [b"OV" + PROTOCOL_VERSION.to_bytes(2, "little") + b"\0" * 20 + b"\x91" * 5000],
        [b"a", b"b", b"c"],
        [b"x"] * 1000,
    ]
    with context.socket(zmq.DEALER) as bad:
        bad.linger = 1000
        bad.connect(address)
        for message in frames:
            bad.send_multipart(message)
        bad.send(encode(CancelRequest(1), 12345, 1))  # well-formed, of no session
        assert bad.poll(30_000)
    assert loop.sessions.channel.num_malformed == len(frames)
    assert loop.sessions.num_strays == 1
    frontend.send(make_submit(1, [1], 3))
    frontend.until(lambda: bool(frontend.received.finished))


def test_strays_are_answered_within_a_bound(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, loop: Loop, frontend: FakeFrontend
) -> None:
    with context.socket(zmq.DEALER) as bad:
        bad.connect(address)
        for number in range(400):
            bad.send(encode(CancelRequest(1), 12345, number))
        assert bad.poll(30_000)
        while loop.sessions.num_strays < 400:
            status(frontend)
        answers = 0
        while bad.poll(100):
            bad.recv()
            answers += 1
    assert 1 <= answers <= 200


def test_a_message_that_a_role_does_not_send_ends_its_session(frontend: FakeFrontend) -> None:
    frontend.peer.send(StepResult(1, 1, b"", b""))
    frontend.until_event(SessionEnded)
    (ended,) = [event for event in frontend.events if isinstance(event, SessionEnded)]
    assert ended.reason.startswith("the scheduler left: a StepResult from frontend")
    frontend.connect()


def test_a_gap_in_the_numbers_ends_the_session(frontend: FakeFrontend, loop: Loop) -> None:
    session = frontend.peer.session_id
    assert session is not None
    frontend.peer.channel.send(CancelRequest(1), session, 5)
    frontend.until_event(SessionEnded)
    (ended,) = [event for event in frontend.events if isinstance(event, SessionEnded)]
    assert ended.reason.startswith("the scheduler left: message 5 came after message ")
    frontend.connect()


def test_a_hello_said_twice_is_ignored_and_counted(frontend: FakeFrontend, loop: Loop) -> None:
    frontend.peer.channel.send(frontend.peer._make_hello())
    status(frontend)
    assert loop.sessions.num_duplicate_hellos == 1


def test_a_process_that_comes_back_ends_its_old_session(
    context: "zmq.Context[zmq.Socket[bytes]]", loop: Loop, frontend: FakeFrontend
) -> None:
    frontend.peer.reset("test")
    frontend.connect()
    assert len([p for p in status(frontend).processes if p.role == "frontend"]) == 1
    assert len([event for event in frontend.events if isinstance(event, SessionBegan)]) == 2


# Traces


def test_plans_and_results_are_traced(context: "zmq.Context[zmq.Socket[bytes]]", address: str, tmp_path: Path) -> None:
    path = tmp_path / "plans.jsonl"
    config = SchedulerConfig(address=address, config_digest=DIGEST, trace_plans=path)
    with (
        LoopThread(config),
        FakeWorker(address, DIGEST, make_facts()) as worker,
        FakeFrontend(context, address, DIGEST) as frontend,
    ):
        frontend.connect()
        frontend.send(make_submit(3, [1, 2], 2))
        frontend.until(lambda: bool(frontend.received.finished))
        epoch = f"{worker.epochs[0]:x}"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        assert line.pop("time_s") > 0
        assert line.pop("epoch") == epoch
    plans = [line for line in lines if "plan" in line]
    name = f"{frontend.boot_id}-3/0"
    assert plans == [
        {
            "plan": 1,
            "rows": [{"row": 0, "sequence": name, "num_tokens": 2}],
            "num_new": 1,
            "cached_tokens": 0,
            "forked_rows": [],
            "freed_rows": [],
            "appended_blocks": 1,
            "copied_blocks": 0,
            "free_blocks": 63,
            "running": 1,
            "waiting": 0,
        },
        {
            "plan": 2,
            "rows": [{"row": 0, "sequence": name, "num_tokens": 1}],
            "num_new": 0,
            "cached_tokens": 0,
            "forked_rows": [],
            "freed_rows": [],
            "appended_blocks": 0,
            "copied_blocks": 0,
            "free_blocks": 63,
            "running": 1,
            "waiting": 0,
        },
    ]
    assert [line for line in lines if "result" in line] == [
        {"result": step, "tokens": 1, "faults": 0, "compute_us": 1} for step in (1, 2)
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_trace_with_one_warning_and_nothing_else(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = SchedulerConfig(address=address, config_digest=DIGEST, trace_plans=Path("/dev/full"))
    with (
        caplog.at_level(logging.WARNING, "octavo.scheduler"),
        LoopThread(config),
        FakeWorker(address, DIGEST, make_facts()),
        FakeFrontend(context, address, DIGEST) as frontend,
    ):
        frontend.connect()
        frontend.send(make_submit(1, [1], 30))
        frontend.until(lambda: bool(frontend.received.finished))
    assert [record.getMessage() for record in caplog.records] == [
        "plans are traced no longer: cannot write /dev/full: No space left on device"
    ]


# The process


def test_a_scheduler_that_is_replaced_leaves_in_good_order(
    context: "zmq.Context[zmq.Socket[bytes]]", config: SchedulerConfig, address: str
) -> None:
    """F40, on purpose: it answers, says Goodbye to all, and the next one takes over what the frontends hold."""
    with FakeWorker(address, DIGEST, make_facts()) as worker, FakeFrontend(context, address, DIGEST) as frontend:
        with LoopThread(config) as first:
            frontend.connect()
            frontend.send(make_submit(1, range(20), max_tokens=400))
            frontend.until(lambda: len(frontend.received.tokens[1, 0]) >= 3)
            frontend.send(ReplaceScheduler(7))
            frontend.until_event(SessionEnded)
            answer, end = [one for one in frontend.events if isinstance(one, SchedulerLeaves | SessionEnded)]
            assert answer == SchedulerLeaves(7, 1)
            assert end == SessionEnded("the scheduler left: the next one takes its place")
            worker.wait_until(lambda: worker.endings == ["the scheduler left: the next one takes its place"])
            assert first.service.is_replaced
        with LoopThread(config):
            assert frontend.connect().session


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_with_goodbyes_and_exit_code_0(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, number: signal.Signals
) -> None:
    code = (
        "import sys; from octavo.scheduler.config import SchedulerConfig; from octavo.scheduler.main import run; "
        f"sys.exit(run(SchedulerConfig(address={address!r}, config_digest={DIGEST!r})))"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            with (
                FakeWorker(address, DIGEST, make_facts(), boot_id=BootId("w")) as worker,
                FakeFrontend(context, address, DIGEST) as frontend,
            ):
                frontend.connect()
                worker.wait_until(lambda: bool(worker.epochs))  # or the process may end before it has read its welcome
                process.send_signal(number)
                assert process.wait(30) == 0
                worker.wait_until(lambda: bool(worker.endings))
                frontend.until_event(SessionEnded)
        finally:
            process.kill()
