"""Steps of one GPU worker alone: no scheduler, no sockets; plans are written ahead, two are always under way.

For a model with dummy weights it measures the time to load and to capture, decode steps at several batch sizes, prompts,
the host's time to launch a step, and how long the GPU idles between decode steps; with --profile also which kernels a
step spends its time in. One JSON line for each figure.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks._cuda import require_cuda
from benchmarks._record import record
from octavo.cli.bench_models import write_config_folder
from octavo.wire.plan import RowSampling, StepPlan
from octavo.worker.config import WorkerConfig
from octavo.worker.interface import Runner
from octavo.worker.loading import load
from tests.support.plan_driver import PlanDriver

BATCHES = (1, 8, 32, 64, 128, 256)
PROMPT = 512
GREEDY = RowSampling(seed=0, temperature=0.0)


def run_ahead(runner: Runner, plans: list[StepPlan], depth: int = 2) -> tuple[float, list[float]]:
    """Execute plans with `depth` of them under way; return the wall time, and the host's time for each launch."""
    launches: list[float] = []
    begin = time.perf_counter()
    left = list(reversed(plans))
    done = 0
    while done < len(plans):
        while left and runner.num_in_flight < depth:
            before = time.perf_counter()
            runner.launch(left.pop())
            launches.append(time.perf_counter() - before)
        done += len(runner.take_results())
    return time.perf_counter() - begin, launches


