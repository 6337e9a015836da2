"""The frontend as a process: how it starts, what it says when it cannot, and how it ends."""

import asyncio
import http.client
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.frontend.main import EXIT_CONFIGURATION, EXIT_FAILED
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc
from octavo.wire.requests import FinishReason, SubmitRequest
from tests.support.frontend_client import EOF, WAIT_S, parse, read, refusal
from tests.support.scripted_scheduler import ScriptedScheduler

CODE = """
import logging, os, resource, sys
if "MOST_FILES" in os.environ:
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(os.environ["MOST_FILES"]),) * 2)
from pathlib import Path
from octavo.frontend.config import FrontendConfig
from octavo.frontend.main import run
logging.basicConfig(level=logging.INFO)
model, address, port, grace, reuse = sys.argv[1:]
config = FrontendConfig(
    Path(model), ("tiny",), address, grpc_port=int(port), grace_s=float(grace), reuse_port=reuse == "reuse",
    http_port=int(os.environ["HTTP_PORT"]) if "HTTP_PORT" in os.environ else None,
)
sys.exit(run(config))
"""


@contextmanager
def process(
    model: Path, address: str, port: int, grace_s: float = 20, reuse: str = "", log: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    arguments = [sys.executable, "-c", CODE, str(model), address, str(port), str(grace_s), reuse]
    with log.open("w") if log is not None else nullcontext(subprocess.PIPE) as stderr:
        running = subprocess.Popen(arguments, stderr=stderr, text=True)
    try:
        yield running
    finally:
        if running.poll() is None:
            running.kill()
        running.communicate()


async def ended(running: "subprocess.Popen[str]") -> tuple[int, str]:
    """Wait for a process's end; return its exit status and what it said."""
    _, said = await asyncio.to_thread(running.communicate, timeout=WAIT_S)
    return running.returncode, said


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[grpc.aio.Channel]:
    options = (("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 50))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        async with asyncio.timeout(WAIT_S):
            await channel.channel_ready()
        yield channel


async def until_serving(channel: grpc.aio.Channel) -> None:
    """Wait until requests are taken."""
    async for event in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S):
        if event.status == health_pb2.HealthCheckResponse.SERVING:
            return


async def begin_stream(channel: grpc.aio.Channel, scheduler: ScriptedScheduler) -> tuple[object, SubmitRequest]:
    """Begin a stream, and read its Started."""
    await scheduler.session_begun()
    await until_serving(channel)  # the frontend may not have read its welcome yet
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    call = stub.GenerateStream(pb.GenerateStreamRequest(input=parse(text="x")), timeout=WAIT_S)
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    assert (await read(call)).WhichOneof("event") == "started"
    return call, request


async def test_health_answers_before_anything_else_is_there(tiny_model: Path, address: str, free_port: int) -> None:
    with process(tiny_model, address, free_port) as running:
        async with connected(free_port) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        running.send_signal(signal.SIGTERM)
        assert (await ended(running))[0] == 0


async def test_it_listens_on_loopback_alone(tiny_model: Path, address: str, free_port: int) -> None:
    with process(tiny_model, address, free_port) as running:
        async with connected(free_port):
            listening = [
                connection.laddr.ip
                for connection in psutil.Process(running.pid).net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            ]
            assert [address.removeprefix("::ffff:") for address in listening] == ["127.0.0.1"]


async def test_sigterm_lets_running_requests_end(
    tiny_model: Path, scheduler: ScriptedScheduler, address: str, free_port: int
) -> None:
    with process(tiny_model, address, free_port) as running:
        async with connected(free_port) as channel:
            call, request = await begin_stream(channel, scheduler)
            running.send_signal(signal.SIGTERM)
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            async with asyncio.timeout(WAIT_S):
                while True:  # until the signal has been seen, requests are taken
                    other = stub.Generate(pb.GenerateRequest(input=parse(text="y", model="none")), timeout=WAIT_S)
                    found = await refusal(other)
                    if found.code == grpc.StatusCode.UNAVAILABLE:
                        break
            assert found.reason == "DRAINING"
            scheduler.emit(request, list(b"all"), finish=FinishReason.LENGTH)
            assert (await read(call)).delta.text == "all"
            assert (await read(call)).WhichOneof("event") == "finished"
            assert await read(call) is EOF
            assert (await ended(running))[0] == 0
            await scheduler.session_over()


async def test_logs_on_a_full_disk_hold_nothing_up(
    tiny_model: Path, scheduler: ScriptedScheduler, address: str, free_port: int
) -> None:
    """F57: lines are lost, requests and the exit code are not."""
    with process(tiny_model, address, free_port, log=Path("/dev/full")) as running:
        async with connected(free_port) as channel:
            call, request = await begin_stream(channel, scheduler)
            scheduler.emit(request, list(b"all"), finish=FinishReason.LENGTH)
            assert (await read(call)).delta.text == "all"
            assert (await read(call)).WhichOneof("event") == "finished"
            running.send_signal(signal.SIGTERM)
            assert (await ended(running))[0] == 0


async def test_more_connections_than_files_take_nothing_from_who_is_connected(
    tiny_model: Path, scheduler: ScriptedScheduler, address: str, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F59: a stream goes on beside 400 connections to a process that may open 256 files, and later ones are served again."""
    monkeypatch.setenv("MOST_FILES", "256")
    with process(tiny_model, address, free_port) as running:
        async with connected(free_port) as channel:
            call, request = await begin_stream(channel, scheduler)
            with ExitStack() as stack:
                for _ in range(400):
                    crowd = stack.enter_context(socket.socket())
                    crowd.setblocking(False)
                    crowd.connect_ex(("127.0.0.1", free_port))
                for position, byte in enumerate(b"all"):
                    scheduler.emit(request, [byte], position=position)
                    assert (await read(call)).delta.text == chr(byte)
                assert psutil.Process(running.pid).num_fds() < 192, "the rest has files left"
            scheduler.emit(request, list(b"!"), position=3, finish=FinishReason.LENGTH)
            assert (await read(call)).delta.text == "!"
        async with connected(free_port) as channel:
            await until_serving(channel)
        running.send_signal(signal.SIGTERM)
        assert (await ended(running))[0] == 0


async def test_more_connections_than_files_at_both_doors(
    tiny_model: Path, scheduler: ScriptedScheduler, address: str, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F59: beside 800 connections to a process that may open 256 files, /health is answered; it recovers, and ends with 0."""
    monkeypatch.setenv("MOST_FILES", "256")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        http_port = probe.getsockname()[1]
    monkeypatch.setenv("HTTP_PORT", str(http_port))
    with process(tiny_model, address, free_port) as running:
        async with connected(free_port) as channel:
            await scheduler.session_begun()
            await until_serving(channel)
            with ExitStack() as stack:
                for number in range(800):
                    crowd = stack.enter_context(socket.socket())
                    crowd.setblocking(False)
                    crowd.connect_ex(("127.0.0.1", http_port if number % 2 else free_port))
                assert await asyncio.to_thread(http_status, http_port) == 200
                # Those that are one too many are taken before they are sent away.
                async with asyncio.timeout(WAIT_S):
                    while psutil.Process(running.pid).num_fds() >= 256 - 16:  # noqa: ASYNC110 (it is another process)
                        await asyncio.sleep(0)
            assert await asyncio.to_thread(http_status, http_port) == 200
        async with connected(free_port) as channel:
            await until_serving(channel)
        running.send_signal(signal.SIGTERM)
        assert (await ended(running))[0] == 0


def http_status(port: int) -> int:
    """Return the status of GET /health."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    finally:
        connection.close()


async def test_a_second_sigterm_does_not_wait(
    tiny_model: Path, scheduler: ScriptedScheduler, address: str, free_port: int
) -> None:
    with process(tiny_model, address, free_port, grace_s=10 * WAIT_S) as running:
        async with connected(free_port) as channel:
            call, _ = await begin_stream(channel, scheduler)
            running.send_signal(signal.SIGTERM)
            health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
            async for event in health:
                if event.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                    break
            running.send_signal(signal.SIGTERM)
            assert (await refusal(call)).code == grpc.StatusCode.UNAVAILABLE
            assert (await ended(running))[0] == 0


async def test_a_port_that_is_taken(tiny_model: Path, address: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with process(tiny_model, address, port) as running:
            status, said = await ended(running)
    assert status == EXIT_FAILED
    assert f"cannot listen on 127.0.0.1:{port}" in said
    assert "Traceback" not in said


async def test_two_frontends_may_share_a_port(tiny_model: Path, address: str, free_port: int) -> None:
    with process(tiny_model, address, free_port, reuse="reuse") as first:
        async with connected(free_port):
            with process(tiny_model, address, free_port, reuse="reuse") as second:
                said = ""
                while "listening on" not in said:
                    assert second.stderr is not None
                    said = await asyncio.wait_for(asyncio.to_thread(second.stderr.readline), WAIT_S)
                assert str(free_port) in said
                assert first.poll() is None


async def test_a_broken_tokenizer_is_named(tmp_path: Path, tiny_model: Path, address: str, free_port: int) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    (tmp_path / "tokenizer.json").write_bytes(b'{"version": "1.0"')
    with process(tmp_path, address, free_port) as running:
        status, said = await ended(running)
    assert status == EXIT_CONFIGURATION
    assert str(tmp_path / "tokenizer.json") in said
    assert "Traceback" not in said


async def test_a_refusal_by_the_scheduler_ends_it(
    tiny_model: Path, scheduler: ScriptedScheduler, address: str, free_port: int
) -> None:
    scheduler.refusal = "this is another model"
    with process(tiny_model, address, free_port) as running:
        status, said = await ended(running)
    assert status == EXIT_CONFIGURATION
    assert "this is another model" in said


async def test_an_address_that_is_none(tiny_model: Path, free_port: int) -> None:
    with process(tiny_model, "tcp://10.0.0.1:5", free_port) as running:
        status, said = await ended(running)
    assert status == EXIT_CONFIGURATION
    assert "tcp://10.0.0.1:5" in said
    assert "Traceback" not in said


async def test_killed_frontends_leave_the_port(tiny_model: Path, address: str, free_port: int) -> None:
    for _ in range(2):
        with process(tiny_model, address, free_port) as running:
            async with connected(free_port):
                os.kill(running.pid, signal.SIGKILL)
            assert (await ended(running))[0] == -signal.SIGKILL
