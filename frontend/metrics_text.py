"""The numbers in Prometheus' text format: of all frontends that share the ports, and of the scheduler."""

import os
from array import array
from collections.abc import Iterable, Iterator
from importlib.metadata import version

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.frontend.metrics_layout import LAYOUT, Counter, Histogram
from octavo.wire.requests import StatusReport

CONTENT_TYPE = CONTENT_TYPE_LATEST

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def render(rows: "dict[str, array[float]]", report: StatusReport | None, model: str) -> bytes:
    """Return all metrics as text; takes a few milliseconds.

    Args:
        rows: the cells of each frontend, by its name.
        report: of the scheduler; None if it did not answer, and then its metrics are absent.
        model: what the label `model_name` says.
    """
    return generate_latest(_Snapshot(rows, report, model))


class _Snapshot(Collector):
    def __init__(self, rows: "dict[str, array[float]]", report: StatusReport | None, model: str) -> None:
        self._rows = rows
        self._report = report
        self._model = model

    def collect(self) -> Iterable[Metric]:
        total = [sum(cells) for cells in zip(*self._rows.values(), strict=True)]
        for metric in LAYOUT.metrics:
            if isinstance(metric, Counter):
                yield self._counter(metric, total)
            else:
                yield self._histogram(metric, total)
        yield from self._frontends()
        yield from self._scheduler()
        info = GaugeMetricFamily("octavo_build_info", "The version, as a label.", labels=["version"])
        info.add_metric([version("octavo")], 1.0)
        yield info

    def _counter(self, metric: Counter, total: list[float]) -> Metric:
        family = CounterMetricFamily(f"octavo_{metric.name}", metric.words, labels=["model_name", *metric.labels])
        for index, values in enumerate(metric.values):
            value = total[metric.first + index]
            if value or index < metric.always:
                family.add_metric([self._model, *values], value)
        return family

    def _histogram(self, metric: Histogram, total: list[float]) -> Metric:
        family = HistogramMetricFamily(f"octavo_{metric.name}", metric.words, labels=["model_name"])
        count, buckets = 0.0, []
        for index, bound in enumerate((*map(repr, metric.bounds), "+Inf")):
            count += total[metric.first + index]
            buckets.append((bound, count))
        family.add_metric([self._model], buckets, total[metric.first + metric.num_cells - 1])
        return family

    def _frontends(self) -> Iterator[Metric]:
        started = GaugeMetricFamily(
            "octavo_frontend_start_time_seconds", "When a frontend was started, since the epoch.", labels=["frontend"]
        )
        memory = GaugeMetricFamily(
            "octavo_frontend_resident_memory_bytes", "Resident memory of a frontend.", labels=["frontend"]
        )
        for name, cells in self._rows.items():
            started.add_metric([name], cells[LAYOUT.STARTED_AT])
            if (resident := _resident_bytes(int(cells[LAYOUT.PID]))) is not None:
                memory.add_metric([name], resident)
        yield from (started, memory)

    def _scheduler(self) -> Iterator[Metric]:
        report = self._report
        yield GaugeMetricFamily(
            "octavo_scheduler_up", "Whether the scheduler answered.", value=float(report is not None)
        )
        if report is None:
            return
        gauges = {
            "num_requests_running": ("Sequences that have a row.", report.running),
            "num_requests_waiting": ("Sequences that wait for one.", report.waiting),
            "kv_cache_blocks": ("Blocks of the KV cache.", report.total_blocks),
            "kv_cache_free_blocks": ("Blocks that no table holds.", report.free_blocks),
            "kv_cache_usage_perc": (
                "Part of the blocks that tables hold, from 0 to 1.",
                1.0 - report.free_blocks / report.total_blocks if report.total_blocks else 0.0,
            ),
            "prefix_cache_blocks": ("Blocks that can be found in the prefix cache.", report.cached_blocks),
        }
        counters = {
            "scheduler_steps": ("Steps that have been computed.", report.steps),
            "num_preemptions": ("Times that a request lost its blocks to another one.", report.preemptions),
            "recomputed_tokens": ("Tokens computed again after preemptions, faults, losses.", report.recomputed_tokens),
            "prefix_cache_queries": ("Prompt tokens looked for in the prefix cache.", report.prompt_tokens),
            "prefix_cache_hits": ("Of these, found there.", report.cached_prompt_tokens),
            "scheduler_failed_checks": ("Times that its state contradicted itself: bugs.", report.failed_checks),
        }
        for name, (words, value) in gauges.items():
            gauge = GaugeMetricFamily(f"octavo_{name}", words, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, (words, value) in counters.items():
            counter = CounterMetricFamily(f"octavo_{name}", words, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        processes = GaugeMetricFamily("octavo_processes", "Processes by role and state.", labels=["role", "state"])
        found = [(process.role, process.state) for process in report.processes]
        for pair in sorted(set(found)):
            processes.add_metric(pair, found.count(pair))
        yield processes


def _resident_bytes(pid: int) -> int | None:
    """Return the resident memory of a process of this machine; None if there is no such process, or no /proc."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None
