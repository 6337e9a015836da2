"""The worker's loop over a real ipc socket, against a scripted scheduler."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq

from octavo.wire.channel import DealerChannel
from octavo.wire.columns import pack_ints
from octavo.wire.errors import MalformedMessage, SessionLost
from octavo.wire.handshake import PROTOCOL_VERSION, Goodbye, Heartbeat, Refuse, WorkerHello
from octavo.wire.held_rows import HeldRow, HeldRows, prompt_digest
from octavo.wire.ids import new_boot_id
from octavo.wire.live import SERVING, Progress
from octavo.wire.metrics_catalogue import WORKER
from octavo.wire.metrics_text import cells_of
from octavo.wire.model_digest import model_digest
from octavo.wire.peer import Peer, PeerRefused
from octavo.wire.plan import FLAG_SAMPLE, NewRow, StepPlan, StepResult
from octavo.wire.requests import WorkerFigures
from octavo.worker import main
from octavo.worker.config import WorkerConfig
from octavo.worker.errors import DeviceHung
from octavo.worker.loading import LoadedWorker, load
from octavo.worker.loop import LoadingStopped, WorkerIdentity, WorkerLoop, keep_in_touch
from octavo.worker.main import EXIT_CONFIGURATION, EXIT_OK
from octavo.worker.metrics import WorkerMetrics
from tests.support.plan_driver import GREEDY, PlanDriver, generate, tokens_of
from tests.support.tiny_models import TINY_LLAMA, load_worker, worker_config, write_model
from tests.support.worker_scheduler import ScriptedScheduler

PROMPT = [5, 6, 7, 8, 9]
WAIT_S = 60.0
Spoil = Callable[[StepPlan], StepPlan]


class Stop:
    """Stands for the stop signal, which only the main thread can have."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._requested = False

    def request(self) -> None:
        self._requested = True
        self._sender.send(b"x")

    def requested(self) -> bool:
        return self._requested

    def fileno(self) -> int:
        return self._receiver.fileno()

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()


class RunningLoop:
    """A WorkerLoop in a thread of its own."""

    def __init__(self, address: str, loaded: LoadedWorker) -> None:
        self.error: Exception | None = None
        self.stop = Stop()
        self.progress = Progress()
        self._loaded = loaded
        self._address = address
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with zmq.Context() as context:
            boot_id = new_boot_id()
            identity = WorkerIdentity("digest", boot_id)
            identity.facts = self._loaded.facts
            peer = Peer(DealerChannel(context, self._address, boot_id), identity.hello, time.monotonic)
            try:
                self.metrics = WorkerMetrics(self._loaded.sizes, self._loaded.held, lambda: (peer.num_dropped, 0))
                loop = WorkerLoop(
                    peer,
                    identity,
                    self._loaded.runner,
                    self.stop,  # type: ignore[arg-type]
                    self.progress,
                    metrics=self.metrics,
                )
                loop.run()
            except Exception as error:  # noqa: BLE001  told to the test
                self.error = error
            finally:
                if not peer.channel.socket.closed:
                    peer.channel.close()

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def end(self) -> None:
        self.stop.request()
        self.join()
        self.stop.close()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedWorker:
    return load_worker(write_model(tmp_path_factory.mktemp("model"), TINY_LLAMA | {"tie_word_embeddings": False}))


@pytest.fixture(scope="module")
def expected(loaded: LoadedWorker) -> list[int]:
    """What the prompt is continued by."""
    return generate(loaded.runner, PROMPT, 4)[0]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


@pytest.fixture
def scheduler(address: str) -> Iterator[ScriptedScheduler]:
    with zmq.Context() as context:
        scheduler = ScriptedScheduler(context, address)
        yield scheduler
        scheduler.close()


@pytest.fixture
def loop(
    scheduler: ScriptedScheduler, address: str, loaded: LoadedWorker, expected: list[int]
) -> Iterator[RunningLoop]:
    loaded.runner.clear()
    loop = RunningLoop(address, loaded)
    yield loop
    loop.end()


def begin(scheduler: ScriptedScheduler, loaded: LoadedWorker, session: int) -> PlanDriver:
    scheduler.hear_ready()
    scheduler.welcome(session)
    limits = loaded.runner.rows.limits
    driver = PlanDriver(limits.block_size, limits.num_blocks, epoch=session)
    driver.begin(0, PROMPT)
    return driver


def test_plans_in_flight_are_answered_in_order(
    scheduler: ScriptedScheduler, loop: RunningLoop, loaded: LoadedWorker, expected: list[int]
) -> None:
    driver = begin(scheduler, loaded, 77)
    for plan in [driver.plan({0: 5}), *(driver.plan({0: 1}) for _ in range(3))]:
        scheduler.send(plan)
    results = [scheduler.hear(StepResult) for _ in range(4)]
    assert [(r.epoch, r.step) for r in results] == [(77, 1), (77, 2), (77, 3), (77, 4)]
    assert [tokens_of(r)[0] for r in results] == expected


