"""The parent's part of `octavo bench serve`: client processes, the row of what they saw, the table."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt

from octavo.cli.bench_client import RunFailed
from octavo.cli.bench_report import Row
from octavo.cli.bench_serve_job import READY, Failure, Job, Report, floats
from octavo.cli.bench_signals import held
from octavo.cli.bench_workloads import Workload
from octavo.cli.program import SECRET_VARIABLES

START_DELAY_S = 0.1
END_TIMEOUT_S = 10.0
BUSY_PERCENT = 80.0
"""Of a core: clients that are busier may be what is measured."""

_CLIENT = (sys.executable, "-P", "-m", "octavo.cli.bench_serve_client")
_STATISTICS = ("mean", "p50", "p90", "p99")
_LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2e": "end to end",
}

Values = npt.NDArray[np.float64]


@dataclass
class _Client:
    """A client process; what it says on standard error is kept."""

    process: "subprocess.Popen[bytes]"
    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]

    def words(self) -> str:
        """Return the last line of its standard error."""
        self.stderr.seek(0)
        lines = self.stderr.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1].removeprefix("octavo: ") if lines else f"exit status {self.process.poll()}"


def run_load(jobs: Iterable[Job]) -> list[Report]:
    """Run a client process for each job; they start together.

    Raises:
        RunFailed: one cannot reach the server, or ended without a report.
    """
    with _running(jobs) as clients:
        for client in clients:
            if client.stdout.readline() != READY:
                client.process.wait(END_TIMEOUT_S)
                raise RunFailed(client.words())
        start = time.monotonic() + START_DELAY_S
        for client in clients:
            client.stdin.write(f"{start!r}\n".encode())
            client.stdin.flush()
        reports = []
        for client in clients:
            data = client.stdout.read()
            if client.process.wait(END_TIMEOUT_S) != 0:
                raise RunFailed(f"a client ended early: {client.words()}")
            reports.append(msgspec.msgpack.decode(data, type=Report))
    return reports


@contextmanager
def _running(jobs: Iterable[Job]) -> Iterator[list[_Client]]:
    """Start the processes; none is left afterwards."""
    environment = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    clients: list[_Client] = []
    try:
        for job in jobs:
            with held():
                stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
                process = subprocess.Popen(
                    _CLIENT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for this process, which ends them
                )
                if process.stdin is None or process.stdout is None:
                    raise RunFailed("a client has no standard streams")
                clients.append(_Client(process, process.stdin, process.stdout, stderr))
            with suppress(BrokenPipeError):  # it has ended; what it said is told by who waits for it
                process.stdin.write(msgspec.json.encode(job) + b"\n")
                process.stdin.flush()
        yield clients
    finally:
        for client in clients:
            client.process.kill()
            client.process.wait()
            for stream in (client.stdin, client.stdout, client.stderr):
                with suppress(BrokenPipeError):
                    stream.close()


def row_of(job: Job, workload: Workload, reports: list[Report]) -> Row:
    """Return the figures of a run, with the keys that other engines' rows have."""
    columns = {
        name: np.concatenate([floats(getattr(report, name)) for report in reports])
        for name in ("sent", "first", "last", "end", "late", "num_prompt_tokens", "num_tokens", "gaps")
    }
    wall_s = max(report.ended for report in reports) - min(report.began for report in reports)
    n_in, n_out = int(columns["num_prompt_tokens"].sum()), int(columns["num_tokens"].sum())
    several = columns["num_tokens"] > 1
    spans: Values = (columns["last"] - columns["first"])[several] / (columns["num_tokens"][several] - 1)
    latencies = {
        "ttft": columns["first"] - columns["sent"],
        "tpot": spans,
        "itl": columns["gaps"],
        "e2e": columns["end"] - columns["sent"],
    }
    cpu_s = sum(report.cpu_s for report in reports)
    busiest = max(report.cpu_s / max(1e-9, report.ended - report.began) for report in reports)
    num_messages = sum(report.num_messages for report in reports)
    failures = merge_failures(reports)
    return {
        "bench": job.target.door,
        "dataset": workload.name,
        "concurrency": job.max_concurrency,
        "request_rate": job.request_rate,
        "num_clients": job.num_clients,
        "n": len(columns["sent"]),
        "errors": sum(failure.count for failure in failures),
        "error_kinds": {failure.kind: failure.count for failure in failures},
        "n_in": n_in,
        "n_out": n_out,
        "wall_s": round(wall_s, 3),
        "req_s": round(len(columns["sent"]) / wall_s, 2),
        "out_tok_s": round(n_out / wall_s, 1),
        "total_tok_s": round((n_in + n_out) / wall_s, 1),
        **{f"{name}_ms_{key}": value for name, each in latencies.items() for key, value in _statistics(each).items()},
        "tokens_per_message": round(n_out / num_messages, 2) if num_messages else None,
        "client_cpu_us_per_token": round(cpu_s / n_out * 1e6, 1) if n_out else None,
        "client_cpu_percent_max": round(100 * busiest, 1),
        "late_ms_p99": _statistics(columns["late"])["p99"] if job.max_concurrency is None else None,
        "sha": workload.digest,
    }


def merge_failures(reports: Iterable[Report]) -> list[Failure]:
    """Return what failed in all client processes, the most frequent first."""
    merged: dict[str, Failure] = {}
    for report in reports:
        for failure in report.failures:
            before = merged.get(failure.kind, msgspec.structs.replace(failure, count=0))
            merged[failure.kind] = msgspec.structs.replace(before, count=before.count + failure.count)
    return sorted(merged.values(), key=lambda failure: -failure.count)


def lines(row: Row) -> list[str]:
    """Return the figures of a row, in lines of at most 80 columns that no terminal need fold."""
    shown = ["ms   " + "".join(f"{name:>12}" for name in _STATISTICS)]
    for name, words in _LATENCIES.items():
        shown.append(
            f"{name:<5}" + "".join(f"{_number(row[f'{name}_ms_{key}']):>12}" for key in _STATISTICS) + f"  {words}"
        )
    for key, words in (
        ("out_tok_s", "output tok/s"),
        ("total_tok_s", "tok/s with those of the prompts"),
        ("req_s", "requests/s"),
        ("n", "answers"),
        ("errors", "errors"),
        ("wall_s", "s for the whole"),
        ("tokens_per_message", "tokens a message"),
        ("client_cpu_us_per_token", "us of the clients' CPU a token"),
        ("client_cpu_percent_max", "% of a core used by the busiest client"),
    ):
        shown.append(f"{key:<24}{_number(row[key]):>14}  {words}")
    return shown


def _statistics(values: Values) -> dict[str, float | None]:
    if not len(values):
        return dict.fromkeys(_STATISTICS)
    ms = values * 1e3
    figures = {"mean": float(ms.mean()), **{f"p{p}": float(np.percentile(ms, p)) for p in (50, 90, 99)}}
    return {name: round(value, 3) for name, value in figures.items()}


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
