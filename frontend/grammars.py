"""From a constraint to the grammar that a worker can match with; each is compiled once, by a process of its own.

The law: nothing that a request asks for can take more of this process than a place in a bounded queue and in bounded
caches; the compiling process is killed when a job takes too long, and started again for the next one.
"""

import asyncio
import hashlib
import json
import logging
import sys
from collections import OrderedDict
from pathlib import Path

import msgspec

from octavo.frontend.constraint import Constraint
from octavo.frontend.errors import InvalidArgument, QueueFull, Unavailable
from octavo.frontend.grammar_jobs import LENGTH, Job, Outcome
from octavo.wire.grammar import MAX_BODY_BYTES

COMPILE_LIMIT_S = 10.0
"""Of one grammar; a schema of everyday size takes milliseconds."""

START_LIMIT_S = 60.0
"""Until the compiling process is ready: a fifth of a second on an idle machine."""

MAX_WAITING = 64
"""Grammars that wait to be compiled."""

MAX_CACHE_BYTES = 128 * 2**20
MAX_CACHE_ENTRIES = 4096

REFUSAL_KEPT_S = 60.0
"""How long it is remembered that compiling a grammar took too long or ended the process: a machine that was busy or
short of memory may do so with any grammar, and soon no more."""

_ENTRY_BYTES = 1024
_MAX_FRAME_BYTES = MAX_BODY_BYTES + 4096

_log = logging.getLogger(__name__)


class _CompilerLost(Exception):
    """The compiling process ended before it answered."""


class _Overrun(Exception):
    """A job was not done in time."""


class _Impossible(Exception):
    """No grammar can be compiled for this model."""


