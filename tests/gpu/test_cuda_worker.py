"""The worker on a CUDA device against the same worker on the CPU: same plans, same tokens, close log-probabilities."""

from pathlib import Path

import pytest

from octavo.wire.columns import unpack_floats
from octavo.wire.plan import RowSampling
from octavo.worker.loading import LoadedWorker
from tests.support.gpu import CUDA, ON_GPU_OR_INTERPRETED, load_gpu, needs_cuda, write_tiny
from tests.support.plan_driver import PlanDriver, faults_of, tokens_of
from tests.support.random_traffic import RandomTraffic
from tests.support.tiny_models import TINY_LLAMA, load_worker, write_model

pytestmark = ON_GPU_OR_INTERPRETED

NUM_STEPS = 400 if CUDA else 12

SHAPE = TINY_LLAMA | {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}


def run(worker: LoadedWorker, sampling: RowSampling, num_steps: int) -> list[tuple[dict[int, int], list[float]]]:
    """Run ragged rows, prefilled in chunks beside decodes; return tokens and top log-probabilities of each step."""
    driver = PlanDriver.of(worker.runner)
    driver.begin(0, range(1, 20), sampling)
    driver.begin(1, [5], sampling, choice=1)
    driver.begin(2, range(40, 90), sampling, choice=2)
    steps = []
    for step in range(num_steps):
        counts = {0: 1 if step else 19, 1: 1, 2: 1 if step > 4 else 10}
        result = worker.runner.execute(driver.plan(counts))
        steps.append((tokens_of(result), [x for e in result.logprobs for x in unpack_floats(e.top_logprobs)]))
    worker.runner.clear()
    return steps


SAMPLINGS = {
    "greedy": RowSampling(seed=0, temperature=0.0, logprobs=5),
    "filters": RowSampling(seed=2**63 + 5, temperature=0.8, top_k=20, top_p=0.9, logprobs=5),
    "penalties": RowSampling(
        seed=3, temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5, min_p=0.01, logprobs=5
    ),
}


@needs_cuda
@pytest.mark.parametrize(("backend", "name"), [*(("auto", name) for name in SAMPLINGS), ("reference", "filters")])
def test_cuda_draws_what_the_cpu_draws(tmp_path: Path, name: str, backend: str) -> None:
    sampling = SAMPLINGS[name]
    folder = write_model(tmp_path / "model", SHAPE)
    on_cpu = run(load_worker(folder), sampling, 40)
    on_cuda = run(load_worker(folder, device="cuda", backend=backend, dtype="float32"), sampling, 40)
    for step, ((cpu_tokens, cpu_logprobs), (cuda_tokens, cuda_logprobs)) in enumerate(
        zip(on_cpu, on_cuda, strict=True)
    ):
        assert cuda_tokens == cpu_tokens, step
        assert cuda_logprobs == pytest.approx(cpu_logprobs, abs=1e-3), step


@needs_cuda
def test_cuda_serves_the_checkpoint_dtype(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", SHAPE | {"dtype": "bfloat16"})
    worker = load_worker(folder, device="auto", backend="auto")
    assert (worker.facts.device, worker.facts.dtype, worker.facts.backend) == ("cuda", "bfloat16", "triton")
    steps = run(worker, RowSampling(seed=0, temperature=0.0), 10)
    assert all(set(tokens) >= {0, 1} for tokens, _ in steps)


def run_shared(worker: LoadedWorker, sampling: RowSampling, num_steps: int) -> list[dict[int, int]]:
    """Fork a row in the middle of a block, and let another one begin with its blocks; return the tokens of each step."""
    driver = PlanDriver.of(worker.runner)
    prompt = list(range(1, 38))
    driver.begin(3, prompt, sampling)
    driver.fork(3, 5, 1)
    driver.fork(3, 6, 2)
    size = worker.facts.block_size
    driver.begin(
        1, [*prompt, 7], sampling, num_cached=2 * (len(prompt) // (2 * size)) * size, cached_from=driver.rows[3]
    )
    steps = []
    for step in range(num_steps):
        counts = (
            {3: 1, 5: 1, 6: 1, 1: 1}
            if step
            else {3: len(prompt), 1: driver.rows[1].num_known - driver.rows[1].num_computed}
        )
        steps.append(tokens_of(worker.runner.execute(driver.plan(counts))))
    worker.runner.clear()
    return steps


@needs_cuda
def test_cuda_shares_blocks_as_the_cpu_does(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", SHAPE)
    sampling = RowSampling(seed=5, temperature=0.9, top_p=0.95, presence_penalty=0.3)
    on_cpu = run_shared(load_worker(folder), sampling, 30)
    on_cuda = run_shared(load_worker(folder, device="cuda", backend="auto", dtype="float32"), sampling, 30)
    assert all(set(tokens) == {1, 3, 5, 6} for tokens in on_cpu)
    assert on_cuda == on_cpu


def test_random_traffic_draws_what_the_cpu_draws(tmp_path: Path) -> None:
    """With a pool that is too small for the rows: hits, forks, copies, preemptions, all kinds of sampling."""
    folder = write_tiny(tmp_path / "model")
    pool = {"block_size": 8, "num_gpu_blocks_override": 24}
    on_cpu, on_cuda = load_worker(folder, **pool).runner, load_gpu(folder, dtype="float32", **pool)
    traffic = RandomTraffic(on_cuda.rows.limits, seed=7)
    for step in range(NUM_STEPS):
        plan = traffic.next_plan()
        expected = on_cpu.execute(plan)
        result = on_cuda.execute(plan)
        assert (tokens_of(result), faults_of(result)) == (tokens_of(expected), faults_of(expected)), step
        traffic.note(result)
