"""The supervisor with children of its own kind: small programs that end as they are told."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli import supervisor as module
from octavo.cli.supervisor import FRONTEND, ChildSpec, Supervisor

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
    with open(log + ".fifo", "w") as fifo:
        fifo.write("x")
    while True:
        signal.pause()
sys.exit(int(end))
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.001)
    path = tmp_path / "log"
    path.touch()
    os.mkfifo(f"{path}.fifo")
    return path


def supervise(log: Path, children: dict[str, list[str]], grace_s: float = 30.0) -> Supervisor:
    """Return a supervisor of children by role, with the end of each of their lives.

    An end is an exit code, kill (itself), wait (for SIGTERM, to which it listens), or stay (whatever comes).
    """
    specs = [ChildSpec(role, (str(log), *ends)) for role, ends in children.items()]
    return Supervisor(specs, grace_s, (sys.executable, "-c", CHILD))


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
    code = await supervise(log, {"worker": ["kill", "0", "1", "kill", "2"]}).run()
    assert code == 2
    assert lines(log) == ["worker begins"] * 5
    assert [r.message.split(";")[0] for r in caplog.records][:4] == [
        "the worker ended (SIGKILL)",
        "the worker ended (exit code 0)",
        "the worker ended (exit code 1)",
        "the worker ended (SIGKILL)",
    ]


async def test_a_child_that_cannot_start_is_given_up(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = await supervise(log, {"scheduler": ["1"]}).run()
    assert code == module.EXIT_GAVE_UP
    assert lines(log) == ["scheduler begins"] * module.MAX_FAILED_STARTS
    assert caplog.records[-1].message == "the scheduler failed 6 times in a row at its start; the service ends"


async def test_a_child_that_is_killed_is_never_given_up(log: Path) -> None:
    num_kills = 2 * module.MAX_FAILED_STARTS
    assert await supervise(log, {"worker": ["kill"] * num_kills + ["2"]}).run() == 2
    assert lines(log) == ["worker begins"] * (num_kills + 1)


async def test_the_delay_doubles_up_to_its_bound(
    log: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BACKOFF_S", 0.004)
    await supervise(log, {"worker": ["kill"] * 6 + ["2"]}).run()
    delays = [r.message.split("again in ")[1] for r in caplog.records if "again in" in r.message]
    assert delays == ["0 s", "0.001 s", "0.002 s", "0.004 s", "0.004 s", "0.004 s"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_ends_the_frontend_before_the_others(log: Path, number: signal.Signals) -> None:
    """The frontend's streams need scheduler and worker until they have drained."""
    service = supervise(log, {"scheduler": ["wait"], "worker": ["wait"], FRONTEND: ["wait"]})
    code, _ = await asyncio.gather(service.run(), signal_when_up(log, 3, number))
    assert code == 0
    ends = [line for line in lines(log) if line.endswith("stops")]
    assert ends[0] == "frontend stops"
    assert sorted(ends[1:]) == ["scheduler stops", "worker stops"]
    assert service.pids == {}


async def test_what_does_not_end_in_time_is_killed(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    service = supervise(log, {"worker": ["stay"]}, grace_s=0.1)
    code, _ = await asyncio.gather(service.run(), signal_when_up(log, 1, signal.SIGTERM))
    assert code == 0
    assert caplog.records[-1].message == "killing what did not end within 0.1 s: worker"
    assert service.pids == {}


async def test_a_second_signal_kills(log: Path) -> None:
    """The grace of 30 s is longer than the test may take."""
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
    command = [sys.executable, "-P", "-m", "octavo.cli.main", "scheduler", str(demo_model), "--exit-with-parent", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == "octavo: the parent process 1 has ended\n"