class Grammars:
    """Compiles constraints for one model.

    Args:
        folder: the model's folder.
        stop_ids: its ends of sequence.
        limit_s: how long one grammar may take.
        refusal_kept_s: how long it is remembered that one took too long or ended the process.
    """

    def __init__(
        self,
        folder: Path,
        stop_ids: tuple[int, ...],
        limit_s: float = COMPILE_LIMIT_S,
        refusal_kept_s: float = REFUSAL_KEPT_S,
    ) -> None:
        self._command = ("-P", "-m", "octavo.frontend.grammar_compiler", str(folder), json.dumps(stop_ids))
        self._limit_s = limit_s
        self._refusal_kept_s = refusal_kept_s
        self._cache: OrderedDict[bytes, Outcome] = OrderedDict()
        self._cache_bytes = 0
        self._running: dict[bytes, asyncio.Task[Outcome]] = {}
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._is_closed = False

    async def compile(self, constraint: Constraint) -> bytes:
        """Return the grammar of a constraint, as it travels to the worker.

        Raises:
            InvalidArgument: it cannot be compiled, or not within the limits; names the constraint's field.
            QueueFull: too many wait already.
            Unavailable: the compiling process cannot be started, or is being stopped.
        """
        key = hashlib.sha256(f"{constraint.kind}\0{constraint.text}".encode()).digest()
        if (outcome := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
        else:
            outcome = await self._wait(self._task(key, Job(str(constraint.kind), constraint.text)))
        if outcome.error:
            raise InvalidArgument(outcome.error, field_path=constraint.path)
        return outcome.body

    async def close(self) -> None:
        """End the compiling process; what waits for it ends UNAVAILABLE."""
        self._is_closed = True
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self._stop()

    async def _wait(self, task: "asyncio.Task[Outcome]") -> Outcome:
        try:
            return await asyncio.shield(task)  # who leaves does not take it from the others
        except asyncio.CancelledError:
            if task.cancelled() and self._is_closed:
                raise Unavailable("the frontend has stopped") from None
            raise

    def _task(self, key: bytes, job: Job) -> "asyncio.Task[Outcome]":
        """Return the task that compiles a grammar: callers that want the same one share it, and may leave it."""
        if (task := self._running.get(key)) is not None:
            return task
        if self._is_closed:
            raise Unavailable("the frontend has stopped")
        if len(self._running) >= MAX_WAITING:
            raise QueueFull(f"{MAX_WAITING} grammars wait to be compiled, the limit")
        task = self._running[key] = asyncio.create_task(self._compile(key, job), name="compile a grammar")
        task.add_done_callback(lambda done: self._forget(key, done))
        return task

    def _forget(self, key: bytes, task: "asyncio.Task[Outcome]") -> None:
        del self._running[key]
        if not task.cancelled() and task.exception() is not None:
            _log.debug("a grammar was not compiled: %s", task.exception())

    async def _compile(self, key: bytes, job: Job) -> Outcome:
        async with self._turn:
            try:
                outcome = await self._ask_again(job)
            except (_Overrun, _CompilerLost) as error:
                outcome = Outcome(error=str(error))
                asyncio.get_running_loop().call_later(self._refusal_kept_s, self._drop, key)
        self._remember(key, outcome)
        return outcome

    async def _ask_again(self, job: Job) -> Outcome:
        """Ask for a grammar, twice if the process ends meanwhile."""
        try:
            return await self._ask(job)
        except _CompilerLost:
            # It may have been somebody else's kill. If it was the job's own doing, it is again.
            try:
                return await self._ask(job)
            except _CompilerLost as error:
                _log.warning("compiling a grammar of kind %s ended the compiler twice: %s", job.kind, error)
                message = "compiling it takes more memory or nesting than there is: make it simpler"
                raise _CompilerLost(message) from error

    async def _ask(self, job: Job) -> Outcome:
        try:
            process = await self._started()
        except _Impossible as error:
            return Outcome(error=str(error))
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._exchange(process, job)
        except TimeoutError:
            await self._stop()
            raise _Overrun(f"compiling it takes more than {self._limit_s:g} s, the limit: make it simpler") from None
        except BaseException:
            await self._stop()  # a job may be half written
            raise

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self._stop()
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable, *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            async with asyncio.timeout(START_LIMIT_S):
                outcome = await _read(process)
        except (OSError, TimeoutError, _CompilerLost) as error:
            await self._stop()
            _log.error("the process that compiles grammars does not start: %s", error)
            raise Unavailable("grammars cannot be compiled at the moment") from error
        if not outcome.ready:
            await self._stop()
            raise _Impossible(f"structured output is not possible with this model: {outcome.error}")
        return process

    async def _exchange(self, process: asyncio.subprocess.Process, job: Job) -> Outcome:
        data = msgspec.msgpack.encode(job)
        if process.stdin is None:
            raise _CompilerLost("it has no input")
        try:
            process.stdin.write(LENGTH.pack(len(data)) + data)
            await process.stdin.drain()
        except OSError as error:
            raise _CompilerLost(str(error)) from error
        return await _read(process)

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()

    def _remember(self, key: bytes, outcome: Outcome) -> None:
        self._cache[key] = outcome
        self._cache_bytes += _size(outcome)
        while self._cache_bytes > MAX_CACHE_BYTES or len(self._cache) > MAX_CACHE_ENTRIES:
            _, oldest = self._cache.popitem(last=False)
            self._cache_bytes -= _size(oldest)

    def _drop(self, key: bytes) -> None:
        if (outcome := self._cache.pop(key, None)) is not None:
            self._cache_bytes -= _size(outcome)


def _size(outcome: Outcome) -> int:
    return len(outcome.body) + len(outcome.error) + _ENTRY_BYTES


async def _read(process: asyncio.subprocess.Process) -> Outcome:
    if process.stdout is None:
        raise _CompilerLost("it has no output")
    try:
        (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        if size > _MAX_FRAME_BYTES:
            raise _CompilerLost(f"it answered {size} bytes, limit {_MAX_FRAME_BYTES}")
        return msgspec.msgpack.decode(await process.stdout.readexactly(size), type=Outcome)
    except (asyncio.IncompleteReadError, msgspec.DecodeError) as error:
        raise _CompilerLost(f"{error}, exit code {process.returncode}") from error
