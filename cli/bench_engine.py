"""The engine that a benchmark measures: a scheduler and a worker in processes of their own, as in production.

They are started through the command line (`octavo scheduler`, `octavo worker`) and meet over ipc in a temporary folder;
the frontend's part is played by `EngineClient` in this process.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from octavo.cli.bench_client import EngineClient, RunFailed
from octavo.cli.bench_models import CONFIGS, write_config_folder
from octavo.cli.bench_signals import held
from octavo.cli.bench_workloads import SmallVocabulary, warmup
from octavo.cli.errors import CommandError, ConfigurationError
from octavo.cli.model_store import Model, resolve
from octavo.cli.program import OCTAVO
from octavo.wire.errors import WireError
from octavo.wire.handshake import ServiceFacts
from octavo.wire.model_digest import model_digest

LOG_TAIL_LINES = 20
END_TIMEOUT_S = 10.0
DEATH_DELAY_S = 2.0
"""How long a broken session may be ahead of the end of the process that broke it."""

_SCHEDULER_FLAGS = ("max-model-len", "enable-prefix-caching", "step-timeout", "trace-plans")
_WORKER_FLAGS = (
    "device",
    "backend",
    "dtype",
    "quantization",
    "model-impl",
    "load-format",
    "enforce-eager",
    "batch-invariant",
    "max-model-len",
    "max-num-seqs",
    "max-num-batched-tokens",
    "block-size",
    "gpu-memory-utilization",
    "num-gpu-blocks-override",
    "kv-cache-memory-bytes",
    "kv-cache-dtype",
    "num-threads",
    "seed",
)
FLAGS = tuple(dict.fromkeys((*_SCHEDULER_FLAGS, *_WORKER_FLAGS)))
"""Flags of the engine, without dashes in front."""

_MAX_WAITING_REQUESTS = 2**20
_MAX_WAITING_TOKENS = 2**30


_LAST_WORDS = re.compile(r"\d\d:\d\d:\d\d +\w+ +ERROR +|octavo: |(?=Usage: )")
"""How the lines begin with which a process says why it ends."""


class EngineFailed(CommandError):
    """The engine did not start, or a process of it ended; the message shows the end of its log."""


class EngineRefused(EngineFailed):
    """A process of the engine cannot start as configured; the message is its own."""

    exit_code = ConfigurationError.exit_code


@dataclass(frozen=True)
class EngineSettings:
    """What to start.

    Args:
        folder: the model; a config.json is enough with the load format `dummy`.
        flags: values by flag of FLAGS; None: the engine's own default.
        worker_arguments: given to the worker as they are, after all others.
        start_timeout_s: most seconds until it is ready.
        source: what the processes are told in place of the folder: a GGUF file.
    """

    folder: Path
    flags: Mapping[str, object] = field(default_factory=dict)
    worker_arguments: tuple[str, ...] = ()
    start_timeout_s: float = 600.0
    source: Path | None = None


@dataclass(frozen=True)
class Engine:
    """An engine that is ready and warm."""

    client: EngineClient
    facts: ServiceFacts
    num_blocks: int  # of the KV cache that requests can hold
    start_s: float  # from the start of the first process until the engine was ready
    backend: str | None  # as the worker's log says, None where it does not
    torch_device: str | None


class EngineProcesses:
    """The two processes and their logs, in a folder that somebody else removes.

    Args:
        settings: what to start.
        folder: for the socket and the logs.
        program: what is run with a role and its arguments.
    """

    def __init__(self, settings: EngineSettings, folder: Path, program: tuple[str, ...] = OCTAVO) -> None:
        self.address = f"ipc://{folder}/scheduler"
        self.num_shown: dict[str, int] = {}
        """Lines of a process that whoever watches has seen, by role."""
        self._folder = folder
        self._program = program
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        flags = settings.flags
        queue = {"max-waiting-requests": _MAX_WAITING_REQUESTS, "max-waiting-tokens": _MAX_WAITING_TOKENS}
        model = str(settings.source or settings.folder)
        self._commands = {
            "scheduler": [model, *_words({**_chosen(flags, _SCHEDULER_FLAGS), **queue})],
            "worker": [model, *_words(_chosen(flags, _WORKER_FLAGS)), *settings.worker_arguments],
        }

    def start(self) -> None:
        """Start both."""
        for role, arguments in self._commands.items():
            common = ["--scheduler-address", self.address, "--exit-with-parent", str(os.getpid())]
            with self._log(role).open("wb") as log:
                self._processes[role] = subprocess.Popen(
                    [*self._program, role, *arguments, *common],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # a Ctrl-C in the terminal reaches this process alone, which ends them
                )

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by role."""
        return {role: process.pid for role, process in self._processes.items()}

    def check(self) -> None:
        """Check that both live.

        Raises:
            EngineRefused: one has ended because of its configuration.
            EngineFailed: one has ended.
        """
        for role, process in self._processes.items():
            if (code := process.poll()) is not None:
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                if code == ConfigurationError.exit_code:
                    raise EngineRefused(f"the {role} ended ({how}){self._reason(role)}")
                raise EngineFailed(f"the {role} ended ({how}); the last it said:\n{self.tail(role)}")

    def explain(self, error: RunFailed) -> CommandError:
        """Return what really happened where a run broke because a process ended."""
        end = time.monotonic() + DEATH_DELAY_S
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        try:
            self.check()
        except EngineFailed as failed:
            return EngineFailed(f"{error}; {failed}")
        return error

    def text(self, role: str) -> str:
        """Return what a process has said so far."""
        return self._log(role).read_text(encoding="utf-8", errors="replace")

    def tail(self, role: str) -> str:
        """Return the last lines of it."""
        return "\n".join(f"  {line}" for line in self.text(role).splitlines()[-LOG_TAIL_LINES:])

    def _reason(self, role: str) -> str:
        """Return what a process said at its end, with a colon in front, unless it has been shown."""
        unseen = self.text(role).splitlines()[self.num_shown.get(role, 0) :]
        lines = [_LAST_WORDS.sub("", line, count=1) for line in unseen[-LOG_TAIL_LINES:]]
        if len(lines) > 1:
            return ":" + "".join(f"\n  {line}" for line in lines)
        return f": {lines[0]}" if lines else ""

    def stop(self) -> None:
        """End both; what does not end in time is killed."""
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        end = time.monotonic() + END_TIMEOUT_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _log(self, role: str) -> Path:
        return self._folder / f"{role}.log"