class Bench:
    """A loaded worker and what is measured with it."""

    def __init__(self, model: str, config: WorkerConfig) -> None:
        begin = time.perf_counter()
        self.model = model
        self.loaded = load(config, lambda: None)
        self.runner = self.loaded.runner
        self.lines: list[dict[str, Any]] = []
        self.say("load", (time.perf_counter() - begin), "s", blocks=self.loaded.facts.num_blocks)

    def say(self, metric: str, value: float, unit: str, **more: Any) -> None:
        """Print and keep a figure."""
        line = {"metric": metric, "value": round(value, 4), "unit": unit, "model": self.model} | more
        self.lines.append(line)
        print(json.dumps(line), flush=True)

    def decode(self, batch: int, steps: int, sampling: RowSampling = GREEDY, name: str = "decode") -> None:
        """Prefill `batch` rows, then measure steps that give each one token."""
        limits = self.runner.rows.limits
        driver = PlanDriver.of(self.runner)
        rng = random.Random(batch)
        group = max(1, limits.max_num_batched_tokens // PROMPT)
        plans = []
        for first in range(0, batch, group):
            rows = range(first, min(first + group, batch))
            for row in rows:
                driver.begin(row, [rng.randrange(1000, 30000) for _ in range(PROMPT)], sampling)
            plans.append(driver.plan(dict.fromkeys(rows, PROMPT)))
        prefill_s, _ = run_ahead(self.runner, plans)
        counts = dict.fromkeys(range(batch), 1)
        run_ahead(self.runner, [driver.plan(counts) for _ in range(5)])
        plans = [driver.plan(counts) for _ in range(steps)]
        wall, launches = run_ahead(self.runner, plans)
        self.say(
            name,
            wall / steps * 1e3,
            "ms",
            batch=batch,
            launch_us=round(statistics.median(launches) * 1e6),
            prefill_s=round(prefill_s, 4),
        )
        self.runner.clear()

    def prompt(self, length: int) -> None:
        """Measure one prompt alone, from the plan to its first id."""
        times = []
        for repeat in range(5):
            driver = PlanDriver.of(self.runner)
            driver.begin(0, [(7919 * i + repeat) % 29000 + 1000 for i in range(length)], GREEDY)
            plan = driver.plan({0: length})
            torch.cuda.synchronize()
            begin = time.perf_counter()
            self.runner.execute(plan)
            times.append(time.perf_counter() - begin)
            self.runner.clear()
        self.say("prompt", min(times) * 1e3, "ms", tokens=length)

    def prefill(self, num_prompts: int, length: int) -> None:
        """Measure prompts that fill whole steps."""
        limits = self.runner.rows.limits
        driver = PlanDriver.of(self.runner)
        plans = []
        group = limits.max_num_batched_tokens // length
        for first in range(0, num_prompts, group):
            for row in range(first, first + group):
                driver.begin(row, [(7919 * i + row) % 29000 + 1000 for i in range(length)], GREEDY)
            plans.append(driver.plan(dict.fromkeys(range(first, first + group), length)))
            for row in range(first, first + group):
                driver.end(row)
        wall, launches = run_ahead(self.runner, plans)
        self.say(
            "prefill",
            num_prompts * length / wall,
            "tok/s",
            wall_s=round(wall, 4),
            launch_us=round(statistics.median(launches) * 1e6),
        )
        self.runner.clear()

    def mixed(self, num_decodes: int, length: int, steps: int) -> None:
        """Measure steps of decodes beside one new prompt each."""
        plans = self._mixed_plans(num_decodes, length, steps + 4)
        run_ahead(self.runner, plans[:5])
        wall, launches = run_ahead(self.runner, plans[5:])
        self.say(
            "mixed",
            wall / steps * 1e3,
            "ms",
            batch=num_decodes,
            tokens=length,
            launch_us=round(statistics.median(launches) * 1e6),
        )
        self.runner.clear()

    def _mixed_plans(self, num_decodes: int, length: int, steps: int) -> list[StepPlan]:
        driver = PlanDriver.of(self.runner)
        last = self.runner.rows.limits.max_num_seqs - 1
        for row in range(num_decodes):
            driver.begin(row, [(31 * i + row) % 29000 + 1000 for i in range(32)], GREEDY)
        plans = [driver.plan(dict.fromkeys(range(num_decodes), 32))] if num_decodes else [driver.plan({})]
        for step in range(steps):
            driver.begin(last, [(7919 * i + step) % 29000 + 1000 for i in range(length)], GREEDY)
            plans.append(driver.plan(dict.fromkeys(range(num_decodes), 1) | {last: length}))
            driver.end(last)
        return plans

    def profile_decode(self, batch: int, length: int = 16) -> None:
        """Profile steps of decodes alone."""
        driver = PlanDriver.of(self.runner)
        rows = range(batch)
        for row in rows:
            driver.begin(row, [(31 * i + row) % 29000 + 1000 for i in range(length)], GREEDY)
        run_ahead(self.runner, [driver.plan(dict.fromkeys(rows, length))])
        self._profile([driver.plan(dict.fromkeys(rows, 1)) for _ in range(12)], batch=batch, tokens=1)

    def profile_mixed(self, num_decodes: int, length: int) -> None:
        """Profile steps of decodes beside one new prompt each."""
        plans = self._mixed_plans(num_decodes, length, 8)
        run_ahead(self.runner, plans[:3])
        self._profile(plans[3:], batch=num_decodes, tokens=length)

    def profile_prompts(self, batch: int, length: int) -> None:
        """Profile steps of new prompts alone."""
        driver = PlanDriver.of(self.runner)
        plans = []
        for _ in range(3):
            for row in range(batch):
                driver.begin(row, [(7919 * i + row) % 29000 + 1000 for i in range(length)], GREEDY)
            plans.append(driver.plan(dict.fromkeys(range(batch), length)))
            for row in range(batch):
                driver.end(row)
        self._profile(plans, batch=batch, tokens=length)

    def _profile(self, plans: list[StepPlan], **more: Any) -> None:
        """Say which kernels the steps spend their time in, and how long the GPU idles between and within them."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            run_ahead(self.runner, plans)
            torch.cuda.synchronize()
        self.runner.clear()
        spans = sorted(
            (event.time_range.start, event.time_range.end, event.name)
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        )
        times: dict[str, list[float]] = defaultdict(list)
        busy_until, idle = spans[0][0], []
        for start, end, name in spans:
            times[name].append(end - start)
            if start > busy_until:
                idle.append(start - busy_until)
            busy_until = max(busy_until, end)
        steps = len(plans)
        for name, taken in sorted(times.items(), key=lambda item: -sum(item[1]))[:14]:
            calls = round(len(taken) / steps, 1)
            self.say("kernel", sum(taken) / steps, "us a step", kernel=name[:70], calls=calls, **more)
        greatest = [round(x, 1) for x in sorted(idle, reverse=True)[: steps - 1]]
        self.say("idle", sum(idle) / steps, "us a step", greatest=greatest, **more)


def main() -> None:
    """Print a JSON line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--quick", action="store_true", help="decode steps only, and their profile at batch 64")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of Octavo, where there is no git to ask")
    options = parser.parse_args()
    require_cuda("gpu_steps")
    with tempfile.TemporaryDirectory() as folder:
        path = write_config_folder(options.model, Path(folder))
        config = WorkerConfig(
            model_path=path, address="ipc:///unused", load_format="dummy", device="cuda", max_model_len=8192
        )
        bench = Bench(options.model, config)
    for batch in options.batches:
        bench.decode(batch, options.steps)
    if not options.quick:
        bench.decode(64, options.steps, RowSampling(seed=1, temperature=0.8), "decode temperature")
        bench.decode(64, options.steps, RowSampling(seed=1, temperature=0.8, top_p=0.9, top_k=50), "decode filters")
        bench.prompt(512)
        bench.prompt(64)
        bench.prefill(64, 1024)
        for length in (60, 120, 180, 220, 300, 500, 800):
            bench.mixed(200, length, 16)
    if options.profile:
        for batch in (64,) if options.quick else (1, 64, 256):
            bench.profile_decode(batch)
        if not options.quick:
            bench.profile_mixed(200, 220)
            bench.profile_mixed(0, 512)
            bench.profile_prompts(8, 1024)
    if options.out is not None:
        device = torch.cuda.get_device_name()
        record(options.out, "benchmarks/gpu_steps.py", bench.lines, device, options.commit)


if __name__ == "__main__":
    main()
