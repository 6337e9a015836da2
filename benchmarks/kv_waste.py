"""How much of the KV cache that requests hold is empty: blocks taken as tokens come, against reserving the greatest length.

The real core runs the requests of `sharegpt_like`, all at once, on a virtual clock (octavo.scheduler.simulate). Waste
is (slots held - tokens stored) / slots held after each plan, in the mean over the plans. Three ways to hold slots:

- blocks: what Octavo does. A sequence holds the blocks that its tokens fill or begin.
- request_length: each running request holds prompt + max_tokens slots from its first step on.
- model_length: each running request holds max_model_len slots.

Reservations are given their slots to the token, without blocks, and may run as many requests as the same pool then
admits. No prefix is shared in this workload, so nothing is found in the cache.
"""

import argparse
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks._record import record
from benchmarks.workloads import VOCABULARIES, Workload, sharegpt_like
from octavo.scheduler.figures import Figures
from octavo.scheduler.simulate.arrivals import Arrival
from octavo.scheduler.simulate.traffic_run import simulate
from octavo.scheduler.simulate.traffic_setup import Setup
from octavo.scheduler.simulate.traffic_worker import FastWorker

TARGET = 0.025


@dataclass
class Reserved:
    """Waste of a reservation, gathered after each plan.

    Args:
        max_model_len: slots of each running request; None: its own greatest length.
    """

    max_model_len: int | None
    waste: list[float] = field(default_factory=list)

    def __call__(self, worker: FastWorker, figures: Figures) -> None:
        """Look at the rows."""
        held = int(worker.greatest.sum())
        if self.max_model_len is not None:
            held = int((worker.lengths > 0).sum()) * self.max_model_len
        if held:
            self.waste.append(1 - int(worker.lengths.sum()) / held)


def measure(workload: Workload, setup: Setup) -> list[dict[str, Any]]:
    """Return the figures of the three ways."""
    arrivals = [Arrival(0.0, len(r.prompt_ids), r.num_output_tokens, r.num_output_tokens) for r in workload.requests]
    pool_tokens = (setup.num_blocks - 1) * setup.block_size
    common = {
        "workload": workload.name,
        "digest": workload.digest,
        "block_size": setup.block_size,
        "pool_tokens": pool_tokens,
        "max_num_seqs": setup.max_num_seqs,
        "max_model_len": setup.max_model_len,
    }
    blocks = simulate(arrivals, setup)
    lines = [_line("blocks", blocks["kv_waste"], blocks, common) | {"target": TARGET}]

    by_request = Reserved(None)
    # Without a single preemption allowed, the core itself admits a request only with all blocks it can ever need.
    report = simulate(arrivals, replace(setup, max_preemptions=0), by_request)
    lines.append(_line("request_length", fmean(by_request.waste), report, common))

    by_model = Reserved(setup.max_model_len)
    rows = min(setup.max_num_seqs, pool_tokens // setup.max_model_len)
    report = simulate(arrivals, replace(setup, max_num_seqs=rows, max_preemptions=0), by_model)
    lines.append(_line("model_length", fmean(by_model.waste), report, common))
    return lines


def _line(way: str, waste: float, report: dict[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    return {
        "metric": "kv_waste",
        "value": round(waste, 5),
        "unit": "share of the slots held",
        "held_by": way,
        **common,
        "most_running": int(report["rows_per_step"]["max"]),
        "mean_running": report["rows_per_step"]["mean"],
        "preemptions": report["preemptions"],
        "steps": report["steps"],
        "virtual_s": report["virtual_s"],
    }


def main() -> None:
    """Measure, print, and append to a file where one is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--pool-tokens", type=int, default=131_072, help="KV slots: 16 GiB of an 8B model by default")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--out", type=Path, help="file that the lines are appended to")
    arguments = parser.parse_args()
    setup = Setup(
        num_blocks=arguments.pool_tokens // arguments.block_size + 1,
        block_size=arguments.block_size,
        max_num_seqs=arguments.max_num_seqs,
        max_model_len=arguments.max_model_len,
    )
    lines = measure(sharegpt_like(VOCABULARIES["llama-3.1-8b"], arguments.requests), setup)
    for line in lines:
        print(json.dumps(line), flush=True)
    if arguments.out is not None:
        record(arguments.out, "benchmarks/kv_waste.py", lines)


if __name__ == "__main__":
    main()
