"""Fail points: what the variable may say, and what then happens at a point."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.wire import failpoints
from octavo.wire.failpoints import EXIT_CODE, POINTS, VARIABLE, FaultInjected, FaultSpecError, arm, failpoint, parse

POINT = "worker.after_compute"
SOURCES = ("worker/loop.py", "scheduler/service.py", "frontend/scheduler_client.py", "frontend/streams.py")


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    arm("")


def test_nothing_is_armed_without_the_variable() -> None:
    arm("")
    assert failpoints._Armed.faults is None
    for point in POINTS:
        failpoint(point)


def test_every_point_is_in_the_code_once_and_no_other() -> None:
    root = Path(__file__).parents[2]
    code = "".join((root / path).read_text() for path in SOURCES)
    for point in POINTS:
        assert code.count(f'failpoint("{point}")') == 1, point
    assert code.count("failpoint(") == len(POINTS)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("worker", "'worker' is not POINT:ACTION"),
        ("worker.sometime:kill", "there is no fail point 'worker.sometime'"),
        (f"{POINT}:burn", "there is no action 'burn'"),
        (f"{POINT}:kill@0", "0 must be at least 1"),
        (f"{POINT}:kill@x", "is not POINT:ACTION"),
        (f"{POINT}:kill@{2**31}", "below 2^31"),
        (f"{POINT}:kill=3", "a delay, and nothing else, has seconds"),
        (f"{POINT}:delay", "a delay, and nothing else, has seconds"),
        (f"{POINT}:delay=nan", "must be a number from 0 to 3600"),
        (f"{POINT}:delay=1h", "must be a number from 0 to 3600"),
        (f"{POINT}:kill,{POINT}", f"'{POINT}' is not POINT:ACTION"),
    ],
)
def test_what_is_malformed_is_refused_by_name(text: str, wrong: str) -> None:
    with pytest.raises(FaultSpecError, match=r"^OCTAVO_FAULT: ") as caught:
        parse(text)
    assert wrong in str(caught.value)


def test_a_role_with_a_malformed_variable_cannot_start(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "octavo.cli.main", "scheduler", str(tmp_path)],
        env={"PATH": "", VARIABLE: "scheduler.later:kill", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "there is no fail point 'scheduler.later'" in done.stderr


def test_it_happens_at_the_nth_time_and_never_again() -> None:
    arm(f"{POINT}:raise@3")
    failpoint(POINT)
    failpoint("worker.before_reply")
    failpoint(POINT)
    with pytest.raises(FaultInjected, match=POINT):
        failpoint(POINT)
    for _ in range(5):
        failpoint(POINT)


def test_a_file_makes_it_happen_in_one_life_only(tmp_path: Path) -> None:
    text = f"{POINT}:raise@2:once={tmp_path / 'hit'}"
    arm(text)
    failpoint(POINT)
    with pytest.raises(FaultInjected):
        failpoint(POINT)
    arm(text)  # the next life
    for _ in range(5):
        failpoint(POINT)
    arm(f"{POINT}:raise")  # without a file each life has it
    with pytest.raises(FaultInjected):
        failpoint(POINT)


def test_a_delay_takes_its_time_and_goes_on() -> None:
    arm(f"{POINT}:delay=0.05")
    began = time.monotonic()
    failpoint(POINT)
    assert time.monotonic() - began >= 0.05


@pytest.mark.parametrize(("action", "code"), [("kill", -signal.SIGKILL), ("exit", EXIT_CODE), ("raise", 1)])
def test_actions_that_end_a_process(action: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", _life(action)], check=False, timeout=60, capture_output=True)
    assert done.returncode == code
    assert done.stdout == b""


def test_a_stopped_process_goes_on_when_it_is_continued() -> None:
    with subprocess.Popen([sys.executable, "-c", _life("stop")], stdout=subprocess.PIPE) as process:
        stopped = _wait_for_stop(process.pid)
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=60)
    assert stopped
    assert output == b"passed\n"


def _life(action: str) -> str:
    point = f"failpoint({POINT!r})"
    return f"from octavo.wire.failpoints import arm, failpoint\narm('{POINT}:{action}')\n{point}\nprint('passed')"


def _wait_for_stop(pid: int) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            return True
    return False
