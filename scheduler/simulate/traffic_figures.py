"""Figures of simulated traffic: gathered in flat arrays while it runs, put together at its end."""

from array import array
from collections import Counter
from typing import Any

import numpy as np

from octavo.scheduler.figures import Figures
from octavo.scheduler.simulate.arrivals import Floats
from octavo.scheduler.simulate.cost import StepLoad
from octavo.scheduler.simulate.traffic_fairness import Fairness
from octavo.scheduler.simulate.traffic_worker import FastWorker, Live
from octavo.wire.requests import FailureCode

MAX_GROUPS = 32
"""Callers, or priorities, whose queue times are told: those with the most requests."""


class TrafficFigures:
    """What is counted while traffic runs; times are virtual seconds."""

    def __init__(self) -> None:
        self.fairness = Fairness()
        self.num_requests = 0
        self.num_output_tokens = 0
        self.refused: Counter[str] = Counter()
        self.first_refusals: dict[str, str] = {}
        """The message of the first refusal, by reason."""
        self.end_s = 0.0
        self._begin_s: float | None = None
        self._ttft, self._tpot, self._e2e, self._queue = array("d"), array("d"), array("d"), array("d")
        self._callers, self._priorities = array("i"), array("i")
        self._rows, self._tokens = array("i"), array("i")  # of each step
        self._waste, self._used = array("d"), array("d")
        self._step_s = array("d")

    @property
    def started(self) -> list[str]:
        """The callers of the requests that have started, in the order in which they did."""
        names = self.fairness.names
        return [names[number] for number in self._callers]

    # While it runs

    def on_submitted(self, now: float, live: Live) -> None:
        """Take note of a request that comes."""
        self.num_requests += 1
        if self._begin_s is None:
            self._begin_s = now
        self.fairness.change_waiting(live.caller, 1)

    def on_started(self, live: Live, queue_s: float) -> None:
        """Take note that a plan names a request for the first time."""
        live.queue_s = queue_s
        self.fairness.change_waiting(live.caller, -1)
        self._queue.append(queue_s)
        self._callers.append(live.caller)
        self._priorities.append(live.arrival.priority)

    def on_refused(self, live: Live, code: FailureCode, message: str) -> None:
        """Take note that a request is not taken in."""
        self.fairness.change_waiting(live.caller, -1)
        reason = code.name.lower()
        self.refused[reason] += 1
        self.first_refusals.setdefault(reason, message)

    def on_finished(self, live: Live, num_tokens: int, prefill_s: float, decode_s: float, choice: int) -> None:
        """Take note of the end of a choice."""
        self.num_output_tokens += num_tokens
        if choice == 0:
            self._ttft.append(live.queue_s + prefill_s)
        if num_tokens > 1:
            self._tpot.append(decode_s / (num_tokens - 1))

    def on_ended(self, now: float, live: Live) -> None:
        """Take note of the end of a request."""
        self.end_s = now
        self._e2e.append(now - live.arrival.at_s)

    def on_planned(self, load: StepLoad, seconds: float) -> None:
        """Take note of a plan and of how long it will take."""
        self._rows.append(load.num_rows)
        self._tokens.append(load.num_tokens)
        self._step_s.append(seconds)

    def on_blocks(self, worker: FastWorker, figures: Figures) -> None:
        """Take note of what blocks hold after a plan."""
        num_used = figures.num_blocks - figures.num_free_blocks
        if num_used:
            self._waste.append(worker.num_empty_slots / (num_used * figures.block_size))
            self._used.append(num_used / figures.num_blocks)

    # At the end

    def report(self, figures: Figures) -> dict[str, Any]:
        """Return everything, as it is printed; `figures` are the core's."""
        elapsed = max(self.end_s - (self._begin_s or 0.0), 1e-9)
        queues = np.frombuffer(self._queue) if self._queue else np.zeros(0)
        return {
            "requests": self.num_requests,
            "finished": len(self._e2e),
            "refused": dict(self.refused),
            "first_refusals": dict(self.first_refusals),
            "virtual_s": round(elapsed, 3),
            "ttft_ms": spread(self._ttft, 1e3),
            "tpot_ms": spread(self._tpot, 1e3),
            "e2e_s": spread(self._e2e),
            "queue_ms": spread(self._queue, 1e3),
            "throughput": {
                "requests_per_s": round(len(self._e2e) / elapsed, 3),
                "output_tokens_per_s": round(self.num_output_tokens / elapsed, 1),
                "prompt_tokens_per_s": round(figures.num_prompt_tokens / elapsed, 1),
            },
            "kv_waste": round(float(np.mean(self._waste)), 5) if self._waste else None,
            "blocks_in_use": spread(self._used),
            "prefix_hit_rate": round(figures.num_cached_prompt_tokens / max(1, figures.num_prompt_tokens), 5),
            "fairness": self._fairness(),
            "preemptions": figures.num_preemptions,
            "recomputed_tokens": figures.num_recomputed_tokens,
            "steps": len(self._rows),
            "step_ms": spread(self._step_s, 1e3),
            "busy": round(min(1.0, sum(self._step_s) / elapsed), 4),
            "rows_per_step": spread(self._rows),
            "tokens_per_step": spread(self._tokens),
            "queue_ms_by_caller": _grouped(queues, self.started),
            "queue_ms_by_priority": _grouped(queues, [str(priority) for priority in self._priorities]),
        }

    def _fairness(self) -> dict[str, Any] | None:
        fairness = self.fairness
        if fairness.num_callers < 2:
            return None
        indices = fairness.indices
        return {
            "jain": round(float(np.mean(indices)), 4) if indices else None,
            "jain_least": round(min(indices), 4) if indices else None,
            "windows": len(indices),
            "largest_gap": fairness.largest_gap,
            "service_by_caller": dict(list(zip(fairness.names, fairness.service.tolist()))[:MAX_GROUPS]),
        }


def spread(values: "array[float] | array[int] | Floats", scale: float = 1.0) -> dict[str, float] | None:
    """Return mean, percentiles and maximum; None of nothing."""
    if not len(values):
        return None
    scaled = np.asarray(values, np.float64) * scale
    p50, p90, p99, most = np.percentile(scaled, [50, 90, 99, 100])
    named = {"mean": scaled.mean(), "p50": p50, "p90": p90, "p99": p99, "max": most}
    return {name: round(float(value), 3) for name, value in named.items()}


def _grouped(values: Floats, names: list[str]) -> dict[str, Any]:
    """Return the spread of values (seconds, told in ms) by name."""
    numbers: dict[str, int] = {}
    index = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
    chosen = [name for name, _ in Counter(names).most_common(MAX_GROUPS)]
    return {name: spread(values[index == numbers[name]], 1e3) for name in sorted(chosen)}
