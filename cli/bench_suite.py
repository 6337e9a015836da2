"""Lists of workloads that run one after the other on one engine, within a time that is set before."""

import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.cli import bench_workloads as workloads
from octavo.cli.bench_client import Run, TimeIsUp
from octavo.cli.bench_engine import say
from octavo.cli.bench_measure import Bench, Row
from octavo.cli.bench_report import RowWriter, name_of
from octavo.cli.errors import CommandError, ConfigurationError

OFFLINE_REPEATS = {"prefill": 3}
"""Runs of a workload where they are not DEFAULT_REPEATS: short ones scatter more."""

DEFAULT_REPEATS = 2
_ESTIMATE_MARGIN = 1.3
"""What is planned for a workload, over what another engine took for it."""

_BATCH = re.compile(r"(decode_b|serving_c)([1-9][0-9]{0,5})")

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
    """Sizes of workloads where they are not the usual ones."""

    num_requests: int | None = None
    num_prompt_tokens: int = 512
    num_output_tokens: int = 128
    repeat: int | None = None


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


def measure(bench: Bench, vocab_size: int, name: str, sizes: Sizes) -> Row:
    """Measure one workload by its name.

    Raises:
        ConfigurationError: there is no such workload, or the vocabulary is too small for it.
        RunFailed: it failed.
        TimeIsUp: the deadline came.
    """
    check_names([name])
    try:
        if (found := _BATCH.fullmatch(name)) is None:
            workload = workloads.make_offline(name, vocab_size, sizes.num_requests)
            return bench.throughput(workload, sizes.repeat or OFFLINE_REPEATS.get(name, DEFAULT_REPEATS))
        number = int(found[2])
        if found[1] == "serving_c":
            return bench.serving(workloads.serving(vocab_size, number), number)
        workload = workloads.decode(vocab_size, number, sizes.num_prompt_tokens, sizes.num_output_tokens)
        return bench.decode(workload, sizes.repeat or DEFAULT_REPEATS)
    except workloads.SmallVocabulary as error:
        raise ConfigurationError(str(error)) from error


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
        took_s = time.monotonic() - began
        writer.write({**row, "took_s": round(took_s, 2)})
        say(f"{name}: measured in {took_s:.1f} s")


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


def _skip(writer: RowWriter, name: str, reason: str) -> None:
    writer.write({"bench": "skipped", "name": name, "reason": reason})
    say(f"{name}: skipped: {reason}")