def test_the_hello_says_who_and_what(scheduler: ScriptedScheduler, loop: RunningLoop, loaded: LoadedWorker) -> None:
    hello = scheduler.hear_ready()
    assert (hello.protocol_version, hello.config_digest, hello.pid) == (PROTOCOL_VERSION, "digest", os.getpid())
    assert hello.facts == loaded.facts


def test_heartbeats_are_answered(scheduler: ScriptedScheduler, loop: RunningLoop) -> None:
    scheduler.hear_ready()
    scheduler.welcome(3)
    scheduler.send(Heartbeat())
    scheduler.hear(Heartbeat)
    assert loop.progress.state == SERVING
    assert loop.progress.is_ready


def test_a_new_session_starts_with_no_rows(
    scheduler: ScriptedScheduler, loop: RunningLoop, loaded: LoadedWorker, expected: list[int]
) -> None:
    driver = begin(scheduler, loaded, 5)
    scheduler.send(driver.plan({0: 5}))
    assert tokens_of(scheduler.hear(StepResult)) == {0: expected[0]}
    scheduler.send(Goodbye("restarting"))
    again = begin(scheduler, loaded, 6)  # takes row 0 anew, in an epoch whose steps begin at 1
    scheduler.send(again.plan({0: 5}))
    result = scheduler.hear(StepResult)
    assert (result.epoch, result.step, tokens_of(result)) == (6, 1, {0: expected[0]})


def test_the_next_scheduler_is_told_of_the_rows_and_may_go_on_from_them(
    scheduler: ScriptedScheduler, loop: RunningLoop, loaded: LoadedWorker, expected: list[int]
) -> None:
    """F40: what the rows have computed is not lost with the scheduler; only ids that nobody computed are."""
    driver = begin(scheduler, loaded, 5)
    for plan in (driver.plan({0: 5}), driver.plan({0: 1})):
        scheduler.send(plan)
        scheduler.hear(StepResult)
    scheduler.send(Goodbye("restarting"))
    assert scheduler.hear_ready().num_held_rows == 1
    scheduler.welcome(6)
    report = scheduler.hear(HeldRows)
    table = driver.rows[0].table
    digest = prompt_digest(pack_ints(PROMPT))
    held = HeldRow("row 0", 0, 5, digest, pack_ints(expected[:2]), 6, pack_ints(table))
    assert report == HeldRows((held,), is_last=True)
    new = NewRow(3, "row 0", 0, 5, 6, pack_ints([*PROMPT, *expected[:2]]), GREEDY)
    plan = StepPlan(
        epoch=6,
        step=1,
        row=pack_ints([3]),
        num_tokens=pack_ints([1]),
        flags=pack_ints([FLAG_SAMPLE]),
        new_rows=(new,),
        append_row=pack_ints([3] * len(table)),
        append_block=pack_ints(table),
    )
    scheduler.send(plan)
    assert tokens_of(scheduler.hear(StepResult)) == {3: expected[2]}


def test_a_session_without_plans_leaves_everything_for_the_next(
    scheduler: ScriptedScheduler, loop: RunningLoop, loaded: LoadedWorker
) -> None:
    driver = begin(scheduler, loaded, 5)
    scheduler.send(driver.plan({0: 5}))
    scheduler.hear(StepResult)
    reports: list[HeldRows] = []
    for session in (6, 7):
        scheduler.send(Goodbye("restarting"))
        assert scheduler.hear_ready().num_held_rows == 1
        scheduler.welcome(session)
        reports.append(scheduler.hear(HeldRows))
    assert reports[0] == reports[1]


def test_an_impossible_plan_leaves_nothing(
    scheduler: ScriptedScheduler, loop: RunningLoop, loaded: LoadedWorker
) -> None:
    driver = begin(scheduler, loaded, 5)
    scheduler.send(driver.plan({0: 5}))
    scheduler.hear(StepResult)
    scheduler.send(msgspec.structs.replace(driver.plan({0: 1}), freed_rows=b"\x07\0\0\0"))
    assert scheduler.hear_ready().num_held_rows == 0


