"""Rows of results: where and when they were measured, what other engines had, and a table of both."""

import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from octavo.cli.bench_engine import Engine, EngineSettings, say
from octavo.cli.errors import CommandError, ConfigurationError

Row = dict[str, Any]

_NO_WORKLOADS = ("engine", "skipped", "end")

MAX_PEERS_BYTES = 16 * 2**20
_COMMAND_TIMEOUT_S = 10.0


class Metric(NamedTuple):
    """A figure of a row that tables show."""

    key: str
    unit: str
    is_rate: bool = False  # more is better


_SERVED = (
    Metric("out_tok_s", "tok/s", True),
    *(Metric(key, "ms") for key in ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99", "itl_ms_p99")),
)

_METRICS: dict[str, tuple[Metric, ...]] = {
    "engine": (Metric("start_s", "s"),),
    "decode": (Metric("tpot_cached_ms", "ms"), Metric("tpot_ms", "ms"), Metric("ttft_all_ms", "ms")),
    "sharegpt_like": (Metric("out_tok_s", "tok/s", True),),
    "prefill": (Metric("in_tok_s", "tok/s", True),),
    "shared_prefix": (Metric("wall_s", "s"),),
    "unique_prefix": (Metric("wall_s", "s"),),
    "offline_256": (Metric("out_tok_s", "tok/s", True),),
    "serving": (Metric("out_tok_s", "tok/s", True), Metric("ttft_ms_p50", "ms"), Metric("tpot_ms_p50", "ms")),
    "latency": (Metric("avg_latency", "s"), Metric("tpot_ms", "ms")),
    "http": _SERVED,
    "grpc": _SERVED,
}

_RATES = tuple(Metric(key, "tok/s", True) for key in ("out_tok_s", "in_tok_s", "total_tok_s"))

_SAME_WORKLOAD = ("model", "tensor_parallel_size", "bench", "batch", "concurrency", "prompt", "out", "n_in", "n_out")
"""What two rows must have in common to be compared; `sha` as well, where both have it."""


def describe(model: str, settings: EngineSettings, engine: Engine, commit: str | None = None) -> Row:
    """Return what every row of a run says of the engine, the machine and the time.

    Args:
        model: its name.
        settings: of the engine.
        engine: the engine, ready.
        commit: of Octavo; None: git is asked.
    """
    row = {
        "engine": "octavo",
        "version": _own_version(),
        "commit": commit or _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": _device(engine.torch_device or str(settings.flags.get("device"))),
        "torch": _version("torch"),
        "model": model,
        "tensor_parallel_size": 1,
        "backend": engine.backend,
        "max_num_seqs": engine.facts.max_num_seqs,
        "max_num_batched_tokens": settings.flags.get("max-num-batched-tokens"),
        "block_size": engine.facts.block_size,
        "num_blocks": engine.num_blocks,
        "prefix_caching": engine.facts.prefix_caching,
        "start_s": round(engine.start_s, 1),
    }
    return {key: value for key, value in row.items() if value is not None}


def describe_client() -> Row:
    """Return what a row says of the program that put the load on a service, and of the machine it ran on."""
    return {
        "client_version": _own_version(),
        "client_commit": _commit(),
        "client_device": _device("any"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def with_paths(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a command with paths as such: depending on its version typer's context has them as text."""
    one = {name: Path(parameters[name]) for name in ("output_json", "result_dir") if parameters.get(name) is not None}
    return {**parameters, **one, "peers": [Path(path) for path in parameters.get("peers") or ()]}


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """Read files of JSON lines.

    Raises:
        ConfigurationError: one cannot be read, or a line is no JSON object.
    """
    rows: list[Row] = []
    for path in paths:
        try:
            if path.stat().st_size > MAX_PEERS_BYTES:
                raise ConfigurationError(f"{path} has more than {MAX_PEERS_BYTES} bytes")
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{path} cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigurationError(f"{path} line {number} is no JSON: {error}") from error
            if not isinstance(row, dict):
                raise ConfigurationError(f"{path} line {number} is no JSON object")
            rows.append(row)
    return rows


def peer_of(row: Row, peers: Iterable[Row]) -> Row | None:
    """Return the row of another engine that ran the same workload of the same model, None if there is none."""
    for peer in peers:
        if peer.get("bench") != row.get("bench"):
            continue
        same = all(peer[key] == row[key] for key in _SAME_WORKLOAD if key in peer and key in row)
        if same and peer.get("sha", row.get("sha")) == row.get("sha", peer.get("sha")):
            return peer
    return None


def table(rows: Iterable[Row], peers: Iterable[Row], *, with_rates: bool = False) -> Table:
    """Return a table of the figures that matter, against those of another engine; a ratio above 1 is in our favour.

    Args:
        rows: ours.
        peers: of other engines.
        with_rates: show the tokens a second of every workload, even where another figure is what counts.
    """
    rows = list(rows)
    known = [peer for peer in peers if any(peer.get("model") == row.get("model") for row in rows)]
    shown = Table("workload", "figure", "unit", box=None)
    shown.add_column("octavo", justify="right")
    if known:
        shown.add_column(", ".join(sorted({_title(peer) for peer in known})), justify="right")
        shown.add_column("ratio", justify="right")
    for row in rows:
        if row["bench"] == "skipped":
            shown.add_row(row["name"], "skipped")
        peer = peer_of(row, known)
        metrics = _METRICS.get(row["bench"], ())
        for metric in dict.fromkeys((*metrics, *_RATES) if with_rates else metrics):
            if (value := row.get(metric.key)) is None:
                continue
            cells = [name_of(row), metric.key, metric.unit, _number(value)]
            if peer is not None and (theirs := peer.get(metric.key)):
                cells += [_number(theirs), _ratio(value, theirs, metric)]
            shown.add_row(*cells)
    return shown


def _title(peer: Row) -> str:
    return f"{peer.get('engine', 'peer')} {peer.get('version', '')} ({peer.get('device', 'unknown device')})"


def name_of(row: Row) -> str:
    """Return the name of a row's workload."""
    if row["bench"] in ("decode", "latency"):
        return f"{row['bench']}_b{row['batch']}"
    if row["bench"] in ("serving", "http", "grpc") and row.get("concurrency") is not None:
        return f"{row['bench']}_c{row['concurrency']}"
    return str(row["bench"])


def print_table(
    rows: Iterable[Row], peers: Iterable[Row], files: Iterable[Path] = (), *, with_rates: bool = False
) -> None:
    """Print the table on standard output; one that is no terminal cuts nothing.

    Args:
        rows: ours.
        peers: of other engines.
        files: that the user named for the peers: where no row of them is of a workload of ours, that is said.
        with_rates: show the tokens a second of every workload.
    """
    rows, peers = list(rows), list(peers)
    console = Console()
    console.print(table(rows, peers, with_rates=with_rates), soft_wrap=not console.is_terminal)
    names = ", ".join(map(str, files))
    if names and not any(peer_of(row, peers) for row in rows if row["bench"] not in _NO_WORKLOADS):
        say(f"--peers {names}: no row has the model, workload and sizes that were measured; nothing is compared")


class RowWriter:
    """Writes rows as they come, each with what describes the run.

    Args:
        path: of a file that is made anew; None: rows are only kept.

    Raises (on construction):
        CommandError: the file cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self.rows: list[Row] = []
        self.common: Row = {}
        try:
            self._file = None if path is None else path.open("w", encoding="utf-8")
        except OSError as error:
            raise CommandError(f"{path} cannot be written: {error.strerror}") from error

    def write(self, row: Row) -> None:
        """Add a row and flush it."""
        whole = {**self.common, **row}
        self.rows.append(whole)
        if self._file is not None:
            self._file.write(json.dumps(whole) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}" if abs(value) >= 10 else f"{value:.3f}"


def _ratio(ours: float, theirs: float, metric: Metric) -> str:
    if ours <= 0:
        return ""
    return f"{ours / theirs if metric.is_rate else theirs / ours:.2f}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _own_version() -> str:
    """Return the installed version; in a checkout that is not installed, what its pyproject.toml says."""
    if (found := _version("octavo")) != "unknown":
        return found
    try:
        text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8")
        return str(tomllib.loads(text)["project"]["version"])
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return "unknown"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return _first_line(command, cwd=Path(__file__).resolve().parent) or "unknown"


def _device(torch_device: str) -> str:
    """Return the name of the GPU where one is used, else the cores that may be used and the processor's name."""
    if torch_device != "cpu" and (gpu := _gpu()):
        return gpu
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        name = name or "unknown"  # not Linux
    return f"{len(os.sched_getaffinity(0))} cores of {name}"


def _gpu() -> str | None:
    return _first_line(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])


def _first_line(command: list[str], cwd: Path | None = None) -> str | None:
    """Return the first line that a command prints, None where it fails or is not there."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=_COMMAND_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().partition("\n")[0] or None if done.returncode == 0 else None
