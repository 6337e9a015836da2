"""On the reference backend a sequence's ids and log-probabilities are the same bits whatever surrounds it."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from octavo.wire.columns import pack_floats, pack_ints
from octavo.wire.plan import RowSampling
from octavo.worker.runner import EagerRunner
from tests.support.gpt_architectures import config_of
from tests.support.plan_driver import PlanDriver, generate, logprob_bits, tokens_of
from tests.support.tiny_models import TINY_LLAMA, TINY_QWEN2_MOE, load_eager, write_model

NUM_OUTPUT = 12
CONFIG = TINY_LLAMA | {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "head_dim": 16}
SAMPLINGS = (
    RowSampling(seed=0, temperature=0.0, logprobs=4),
    RowSampling(seed=2**64 - 5, temperature=0.9, logprobs=4),
    RowSampling(seed=8, temperature=1.3, top_p=0.9, top_k=30, min_p=0.01, logprobs=0),
    RowSampling(
        seed=9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, min_tokens=4,
        stop_token_ids=pack_ints([5, 6]), logit_bias_ids=pack_ints([7]), logit_bias_values=pack_floats([2.0]),
        logprobs=2,
    ),
)  # fmt: skip


def prompt_of(row: int) -> list[int]:
    random = Random(row)
    return [random.randrange(97) for _ in range((5, 33, 17, 64, 1, 48, 16, 31)[row])]


def sampling_of(row: int) -> RowSampling:
    return SAMPLINGS[row % len(SAMPLINGS)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> EagerRunner:
    return load_eager(write_model(tmp_path_factory.mktemp("model"), CONFIG))


@pytest.fixture
def runner(loaded: EagerRunner) -> EagerRunner:
    loaded.clear()
    return loaded


@pytest.fixture(scope="module")
def solo(loaded: EagerRunner) -> list[tuple[list[int], list[bytes]]]:
    """Ids and log-probability bits of each row alone."""
    loaded.clear()
    return [generate(loaded, prompt_of(row), NUM_OUTPUT, sampling_of(row), choice=row, chunk=64) for row in range(8)]


@pytest.mark.parametrize("chunk", [1, 3, 16, 23])
def test_chunks(runner: EagerRunner, solo: list[tuple[list[int], list[bytes]]], chunk: int) -> None:
    for row in range(8):
        again = generate(runner, prompt_of(row), NUM_OUTPUT, sampling_of(row), choice=row, chunk=chunk, seed=chunk)
        assert again == solo[row]


def run_together(runner: EagerRunner, seed: int) -> dict[int, tuple[list[int], list[bytes]]]:
    """Run all rows at once: begun at random steps, in chunks of random size, in random order; some lose their row."""
    random = Random(seed)
    driver = PlanDriver.of(runner, seed)
    outputs: dict[int, tuple[list[int], list[bytes]]] = {}
    waiting = list(range(8))
    random.shuffle(waiting)
    recomputed: set[int] = set()
    while waiting or driver.rows:
        if waiting and random.random() < 0.6:
            row = waiting.pop()
            ids, _ = outputs.setdefault(row, ([], []))
            prompt = prompt_of(row)
            driver.begin(row, [*prompt, *ids], sampling_of(row), num_prompt=len(prompt), choice=row)
        counts: dict[int, int] = {}
        budget = 64
        for row in random.sample(list(driver.rows), len(driver.rows)):
            left = driver.rows[row].num_known - driver.rows[row].num_computed
            count = min(left, random.randint(1, 40), budget)
            if count:
                counts[row] = count
                budget -= count
        result = runner.execute(driver.plan(counts))
        bits_of = logprob_bits(result)
        for row, token in tokens_of(result).items():
            outputs[row][0].append(token)
            outputs[row][1].append(bits_of[row])
            if len(outputs[row][0]) == NUM_OUTPUT:
                driver.end(row)
            elif row not in recomputed and random.random() < 0.1:
                recomputed.add(row)
                driver.end(row)
                waiting.append(row)
    assert recomputed
    return outputs


@pytest.mark.parametrize("seed", range(6))
def test_batch_mates_chunks_blocks_and_recomputation(
    runner: EagerRunner, solo: list[tuple[list[int], list[bytes]]], seed: int
) -> None:
    together = run_together(runner, seed)
    assert [together[row] for row in range(8)] == solo


GEMMA2 = TINY_LLAMA | {
    "architectures": ["Gemma2ForCausalLM"],
    "sliding_window": 7,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 9.0,
}
GROWING = TINY_LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 32.0}, "max_position_embeddings": 16}


@pytest.mark.parametrize("config", [config_of("gpt2"), config_of("falcon"), GEMMA2, GROWING, TINY_QWEN2_MOE])
def test_decoders_unlike_llama(tmp_path: Path, config: dict[str, Any]) -> None:
    runner = load_eager(write_model(tmp_path, config))
    alone = [generate(runner, prompt_of(row), NUM_OUTPUT, sampling_of(row), choice=row, chunk=64) for row in range(8)]
    runner.clear()
    together = run_together(runner, 0)
    assert [together[row] for row in range(8)] == alone


def test_rows_differ_from_each_other(solo: list[tuple[list[int], list[bytes]]]) -> None:
    assert len({tuple(ids) for ids, _ in solo}) == 8
    assert all(len(ids) == len(bits) == NUM_OUTPUT for ids, bits in solo)
