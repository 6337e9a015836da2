"""Faults have names, hit whom they concern alone, and leave the device usable; launching never waits for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from octavo.wire.columns import pack_ints
from octavo.wire.plan import FAULT_NONFINITE_LOGITS, RowSampling, StepPlan
from octavo.worker import memory
from octavo.worker.errors import MemoryShortage, PlanError, StartError
from octavo.worker.gpu.runner import GpuRunner
from tests.support.gpu import CUDA, ON_GPU_OR_INTERPRETED, SHAPE, load_gpu, needs_cuda, settle, write_tiny
from tests.support.plan_driver import GREEDY, PlanDriver, faults_of, generate, tokens_of
from tests.support.random_traffic import SAMPLINGS, RandomTraffic
from tests.support.tiny_models import load_worker, write_model

pytestmark = ON_GPU_OR_INTERPRETED

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32]
OTHER = [27, 18, 28]
LOGPROBS = RowSampling(seed=1, temperature=0.0, logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(
    scope="module", params=[False, True] if CUDA else [True], ids=["graphs", "eager"] if CUDA else ["eager"]
)
def loaded(folder: Path, request: pytest.FixtureRequest) -> GpuRunner:
    return load_gpu(folder, dtype="float32", enforce_eager=request.param)


@pytest.fixture
def runner(loaded: GpuRunner) -> GpuRunner:
    loaded.clear()
    return loaded


def of_device(num_bytes: int) -> float:
    return num_bytes / memory.free_and_total(torch.device("cuda"))[1]


@needs_cuda
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"share": 2**20}, r"the weights need .* utilisation .* raise --gpu-memory-utilization"),
        ({"share": memory.CONTEXT_BYTES + 2**28}, r"which leaves nothing for the KV cache.*raise --gpu-memory-util"),
        ({"num_gpu_blocks_override": 2**40}, r"KV cache needs .* are free on cuda.*lower --num-gpu-blocks-override"),
        ({"kv_cache_memory_bytes": 2**50}, r"KV cache needs .* are free on cuda.*lower --kv-cache-memory-bytes"),
    ],
    ids=["weights", "utilisation", "override", "bytes"],
)
def test_too_little_memory_is_named(folder: Path, settings: dict[str, Any], words: str) -> None:
    settings = {"num_gpu_blocks_override": None} | settings
    if share := settings.pop("share", 0):
        settings["gpu_memory_utilization"] = of_device(share)
    with pytest.raises(MemoryShortage, match=words):
        load_worker(folder, device="cuda", backend="triton", **settings)
    generate(load_gpu(folder), PROMPT, 2)  # nothing is left of the attempt that would be in the way


@needs_cuda
def test_a_head_size_that_no_kernel_is_made_for_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, SHAPE | {"head_dim": 72})
    with pytest.raises(StartError, match="head_dim = 72 is not supported by backend 'triton'; supported are 64, 80"):
        load_worker(folder, device="cuda", backend="triton")


@pytest.mark.parametrize("sampling", [GREEDY, LOGPROBS], ids=["plain", "log-probabilities"])
def test_a_row_whose_values_are_no_numbers_faults_alone(runner: GpuRunner, sampling: RowSampling) -> None:
    expected, _ = generate(runner, OTHER, 6, sampling)
    driver = PlanDriver.of(runner)
    driver.begin(2, PROMPT, sampling)
    driver.begin(5, OTHER, sampling)
    ids = [tokens_of(runner.execute(driver.plan({2: 9, 5: 3})))[5]]
    blocks = driver.rows[2].table
    for cache in runner._caches:
        cache.values[blocks] = float("nan")
    settle()
    for _ in range(3):
        result = runner.execute(driver.plan({2: 1, 5: 1}))
        assert faults_of(result) == {2: FAULT_NONFINITE_LOGITS}
        ids.append(tokens_of(result)[5])
    driver.end(2)
    driver.begin(2, OTHER, sampling)  # takes blocks that still hold what is no number
    result = runner.execute(driver.plan({5: 1, 2: 3}))
    assert set(driver.rows[2].table) <= set(blocks)
    assert tokens_of(result)[2] == expected[0]
    ids.append(tokens_of(result)[5])
    assert ids == expected[:5]


def begun_with(row: int = 0, **changes: Any) -> Callable[[PlanDriver], StepPlan]:
    def write(driver: PlanDriver) -> StepPlan:
        driver.begin(row, PROMPT, RowSampling(seed=1))
        plan = driver.plan({row: len(PROMPT)})
        (new,) = plan.new_rows
        return msgspec.structs.replace(plan, new_rows=(msgspec.structs.replace(new, **changes),))

    return write


def with_column(**columns: bytes) -> Callable[[PlanDriver], StepPlan]:
    return lambda driver: msgspec.structs.replace(begun_with()(driver), **columns)


PLANS: dict[str, tuple[Callable[[PlanDriver], StepPlan], str]] = {
    "id": (begun_with(token_ids=pack_ints([*PROMPT[:-1], 97])), r"row 0 holds an id outside of \[0, 97\)"),
    "negative id": (begun_with(token_ids=pack_ints([*PROMPT[:-1], -1])), r"row 0 holds an id outside of \[0, 97\)"),
    "allowed id": (
        begun_with(sampling=RowSampling(seed=1, allowed_token_ids=pack_ints([97]))),
        r"allowed_token_ids holds an id outside of \[0, 97\)",
    ),
    "biased id": (
        begun_with(sampling=RowSampling(seed=1, logit_bias_ids=pack_ints([2**31 - 1]), logit_bias_values=b"\0\0\0\0")),
        r"logit_bias holds an id outside of \[0, 97\)",
    ),
    "stop id": (
        begun_with(sampling=RowSampling(seed=1, stop_token_ids=pack_ints([-5]))),
        r"stop_token_ids holds an id outside of \[0, 97\)",
    ),
    "row": (begun_with(row=8), "row 8, limit 8"),
    "block": (with_column(append_block=pack_ints([1, 2, 129])), r"block 129 for row 0 is outside of \[1, 129\)"),
    "null block": (with_column(append_block=pack_ints([1, 2, 0])), r"block 0 for row 0 is outside of \[1, 129\)"),
    "freed row": (with_column(freed_rows=pack_ints([7])), "row 7 is not live"),
}


@pytest.mark.parametrize("name", PLANS)
def test_numbers_out_of_range_are_a_plan_error_and_never_reach_the_device(runner: GpuRunner, name: str) -> None:
    expected, _ = generate(runner, PROMPT, 3)
    write, words = PLANS[name]
    with pytest.raises(PlanError, match=words):
        runner.launch(write(PlanDriver.of(runner)))
    runner.clear()
    assert generate(runner, PROMPT, 3)[0] == expected


@contextmanager
def synchronising_is_an_error() -> Iterator[None]:
    if not CUDA:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_launching_never_waits_for_the_device(runner: GpuRunner) -> None:
    """Decodes, prompts beside them, every kind of sampling, forks, copies, hits: all that random traffic brings."""
    driver = PlanDriver.of(runner)
    for row, sampling in enumerate(SAMPLINGS):
        driver.begin(row, [*PROMPT, row], sampling)
    rows = dict.fromkeys(range(len(SAMPLINGS)), 1)
    plans = [driver.plan(dict.fromkeys(rows, 10)), driver.plan(rows), driver.plan({0: 1, 1: 1})]
    driver.begin(6, OTHER)
    plans += [driver.plan({6: 2, 1: 1}), driver.plan({6: 1} | rows)]
    for plan in plans:
        with synchronising_is_an_error():
            runner.launch(plan)
        while not runner.take_results():
            pass
    runner.clear()
    traffic = RandomTraffic(runner.rows.limits, seed=5)
    for _ in range(200 if CUDA else 2):
        plan = traffic.next_plan()
        with synchronising_is_an_error():
            runner.launch(plan)
        while not (results := runner.take_results()):
            pass
        traffic.note(results[0])
    assert not CUDA or traffic.seen.keys() > {"hits", "forks"}
