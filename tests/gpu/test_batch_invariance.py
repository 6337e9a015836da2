"""A batch-invariant worker gives a sequence the same ids and bits whatever surrounds it and however it is cut up.

The tiny model runs through Triton's interpreter too, when that is asked for; the larger one needs a GPU.
"""

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from octavo.wire.plan import RowSampling
from octavo.worker.gpu.runner import GpuRunner
from tests.support.gpu import CUDA, ON_GPU_OR_INTERPRETED, load_gpu
from tests.support.plan_driver import PlanDriver, generate, logprob_bits, tokens_of
from tests.support.tiny_models import TINY_LLAMA, write_model

pytestmark = ON_GPU_OR_INTERPRETED

SAMPLINGS = (
    RowSampling(seed=0, temperature=0.0, logprobs=4),
    RowSampling(seed=2**64 - 5, temperature=0.9, logprobs=4),
    RowSampling(seed=8, temperature=1.3, top_p=0.9, top_k=30, min_p=0.01, logprobs=0),
    RowSampling(seed=9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, logprobs=2),
)


@dataclass(frozen=True)
class Scale:
    """A model, its worker's limits, and the rows that run on it."""

    model: dict[str, Any]
    settings: dict[str, Any]
    lengths: tuple[int, ...]  # of the prompts
    num_output: int
    chunks: tuple[int, ...]
    seeds: int  # of random mixes


TINY = Scale(
    TINY_LLAMA | {"tie_word_embeddings": False, "attention_bias": True, "head_dim": 64 if CUDA else 8},
    {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 24},
    (5, 68, 1),
    num_output=3,
    chunks=(13, 24),
    seeds=1,
)
LARGE = Scale(
    TINY_LLAMA
    | {
        "vocab_size": 2000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 2048,
        "dtype": "bfloat16",
    },
    {
        "dtype": "auto",
        "block_size": 16,
        "max_num_seqs": 40,
        "max_num_batched_tokens": 1500,
        "num_gpu_blocks_override": 2000,
    },
    (5, 333, 170, 64, 1, 480, 16, 310, 2, 700, 65, 1100, 33, 128, 90, 600),
    num_output=12,
    chunks=(7, 64, 1500),
    seeds=3,
)
SCALES = {"tiny": TINY, "large": LARGE} if CUDA else {"tiny": TINY}
Outputs = list[tuple[list[int], list[bytes]]]


@pytest.fixture(scope="module", params=SCALES)
def scale(request: pytest.FixtureRequest) -> Scale:
    return SCALES[request.param]


@pytest.fixture(scope="module")
def folder(scale: Scale, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), scale.model)


@pytest.fixture(scope="module")
def eager(folder: Path, scale: Scale) -> GpuRunner:
    return load_gpu(folder, batch_invariant=True, enforce_eager=True, **scale.settings)


@pytest.fixture(scope="module")
def captured(folder: Path, scale: Scale) -> GpuRunner:
    return load_gpu(folder, batch_invariant=True, **scale.settings)


def prompt_of(scale: Scale, row: int) -> list[int]:
    random = Random(row)
    return [random.randrange(scale.model["vocab_size"]) for _ in range(scale.lengths[row])]


def alone(runner: GpuRunner, scale: Scale, row: int, chunk: int, sampling: RowSampling | None = None) -> Any:
    sampling = sampling or SAMPLINGS[row % 4]
    return generate(runner, prompt_of(scale, row), scale.num_output, sampling, choice=row, chunk=chunk, seed=chunk)


@pytest.fixture(scope="module")
def solo(eager: GpuRunner, scale: Scale) -> Outputs:
    """Ids and log-probability bits of each row alone, its prompt whole, every step as large as it is."""
    eager.clear()
    return [alone(eager, scale, row, scale.chunks[-1]) for row in range(len(scale.lengths))]


def together(runner: GpuRunner, scale: Scale, seed: int, samplings: tuple[RowSampling, ...] = SAMPLINGS) -> Outputs:
    """Run all rows at once: begun at random steps, in chunks of random size, in random order; some lose their row."""
    random = Random(seed)
    runner.clear()
    driver = PlanDriver.of(runner, seed)
    count = len(scale.lengths)
    outputs: Outputs = [([], []) for _ in range(count)]
    waiting = random.sample(range(count), count)
    recomputed: set[int] = set()
    while waiting or driver.rows:
        while waiting and random.random() < 0.7:
            row = waiting.pop()
            prompt = prompt_of(scale, row)
            ids = [*prompt, *outputs[row][0]]
            driver.begin(row, ids, samplings[row % 4], num_prompt=len(prompt), choice=row)
        counts: dict[int, int] = {}
        budget = random.choice([scale.settings["max_num_batched_tokens"], 16])
        for row in random.sample(list(driver.rows), len(driver.rows)):
            left = driver.rows[row].num_known - driver.rows[row].num_computed
            size = min(left, random.choice([1, random.randint(1, left), left]), budget)
            if size:
                counts[row] = size
                budget -= size
        result = runner.execute(driver.plan(counts))
        bits_of = logprob_bits(result)
        for row, token in tokens_of(result).items():
            outputs[row][0].append(token)
            outputs[row][1].extend([bits_of[row]] if row in bits_of else [])
            if len(outputs[row][0]) == scale.num_output:
                driver.end(row)
            elif len(recomputed) < count // 2 and row not in recomputed:
                recomputed.add(row)
                driver.end(row)
                waiting.append(row)
    assert recomputed
    return outputs


def test_rows_differ_from_each_other(solo: Outputs, scale: Scale) -> None:
    assert len({tuple(ids) for ids, _ in solo}) == len(solo)
    assert all(len(ids) == len(bits) == scale.num_output for ids, bits in solo)


def test_chunks_give_the_same_bits(eager: GpuRunner, solo: Outputs, scale: Scale) -> None:
    eager.clear()
    for chunk in scale.chunks:
        for row in range(len(solo)) if chunk > 7 else range(0, len(solo), 3):
            assert alone(eager, scale, row, chunk) == solo[row], (chunk, row)


def test_captured_shapes_give_the_same_bits(captured: GpuRunner, solo: Outputs, scale: Scale) -> None:
    captured.clear()
    for chunk in scale.chunks[1:]:
        for row in range(len(solo)):
            assert alone(captured, scale, row, chunk) == solo[row], (chunk, row)


def test_batch_mates_chunks_blocks_and_recomputation_give_the_same_bits(
    eager: GpuRunner, captured: GpuRunner, solo: Outputs, scale: Scale
) -> None:
    for seed in range(scale.seeds):
        for runner in (eager, captured):
            assert together(runner, scale, seed) == solo, (seed, runner is captured)


def test_draws_inside_the_graph_give_the_same_ids(eager: GpuRunner, captured: GpuRunner, scale: Scale) -> None:
    """Rows that ask for nothing but a temperature draw in the captured step itself."""
    plain = tuple(RowSampling(seed=row, temperature=t) for row, t in enumerate((0.0, 0.7, 1.0, 1.4)))
    eager.clear()
    expected = [alone(eager, scale, row, scale.chunks[-1], plain[row % 4])[0] for row in range(len(scale.lengths))]
    assert [ids for ids, _ in together(captured, scale, 5, plain)] == expected