@contextmanager
def settings_for(
    model: str, flags: Mapping[str, object], worker_arguments: tuple[str, ...] = (), start_timeout_s: float = 600.0
) -> Iterator[EngineSettings]:
    """Yield what is to be started for a model by its name; the folder of a shape lives as long as the context.

    Args:
        model: a name of CONFIGS, which runs with random weights, or what `resolve` knows.
        flags: values by flag of FLAGS.
        worker_arguments: given to the worker as they are.
        start_timeout_s: most seconds until the engine is ready.

    Raises:
        ConfigurationError: there is no such model.
        CommandError: it cannot be fetched.
    """
    if model not in CONFIGS or Path(model).is_dir():
        found = _resolve(model)
        yield EngineSettings(found.folder, flags, worker_arguments, start_timeout_s, found.source)
        return
    with _temporary_folder("octavo-bench-model-") as parent:
        folder = write_config_folder(model, parent)
        yield EngineSettings(folder, {**flags, "load-format": "dummy"}, worker_arguments, start_timeout_s)


def known_max_model_len(settings: EngineSettings) -> int | None:
    """Return the most tokens of a request, as flag or model say it before the start; None where neither does.

    The engine may take less: its KV cache has not been measured yet.
    """
    if any(argument.startswith("--max-model-len") for argument in settings.worker_arguments):
        return None
    try:
        if (flag := settings.flags.get("max-model-len")) is not None:
            return int(str(flag))
        config = json.loads((settings.folder / "config.json").read_text(encoding="utf-8"))
        return int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # the engine will say what is wrong with it


