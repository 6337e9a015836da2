"""The scheduler makes room for the next one while streams are open, and no process outlives the one it belongs to."""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import psutil
import pytest

from octavo.v1 import admin_pb2
from octavo.v1 import generation_pb2 as pb
from tests.support.service import Answer, Service, assert_gone, request

MakeService = Callable[[], Service]

LONG = 24
WAIT_S = 60.0
FORMS = itertools.count()


@pytest.fixture
def running(make_service: MakeService, demo_model: Path) -> Service:
    return make_service().serve(str(demo_model), "--backend", "reference").wait_until_ready()


def stream(service: Service, at: dict[int, Callable[[], object]]) -> Answer:
    """Read a stream to its end; do something whenever so many tokens have come."""
    answer, left = Answer(), dict(at)
    for event in service.generation.GenerateStream(request([1], max_tokens=LONG, ignore_eos=True), timeout=2 * WAIT_S):
        answer.add(event)
        for count in [count for count in left if count <= len(answer.ids)]:
            left.pop(count)()
    assert len(answer.ids) == LONG
    assert answer.finished is not None
    assert not left
    return answer


def next_scheduler(service: Service, without: set[int]) -> int:
    """Wait for a scheduler of another process id, and return that."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        pids = service.pids_of("scheduler", "ready")
        if pids and pids[0] not in without:
            return pids[0]
    raise AssertionError(f"no scheduler but {without}; it said:\n{service.output}")


def test_streams_go_on_over_three_replacements(running: Service) -> None:
    """F40, on purpose: by the admin call, by the command, and by SIGHUP, which no terminal sent."""
    undisturbed = stream(running, {})
    seen = {running.pid_of("scheduler")}

    def replace(ask: Callable[[], object]) -> Callable[[], None]:
        def act() -> None:
            ask()
            seen.add(next_scheduler(running, seen))

        return act

    def call() -> None:
        answer = running.admin.ReplaceScheduler(admin_pb2.ReplaceSchedulerRequest(), timeout=WAIT_S)
        assert answer.running_requests == 1

    def command() -> None:
        done = running.run("replace-scheduler")
        assert done.stdout == "the scheduler leaves; requests that have begun: 1\n", done

    disturbed = stream(
        running,
        {
            4: replace(call),
            10: replace(command),
            16: replace(lambda: running.process.send_signal(signal.SIGHUP)),
        },
    )
    assert disturbed.ids == undisturbed.ids
    assert len(seen) == 4
    assert running.output.count("left in good order after") == 3
    assert running.output.count("it starts again at once") == 3
    held = running.wait_until_idle()
    assert held.free_blocks == held.total_blocks


def test_no_process_outlives_the_one_it_belongs_to(running: Service) -> None:
    """F44: kill -9 of each process in turn, the one that compiles grammars among them, and at last of the supervisor."""
    compiler = compile_something(running)
    compiler.kill()
    compile_something(running)
    for role in ("worker", "scheduler"):
        os.kill(running.pid_of(role), signal.SIGKILL)
        compiler = compile_something(running)
    frontend = psutil.Process(running.pid_of("frontend"))
    frontend.kill()
    assert_gone([frontend, compiler])
    running.wait_until_ready()
    compile_something(running)
    family = running.family()
    assert len(family) == 5
    running.process.kill()
    assert_gone(family)
    assert [one.pid for one in psutil.process_iter() if belongs_to(running, one)] == []


def compile_something(service: Service) -> psutil.Process:
    """Generate by a form that nobody asked for yet; return the process that compiled it."""
    asked = request([1], max_tokens=4).input
    asked.constraint.regex = f"[ab]{{1,{2 + next(FORMS)}}}"
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            service.generation.Generate(pb.GenerateRequest(input=asked), timeout=WAIT_S, wait_for_ready=True)
            break
        except grpc.RpcError:
            assert time.monotonic() < deadline
    (found,) = [one for one in service.family() if "octavo.frontend.grammar_compiler" in one.cmdline()]
    return found


def belongs_to(service: Service, process: psutil.Process) -> bool:
    """Whether a process was started by the service, or by one of its processes."""
    with contextlib.suppress(psutil.Error):
        return process.environ().get("OCTAVO_RUNTIME_DIR") == service.environment["OCTAVO_RUNTIME_DIR"]
    return False
