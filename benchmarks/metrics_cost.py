"""CPU time that a step pays for what scheduler and worker count of it, beside that of the scheduler's step itself.

Both alternate in one run, in this thread's CPU time: a step of the core over running decodes, and what is counted of such a
step (plan, result, compute time). What a report with metrics costs, which a scrape asks for, stands beside them.
"""

import argparse
import json
import statistics
from pathlib import Path

from benchmarks._record import record
from benchmarks.scheduler_step import Bench, timed
from octavo.scheduler.metrics import SchedulerMetrics
from octavo.wire.columns import pack_ints
from octavo.wire.plan import StepPlan, StepResult
from octavo.worker.metrics import WorkerMetrics


def measure(num_rows: int, num_steps: int) -> dict[str, object]:
    """Return the medians over steps."""
    bench, scheduler, worker = Bench(num_rows), SchedulerMetrics(), WorkerMetrics()
    rows = pack_ints(range(num_rows))
    plan = StepPlan(1, 1, rows, pack_ints([1] * num_rows), rows)
    result = StepResult(1, 1, rows, rows, compute_us=1500)

    def count() -> None:
        scheduler.plan_sent(plan, 3000, 1.0)
        scheduler.step_completed(result, 1.01)
        worker.step_done(result)

    steps: list[int] = []
    counts: list[int] = []
    for _ in range(num_steps):
        steps.append(bench.step())
        counts.append(timed(count))
    reports = [timed(worker.figures) for _ in range(200)]
    step, counted = statistics.median(steps) / 1000, statistics.median(counts) / 1000
    return {
        "metric": "metrics_cost_of_a_step",
        "value": round(counted, 2),
        "unit": "us",
        "scheduler_step_us": round(step, 1),
        "percent_of_scheduler_step": round(100 * counted / step, 2),
        "worker_figures_us": round(statistics.median(reports) / 1000, 1),
        "rows": num_rows,
        "steps": num_steps,
    }


def main() -> None:
    """Print a JSON line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="file that the lines are appended to, with date, commit and device")
    options = parser.parse_args()
    for num_rows in (16, 256):
        line = measure(num_rows, options.steps)
        print(json.dumps(line), flush=True)
        if options.out is not None:
            record(options.out, "benchmarks/metrics_cost.py", [line])


if __name__ == "__main__":
    main()
