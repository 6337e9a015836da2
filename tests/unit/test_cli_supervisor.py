"""The supervisor with children of its own kind: small programs that end as they are told."""

import asyncio
import errno
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import restarts, supervisor
from octavo.cli.restarts import GiveUp, Restarts, how_it_ended
from octavo.cli.supervisor import FRONTEND, SCHEDULER, ChildSpec, Supervisor

CHILD = """
import os, signal, sys
role, log, *ends = sys.argv[1:-2]

def write(word):
    with open(log, "a") as file:
        file.write(f"{role} {word}\\n")

with open(log) as file:
    lives = sum(line == f"{role} begins\\n" for line in file)
end = ends[min(lives, len(ends) - 1)]
signal.signal(signal.SIGTERM, lambda *_: (write("stops"), sys.exit(0)) if end == "wait" else write("refuses"))
write("begins")
if end == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif end in ("wait", "stay"):
    os.write(os.open(log + ".fifo", os.O_WRONLY), b"x")
    while True:
        signal.pause()
sys.exit(int(end))
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(restarts, "FIRST_BACKOFF_S", 0.001)
    path = tmp_path / "log"
    path.touch()
    os.mkfifo(f"{path}.fifo")
    return path


def supervise(
    log: Path, children: dict[str, list[str]], grace_s: float = 30.0, ends_on_hangup: bool = True
) -> Supervisor:
    """Return a supervisor of children by role, with the end of each of their lives.

    An end is an exit code, kill (itself), wait (for SIGTERM, to which it listens), or stay (whatever comes).
    """
    specs = [ChildSpec(role, (str(log), *ends)) for role, ends in children.items()]
    return Supervisor(specs, grace_s, (sys.executable, "-c", CHILD), ends_on_hangup=ends_on_hangup)


async def signal_when_up(log: Path, num_children: int, number: signal.Signals) -> None:
    """Send this process a signal once that many children wait."""

    def read() -> None:
        descriptor = os.open(f"{log}.fifo", os.O_RDWR)
        try:
            for _ in range(num_children):
                os.read(descriptor, 1)
        finally:
            os.close(descriptor)

    await asyncio.to_thread(read)
    os.kill(os.getpid(), number)


def lines(log: Path) -> list[str]:
    return log.read_text().splitlines()


async def test_a_configuration_error_ends_everything(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = await supervise(log, {FRONTEND: ["wait"], "worker": ["2"]}).run()
    assert code == 2
    assert lines(log).count("worker begins") == 1
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING] == [
        "the worker cannot start as configured; the service ends"
    ]


async def test_a_child_that_dies_is_started_again(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    code = await supervise(log, {"worker": ["kill", "0", "1", "kill", "2"]}).run()
    assert code == 2
    assert lines(log) == ["worker begins"] * 5
    words = [re.sub(r"pid \d+|\d+\.\d+ s", "_", r.message) for r in caplog.records]
    assert words == [
        "the worker (_) was killed by SIGKILL after _; it starts again at once",
        "the worker (_) left in good order after _; it starts again in _",
        "the worker (_) failed (exit code 1) after _; it starts again in _",
        "the worker (_) was killed by SIGKILL after _; it starts again in _",
        "the worker cannot start as configured; the service ends",
    ]


async def test_a_child_that_cannot_start_is_given_up(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F39."""
    code = await supervise(log, {"scheduler": ["1"]}).run()
    assert code == restarts.EXIT_GAVE_UP
    assert lines(log) == ["scheduler begins"] * restarts.MAX_FAILED_STARTS
    assert caplog.records[-1].message == "the scheduler failed 6 times in a row at its start; the service ends"


async def test_a_child_that_is_killed_is_never_given_up(log: Path) -> None:
    num_kills = 2 * restarts.MAX_FAILED_STARTS
    assert await supervise(log, {"worker": ["kill"] * num_kills + ["2"]}).run() == 2
    assert lines(log) == ["worker begins"] * (num_kills + 1)


