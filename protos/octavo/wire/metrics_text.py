"""Numbers as the families of prometheus_client, which writes Prometheus' text format and OpenMetrics'.

Processes that tell no text (scheduler and worker without --metrics-port) do not import this.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.wire.metrics import Cells, Counter, Histogram, Layout, Table
from octavo.wire.metrics_catalogue import SCHEDULER, WORKER
from octavo.wire.process_stats import ProcessSample
from octavo.wire.requests import MetricsRow, StatusReport

PROCESS_METRICS = {
    "resident_memory_bytes": "Resident memory.",
    "open_fds": "Open file descriptors.",
    "max_fds": "Most file descriptors that it may open; 0: no limit is known.",
    "threads": "Threads.",
    "start_time_seconds": "When it was started, since the epoch.",
}
"""Gauges of every process."""


class Families(Collector):
    """Families that are there already, for the library to write."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        """Return them."""
        return self._families


def cells_of(row: MetricsRow | None, layout: Layout) -> "array[float] | None":
    """Return the numbers of a row that was told; None if there is none, or it is of another layout."""
    if row is None or row.layout != layout.digest or len(row.cells) != layout.num_bytes:
        return None
    return array("d", row.cells)


def layout_families(layout: Layout, cells: Cells, model: str) -> Iterator[Metric]:
    """Yield the metrics of a row.

    Args:
        layout: of the row.
        cells: the row.
        model: what the label `model_name` says.
    """
    for metric in layout.metrics:
        if isinstance(metric, Histogram):
            yield _histogram(metric, cells, model)
        else:
            yield _table(metric, cells, model)


def scheduler_families(report: StatusReport, model: str) -> Iterator[Metric]:
    """Yield what the scheduler tells of itself."""
    used = report.total_blocks - report.free_blocks
    gauges = {
        "num_requests_running": ("Sequences that have a row.", report.running),
        "num_requests_waiting": ("Sequences that wait for one.", report.waiting),
        "kv_cache_blocks": ("Blocks of the KV cache.", report.total_blocks),
        "kv_cache_free_blocks": ("Blocks that no table holds.", report.free_blocks),
        "kv_cache_used_blocks": ("Blocks that tables hold.", used),
        "kv_cache_block_size_tokens": ("Tokens in a block.", report.block_size),
        "kv_cache_usage_perc": (
            "Part of the blocks that tables hold, from 0 to 1.",
            used / report.total_blocks if report.total_blocks else 0.0,
        ),
        "prefix_cache_blocks": ("Blocks that can be found in the prefix cache.", report.cached_blocks),
    }
    if (limits := report.limits) is not None:
        gauges |= {
            "scheduler_max_waiting_requests": ("Bound of the queue in requests.", limits.max_waiting_requests),
            "scheduler_max_waiting_tokens": ("Bound of the queue in tokens.", limits.max_waiting_tokens),
        }
    counters = {
        "scheduler_steps": ("Steps that have been computed.", report.steps),
        "num_preemptions": ("Times that a request lost its blocks to another one.", report.preemptions),
        "recomputed_tokens": ("Tokens computed again after preemptions, faults, losses.", report.recomputed_tokens),
        "adopted_rows": ("Rows of a worker's earlier session that sequences went on from.", report.adopted_rows),
        "adopted_tokens": ("Tokens of these that were not computed again.", report.adopted_tokens),
        "prefix_cache_queries": ("Prompt tokens looked for in the prefix cache.", report.prompt_tokens),
        "prefix_cache_hits": ("Of these, found there.", report.cached_prompt_tokens),
        "scheduler_failed_checks": ("Times that its state contradicted itself: bugs.", report.failed_checks),
    }
    for name, (words, value) in gauges.items():
        gauge = GaugeMetricFamily(f"octavo_{name}", words, labels=["model_name"])
        gauge.add_metric([model], value)
        yield gauge
    for name, (words, value) in counters.items():
        counter = CounterMetricFamily(f"octavo_{name}", words, labels=["model_name"])
        counter.add_metric([model], value)
        yield counter
    if (cells := cells_of(report.row, SCHEDULER)) is not None:
        yield from layout_families(SCHEDULER, cells, model)
    processes = GaugeMetricFamily("octavo_processes", "Processes by role and state.", labels=["role", "state"])
    found = [(process.role, process.state) for process in report.processes]
    for pair in sorted(set(found)):
        processes.add_metric(pair, found.count(pair))
    yield processes


def worker_families(row: MetricsRow | None, model: str) -> Iterator[Metric]:
    """Yield what a worker tells of itself."""
    if (cells := cells_of(row, WORKER)) is not None:
        yield from layout_families(WORKER, cells, model)


def process_families(samples: Mapping[tuple[str, str], ProcessSample]) -> Iterator[Metric]:
    """Yield what processes take of their machines, and which version this is.

    Args:
        samples: by role, and name of the process.
    """
    cpu = CounterMetricFamily(
        "octavo_process_cpu_seconds", "CPU time, user and system, of a process.", labels=["role", "process"]
    )
    for who, sample in samples.items():
        cpu.add_metric(who, sample.cpu_seconds)
    yield cpu
    for name, words in PROCESS_METRICS.items():
        gauge = GaugeMetricFamily(f"octavo_process_{name}", f"{words} Of a process.", labels=["role", "process"])
        for who, sample in samples.items():
            gauge.add_metric(who, _value(sample, name))
        yield gauge
    info = GaugeMetricFamily("octavo_build_info", "The version, as a label.", labels=["version"])
    info.add_metric([version("octavo")], 1.0)
    yield info


def _value(sample: ProcessSample, name: str) -> float:
    names = {"resident_memory_bytes": "resident_bytes", "start_time_seconds": "started_at"}
    return float(getattr(sample, names.get(name, name)))


def _table(metric: Table, cells: Cells, model: str) -> Metric:
    kind = CounterMetricFamily if isinstance(metric, Counter) else GaugeMetricFamily
    family = kind(f"octavo_{metric.name}", metric.words, labels=["model_name", *metric.labels])
    for index, values in enumerate(metric.values):
        value = cells[metric.first + index]
        if value or index < metric.always:
            family.add_metric([model, *values], value)
    return family


def _histogram(metric: Histogram, cells: Cells, model: str) -> Metric:
    family = HistogramMetricFamily(f"octavo_{metric.name}", metric.words, labels=["model_name"])
    count, buckets = 0.0, []
    for index, bound in enumerate((*map(repr, metric.bounds), "+Inf")):
        count += cells[metric.first + index]
        buckets.append((bound, count))
    family.add_metric([model], buckets, cells[metric.first + metric.num_cells - 1])
    return family