@contextmanager
def running_engine(settings: EngineSettings, program: tuple[str, ...] = OCTAVO) -> Iterator[Engine]:
    """Start an engine, run the warm-up workload, yield it, and end its processes whatever happens.

    Args:
        settings: what to start.
        program: what is run with a role and its arguments.

    Raises:
        EngineRefused: it cannot start as configured.
        EngineFailed: it does not start, or one of its processes ended meanwhile.
        RunFailed: a run on it failed for another reason.
    """
    with _temporary_folder("octavo-bench-") as folder:
        processes = EngineProcesses(settings, folder, program)
        try:
            client = EngineClient(processes.address, model_digest(settings.folder), processes.check)
        except WireError as error:
            raise EngineFailed(f"{error}; TMPDIR can name a shorter folder") from error
        try:
            yield _ready(processes, client, settings.start_timeout_s)
        except RunFailed as error:
            if (cause := processes.explain(error)) is not error:
                raise cause from error
            raise
        finally:
            with held():
                client.close()
                processes.stop()


@contextmanager
def _temporary_folder(prefix: str) -> Iterator[Path]:
    with held():
        folder = tempfile.TemporaryDirectory(prefix=prefix)
    try:
        yield Path(folder.name)
    finally:
        with held():
            folder.cleanup()


def _resolve(model: str) -> Model:
    """Return a model; where there is none, the message names the shapes as well."""
    try:
        return resolve(model)
    except ConfigurationError as error:
        if Path(model).expanduser().is_dir():
            raise
        raise ConfigurationError(f"{error}, nor a shape for benchmarks ({', '.join(CONFIGS)})") from error


def _ready(processes: EngineProcesses, client: EngineClient, timeout_s: float) -> Engine:
    began = time.monotonic()
    processes.start()
    waiting = _Waiting(processes, began)
    facts = client.connect(timeout_s, waiting)
    start_s = time.monotonic() - began
    waiting.show_rest()
    say(f"ready after {start_s:.1f} s")
    num_blocks = client.status().total_blocks
    log = processes.text("worker")
    try:
        client.run(warmup(facts.vocab_size, max_model_len=facts.max_model_len))
    except SmallVocabulary as error:
        raise ConfigurationError(f"the model cannot be benchmarked: {error}") from error
    client.reset_prefix_cache()
    return Engine(client, facts, num_blocks, start_s, _found(r"\bbackend (\w+)", log), _found(r" on (cuda|cpu)\b", log))


class _Waiting:
    """Says on standard error what a start waits for and what the worker says, when that changes.

    From an error on the worker's lines are held back: where it ends by it, the error that is raised says them.
    """

    def __init__(self, processes: EngineProcesses, began: float) -> None:
        self._processes = processes
        self._began = began
        self._shown = ""

    def __call__(self, reason: str) -> None:
        if reason != self._shown:
            self._shown = reason
            self._say(f"waiting: {reason}")
        self._show_lines(is_over=False)

    def show_rest(self) -> None:
        """Say what was held back."""
        self._show_lines(is_over=True)

    def _show_lines(self, *, is_over: bool) -> None:
        shown = self._processes.num_shown.get("worker", 0)
        whole = self._processes.text("worker").rpartition("\n")[0]
        for line in whole.splitlines()[shown:]:
            if not is_over and _LAST_WORDS.match(line):
                break
            self._say(line)
            shown += 1
        self._processes.num_shown["worker"] = shown

    def _say(self, words: str) -> None:
        say(f"{time.monotonic() - self._began:6.1f} s  {words}")


def say(words: str) -> None:
    """Print a line for whoever watches, apart from the results."""
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()


def _chosen(flags: Mapping[str, object], names: tuple[str, ...]) -> dict[str, object]:
    return {name: flags[name] for name in names if flags.get(name) is not None}


def _words(flags: Mapping[str, object]) -> list[str]:
    words: list[str] = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", str(value)]
    return words


def _found(pattern: str, text: str) -> str | None:
    matches = re.findall(pattern, text)
    return matches[-1] if matches else None