async def test_the_delay_doubles_up_to_its_bound(
    log: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "MAX_BACKOFF_S", 0.004)
    await supervise(log, {"worker": ["kill"] * 6 + ["2"]}).run()
    delays = [r.message.split("again ")[1] for r in caplog.records if "again" in r.message]
    assert delays == ["at once", "in 0.001 s", "in 0.002 s", "in 0.004 s", "in 0.004 s", "in 0.004 s"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_ends_the_frontend_first_and_the_scheduler_last(log: Path, number: signal.Signals) -> None:
    """The frontend's streams need scheduler and worker until they have drained; the worker says Goodbye to the scheduler."""
    service = supervise(log, {"scheduler": ["wait"], "worker": ["wait"], FRONTEND: ["wait"]})
    code, _ = await asyncio.gather(service.run(), signal_when_up(log, 3, number))
    assert code == 0
    ends = [line for line in lines(log) if line.endswith("stops")]
    assert ends == ["frontend stops", "worker stops", "scheduler stops"]
    assert service.pids == {}


async def test_what_does_not_end_in_time_is_killed(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    service = supervise(log, {"worker": ["stay"]}, grace_s=0.1)
    code, _ = await asyncio.gather(service.run(), signal_when_up(log, 1, signal.SIGTERM))
    assert code == 0
    assert caplog.records[-1].message == "killing what did not end within 0.1 s: worker"
    assert service.pids == {}


async def test_a_second_signal_kills(log: Path) -> None:
    """F42: the grace of 30 s is longer than the test may take."""
    service = supervise(log, {FRONTEND: ["stay"]})

    async def twice() -> None:
        await signal_when_up(log, 1, signal.SIGTERM)
        await service.stopping.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    async with asyncio.timeout(20):
        code, _ = await asyncio.gather(service.run(), twice())
    assert code == 0


async def test_a_closed_terminal_may_say_so_twice(log: Path) -> None:
    """Shell, make and kernel each send a SIGHUP: none of them is the second signal, which kills."""
    service = supervise(log, {FRONTEND: ["wait"]})

    async def twice() -> None:
        await signal_when_up(log, 1, signal.SIGHUP)
        await service.stopping.wait()
        os.kill(os.getpid(), signal.SIGHUP)

    code, _ = await asyncio.gather(service.run(), twice())
    assert code == 0
    assert lines(log)[-1] == "frontend stops"


async def test_a_hangup_without_a_terminal_replaces_the_scheduler(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At once, however often, and nothing else is touched."""
    caplog.set_level(logging.INFO)
    service = supervise(log, {SCHEDULER: ["wait"], "worker": ["wait"]}, ends_on_hangup=False)

    async def hang_up() -> None:
        await signal_when_up(log, 2, signal.SIGHUP)
        for _ in range(restarts.MAX_FAILED_STARTS):
            await signal_when_up(log, 1, signal.SIGHUP)
        await signal_when_up(log, 1, signal.SIGTERM)

    code, _ = await asyncio.gather(service.run(), hang_up())
    assert code == 0
    number = restarts.MAX_FAILED_STARTS + 1
    assert lines(log).count("scheduler stops") == number + 1
    assert lines(log).count("worker begins") == 1
    words = [re.sub(r"pid \d+|\d+\.\d+ s", "_", r.message) for r in caplog.records][: 2 * number]
    assert (
        words
        == [
            "the scheduler (_) is replaced",
            "the scheduler (_) left in good order after _; it starts again at once",
        ]
        * number
    )


async def test_a_scheduler_that_does_not_make_room_is_killed(
    log: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "KILL_DELAY_S", 0.1)
    service = supervise(log, {SCHEDULER: ["stay", "2"]}, ends_on_hangup=False)
    code, _ = await asyncio.gather(service.run(), signal_when_up(log, 1, signal.SIGHUP))
    assert code == 2
    assert "does not leave within 0.1 s: it is killed" in caplog.text
    assert re.search(r"was killed by SIGKILL after \S+ s; it starts again at once", caplog.text)


async def test_a_child_that_the_system_cannot_start_is_tried_again(
    log: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F39: no process is left to start one, say. That is no end of the service, and no busy loop."""
    start, failures = asyncio.create_subprocess_exec, iter([True] * 3 + [False])

    async def sometimes(*words: str, **settings: Any) -> asyncio.subprocess.Process:
        if next(failures):
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return await start(*words, **settings)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", sometimes)
    assert await supervise(log, {"worker": ["2"]}).run() == 2
    words = "the worker cannot be started: [Errno 11] Resource temporarily unavailable; again "
    assert [r.message for r in caplog.records][:3] == [words + "at once", words + "in 0.001 s", words + "in 0.002 s"]


async def test_what_a_child_leaves_behind_is_killed(log: Path, tmp_path: Path) -> None:
    """F44: a compiler that it had started, say, and that has no parent any more."""
    left = tmp_path / "left"
    os.mkfifo(left)
    # The reader sees the end of the pipe when the last writer is gone.
    code = f"import os, time; pipe = open({str(left)!r}, 'w'); os.fork() or time.sleep(600); os._exit(2)"
    service = Supervisor([ChildSpec("worker", ())], 30.0, (sys.executable, "-c", code))

    def read() -> bytes:
        with left.open("rb") as pipe:
            return pipe.read()

    async with asyncio.timeout(60):
        exit_code, rest = await asyncio.gather(service.run(), asyncio.to_thread(read))
    assert exit_code == 2
    assert rest == b""


# When a process starts again


def test_a_process_that_leaves_in_good_order_starts_at_once() -> None:
    lives = Restarts("scheduler")
    assert [lives.after(0, 3.0) for _ in range(20)] == [0.0] * 20


def test_a_process_that_leaves_at_once_is_held_back_and_given_up() -> None:
    lives = Restarts("scheduler")
    ends = [lives.after(0, 0.5) for _ in range(restarts.MAX_FAILED_STARTS)]
    assert ends[:-1] == [0.0, 0.25, 0.5, 1.0, 2.0]
    assert isinstance(ends[-1], GiveUp)


def test_a_crash_loop_costs_two_starts_a_minute() -> None:
    """F39: no fork bomb, and two lines a minute in the log."""
    lives = Restarts("worker")
    delays = [lives.after(-signal.SIGSEGV, 0.1) for _ in range(100)]
    assert delays[:9] == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert set(delays[9:]) == {30.0}
    assert lives.after(-signal.SIGSEGV, restarts.STABLE_AFTER_S + 1) == 0.0


def test_a_process_that_was_well_starts_at_once_however_often_it_is_killed() -> None:
    """F40: a delay would be a pause of every stream."""
    lives = Restarts("scheduler")
    assert [lives.after(-signal.SIGKILL, 10.0, well_s=restarts.WELL_FOR_S) for _ in range(20)] == [0.0] * 20
    lives = Restarts("scheduler")
    assert [lives.after(-signal.SIGKILL, 10.0, well_s=restarts.WELL_FOR_S / 2) for _ in range(3)] == [0.0, 0.25, 0.5]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "was killed by SIGKILL after 1.5 s"),
        (-40, "was killed by signal 40 after 1.5 s"),
        (0, "left in good order after 1.5 s"),
        (1, "failed (exit code 1) after 1.5 s"),
        (3, "ended itself because it hung (exit code 3) after 1.5 s"),
    ],
)
def test_how_a_process_ended(code: int, words: str) -> None:
    assert how_it_ended(code, 1.5) == words


async def test_sighup_stays_ignored_under_nohup(log: Path) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        service = supervise(log, {FRONTEND: ["wait"]})

        async def signals() -> None:
            await signal_when_up(log, 1, signal.SIGHUP)
            assert not service.stopping.is_set()
            os.kill(os.getpid(), signal.SIGTERM)

        await asyncio.gather(service.run(), signals())
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_a_child_whose_parent_has_ended_does_not_start(demo_model: Path) -> None:
    """F44: it was too late to ask the kernel to be killed with it."""
    command = [sys.executable, "-P", "-m", "octavo.cli.main", "scheduler", str(demo_model), "--exit-with-parent", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == "octavo: the parent process 1 has ended\n"
