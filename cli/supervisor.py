"""The supervisor: starts the processes of a service, restarts what dies, ends them all together.

A child that exits with EXIT_CONFIGURATION is not restarted, since it would fail again: everything ends. Any other child
that ends is restarted, first at once, then with a delay that doubles up to MAX_BACKOFF_S, and starts over once a life has
lasted STABLE_AFTER_S.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

logger = logging.getLogger(__name__)

EXIT_CONFIGURATION = 2
FRONTEND = "frontend"
FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 30.0
STABLE_AFTER_S = 60.0


@dataclass(frozen=True)
class ChildSpec:
    """A process to keep alive: `octavo ROLE ARGUMENTS`."""

    role: str
    arguments: tuple[str, ...]


class Supervisor:
    """Owns the child processes of one service."""

    def __init__(self, children: Sequence[ChildSpec], grace_s: float) -> None:
        """Take the children to start.

        Args:
            children: the processes.
            grace_s: time that children get to end after SIGTERM, before they are killed.
        """
        self._specs = children
        self._grace_s = grace_s
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._exit_code = 0

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children that run, by role."""
        return {role: process.pid for role, process in self._processes.items()}

    @property
    def stopping(self) -> asyncio.Event:
        """Set when the service is about to end."""
        return self._stopping

    async def run(self) -> int:
        """Keep the children alive until a signal or a configuration error; return the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        watches = {spec.role: asyncio.create_task(self._keep_alive(spec)) for spec in self._specs}
        try:
            await self._stopping.wait()
            await self._end_children(watches)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        return self._exit_code

    def _on_signal(self) -> None:
        if self._stopping.is_set():  # the second one
            self._signal_all(signal.SIGKILL)
        self._stopping.set()

    async def _keep_alive(self, spec: ChildSpec) -> None:
        backoff_s = 0.0
        while not self._stopping.is_set():
            started = asyncio.get_running_loop().time()
            code = await self._live(spec)
            if self._stopping.is_set():
                return
            if code == EXIT_CONFIGURATION:
                logger.error("the %s cannot start as configured; the service ends", spec.role)
                self._exit_code = EXIT_CONFIGURATION
                self._stopping.set()
                return
            if asyncio.get_running_loop().time() - started > STABLE_AFTER_S:
                backoff_s = 0.0
            logger.warning("the %s ended (%s); it starts again in %g s", spec.role, _how(code), backoff_s)
            try:
                await asyncio.wait_for(self._stopping.wait(), backoff_s)
            except TimeoutError:
                backoff_s = min(max(2 * backoff_s, FIRST_BACKOFF_S), MAX_BACKOFF_S)

    async def _live(self, spec: ChildSpec) -> int:
        """Run one life of a child; return its exit code, negative for a signal."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "octavo.cli.main",
            spec.role,
            *spec.arguments,
            "--exit-with-parent",
            str(os.getpid()),
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal reaches the supervisor alone, which then ends in order
        )
        self._processes[spec.role] = process
        if self._stopping.is_set():
            process.terminate()
        code = await process.wait()
        del self._processes[spec.role]
        return code

    async def _end_children(self, watches: dict[str, "asyncio.Task[None]"]) -> None:
        # The frontend drains its streams, for which it needs the others: they are told when it has ended.
        for roles in ([FRONTEND], [role for role in watches if role != FRONTEND]):
            tasks = [watches[role] for role in roles if role in watches]
            for role in roles:
                self._signal(role, signal.SIGTERM)
            if not tasks:
                continue
            _, alive = await asyncio.wait(tasks, timeout=self._grace_s)
            if alive:
                logger.warning("killing what did not end within %g s: %s", self._grace_s, ", ".join(roles))
                for role in roles:
                    self._signal(role, signal.SIGKILL)
                await asyncio.wait(alive)

    def _signal_all(self, number: signal.Signals) -> None:
        for role in list(self._processes):
            self._signal(role, number)

    def _signal(self, role: str, number: signal.Signals) -> None:
        process = self._processes.get(role)
        if process is not None and process.returncode is None:
            process.send_signal(number)


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
