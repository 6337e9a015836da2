"""What is measured on an engine, one JSON row each, with the keys that the rows of other engines have.

Each figure is the best of several runs, and the rows hold all of them (`walls`). Before a run that must find nothing in
the prefix cache, the cache is reset.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.cli.bench_client import EngineClient, Run, TimeIsUp
from octavo.cli.bench_workloads import Workload

Row = dict[str, Any]

_PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True)
class Bench:
    """Measures on one engine.

    Args:
        client: of the engine, which is warm.
        deadline: of time.monotonic(), at which a run is cut; None: never.
        on_run: called with a name and each run, for a trace.
    """

    client: EngineClient
    deadline: float | None = None
    on_run: Callable[[str, Run], None] = lambda _name, _run: None

    def decode(self, workload: Workload, repeat: int = 2) -> Row:
        """Time the decode steps of equal requests that run together.

        With T(n) the wall time of the workload with n tokens of output each, and N the workload's own:
        tpot = (min T(N) - min T(1)) / (N - 1). `tpot_ms` is of runs that find nothing in the prefix cache,
        `tpot_cached_ms` of runs that find the prompts there; `tpot_engine_ms` is the median over the requests of
        (last token - first token) / (N - 1) in the best of the latter; `ttft_all_ms` is T(1) of the former: until the
        last request has its first token.

        Raises:
            RunFailed: a run failed.
            TimeIsUp: the deadline came.
        """
        cold, cold_1, cached, cached_1 = [], [], [], []
        for _ in range(repeat):
            cold_1.append(self._run(workload, max_tokens=1))
            cold.append(self._run(workload))
            cached_1.append(self._run(workload, max_tokens=1, is_cold=False))
            cached.append(self._run(workload, is_cold=False))
        batch, prompt, out = len(workload.requests), len(workload.requests[0].prompt_ids), workload.num_output_tokens
        per_request = out // batch
        wall_s = _best(cold)
        tpot_s, tpot_cached_s = (
            (_best(whole) - _best(first)) / max(1, per_request - 1)
            for whole, first in ((cold, cold_1), (cached, cached_1))
        )
        gaps_ms = np.concatenate([run.gaps for run in cached]) * 1e3
        return {
            "bench": "decode",
            "batch": batch,
            "prompt": prompt,
            "out": per_request,
            "repeat": repeat,
            "tpot_ms": round(tpot_s * 1e3, 4),
            "tpot_cached_ms": round(tpot_cached_s * 1e3, 4),
            "tpot_engine_ms": round(min(float(np.median(run.tpot_s)) for run in cached) * 1e3, 4),
            "decode_tok_s": round(batch / tpot_cached_s, 1) if tpot_cached_s > 0 else None,
            "ttft_all_ms": round(_best(cold_1) * 1e3, 2),
            "wall_s": round(wall_s, 4),
            **_tokens_a_second(workload, wall_s),
            "walls": _walls(cold),
            "walls1": _walls(cold_1),
            "cached_walls": _walls(cached),
            "cached_walls1": _walls(cached_1),
            "itl_ms_p50": _percentile(gaps_ms, 50),
            "itl_ms_p99": _percentile(gaps_ms, 99),
            "cached_in_tokens": max(run.num_cached_tokens for run in cached),
            "sha": workload.digest,
        }

    def throughput(self, workload: Workload, repeat: int = 2) -> Row:
        """Time a workload whose requests all come at once. Runs that no longer fit before the deadline are left out.

        Raises:
            RunFailed: a run failed.
            TimeIsUp: the deadline came before one run had ended.
        """
        runs: list[Run] = []
        for _ in range(repeat):
            if runs and self.deadline is not None and time.monotonic() + runs[-1].wall_s > self.deadline:
                break
            try:
                runs.append(self._run(workload))
            except TimeIsUp:
                if not runs:
                    raise
                break
        best = min(runs, key=lambda run: run.wall_s)
        return {
            "bench": workload.name,
            "n": len(workload.requests),
            **_rates(workload, best.wall_s),
            "cached_in_tokens": best.num_cached_tokens,
            "walls": _walls(runs),
            "ttft_ms_p50": _percentile(best.ttft_s * 1e3, 50),
            "itl_ms_p50": _percentile(best.gaps * 1e3, 50),
            "itl_ms_p99": _percentile(best.gaps * 1e3, 99),
            "sha": workload.digest,
        }

    def serving(self, workload: Workload, concurrency: int) -> Row:
        """Time a closed loop: so many requests are under way, and the next one goes out when one has ended.

        No HTTP and no text are in this: it is what the engine alone does to the clients of a frontend.

        Raises:
            RunFailed: the run failed.
            TimeIsUp: the deadline came.
        """
        run = self._run(workload, concurrency=concurrency)
        return {
            "bench": "serving",
            "concurrency": concurrency,
            "n": len(workload.requests),
            **_rates(workload, run.wall_s),
            **_latencies(run),
            "sha": workload.digest,
        }

    def latency(self, workload: Workload, num_iters: int) -> Row:
        """Time a batch from its first request to its last token, again and again, with nothing cached.

        Raises:
            RunFailed: a run failed.
            TimeIsUp: the deadline came.
        """
        runs = [self._run(workload) for _ in range(num_iters)]
        walls = [run.wall_s for run in runs]
        return {
            "bench": "latency",
            "batch": len(workload.requests),
            "prompt": len(workload.requests[0].prompt_ids),
            "out": workload.requests[0].num_output_tokens,
            "repeat": num_iters,
            "avg_latency": round(fmean(walls), 4),
            "median_latency": round(median(walls), 4),
            "percentiles": {str(p): round(float(np.percentile(walls, p)), 4) for p in _PERCENTILES},
            "latencies": _walls(runs),
            "tpot_ms": round(float(np.median(np.concatenate([run.tpot_s for run in runs]))) * 1e3, 4)
            if workload.requests[0].num_output_tokens > 1
            else None,
            "ttft_ms_p50": _percentile(np.concatenate([run.ttft_s for run in runs]) * 1e3, 50),
            "sha": workload.digest,
        }

    def _run(
        self, workload: Workload, *, max_tokens: int | None = None, concurrency: int | None = None, is_cold: bool = True
    ) -> Run:
        if is_cold:
            self.client.reset_prefix_cache()
        run = self.client.run(workload, max_tokens=max_tokens, concurrency=concurrency, deadline=self.deadline)
        self.on_run(workload.name, run)
        return run


def _rates(workload: Workload, wall_s: float) -> Row:
    n_in, n_out = workload.num_prompt_tokens, workload.num_output_tokens
    return {
        "n_in": n_in,
        "n_out": n_out,
        "wall_s": round(wall_s, 4),
        "req_s": round(len(workload.requests) / wall_s, 2),
        **_tokens_a_second(workload, wall_s),
    }


def _tokens_a_second(workload: Workload, wall_s: float) -> Row:
    n_in, n_out = workload.num_prompt_tokens, workload.num_output_tokens
    return {
        "out_tok_s": round(n_out / wall_s, 1),
        "in_tok_s": round(n_in / wall_s, 1),
        "total_tok_s": round((n_in + n_out) / wall_s, 1),
    }


def _latencies(run: Run) -> Row:
    return {
        "ttft_ms_p50": _percentile(run.ttft_s * 1e3, 50),
        "ttft_ms_p99": _percentile(run.ttft_s * 1e3, 99),
        "tpot_ms_p50": _percentile(run.tpot_s * 1e3, 50),
        "tpot_ms_p99": _percentile(run.tpot_s * 1e3, 99),
        "itl_ms_p99": _percentile(run.gaps * 1e3, 99),
    }


def _best(runs: list[Run]) -> float:
    return min(run.wall_s for run in runs)


def _walls(runs: list[Run]) -> list[float]:
    return [round(run.wall_s, 4) for run in runs]


def _percentile(values: npt.NDArray[np.float64], percent: int) -> float | None:
    return round(float(np.percentile(values, percent)), 3) if len(values) else None
