"""Thousands of steps of random traffic: nothing grows, and each step writes the slots that it should and no others."""

import gc
import os
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from octavo.wire.columns import unpack_ints
from octavo.wire.plan import StepPlan
from octavo.worker.gpu.runner import GpuRunner
from tests.support.gpu import CUDA, DEVICE, ON_GPU_OR_INTERPRETED, load_gpu, settle, write_tiny
from tests.support.plan_driver import PlanDriver
from tests.support.random_traffic import RandomTraffic, run_traffic

pytestmark = ON_GPU_OR_INTERPRETED

WARM_UP_STEPS, STEPS, STEPS_WITH_GC = (1_000, 10_000, 500) if CUDA else (4, 8, 4)
CHECKED_STEPS = int(os.environ.get("OCTAVO_TEST_STEPS", 300 if CUDA else 5))  # fewer under slow tools
MOST_GROWTH_BYTES = 16 * 2**20
"""Of the process over STEPS: 1.6 kB a step; what a step keeps, its plan alone, would be as much."""
MOST_RESERVED_BYTES = 4 * 2**20
"""That the allocator may take when the traffic comes to a mix of sizes that it did not meet in the warm-up."""
KINDS = {"ends", "begins", "hits", "forks", "preemptions"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"))


def load(folder: Path, dtype: str, eager: bool = False) -> GpuRunner:
    """Load with a pool that is too small for the rows, so that some are preempted."""
    return load_gpu(folder, dtype=dtype, enforce_eager=eager, block_size=8, num_gpu_blocks_override=24)


def held() -> tuple[int, int, int]:
    """Return bytes that the allocator gave out and that it holds, on the GPU, and those of the process."""
    gc.collect()
    gpu = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if CUDA else (0, 0)
    return *gpu, psutil.Process().memory_info().rss


def test_nothing_grows_over_ten_thousand_steps(folder: Path) -> None:
    runner = load(folder, "bfloat16" if CUDA else "float32")
    traffic = RandomTraffic(runner.rows.limits, seed=1)
    run_traffic(runner, traffic, WARM_UP_STEPS)
    runner.clear()
    allocated, reserved, resident = held()
    traffic = RandomTraffic(runner.rows.limits, seed=2)
    gc.disable()  # steps must leave nothing that only the collector finds: it would stop a step for milliseconds
    try:
        run_traffic(runner, traffic, STEPS)
        in_run = psutil.Process().memory_info().rss
    finally:
        gc.enable()
    run_traffic(runner, traffic, STEPS_WITH_GC)
    assert not CUDA or traffic.seen.keys() == KINDS
    runner.clear()
    allocated_now, reserved_now, resident_now = held()
    assert allocated_now == allocated
    assert reserved_now - reserved <= MOST_RESERVED_BYTES
    if CUDA:  # the interpreter keeps what it likes
        assert in_run - resident < MOST_GROWTH_BYTES
        assert resident_now - resident < MOST_GROWTH_BYTES


def bits(cache: Tensor) -> Tensor:
    """Return a cache [num_blocks, block_size, heads, d] as integers, which compare equal to themselves."""
    return cache.transpose(1, 2).view({2: torch.int16, 4: torch.int32}[cache.element_size()]).transpose(1, 2)


def expected_writes(plan: StepPlan, driver: PlanDriver, shape: torch.Size, block_size: int) -> Tensor:
    """Return which slots [num_blocks, block_size] bool a plan writes; the driver is as that plan left it."""
    written = torch.zeros(shape[:2], dtype=torch.bool)
    for row, count in zip(unpack_ints(plan.row), unpack_ints(plan.num_tokens), strict=True):
        state = driver.rows[row]
        for place in range(state.num_computed - count, state.num_computed):
            written[state.table[place // block_size], place % block_size] = True
    return written.to(DEVICE)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_writes_its_slots_and_no_others(folder: Path, dtype: str, eager: bool) -> None:
    if not CUDA and dtype == "bfloat16":
        pytest.skip("the interpreter cuts bfloat16 off")
    runner = load(folder, dtype, eager)
    halves = [half for cache in runner._caches for half in (cache.keys, cache.values)]
    for half in halves:
        half.fill_(float("nan"))  # read by mistake, it would fault a row
    traffic = RandomTraffic(runner.rows.limits, seed=3)
    for step in range(CHECKED_STEPS):
        plan = traffic.next_plan()
        expected = [bits(half).clone() for half in halves]
        settle()
        traffic.note(runner.execute(plan))
        written = expected_writes(plan, traffic.driver, halves[0].shape, runner.rows.limits.block_size)
        sources, targets = (list(unpack_ints(column)) for column in (plan.copy_src, plan.copy_dst))
        for half, before in zip(halves, expected, strict=True):
            before[targets] = before[sources]
            changed = (bits(half) != before).flatten(2).any(-1)
            assert not (changed & ~written).any(), step
            assert bool(half[written].isfinite().all()), step
    assert CHECKED_STEPS < 300 or traffic.seen.keys() == KINDS
