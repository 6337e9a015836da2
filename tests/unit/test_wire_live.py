"""Who notices that a loop stands still: the thread that answers for it, and ends the process."""

import json
import os
import queue
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.wire import live
from octavo.wire.live import EXIT_STALLED, LOADING_LIMIT_S, LiveAnswers, Progress, Standstill
from tests.support.service import OCTAVO

WAIT_S = 30.0


@pytest.fixture
def path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
        yield f"{folder}/s"


def ask(path: str, what: str = "/health") -> tuple[int, dict[str, object]]:
    with socket.socket(socket.AF_UNIX) as asker:
        asker.settimeout(WAIT_S)
        asker.connect(path)
        asker.sendall(f"GET {what} HTTP/1.1\r\n\r\n".encode())
        answer = b""
        while data := asker.recv(4096):
            answer += data
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


# How long a loop has stood still


def test_a_loop_that_moves_or_rests_does_not_stand_still() -> None:
    progress = Progress(limit_s=5.0)
    progress.serve()
    still = Standstill(progress, 100.0)
    for now in range(101, 131):
        progress.move()
        still.look(float(now))
        assert still.seconds == 0.0
    progress.rest()
    for now in range(131, 161):
        still.look(float(now))
        assert still.seconds == 0.0


def test_a_loop_that_stands_still_is_hung_after_its_limit() -> None:
    """F37 from within: also where a step never comes back from the device."""
    progress = Progress(limit_s=5.0)
    progress.serve()
    still = Standstill(progress, 100.0)
    seen = []
    for now in range(101, 108):
        still.look(float(now))
        seen.append((still.seconds, still.is_too_long))
    assert seen == [(float(n), n > 5) for n in range(1, 8)]
    progress.move()
    still.look(108.0)
    assert not still.is_too_long


def test_a_pause_of_the_whole_process_hardly_counts() -> None:
    """SIGSTOP and SIGCONT, a suspended machine, or one so busy that nobody gets a turn: none of it kills."""
    progress = Progress(limit_s=5.0)
    progress.serve()
    still = Standstill(progress, 100.0)
    still.look(9_000.0)
    assert still.seconds == 2 * live.LOOK_INTERVAL_S
    assert not still.is_too_long


def test_loading_has_a_limit_of_its_own() -> None:
    progress = Progress(limit_s=1.0)
    assert progress.limit_s == LOADING_LIMIT_S
    progress.serve()
    assert progress.limit_s == 1.0


# What is answered


def test_it_tells_of_loading_and_readiness(path: str) -> None:
    progress = Progress(limit_s=WAIT_S)
    with LiveAnswers("worker", progress, path):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert ask(path) == (200, {"state": "loading", "ready": False, "standstill_s": 0.0})
        assert ask(path, "/ready")[0] == 503
        progress.serve()
        progress.is_ready = True
        status, body = ask(path)
        assert (status, body["state"], body["ready"]) == (200, "serving", True)
        assert ask(path, "/ready")[0] == 200
        assert ask(path, "/metrics")[0] == 404
    assert not os.path.exists(path)


def test_a_loop_that_hangs_is_told_and_ends_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LOOK_INTERVAL_S", 0.01)
    told: queue.Queue[str] = queue.Queue()
    progress = Progress(limit_s=0.02)
    progress.serve()
    progress.is_ready = True
    with LiveAnswers("worker", progress, path, told.put):
        assert told.get(timeout=WAIT_S).startswith(
            "the worker has made no progress with its work for 0 s; its loop is at "
        )
        status, body = ask(path)
        assert (status, body["state"], body["ready"]) == (503, "stalled", False)
        assert str(body["reason"]).startswith("it has made no progress with its work for ")
        assert ask(path, "/ready")[0] == 503
    assert told.empty()


def test_an_asker_that_says_nothing_keeps_nobody_from_an_answer(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "ASKER_PATIENCE_S", 0.01)
    with LiveAnswers("worker", Progress(), path), socket.socket(socket.AF_UNIX) as silent:
        silent.connect(path)
        assert ask(path)[0] == 200


def test_what_an_earlier_life_left_is_replaced(path: str) -> None:
    """F56."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    with LiveAnswers("worker", Progress(), path):
        assert ask(path)[0] == 200


def test_what_is_no_socket_stays(path: str) -> None:
    """F56."""
    Path(path).write_text("mine")
    with pytest.raises(OSError, match="Address already in use"):
        LiveAnswers("worker", Progress(), path)
    assert Path(path).read_text() == "mine"


def test_what_belongs_to_somebody_else_stays(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F56."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(OSError, match="Address already in use"):
            LiveAnswers("worker", Progress(), path)
    assert os.path.exists(path)


HANGS = """
import logging, sys, threading
from octavo.wire import live
logging.basicConfig()
live.LOOK_INTERVAL_S = 0.01
progress = live.Progress(limit_s=0.05)
progress.serve()
def step_that_hangs():
    threading.Event().wait()
with live.LiveAnswers("worker", progress, sys.argv[1]):
    step_that_hangs()
"""


def test_a_process_that_hangs_ends_itself(path: str) -> None:
    """F37, where nobody supervises: whoever started it starts it again."""
    done = subprocess.run(
        [sys.executable, "-c", HANGS, path], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == EXIT_STALLED
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "CRITICAL:octavo.wire.live:the worker has made no progress with its work for 0 s; its loop is at"
    )
    assert "step_that_hangs" in line
    assert line.endswith("this process ends, so that another one can try")


def test_a_hanging_log_does_not_keep_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_TELL_TIMEOUT_S", 0.01)
    codes: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(os, "_exit", codes.put)
    blocked = threading.Event()
    monkeypatch.setattr(live._log, "critical", lambda *_: blocked.wait())
    live._end_process("it hangs")
    assert codes.get_nowait() == EXIT_STALLED
    blocked.set()


# octavo live


def octavo_live(path: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*OCTAVO, "live", "--socket", path, *arguments], capture_output=True, text=True, timeout=WAIT_S, check=False
    )


def test_the_command_asks_a_process(path: str) -> None:
    progress = Progress(limit_s=WAIT_S)
    with LiveAnswers("worker", progress, path):
        done = octavo_live(path)
        assert (done.returncode, json.loads(done.stdout)["state"]) == (0, "loading")
        assert octavo_live(path, "--ready").returncode == 1
    done = octavo_live(path)
    assert (done.returncode, done.stderr) == (1, f"octavo: {path}: No such file or directory\n")


def test_the_command_says_that_a_stopped_process_does_not_answer(path: str) -> None:
    """F37: what a container's health check sees of a worker that was stopped."""
    with subprocess.Popen([sys.executable, "-c", HANGS.replace("0.05", "1e9"), path]) as hung:
        try:
            while not os.path.exists(path):
                assert hung.poll() is None
            os.kill(hung.pid, signal.SIGSTOP)
            done = octavo_live(path, "--timeout", "0.1")
            assert (done.returncode, done.stderr) == (1, f"octavo: {path}: no answer within 0.1 s\n")
        finally:
            hung.kill()


def test_the_command_imports_little() -> None:
    """It runs every few seconds in each container."""
    code = (
        "import sys; from octavo.cli.main import build; build('live'); "
        "print([name for name in ('grpc', 'torch', 'zmq', 'rich', 'msgspec', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout == "[]\n"
