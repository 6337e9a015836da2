"""Lists of workloads that run one after the other on one engine, within a time that is set before."""

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from octavo.cli import bench_workloads as workloads
from octavo.cli.bench_client import Run, TimeIsUp, require_fit
from octavo.cli.bench_engine import say
from octavo.cli.bench_measure import Bench, Row
from octavo.cli.bench_report import RowWriter, name_of
from octavo.cli.errors import CommandError, ConfigurationError

OFFLINE_REPEATS = {"prefill": 3}
"""Runs of a workload where they are not DEFAULT_REPEATS: short ones scatter more."""

DEFAULT_REPEATS = 2
_ESTIMATE_MARGIN = 1.3
"""What is planned for a workload, over what another engine took for it."""

_BATCH = re.compile(r"(decode)_b([1-9][0-9]{0,5})|(serving)_c([1-9][0-9]{0,5})")

TAKEN_BY: dict[str, tuple[str, ...]] = {
    "num-prompts": (*workloads.OFFLINE, "serving"),
    "batch": ("decode",),
    "input-len": ("decode", "prefill", "unique_prefix"),
    "output-len": ("decode", "shared_prefix", "unique_prefix"),
    "concurrency": ("serving",),
    "repeat": (*workloads.OFFLINE, "decode"),
}
"""The workloads that a flag for sizes holds for: the others have fixed or drawn lengths, or run once."""

_LARGE_MODEL = (
    *(f"decode_b{batch}" for batch in workloads.DECODE_BATCHES),
    "sharegpt_like",
    "prefill",
    "shared_prefix",
    "unique_prefix",
)
SUITES: dict[str, tuple[str, ...]] = {"qwen3-0.6b": ("decode_b1", "decode_b64", "decode_b256", "offline_256")}
"""Workloads by model, where they are not those of large models: the ones that other engines have rows of."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of workloads where they are not the usual ones; each is for those that TAKEN_BY names."""

    num_requests: int | None = None
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    repeat: int | None = None

    @property
    def flags(self) -> dict[str, int]:
        """What is given, by flag."""
        flags = {
            "num-prompts": self.num_requests,
            "input-len": self.num_prompt_tokens,
            "output-len": self.num_output_tokens,
            "repeat": self.repeat,
        }
        return {flag: value for flag, value in flags.items() if value is not None}


def suite_of(model: str) -> tuple[str, ...]:
    """Return the workloads that a model's published figures consist of."""
    return SUITES.get(model, _LARGE_MODEL)


def check_names(names: Iterable[str]) -> None:
    """Check names of workloads before anything is started.

    Raises:
        ConfigurationError: one is unknown.
    """
    for name in names:
        if name not in workloads.OFFLINE and not _BATCH.fullmatch(name):
            known = (*workloads.OFFLINE, "decode_b<batch>", "serving_c<clients>")
            raise ConfigurationError(f"workload {name!r} is unknown; there are {', '.join(known)}")


def check_flags(flags: Mapping[str, int], names: Sequence[str]) -> None:
    """Check that each flag for sizes holds for one of the workloads.

    Args:
        flags: values by flag of TAKEN_BY.
        names: of workloads, which are known.

    Raises:
        ConfigurationError: one would be without effect.
    """
    kinds = {_kind(name) for name in names}
    for flag, value in flags.items():
        if not kinds & set(TAKEN_BY[flag]):
            raise ConfigurationError(
                f"--{flag} {value} does not hold for workload {', '.join(names)}; "
                f"it holds for {', '.join(TAKEN_BY[flag])}"
            )


def make(name: str, vocab_size: int, sizes: Sizes) -> workloads.Workload:
    """Return a workload by its name, in the sizes that hold for it.

    Raises:
        ConfigurationError: there is no such workload, or the vocabulary is too small for it.
    """
    check_names([name])
    kind = _kind(name)
    arguments = {"num-prompts": "num_requests", "input-len": "num_prompt_tokens", "output-len": "num_output_tokens"}
    chosen = {
        arguments[flag]: value for flag, value in sizes.flags.items() if flag in arguments and kind in TAKEN_BY[flag]
    }
    try:
        if kind == "decode":
            return workloads.decode(vocab_size, _number(name), **chosen)
        if kind == "serving":
            return workloads.serving(vocab_size, _number(name), num_requests=sizes.num_requests)
        return workloads.make_offline(name, vocab_size, **chosen)
    except workloads.SmallVocabulary as error:
        raise ConfigurationError(str(error)) from error


