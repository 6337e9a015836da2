"""`octavo worker` as a process of its own, and its scheduler's end of the socket."""

import os
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

from octavo.wire.handshake import WorkerFacts
from tests.support.service import OCTAVO
from tests.support.worker_scheduler import ScriptedScheduler

END_TIMEOUT_S = 30.0


class WorkerProcess:
    """A worker that loads a model; `scheduler` is what it talks to."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", folder: Path, model: Path, *arguments: str) -> None:
        """Start it; the socket and the log lie in `folder`."""
        address = f"ipc://{folder}/s"  # short: the path of a socket may have 107 bytes
        self.scheduler = ScriptedScheduler(context, address)
        self.started = time.monotonic()
        self._log = folder / "worker.log"
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(
                [*OCTAVO, "worker", str(model), "--scheduler-address", address, *arguments],
                stdout=out,
                stderr=out,
                env=os.environ | {"OCTAVO_RUNTIME_DIR": str(folder)},
            )

    def ready(self) -> WorkerFacts:
        """Wait until it is ready for a session.

        Raises:
            AssertionError: it is not in time; the message holds its log.
        """
        try:
            facts = self.scheduler.hear_ready().facts
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from error
        assert facts is not None
        return facts

    @property
    def output(self) -> str:
        """What it printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.scheduler.close()
