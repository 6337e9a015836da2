"""The supervisor: starts the processes of a service, restarts what dies, ends them all together.

When a child starts again, and when it does not and everything ends, is `octavo.cli.restarts`. A child that can be asked
whether it is well and does not answer is killed, and then restarted. What a child leaves behind (it leads a process group
of its own) is killed.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from octavo.cli.program import OCTAVO, SECRET_VARIABLES
from octavo.cli.restarts import GiveUp, Restarts, how_it_ended, when
from octavo.cli.watchdog import until_stalled
from octavo.wire.signals import stop_signals

logger = logging.getLogger(__name__)

FRONTEND, SCHEDULER = "frontend", "scheduler"
KILL_DELAY_S = 5.0
STALL_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class ChildSpec:
    """A process to keep alive: `octavo ROLE ARGUMENTS`.

    Attributes:
        role: what it is.
        arguments: of its command line, which everybody can read.
        environment: what it alone gets, beside ours without keys.
        index: its number, where there are several of the role.
        live_socket: path of the Unix socket where it answers while it is well; '' if it cannot be asked.
    """

    role: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    index: int | None = None
    live_socket: str = ""

    @property
    def name(self) -> str:
        """Tells it from the others."""
        return self.role if self.index is None else f"{self.role}-{self.index}"


class Supervisor:
    """Owns the child processes of one service."""

    def __init__(
        self,
        children: Sequence[ChildSpec],
        grace_s: float,
        program: Sequence[str] = OCTAVO,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        ends_on_hangup: bool = True,
    ) -> None:
        """Take the children to start.

        Args:
            children: the processes, each of another name.
            grace_s: time that running requests get after SIGTERM; children that live KILL_DELAY_S longer are killed.
            program: what is run with a role and its arguments.
            stall_timeout_s: how long a child that can be asked may leave that without an answer.
            ends_on_hangup: whether SIGHUP ends everything, as for a program whose terminal is closed; else it replaces
                the scheduler.
        """
        self._specs = children
        self._program = program
        self._grace_s = grace_s
        self._stall_timeout_s = stall_timeout_s
        self._ends_on_hangup = ends_on_hangup
        self._leaving: set[str] = set()  # children that were told to make room for the next one
        self._tasks: set[asyncio.Task[None]] = set()
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._well_since: dict[str, float] = {}  # of children that can be asked: their first good answer
        self._stopping = asyncio.Event()
        self._exit_code = 0

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children that run, by name."""
        return {name: process.pid for name, process in self._processes.items()}

    @property
    def stopping(self) -> asyncio.Event:
        """Set when the service is about to end."""
        return self._stopping

    async def run(self) -> int:
        """Keep the children alive until a signal or a configuration error; return the exit code."""
        loop = asyncio.get_running_loop()
        numbers = stop_signals()
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        watches = {spec.name: asyncio.create_task(self._keep_alive(spec)) for spec in self._specs}
        try:
            await self._stopping.wait()
            await self._end_children(watches)
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
        return self._exit_code

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stopping.is_set():
            if number != signal.SIGHUP:
                self._signal_all(signal.SIGKILL)
        elif number == signal.SIGHUP and not self._ends_on_hangup:
            self.replace(SCHEDULER)
        else:
            logger.info(
                "%s: running requests get %g s to end; a second signal ends them now", number.name, self._grace_s
            )
            self._stopping.set()

    def replace(self, name: str) -> None:
        """End a child in good order, and start the next one at once; while that is being done, do nothing."""
        process = self._processes.get(name)
        if process is None or name in self._leaving:
            return
        logger.info("the %s (pid %d) is replaced", name, process.pid)
        self._leaving.add(name)
        self._signal(name, signal.SIGTERM)
        task = asyncio.create_task(self._kill_late(name, process))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _kill_late(self, name: str, process: asyncio.subprocess.Process) -> None:
        try:
            await asyncio.wait_for(process.wait(), KILL_DELAY_S)
        except TimeoutError:
            logger.warning("the %s (pid %d) does not leave within %g s: it is killed", name, process.pid, KILL_DELAY_S)
            process.kill()

    async def _keep_alive(self, spec: ChildSpec) -> None:
        restarts = Restarts(spec.name)
        now = asyncio.get_running_loop().time
        while not self._stopping.is_set():
            started = now()
            try:
                pid, code, well_s = await self._live(spec)
            except OSError as error:  # no process or no memory is left for it; that may change
                delay_s = restarts.after_no_start()
                logger.error("the %s cannot be started: %s; again %s", spec.name, error, when(delay_s))
                await self._pause(delay_s)
                continue
            lasted_s = now() - started
            was_asked = spec.name in self._leaving
            self._leaving.discard(spec.name)
            if self._stopping.is_set():
                return
            next_life = restarts.after(code, lasted_s, was_asked, well_s)
            if isinstance(next_life, GiveUp):
                self._give_up(next_life.reason, next_life.exit_code)
                return
            logger.log(
                logging.INFO if code == 0 else logging.WARNING,
                "the %s (pid %d) %s; it starts again %s",
                spec.name,
                pid,
                how_it_ended(code, lasted_s),
                when(next_life),
            )
            await self._pause(next_life)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    def _give_up(self, reason: str, exit_code: int) -> None:
        logger.error("%s", reason)
        self._exit_code = exit_code
        self._stopping.set()

    async def _live(self, spec: ChildSpec) -> tuple[int, int, float]:
        """Run one life of a child.

        Returns:
            Its process id, its exit code, negative for a signal, and how long before its end it was well first.
        """
        ours = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
        process = await asyncio.create_subprocess_exec(
            *self._program,
            spec.role,
            *spec.arguments,
            "--exit-with-parent",
            str(os.getpid()),
            stdin=asyncio.subprocess.DEVNULL,
            env={**ours, **spec.environment},
            start_new_session=True,  # a Ctrl-C in the terminal reaches the supervisor alone, which then ends in order
        )
        logger.debug("the %s begins (pid %d)", spec.name, process.pid)
        self._processes[spec.name] = process
        if self._stopping.is_set():
            process.terminate()
        watchdog = asyncio.create_task(self._kill_when_stalled(spec, process)) if spec.live_socket else None
        code = await process.wait()
        ended = asyncio.get_running_loop().time()
        if watchdog is not None:
            watchdog.cancel()
            await asyncio.gather(watchdog, return_exceptions=True)
        well_s = ended - self._well_since.pop(spec.name, ended)
        del self._processes[spec.name]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # compilers and the like that it has left behind
        return process.pid, code, well_s

    async def _kill_when_stalled(self, spec: ChildSpec, process: asyncio.subprocess.Process) -> None:
        now = asyncio.get_running_loop().time
        reason = await until_stalled(
            spec.live_socket, self._stall_timeout_s, lambda: self._well_since.setdefault(spec.name, now())
        )
        # What ends has its grace, and is killed after it.
        if not self._stopping.is_set() and process.returncode is None:
            logger.error("the %s (pid %d) stalls: %s; it is killed", spec.name, process.pid, reason)
            process.kill()

    async def _end_children(self, watches: dict[str, "asyncio.Task[None]"]) -> None:
        # Frontends drain their streams, for which they need the others: these are told when all frontends have ended. The
        # scheduler is the last, since what it says when it leaves may be lost with the connection, which its peers regret.
        frontends = [spec.name for spec in self._specs if spec.role == FRONTEND]
        schedulers = [spec.name for spec in self._specs if spec.role == SCHEDULER]
        others = [name for name in watches if name not in (*frontends, *schedulers)]
        for names in (frontends, others, schedulers):
            if not names:
                continue
            for name in names:
                self._signal(name, signal.SIGTERM)
            _, alive = await asyncio.wait([watches[name] for name in names], timeout=self._grace_s + KILL_DELAY_S)
            if alive:
                left = [name for name in names if watches[name] in alive]
                logger.warning("killing what did not end within %g s: %s", self._grace_s, ", ".join(left))
                for name in left:
                    self._signal(name, signal.SIGKILL)
                await asyncio.wait(alive)

    def _signal_all(self, number: signal.Signals) -> None:
        for name in list(self._processes):
            self._signal(name, number)

    def _signal(self, name: str, number: signal.Signals) -> None:
        process = self._processes.get(name)
        if process is not None and process.returncode is None:
            process.send_signal(number)
