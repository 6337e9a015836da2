"""What `octavo top` shows: figures of one moment, and of the time between two, from the service's metrics."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from prometheus_client.parser import text_string_to_metric_families

_TTFT, _ITL = "octavo_time_to_first_token_seconds", "octavo_inter_token_latency_seconds"
_QUEUE = "octavo_request_queue_time_seconds"

Buckets = tuple[tuple[float, float], ...]
"""Upper bound and cumulative count of each bucket, in order; the last bound is infinite."""


@dataclass(frozen=True)
class Snapshot:
    """All samples of one moment.

    Attributes:
        time_s: monotonic seconds.
        values: by name and labels.
    """

    time_s: float
    values: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    @classmethod
    def read(cls, text: str, time_s: float) -> "Snapshot":
        """Read the text format of Prometheus.

        Raises:
            ValueError: it is none.
        """
        values = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name, frozenset(sample.labels.items())] = sample.value
        return cls(time_s, values)

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of the samples of a name that have these labels; None if there is none."""
        wanted = labels.items()
        found = [value for (of, have), value in self.values.items() if of == name and wanted <= dict(have).items()]
        return sum(found) if found else None

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the samples of a name by the values of some labels."""
        rows = ((dict(have), value) for (of, have), value in self.values.items() if of == name)
        return {tuple(have.get(label, "") for label in labels): value for have, value in rows}

    def buckets(self, name: str) -> Buckets:
        """Return the buckets of a histogram."""
        found = self.by(f"{name}_bucket", "le")
        return tuple(sorted((float(bound), count) for (bound,), count in found.items()))


def quantile(before: Buckets, after: Buckets, part: float) -> float | None:
    """Return a quantile of what a histogram has got between two moments, in its unit, as Prometheus interpolates it.

    Args:
        before: empty, if all that there is counts.
        after: the same buckets later.
        part: from 0 to 1.

    Returns:
        None if nothing came; the largest finite bound if it lies beyond.
    """
    earlier = dict(before)
    counts = [(bound, count - earlier.get(bound, 0.0)) for bound, count in after]
    if not counts or counts[-1][1] <= 0:
        return None
    rank, below, low = part * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= rank:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / (count - below) if count > below else bound
        below, low = count, bound
    return low


@dataclass(frozen=True)
class Process:
    """One process of the service."""

    role: str
    name: str
    rss_bytes: float | None
    cpu_percent: float | None  # of a core, in the time between
    files: float | None


@dataclass(frozen=True)
class Figures:
    """What is shown. Rates and quantiles are of the time between two moments; None: not known, or nothing came."""

    scheduler_up: bool
    running: float | None
    waiting: float | None
    waiting_for: str
    blocks_used: float | None
    blocks: float | None
    hit_percent: float | None
    input_tokens_per_s: float | None
    output_tokens_per_s: float | None
    requests_per_s: float | None
    aborts_per_s: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    queue_p99_s: float | None
    steps_per_s: float | None
    tokens_per_step: float | None
    preemptions: float | None  # since the scheduler began
    recomputed_tokens: float | None
    worker_epochs: float | None
    processes: list[Process] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        """Return them for JSON."""
        return asdict(self)


def figures(before: Snapshot, after: Snapshot) -> Figures:
    """Return what two moments tell; a counter that began anew between them has no rate."""
    passed = after.time_s - before.time_s

    def rate(name: str, **labels: str) -> float | None:
        first, last = before.total(name, **labels), after.total(name, **labels)
        return (last - first) / passed if first is not None and last is not None and last >= first else None

    def between(name: str, part: float) -> float | None:
        return quantile(before.buckets(name), after.buckets(name), part)

    waiting_for = [reason for (reason,), on in after.by("octavo_scheduler_waiting_for", "reason").items() if on]
    steps, tokens = rate("octavo_scheduler_step_tokens_count"), rate("octavo_scheduler_step_tokens_sum")
    return Figures(
        scheduler_up=bool(after.total("octavo_scheduler_up")),
        running=after.total("octavo_num_requests_running"),
        waiting=after.total("octavo_num_requests_waiting"),
        waiting_for=", ".join(waiting_for),
        blocks_used=after.total("octavo_kv_cache_used_blocks"),
        blocks=after.total("octavo_kv_cache_blocks"),
        hit_percent=_percent(rate("octavo_prefix_cache_hits_total"), rate("octavo_prefix_cache_queries_total")),
        input_tokens_per_s=rate("octavo_prompt_tokens_total"),
        output_tokens_per_s=rate("octavo_generation_tokens_total"),
        requests_per_s=rate("octavo_request_success_total"),
        aborts_per_s=rate("octavo_stream_aborts_total"),
        ttft_p50_s=between(_TTFT, 0.5),
        ttft_p99_s=between(_TTFT, 0.99),
        itl_p50_s=between(_ITL, 0.5),
        itl_p99_s=between(_ITL, 0.99),
        queue_p99_s=between(_QUEUE, 0.99),
        steps_per_s=steps,
        tokens_per_step=tokens / steps if tokens is not None and steps else None,
        preemptions=after.total("octavo_num_preemptions_total"),
        recomputed_tokens=after.total("octavo_recomputed_tokens_total"),
        worker_epochs=after.total("octavo_scheduler_sessions_begun_total", role="worker"),
        processes=list(_processes(before, after, passed)),
    )


def _percent(part: float | None, whole: float | None) -> float | None:
    return 100 * part / whole if part is not None and whole else None


def _processes(before: Snapshot, after: Snapshot, passed: float) -> Iterable[Process]:
    of = ("role", "process")
    earlier, later = (moment.by("octavo_process_cpu_seconds_total", *of) for moment in (before, after))
    files = after.by("octavo_process_open_fds", *of)
    for key, rss in sorted(after.by("octavo_process_resident_memory_bytes", *of).items()):
        used = later.get(key, math.nan) - earlier.get(key, math.nan)
        role, name = key
        yield Process(role, name, rss, 100 * used / passed if used >= 0 else None, files.get(key))
