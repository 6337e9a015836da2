"""A whole service in processes of its own, as a user starts it, and what tests ask of it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Self

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.v1 import admin_pb2, admin_pb2_grpc
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as rpc

OCTAVO = (sys.executable, "-P", "-m", "octavo.cli.main")
READY_TIMEOUT_S = 90.0
END_TIMEOUT_S = 30.0
IDLE_TIMEOUT_S = 30.0


def free_port() -> int:
    """Return a TCP port of the loopback interface that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Service:
    """Processes of one service; `process` is the one that was started, usually `octavo serve`."""

    def __init__(self, port: int, runtime: Path, log: Path) -> None:
        self.address = f"127.0.0.1:{port}"
        self.environment = os.environ | {"OCTAVO_RUNTIME_DIR": str(runtime), "OMP_NUM_THREADS": "2"}
        self.processes: list[subprocess.Popen[bytes]] = []
        self._log = log
        self.channel = grpc.insecure_channel(self.address, options=[("grpc.max_reconnect_backoff_ms", 200)])
        self.generation = rpc.GenerationServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)

    def serve(self, model: str, *arguments: str) -> Self:
        """Start `octavo serve MODEL ARGUMENTS` on this service's port."""
        return self.start(
            "serve", model, "--grpc-port", self.address.rpartition(":")[2], "--http-port", "0", *arguments
        )

    def start(self, *arguments: str) -> Self:
        """Start `octavo ARGUMENTS`; what it prints goes to the log."""
        with self._log.open("ab") as out:
            process = subprocess.Popen(
                [*OCTAVO, *arguments], stdout=out, stderr=out, env=self.environment, start_new_session=True
            )
        self.processes.append(process)
        return self

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self.processes[0]

    @property
    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_until_ready(self) -> Self:
        """Wait until the service serves."""
        return self.wait_for_health(health_pb2.HealthCheckResponse.SERVING)

    def wait_for_health(self, wanted: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> Self:
        """Wait for a state of the service's health; fail at once when the first process ends."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        code: grpc.StatusCode | None = None
        while self.process.poll() is None and (left := deadline - time.monotonic()) > 0:
            watch = health_pb2_grpc.HealthStub(self.channel).Watch(
                health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=left
            )
            threading.Thread(target=self._cancel_at_end, args=(watch,), daemon=True).start()
            try:
                for answer in watch:
                    if answer.status == wanted:
                        watch.cancel()
                        return self
            except grpc.RpcError as error:
                # The connection to a frontend that was killed may break only now: the next watch waits for a new one.
                code = error.code()
        raise AssertionError(f"health did not become {wanted}: {code}; it said:\n{self.output}")

    def _cancel_at_end(self, watch: "grpc.Future[health_pb2.HealthCheckResponse]") -> None:
        self.process.wait()
        watch.cancel()

    def status(self) -> admin_pb2.GetStatusResponse:
        return self.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=10)

    def pid_of(self, role: str) -> int:
        (pid,) = self.pids_of(role)
        return pid

    def pids_of(self, role: str, state: str | None = None) -> list[int]:
        """Return the processes of a role, perhaps only those in one state."""
        found = self.status().processes
        return [one.pid for one in found if one.role == role and state in (None, one.state)]

    def wait_for_frontends(self, number: int, without: Container[int] = ()) -> list[int]:
        """Return so many ready frontends once they are there, and none of those that must not be among them."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        pids: list[int] = []
        while time.monotonic() < deadline:
            with contextlib.suppress(grpc.RpcError):  # the asked one may be the one that ends
                pids = self.pids_of("frontend", "ready")
                if len(pids) == number and not any(pid in without for pid in pids):
                    return pids
        raise AssertionError(f"frontends {pids}, wanted {number} without {without}; it said:\n{self.output}")

    def wait_until_idle(self) -> admin_pb2.SchedulerStatus:
        """Return the scheduler's state once it holds no request; the bound is only there to fail."""
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while time.monotonic() < deadline:
            status = self.status()
            held = status.scheduler
            if status.HasField("scheduler") and held.running_requests == held.waiting_requests == 0:
                return held
        raise AssertionError(f"not idle after {IDLE_TIMEOUT_S} s: {held}")

    def run(
        self, *arguments: str, stdin: str | None = None, timeout_s: float = 60.0
    ) -> "subprocess.CompletedProcess[str]":
        """Run another `octavo` command against this service to its end."""
        return subprocess.run(
            [*OCTAVO, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=self.environment | {"OCTAVO_ADDRESS": self.address},
            check=False,
        )

    def family(self) -> list[psutil.Process]:
        """Return every process of the service that lives."""
        found = []
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                parent = psutil.Process(process.pid)
                found += [parent, *parent.children(recursive=True)]
        return found

    def stop(self) -> list[int]:
        """End the service with SIGTERM; return the exit codes; fail if any process of it is left."""
        family = self.family()
        codes = []
        try:
            for process in reversed(self.processes):  # a frontend, started last, drains while the others live
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                codes.append(process.wait(END_TIMEOUT_S))
        finally:
            self.channel.close()
            for process in self.processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            assert_gone(family)
        return codes


def assert_gone(processes: Iterable[psutil.Process], timeout_s: float = 10.0) -> None:
    """Fail if one of these processes does not end soon; kill it then."""
    _, left = psutil.wait_procs(list(processes), timeout=timeout_s)
    for process in left:
        process.kill()
    assert not left, f"left behind: {left}"


class Answer:
    """What a stream delivered, checked event by event against the contract."""

    def __init__(self) -> None:
        self.started: pb.Started | None = None
        self.text = ""
        self.ids: list[int] = []
        self.finished: pb.Finished | None = None

    def add(self, event: pb.GenerateStreamResponse) -> None:
        match event.WhichOneof("event"):
            case "started":
                assert self.started is None
                assert not self.ids
                self.started = event.started
            case "delta":
                assert self.started is not None
                assert self.finished is None
                assert event.delta.first_token == len(self.ids), "positions are not contiguous"
                self.ids += event.delta.token_ids
                self.text += event.delta.text
            case "finished":
                assert self.finished is None
                self.finished = event.finished


def request(prompt: str | list[int], max_tokens: int, ignore_eos: bool = False) -> pb.GenerateStreamRequest:
    """Return a greedy request with ids, for a chat message or for token ids."""
    source = (
        pb.GenerationInput(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=prompt)]))
        if isinstance(prompt, str)
        else pb.GenerationInput(token_ids=pb.TokenIds(ids=prompt))
    )
    source.sampling.temperature = 0.0
    source.stopping.CopyFrom(pb.StoppingParams(max_tokens=max_tokens, ignore_eos=ignore_eos))
    source.output.token_ids = True
    return pb.GenerateStreamRequest(input=source)
