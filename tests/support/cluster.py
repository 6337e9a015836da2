"""Scheduler, worker and frontends as processes of their own, each started again whenever it ends: what compose does.

A thread for each process waits for its end and starts the next life at once, so that a campaign of kills is not slowed
down by a supervisor's back-off. Each frontend has ports of its own, so that a client knows whom it talks to.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.v1 import admin_pb2, admin_pb2_grpc
from tests.support.service import assert_gone, free_port

ROOT = Path(__file__).parents[2]
PROGRAM = (sys.executable, "-P", "-m", "tests.support.chaos_process")
WAIT_S = 60.0
"""Bound of every wait in here: longer means that the test has failed."""

END_TIMEOUT_S = 30.0
LOOK_INTERVAL_S = 0.02

FAKE_WORKER = ("fake-worker", "--vocab-size", "300", "--max-model-len", "256", "--num-blocks", "129")


@dataclass
class Life:
    """One life of a process; `code` is negative for a signal, None while it lives."""

    name: str
    pid: int
    began: float
    ended: float | None = None
    code: int | None = None


@dataclass
class Target:
    """Where a frontend is reached."""

    grpc_port: int
    http_port: int


@dataclass
class Child:
    """A process that is kept alive."""

    name: str
    command: Sequence[str]
    next_environment: dict[str, str] = field(default_factory=dict)  # of its next life alone
    next_arguments: Sequence[str] = ()
    process: "subprocess.Popen[bytes] | None" = None
    is_held: bool = False  # it is not to be started again
    thread: threading.Thread | None = None


class Cluster:
    """The processes of one service.

    Args:
        folder: for sockets and logs; short, since the path of a socket may have 107 bytes.
        model: the model's folder.
        worker: role and options of the worker.
        num_frontends: each on ports of its own.
        program: what is run with a role and its arguments.
        options: of chaos_process, before the role, for every process.
        scheduler: further arguments of the scheduler.
        address: where peers are told to find the scheduler; by default where it listens.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        worker: Sequence[str] = FAKE_WORKER,
        *,
        num_frontends: int = 1,
        options: Sequence[str] = (),
        scheduler: Sequence[str] = (),
        frontend: Sequence[str] = (),
        address: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.address = f"ipc://{folder}/s"
        self.lives: list[Life] = []
        self.targets = [Target(free_port(), free_port()) for _ in range(num_frontends)]
        self._peer_address = address or self.address
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
            "OCTAVO_RUNTIME_DIR": str(folder / "run"),
            **(environment or {}),
        }
        begin = [*PROGRAM, *options]
        role, *worker_arguments = worker
        self._children = {
            "scheduler": Child(
                "scheduler", [*begin, "scheduler", str(model), "--scheduler-address", self.address, *scheduler]
            ),
            "worker": Child("worker", [*begin, role, str(model), *self._to_scheduler(), *worker_arguments]),
        }
        for index, target in enumerate(self.targets):
            name = f"frontend-{index}"
            ports = ["--grpc-port", str(target.grpc_port), "--http-port", str(target.http_port)]
            self._children[name] = Child(
                name, [*begin, "frontend", str(model), *self._to_scheduler(), *ports, *frontend]
            )
        self._channels = [grpc.insecure_channel(f"127.0.0.1:{t.grpc_port}", _RECONNECT) for t in self.targets]
        self._admins = [admin_pb2_grpc.AdminServiceStub(channel) for channel in self._channels]

    def __enter__(self) -> Self:
        for child in self._children.values():
            child.thread = threading.Thread(target=self._keep_alive, args=(child,), daemon=True, name=child.name)
            child.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def names(self) -> list[str]:
        return [name for name, child in self._children.items() if not child.is_held]

    def pid(self, name: str) -> int:
        """Return the process id of the present life; wait for it between two lives."""
        with self._changed:
            self._wait_for(lambda: self._children[name].process is not None, f"no life of the {name}")
            process = self._children[name].process
            assert process is not None
            return process.pid

    def signal(self, name: str, number: signal.Signals) -> int:
        """Send a signal to a process; return its id."""
        pid = self.pid(name)
        os.kill(pid, number)
        return pid

    def kill(self, name: str) -> Life:
        """Kill a process -9 and wait until the system has noticed; its next life begins by itself."""
        pid = self.signal(name, signal.SIGKILL)
        return self.wait_for_end(pid)

    def wait_for_end(self, pid: int) -> Life:
        """Return the life of a process that has ended, once it has."""
        with self._changed:
            self._wait_for(lambda: self._ended(pid) is not None, f"process {pid} did not end")
            life = self._ended(pid)
            assert life is not None
            return life

    def begin_anew(self, name: str, environment: Mapping[str, str] | None = None, arguments: Sequence[str] = ()) -> int:
        """End a process in order and begin a life with an environment and arguments of its own; return its process id."""
        child = self._children[name]
        child.next_environment, child.next_arguments = dict(environment or {}), arguments
        old = self.signal(name, signal.SIGTERM)
        self.wait_for_end(old)
        return self.pid(name)

    def replace(self, name: str) -> int:
        """Begin a life beside the present one, which is no longer kept alive; return the new one's id."""
        child = self._children[name]
        old, child.is_held = self.pid(name), True
        twin = Child(name, child.command)
        self._children[f"{name} (old)"] = child
        self._children[name] = twin
        twin.thread = threading.Thread(target=self._keep_alive, args=(twin,), daemon=True, name=name)
        twin.thread.start()
        new = self.pid(name)
        assert new != old
        return new

    def status(self, frontend: int = 0) -> admin_pb2.GetStatusResponse:
        return self._admins[frontend].GetStatus(admin_pb2.GetStatusRequest(), timeout=10)

    def wait_until_whole(self) -> None:
        """Wait until every frontend serves and the scheduler knows all present processes as ready."""
        self.wait_until_serving()
        self.poll(self._is_whole, "the service is not whole")

    def wait_until_serving(self, frontend: int | None = None) -> None:
        """Wait until health says SERVING, of one frontend or of all."""
        for index, channel in enumerate(self._channels):
            if frontend in (None, index):
                self.poll(partial(_serves, health_pb2_grpc.HealthStub(channel)), f"frontend-{index} does not serve")

    def wait_until_idle(self) -> admin_pb2.SchedulerStatus:
        """Return the scheduler's state once it holds no request and no block."""
        found: list[admin_pb2.SchedulerStatus] = []

        def is_idle() -> bool:
            held = self.status().scheduler
            found.append(held)
            free = held.total_blocks and held.free_blocks == held.total_blocks
            return bool(free and held.running_requests == held.waiting_requests == 0)

        self.poll(is_idle, lambda: f"not idle: {found[-1] if found else None}")
        return found[-1]

    def poll(self, condition: Callable[[], bool], otherwise: str | Callable[[], str]) -> None:
        """Look again and again until something holds; calls that fail meanwhile count as no.

        Raises:
            AssertionError: it did not come to hold in time.
        """
        deadline = time.monotonic() + WAIT_S
        last: Exception | None = None
        while time.monotonic() < deadline:
            try:
                if condition():
                    return
            except grpc.RpcError as error:
                last = error
            time.sleep(LOOK_INTERVAL_S)
        words = otherwise if isinstance(otherwise, str) else otherwise()
        raise AssertionError(f"{words} after {WAIT_S:g} s ({last})\n{self.output[-6000:]}")

    @property
    def output(self) -> str:
        """What all processes printed."""
        parts = [f"--- {path.name}\n{path.read_text(errors='replace')}" for path in sorted(self.folder.glob("*.log"))]
        return "\n".join(parts)

    def log_of(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def odd_ends(self) -> list[Life]:
        """Return lives that ended by themselves: neither killed by us nor told to end."""
        return [one for one in self.lives if one.code not in (None, 0, -signal.SIGKILL)]

    def processes(self) -> dict[str, psutil.Process]:
        return {name: psutil.Process(self.pid(name)) for name in self.names}

    def orphans(self) -> list[psutil.Process]:
        """Return processes of this service, known by their environment, that no present life of it has begun."""
        known = {pid for one in self.processes().values() for pid in (one.pid, *(c.pid for c in _children_of(one)))}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has ended, or is somebody else's
                runtime = process.environ().get("OCTAVO_RUNTIME_DIR")
                if runtime == self._environment["OCTAVO_RUNTIME_DIR"] and process.pid not in known:
                    found.append(process)
        return found

    def close(self) -> None:
        """End all processes in order, frontends first; fail if one is left or did not exit with 0."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        present = []
        for child in list(self._children.values()):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                if (process := child.process) is not None:
                    present.append(psutil.Process(process.pid))
        for channel in self._channels:
            channel.close()
        family = present + [one for process in present for one in _children_of(process)]
        for name, child in reversed(self._children.items()):
            process = child.process
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
            assert child.thread is not None
            child.thread.join(END_TIMEOUT_S)
            if child.thread.is_alive() and process is not None:
                process.kill()
                raise AssertionError(f"the {name} did not end on SIGTERM\n{self.output[-4000:]}")
        assert_gone(family)

    def _to_scheduler(self) -> list[str]:
        return ["--scheduler-address", self._peer_address]

    def _is_whole(self) -> bool:
        for index in range(len(self.targets)):
            shown = {(one.role, one.pid) for one in self.status(index).processes if one.state == "ready"}
            if shown != {(name.partition("-")[0], self.pid(name)) for name in self.names}:
                return False
        return True

    def _keep_alive(self, child: Child) -> None:
        while not self._closing.is_set():
            process = self._start(child)
            life = Life(child.name, process.pid, time.monotonic())
            with self._changed:
                self.lives.append(life)
                child.process = process
                self._changed.notify_all()
            if self._closing.is_set():
                process.terminate()
            process.wait()
            with self._changed:
                life.ended, life.code = time.monotonic(), process.returncode
                child.process = None
                self._changed.notify_all()
                while child.is_held and not self._closing.is_set():
                    self._changed.wait()

    def _start(self, child: Child) -> "subprocess.Popen[bytes]":
        environment = self._environment | child.next_environment
        command = [*child.command, *child.next_arguments, "--exit-with-parent", str(os.getpid())]
        child.next_environment, child.next_arguments = {}, ()
        with (self.folder / f"{child.name}.log").open("ab") as out:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
            )

    def _ended(self, pid: int) -> Life | None:
        return next((one for one in self.lives if one.pid == pid and one.ended is not None), None)

    def _wait_for(self, condition: Callable[[], bool], otherwise: str) -> None:
        if not self._changed.wait_for(condition, WAIT_S):
            raise AssertionError(f"{otherwise}\n{self.output[-4000:]}")


_RECONNECT = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)]


def _serves(stub: health_pb2_grpc.HealthStub) -> bool:
    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=10, wait_for_ready=True)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _children_of(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
