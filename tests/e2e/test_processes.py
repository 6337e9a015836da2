"""How the processes of a service begin, end, and survive each other."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse

from octavo.v1 import generation_pb2 as pb
from tests.support.service import OCTAVO, Answer, Service, assert_gone, request

MakeService = Callable[[], Service]

LONG = 60


@pytest.fixture
def running(make_service: MakeService, demo_model: Path) -> Service:
    return make_service().serve(str(demo_model), "--backend", "cpu").wait_until_ready()


def test_kill_of_the_supervisor_leaves_no_process(running: Service) -> None:
    family = running.family()
    assert len(family) == 4
    running.process.send_signal(signal.SIGKILL)
    assert_gone(family)


def test_sigterm_drains_and_exits_with_0(running: Service) -> None:
    assert stream(running, lambda: running.process.send_signal(signal.SIGTERM)).finished is not None
    assert running.process.wait(30) == 0
    assert "WARNING" not in running.output
    assert left_by(running) == []


def left_by(service: Service) -> list[Path]:
    return list(Path(service.environment["OCTAVO_RUNTIME_DIR"]).iterdir())


def test_a_terminal_that_vanishes_ends_the_service_in_order(make_service: MakeService, demo_model: Path) -> None:
    service = make_service()
    master, slave = os.openpty()
    flags = ("--backend", "cpu", "--http-port", "0", "--num-frontends", "2", "--log-level", "warning")
    command = (*OCTAVO, "serve", str(demo_model), "--grpc-port", service.address.rpartition(":")[2], *flags)
    # The first terminal that the leader of a session opens becomes its own.
    words = ("sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(slave), *command)
    service.processes.append(subprocess.Popen(words, env=service.environment, start_new_session=True))
    os.close(slave)
    service.wait_until_ready()
    family = service.family()
    os.close(master)
    assert service.process.wait(30) == 0
    assert_gone(family)
    assert left_by(service) == []


@pytest.mark.parametrize("role", ["worker", "scheduler"])
def test_streams_go_on_after_a_process_was_killed(running: Service, role: str) -> None:
    old = running.pid_of(role)
    stream(running, lambda: os.kill(old, signal.SIGKILL))
    assert running.pid_of(role) != old
    held = running.wait_until_idle()
    assert held.free_blocks == held.total_blocks


def test_streams_go_on_after_a_process_was_stopped(make_service: MakeService, demo_model: Path) -> None:
    """F37: nobody closes a connection, and yet it is noticed; what the stopped one holds is gone with it."""
    service = make_service().serve(str(demo_model), "--backend", "reference", "--stall-timeout", "2").wait_until_ready()
    undisturbed = stream(service)
    for role in ("scheduler", "worker"):
        old = service.pid_of(role)
        assert stream(service, lambda: os.kill(old, signal.SIGSTOP)).ids == undisturbed.ids  # noqa: B023
        assert service.pid_of(role) != old
        assert f"the {role} (pid {old}) stalls: it has not answered for 2 s; it is killed" in service.output


def stream(service: Service, disturb: Callable[[], object] = lambda: None) -> Answer:
    """Read a long stream to its end; disturb the service after the fifth token."""
    answer = Answer()
    for event in service.generation.GenerateStream(request([1], max_tokens=LONG, ignore_eos=True), timeout=90):
        before = len(answer.ids)
        answer.add(event)
        if before < 5 <= len(answer.ids):
            disturb()
    assert len(answer.ids) == LONG
    return answer


def test_a_killed_frontend_comes_back_on_its_port(running: Service) -> None:
    """Its own streams end UNAVAILABLE; the scheduler forgets them."""
    call = running.generation.GenerateStream(request([1], max_tokens=4000, ignore_eos=True), timeout=120)
    next(iter(call))
    os.kill(running.pid_of("frontend"), signal.SIGKILL)
    with pytest.raises(grpc.RpcError) as caught:
        for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    held = running.wait_until_ready().wait_until_idle()
    assert held.free_blocks == held.total_blocks


def test_a_second_signal_ends_at_once(running: Service) -> None:
    call = running.generation.GenerateStream(request([1], max_tokens=4000, ignore_eos=True), timeout=120)
    family = running.family()
    next(iter(call))
    running.process.send_signal(signal.SIGINT)
    running.wait_for_health(HealthCheckResponse.NOT_SERVING)  # it drains: the first signal was seen
    running.process.send_signal(signal.SIGINT)
    assert_gone(family)


def test_three_roles_start_by_hand(make_service: MakeService, demo_model: Path) -> None:
    service = make_service()
    port = service.address.rpartition(":")[2]
    service.start("scheduler", str(demo_model))
    service.start("worker", str(demo_model), "--max-num-seqs", "4")
    service.start(
        "frontend", str(demo_model), "--grpc-port", port, "--http-port", "0", "--served-model-name", "by-hand"
    )
    service.wait_until_ready()
    answer = service.generation.Generate(
        pb.GenerateRequest(input=request("What is the capital of France?", max_tokens=32).input), timeout=60
    )
    assert answer.model == "by-hand"
    assert answer.choices[0].text == "The capital of France is Paris."
    assert service.stop() == [0, 0, 0]


def test_a_port_in_use_is_refused_before_anything_starts(make_service: MakeService, demo_model: Path) -> None:
    service = make_service()
    host, _, port = service.address.rpartition(":")
    with socket.create_server((host, int(port))):
        done = service.run("serve", str(demo_model), "--grpc-port", port)
    assert done.returncode == 2
    assert done.stderr == f"octavo: cannot listen on {service.address}: Address already in use\n"


def test_a_damaged_model_is_refused_before_anything_starts(
    make_service: MakeService, demo_model: Path, tmp_path: Path
) -> None:
    with (demo_model / "model.safetensors").open("rb") as source:
        (tmp_path / "model.safetensors").write_bytes(source.read(1_000_000))
    for path in demo_model.iterdir():
        if path.name != "model.safetensors":
            (tmp_path / path.name).symlink_to(path)
    service = make_service().serve(str(tmp_path))
    assert service.process.wait(60) == 2
    assert f"{tmp_path} cannot be served" in service.output
    assert "model.safetensors" in service.output
    assert "listens" not in service.output


def test_what_only_the_worker_finds_ends_the_service(
    make_service: MakeService, demo_model: Path, tmp_path: Path
) -> None:
    """The worker's reason is shown, and nothing is started again."""
    for path in demo_model.iterdir():
        if path.name != "config.json":
            (tmp_path / path.name).symlink_to(path)
    config = json.loads((demo_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 31}))
    service = make_service().serve(str(tmp_path))
    assert service.process.wait(60) == 2
    assert "lacks 9 tensors" in service.output
    assert service.output.count("the worker cannot start as configured") == 1
    assert "starts again" not in service.output