def test_a_scheduler_that_vanishes_is_replaced(address: str, loaded: LoadedWorker, expected: list[int]) -> None:
    loop = None
    try:
        for session in (8, 9):
            with zmq.Context() as context:
                scheduler = ScriptedScheduler(context, address)
                loop = loop or RunningLoop(address, loaded)
                driver = begin(scheduler, loaded, session)
                scheduler.send(driver.plan({0: 5}))
                assert tokens_of(scheduler.hear(StepResult)) == {0: expected[0]}
                scheduler.close()
    finally:
        if loop is not None:
            loop.end()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda plan: msgspec.structs.replace(plan, epoch=plan.epoch + 1),
        lambda plan: msgspec.structs.replace(plan, step=3),
        lambda plan: msgspec.structs.replace(plan, step=1),
        lambda plan: msgspec.structs.replace(plan, freed_rows=b"\x07\0\0\0"),
        lambda plan: msgspec.structs.replace(plan, num_tokens=b"\x02\0\0\0"),
    ],
    ids=["other epoch", "step left out", "step repeated", "row not live", "too many tokens"],
)
def test_an_impossible_plan_ends_the_session_and_nothing_else(
    scheduler: ScriptedScheduler, loop: RunningLoop, loaded: LoadedWorker, expected: list[int], spoil: Spoil
) -> None:
    driver = begin(scheduler, loaded, 21)
    scheduler.send(driver.plan({0: 5}))
    scheduler.hear(StepResult)
    scheduler.send(spoil(driver.plan({0: 1})))
    with suppress(SessionLost):  # it may have left already
        scheduler.send(driver.plan({0: 1}))  # in flight behind it: must not be executed
    again = begin(scheduler, loaded, 22)
    scheduler.send(again.plan({0: 5}))
    result = scheduler.hear(StepResult)
    assert (result.epoch, tokens_of(result)) == (22, {0: expected[0]})


def test_a_stopped_loop_says_goodbye(scheduler: ScriptedScheduler, loop: RunningLoop) -> None:
    scheduler.hear_ready()
    scheduler.welcome(3)
    scheduler.send(Heartbeat())
    scheduler.hear(Heartbeat)
    loop.stop.request()
    assert scheduler.hear(Goodbye).reason == "the worker was told to stop"
    loop.join()
    assert loop.error is None


def test_a_refused_worker_stops_and_says_why(scheduler: ScriptedScheduler, loop: RunningLoop) -> None:
    scheduler.hear_ready()
    scheduler.router.send(scheduler.identity, Refuse("another model"))
    loop.join()
    assert isinstance(loop.error, PeerRefused)
    assert str(loop.error) == "another model"


class HungRunner:
    """A device that takes plans and never comes to an end with them."""

    def __init__(self, loaded: LoadedWorker) -> None:
        self.rows = loaded.runner.rows
        self.num_in_flight = 0
        self.looks = threading.Semaphore(0)

    def launch(self, plan: StepPlan) -> None:
        self.num_in_flight += 1

    def take_results(self) -> list[StepResult]:
        if self.num_in_flight:
            self.looks.release()
        return []

    def clear(self) -> None:
        self.num_in_flight = 0


def test_what_a_worker_counts_is_told_unasked(
    scheduler: ScriptedScheduler, loop: RunningLoop, loaded: LoadedWorker
) -> None:
    driver = begin(scheduler, loaded, 5)
    scheduler.send(driver.plan({0: 5}))
    scheduler.hear(StepResult)
    while True:
        figures = scheduler.hear(WorkerFigures)
        cells = cells_of(figures.row, WORKER)
        assert cells is not None
        if cells[WORKER.sampled.first]:
            break
        scheduler.send(Heartbeat())
    assert cells[WORKER.sampled.first] == cells[WORKER.sessions.first] == cells[WORKER.rows.first] == 1
    assert cells[WORKER.kv_bytes.first] > 0
    assert cells[WORKER.weights_bytes.first] > 0
    assert sum(cells[WORKER.compute_seconds.first :][: len(WORKER.compute_seconds.bounds) + 1]) == 1
    assert figures.sample is not None
    assert figures.sample.resident_bytes > 2**20


def test_a_loop_that_only_waits_for_the_device_makes_no_progress(
    scheduler: ScriptedScheduler, address: str, loaded: LoadedWorker
) -> None:
    """F37: it turns and turns, answers heartbeats, and yet nothing comes of it."""
    runner = HungRunner(loaded)
    loop = RunningLoop(address, replace(loaded, runner=runner))  # type: ignore[arg-type]
    try:
        driver = begin(scheduler, loaded, 7)
        scheduler.send(driver.plan({0: 5}))
        assert runner.looks.acquire(timeout=WAIT_S)
        moves = loop.progress.num_moves
        for _ in range(50):
            assert runner.looks.acquire(timeout=WAIT_S)
        assert loop.progress.num_moves == moves
    finally:
        loop.end()