def check_lengths(names: Iterable[str], sizes: Sizes, max_model_len: int | None) -> None:
    """Check before a start that the longest request of each workload fits; lengths do not depend on the vocabulary.

    Raises:
        ConfigurationError: one does not.
    """
    if max_model_len is not None:
        for name in names:
            require_fit(make(name, workloads.END_ID, sizes), max_model_len)


def measure(bench: Bench, vocab_size: int, name: str, sizes: Sizes) -> Row:
    """Measure one workload by its name; say before what it is, and after how long it took.

    Raises:
        ConfigurationError: there is no such workload, the vocabulary is too small for it, or it is too long.
        RunFailed: it failed.
        TimeIsUp: the deadline came.
    """
    workload = make(name, vocab_size, sizes)
    kind = _kind(name)
    with timed(name, workload):
        if kind == "serving":
            return bench.serving(workload, _number(name))
        repeat = sizes.repeat or OFFLINE_REPEATS.get(name, DEFAULT_REPEATS)
        return bench.decode(workload, repeat) if kind == "decode" else bench.throughput(workload, repeat)


@contextmanager
def timed(name: str, workload: workloads.Workload) -> Iterator[None]:
    """Say what is about to be measured, and at the end how long that took."""
    say(f"{name}: {workload.sizes}")
    began = time.monotonic()
    yield
    say(f"{name}: measured in {time.monotonic() - began:.1f} s")


def run_suite(
    bench: Bench, vocab_size: int, names: Sequence[str], sizes: Sizes, writer: RowWriter, estimates: dict[str, float]
) -> None:
    """Measure workloads one after the other; each row is written when it is there.

    What does not fit before the bench's deadline any more is skipped, which a row of bench `skipped` says.

    Args:
        bench: what measures.
        vocab_size: of the model.
        names: of the workloads.
        sizes: of the workloads.
        writer: gets the rows.
        estimates: seconds that each may take, by name; what is not there counts as nothing.
    """
    for name in names:
        left = None if bench.deadline is None else bench.deadline - time.monotonic()
        expected = estimates.get(name, 0.0)
        if left is not None and left < max(expected, 0.001):
            _skip(writer, name, f"{max(0.0, left):.0f} s are left, about {expected:.0f} s are needed")
            continue
        began = time.monotonic()
        try:
            row = measure(bench, vocab_size, name, sizes)
        except TimeIsUp as error:
            _skip(writer, name, str(error))
            continue
        writer.write({**row, "took_s": round(time.monotonic() - began, 2)})


def estimate(peers: Iterable[Row], model: str) -> dict[str, float]:
    """Return seconds for each workload, from what another engine's runs took; prompts of warm-up runs are in the margin."""
    found: dict[str, float] = {}
    for row in peers:
        if row.get("model") != model or row.get("tensor_parallel_size", 1) != 1 or "walls" not in row:
            continue
        if row["bench"] != "decode" and row["bench"] not in workloads.OFFLINE:
            continue
        lists = ("walls", "walls1", "cached_walls", "cached_walls1")
        found[name_of(row)] = _ESTIMATE_MARGIN * sum(sum(row.get(key, ())) for key in lists)
    return found


class ClientTrace:
    """A file with one JSON line for each message that the client got: time (as in plans' traces), tokens.

    Raises (on construction):
        CommandError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._num_runs = 0
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise CommandError(f"{path} cannot be written: {error.strerror}") from error

    def __call__(self, name: str, run: Run) -> None:
        """Write the messages of a run that has ended."""
        self._num_runs += 1
        for time_s, num_tokens in run.steps:
            line = {"run": self._num_runs, "workload": name, "time_s": round(time_s, 6), "tokens": num_tokens}
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _kind(name: str) -> str:
    found = _BATCH.fullmatch(name)
    return name if found is None else found[1] or found[3]


def _number(name: str) -> int:
    found = _BATCH.fullmatch(name)
    return 1 if found is None else int(found[2] or found[4])


def _skip(writer: RowWriter, name: str, reason: str) -> None:
    writer.write({"bench": "skipped", "name": name, "reason": reason})
    say(f"{name}: skipped: {reason}")
