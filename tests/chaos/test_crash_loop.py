"""A worker that dies at each start, under the supervisor of `octavo serve`."""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.cli.supervisor import ChildSpec, Supervisor
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as rpc
from octavo.wire.failpoints import VARIABLE
from tests.support.cluster import FAKE_WORKER, PROGRAM, ROOT
from tests.support.frontend_client import EOF, read
from tests.support.service import assert_gone, free_port, request
from tests.support.tiny_tokenizers import write_model_folder

RECOVERY_S = "2"
WAIT_S = 60.0
RESTART = re.compile(
    r"the fake-worker \(pid (\d+)\) was killed by SIGKILL after .* s; it starts again (?:in (.*) s|at once)"
)


def children(folder: Path, port: int) -> list[ChildSpec]:
    """Return the processes of a service; the worker dies at a start at which the file `healthy` is not there."""
    model, address = folder / "model", f"ipc://{folder}/s"
    write_model_folder(model)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    common = {"PYTHONPATH": path, "OCTAVO_RUNTIME_DIR": str(folder / "run")}
    fault = {VARIABLE: f"worker.before_receive:kill:once={folder / 'healthy'}"}
    peer = (str(model), "--scheduler-address", address)
    role, *options = FAKE_WORKER
    recovery = ("--recovery-timeout", RECOVERY_S)
    doors = ("--grpc-port", str(port), "--http-port", "0")
    return [
        ChildSpec("scheduler", (*peer, *recovery), common),
        ChildSpec(role, (*peer, *options, "--seconds-per-step", "0.1"), {**common, **fault}),
        ChildSpec("frontend", (*peer, *recovery, *doors), common),
    ]


@asynccontextmanager
async def supervised(folder: Path, port: int) -> AsyncIterator[Supervisor]:
    """Run a service; at its end no process is left."""
    supervisor = Supervisor(children(folder, port), grace_s=1.0, program=PROGRAM)
    running = asyncio.create_task(supervisor.run())
    try:
        yield supervisor
        family = psutil.Process().children(recursive=True)
        assert len(family) <= 4, "one process a role, and the compiler of grammars"
    finally:
        supervisor.stopping.set()
        assert await running == 0
    assert_gone(family)


async def until_health(channel: grpc.aio.Channel, wanted: int) -> None:
    """Wait for a state of the service's health."""
    watch = health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=WAIT_S
    )
    async for answer in watch:
        if answer.status == wanted:
            return


async def never_healthy(folder: Path) -> None:
    """Let each start of the worker be one at which it dies: its fault leaves the file, once."""
    while True:
        (folder / "healthy").unlink(missing_ok=True)
        await asyncio.sleep(0.01)


async def test_a_worker_that_dies_at_each_start(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F39: delays grow, requests end UNAVAILABLE with the reason, health says so, and each death is one line."""
    caplog.set_level("INFO", "octavo.cli.supervisor")
    (folder / "healthy").touch()
    port = free_port()
    async with supervised(folder, port) as supervisor, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await until_health(channel, health_pb2.HealthCheckResponse.SERVING)
        stub = rpc.GenerationServiceStub(channel)
        call = stub.GenerateStream(request([1], max_tokens=200, ignore_eos=True), timeout=WAIT_S)
        assert (await read(call)).WhichOneof("event") == "started"
        crashing = asyncio.create_task(never_healthy(folder))
        await asyncio.sleep(0)  # it has begun
        os.kill(supervisor.pids["fake-worker"], 9)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            while await read(call) is not EOF:
                pass
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "worker" in (ended.value.details() or "")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Generate(pb.GenerateRequest(input=request([1], max_tokens=2).input), timeout=WAIT_S)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        await until_health(channel, health_pb2.HealthCheckResponse.NOT_SERVING)
        crashing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await crashing
    lines = [record.getMessage() for record in caplog.records if "fake-worker" in record.getMessage()]
    found = [match for line in lines if (match := RESTART.fullmatch(line))]
    assert len(found) == len(lines), lines
    assert len({match[1] for match in found}) == len(found), "a line a death"
    delays = [float(match[2] or 0) for match in found]
    assert delays == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0][: len(delays)]
    assert len(delays) >= 4