def test_loading_says_hello_without_facts_and_can_be_stopped(scheduler: ScriptedScheduler, address: str) -> None:
    stop = Stop()
    with zmq.Context() as context:
        boot_id = new_boot_id()
        identity = WorkerIdentity("digest", boot_id)
        now = 0.0
        peer = Peer(DealerChannel(context, address, boot_id), identity.hello, lambda: now)
        heard: list[object] = []
        progress = Progress()
        while not heard:
            now += 1.0
            moves = progress.num_moves
            keep_in_touch(peer, stop, progress)  # type: ignore[arg-type]
            assert progress.num_moves > moves
            heard += [message for _, _, message in scheduler.router.receive(1)]
        assert isinstance(heard[0], WorkerHello)
        assert heard[0].facts is None
        stop.request()
        with pytest.raises(LoadingStopped):
            keep_in_touch(peer, stop, progress)  # type: ignore[arg-type]
        peer.channel.close()
    stop.close()


def test_sigterm_while_loading_ends_the_process_in_good_order(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[LoadedWorker] = []

    def load_after_sigterm(config: WorkerConfig, between_tensors: Callable[[], None]) -> LoadedWorker:
        os.kill(os.getpid(), signal.SIGTERM)
        loaded.append(load(config, between_tensors))
        return loaded[0]

    monkeypatch.setattr(main, "load", load_after_sigterm)
    config = worker_config(write_model(tmp_path / "model"), address=address)
    assert main.run(config) == main.EXIT_OK
    assert loaded == []


PROCESS = """
import logging, sys
from pathlib import Path
logging.basicConfig(level="INFO", stream=sys.stderr, format="%(message)s")
from octavo.worker.config import WorkerConfig
from octavo.worker.main import run
sys.exit(run(WorkerConfig(Path(sys.argv[1]), sys.argv[2], device="cpu", backend="cpu", block_size=4, max_num_seqs=2,
                          num_gpu_blocks_override=33, num_threads=1, load_format=sys.argv[3])))
"""


def start_process(folder: Path, address: str, load_format: str = "auto") -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(folder), address, load_format], stderr=subprocess.PIPE, text=True
    )


def test_a_process_serves_and_leaves_in_good_order(scheduler: ScriptedScheduler, address: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    process = start_process(folder, address)
    try:
        hello = scheduler.hear_ready()
        assert (hello.pid, hello.config_digest) == (process.pid, model_digest(folder))
        assert hello.facts is not None
        scheduler.welcome(4)
        driver = PlanDriver(4, 33, epoch=4)
        driver.begin(1, PROMPT)
        scheduler.send(driver.plan({1: 5}))
        assert tokens_of(scheduler.hear(StepResult)).keys() == {1}
        process.send_signal(signal.SIGTERM)
        scheduler.hear(Goodbye)
        _, log = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    assert process.returncode == EXIT_OK, log
    assert "loading weights 100%" in log
    assert len([line for line in log.splitlines() if "loading weights" in line]) <= 10


def test_a_process_that_cannot_start_says_why_once(address: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1])
    process = start_process(folder, address)
    try:
        _, log = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    assert process.returncode == EXIT_CONFIGURATION, log
    assert f"{folder / 'model.safetensors'} ({len(content) - 1} bytes) is damaged" in log
    assert "Traceback" not in log


def test_a_folder_that_is_no_model_is_named(address: str, tmp_path: Path) -> None:
    process = start_process(tmp_path / "nothing", address)
    try:
        _, log = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    assert process.returncode == EXIT_CONFIGURATION, log
    assert f"{tmp_path / 'nothing'} is no model folder: config.json: No such file" in log


def test_the_worker_imports_nothing_heavy_besides_torch() -> None:
    code = "import sys, octavo.worker.main; print([m for m in ('transformers', 'numpy.testing', 'grpc') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_hung_device_ends_the_process_so_that_another_can_try(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    def hang(*_: object) -> None:
        raise DeviceHung("the GPU did not finish")

    monkeypatch.setattr(main, "_serve", hang)
    monkeypatch.setattr(main, "StopSignal", contextlib.nullcontext)
    monkeypatch.setattr(os, "_exit", ended.append)
    main.run(WorkerConfig(model_path=Path(), address="ipc:///nowhere"))
    assert ended == [main.EXIT_FAILED]


def test_a_message_that_cannot_be_built_is_no_matter_of_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(*_: object) -> None:
        raise MalformedMessage("log-probabilities of row 3 are no numbers")

    monkeypatch.setattr(main, "_serve", spoil)
    monkeypatch.setattr(main, "StopSignal", contextlib.nullcontext)
    with pytest.raises(MalformedMessage):
        main.run(WorkerConfig(model_path=Path(), address="ipc:///nowhere"))
