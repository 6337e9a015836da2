"""A worker and a scheduler that are killed, or stopped and continued, at each boundary of a step, under 16 streams.

F36, F37, F38, F40; I11, I12, I16, I23.
"""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from octavo.wire.failpoints import EXIT_CODE, PLACES, VARIABLE
from tests.chaos.conftest import SILENCE_S, Chaos, running
from tests.support.history import UNAVAILABLE

WAIT_S = 30.0
STEP_TIMEOUT_S = 1.0

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chaos() -> AsyncIterator[Chaos]:
    """Return a service that all tests of this module share; each gives the faulted process a new life."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as name:
        async with running(Path(name), 0, num_frontends=2, scheduler=("--step-timeout", str(STEP_TIMEOUT_S))) as one:
            yield one


@pytest.fixture(autouse=True)
def histories_of_this_test_alone(chaos: Chaos) -> None:
    """One that failed may have left some."""
    chaos.client.histories = []


PROCESSES = ("scheduler", "worker", "frontend-0", "frontend-1")


async def begin_faulted(chaos: Chaos, role: str, fault: str) -> int:
    """Begin a life with a fault; return its process id."""
    return await asyncio.to_thread(chaos.cluster.begin_anew, role, {VARIABLE: fault})


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("role", ["worker", "scheduler"])
async def test_killed_at_a_step_boundary(chaos: Chaos, seed: int, role: str, place: str) -> None:
    """F36 (worker), F40 (scheduler): streams pause and go on without loss or repetition; I11, I12."""
    chaos.seed = seed
    pid = await begin_faulted(chaos, role, f"{role}.{place}:kill@20")
    await chaos.load().once()
    assert (await asyncio.to_thread(chaos.cluster.wait_for_end, pid)).code == -signal.SIGKILL
    await chaos.judge()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("role", ["worker", "scheduler"])
async def test_stopped_at_a_step_boundary(chaos: Chaos, seed: int, role: str, place: str) -> None:
    """F37: its sessions end by silence or by the step timeout; what it says when it wakes is of an old epoch (I23)."""
    chaos.seed = seed
    log_sizes = {name: len(chaos.cluster.log_of(name)) for name in PROCESSES}
    pid = await begin_faulted(chaos, role, f"{role}.{place}:stop@20")
    load = chaos.load()
    load.start()
    poll = chaos.cluster.poll
    try:
        await asyncio.to_thread(poll, lambda: is_stopped(pid), f"the {role} did not stop")
        await asyncio.to_thread(poll, lambda: is_missed(chaos, role, log_sizes), f"nobody missed the {role}")
    finally:
        os.kill(pid, signal.SIGCONT)
    await load.stop()
    assert chaos.cluster.pid(role) == pid, "it goes on in its old life"
    await chaos.judge()


@pytest.mark.parametrize("place", PLACES)
async def test_a_frontend_killed_at_a_step_boundary(chaos: Chaos, seed: int, place: str) -> None:
    """F41: its own requests end UNAVAILABLE at a token that is right; those of the other frontend are whole."""
    chaos.seed = seed
    pid = await begin_faulted(chaos, "frontend-1", f"frontend.{place}:kill@20")
    load = chaos.load()
    load.start()  # and goes on: while it loads, a frontend refuses what comes
    assert (await asyncio.to_thread(chaos.cluster.wait_for_end, pid)).code == -signal.SIGKILL
    await asyncio.to_thread(chaos.cluster.wait_until_whole)
    await load.stop()
    await chaos.judge(lambda history: {UNAVAILABLE, "TRUNCATED"} if history.frontend == 1 else ())


def is_stopped(pid: int) -> bool:
    return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def is_missed(chaos: Chaos, role: str, log_sizes: dict[str, int]) -> bool:
    """Whether somebody who talked to a stopped process has given it up; it may have stopped before all had come to it."""
    said = {name: chaos.cluster.log_of(name)[size:] for name, size in log_sizes.items()}
    if role == "scheduler":
        return any("nothing heard from the scheduler" in text for name, text in said.items() if name != "scheduler")
    return "ended: no step finished" in said["scheduler"] or "ended: silent for" in said["scheduler"]


async def test_a_worker_that_hangs_is_replaced_and_refused_when_it_wakes(chaos: Chaos, seed: int) -> None:
    """F37: another one takes its place meanwhile; the old one ends, for one worker is supported."""
    chaos.seed = seed
    pid = await begin_faulted(chaos, "worker", "worker.after_compute:stop@20")
    load = chaos.load()
    load.start()
    await asyncio.to_thread(chaos.cluster.poll, lambda: is_stopped(pid), "the worker did not stop")
    await asyncio.to_thread(chaos.cluster.replace, "worker")
    await load.stop()
    # One that came while the stopped one still counted as well was refused, and the next one took the place.
    serving = chaos.cluster.pid("worker")
    os.kill(pid, signal.SIGCONT)
    assert (await asyncio.to_thread(chaos.cluster.wait_for_end, pid)).code == 2
    assert chaos.cluster.pid("worker") == serving != pid
    await chaos.judge()


@pytest.mark.parametrize(("action", "code"), [("exit", EXIT_CODE), ("raise", EXIT_CODE)])
async def test_a_worker_that_fails_is_not_used_again(chaos: Chaos, seed: int, action: str, code: int) -> None:
    """F38: an error that nobody expects ends the process, and the next one goes on."""
    chaos.seed = seed
    pid = await begin_faulted(chaos, "worker", f"worker.after_receive:{action}@20")
    await chaos.load().once()
    assert (await asyncio.to_thread(chaos.cluster.wait_for_end, pid)).code == code
    await chaos.judge()


async def test_a_slow_step_is_no_fault(chaos: Chaos, seed: int) -> None:
    """A delay that is shorter than the step timeout, and longer than a heartbeat, ends no session."""
    chaos.seed = seed
    said = len(chaos.cluster.log_of("scheduler"))
    fault = f"worker.after_receive:delay={SILENCE_S * 0.6}@20"
    pid = await begin_faulted(chaos, "worker", fault)
    await asyncio.to_thread(chaos.cluster.wait_until_whole)
    began = time.monotonic()
    await chaos.load().once()
    assert time.monotonic() - began > SILENCE_S * 0.6
    assert chaos.cluster.pid("worker") == pid
    assert "ended: no step finished" not in chaos.cluster.log_of("scheduler")[said:]
    await chaos.judge()
