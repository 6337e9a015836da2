"""The demo model against transformers in fp32 on the reference backend: 20 prompts of 64 tokens, 64 greedy ids each.

transformers sees our whole sequences at once: if the id that it finds most likely is ours at every place of the output,
it would have generated the same.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from octavo.wire.plan import RowSampling
from octavo.worker.runner import EagerRunner
from tests.support.architectures import logits_of
from tests.support.plan_driver import PlanDriver, generate, logprob_bits, tokens_of
from tests.support.tiny_models import load_eager

NUM_PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 20, 64, 64
TEXT = Path(__file__).parents[2] / "LICENSE"


@pytest.fixture(scope="module")
def runner(demo_model: Path) -> EagerRunner:
    return load_eager(
        demo_model,
        block_size=16,
        max_num_seqs=NUM_PROMPTS,
        max_num_batched_tokens=NUM_PROMPTS * PROMPT_TOKENS,
        max_model_len=256,
        num_gpu_blocks_override=200,
    )


@pytest.fixture(scope="module")
def prompts(demo_model: Path) -> list[list[int]]:
    ids: list[int] = Tokenizer.from_file(str(demo_model / "tokenizer.json")).encode(TEXT.read_text()).ids
    stride = (len(ids) - PROMPT_TOKENS) // (NUM_PROMPTS - 1)
    return [ids[i * stride : i * stride + PROMPT_TOKENS] for i in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def generated(runner: EagerRunner, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy outputs of all prompts, which run together."""
    runner.clear()
    driver = PlanDriver.of(runner)
    for row, prompt in enumerate(prompts):
        driver.begin(row, prompt)
    outputs: list[list[int]] = [[] for _ in prompts]
    for step in range(OUTPUT_TOKENS):
        result = runner.execute(driver.plan(dict.fromkeys(range(NUM_PROMPTS), 1 if step else PROMPT_TOKENS)))
        for row, token in tokens_of(result).items():
            outputs[row].append(token)
    runner.clear()
    return outputs


@pytest.fixture(scope="module")
def theirs(demo_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    return model.eval()


def test_greedy_ids_and_logits_agree(
    runner: EagerRunner, prompts: list[list[int]], generated: list[list[int]], theirs: Any
) -> None:
    for prompt, output in zip(prompts, generated, strict=True):
        ids = [*prompt, *output]
        with torch.inference_mode():
            expected = theirs(torch.tensor([ids])).logits[0]
        assert output == expected.argmax(-1)[PROMPT_TOKENS - 1 : -1].tolist()
        ours = logits_of(runner._model, runner._caches, ids, [37, len(ids) - 38, 1], 16)
        assert (ours - expected).abs().max() < 1e-3


def test_solo_runs_are_the_same_bits(runner: EagerRunner, prompts: list[list[int]]) -> None:
    sampling = [RowSampling(seed=row, temperature=(0.0, 1.0)[row % 2], top_p=0.9, logprobs=5) for row in range(4)]
    runner.clear()
    driver = PlanDriver.of(runner)
    ids: dict[int, list[int]] = {row: [] for row in range(4)}
    bits: dict[int, list[bytes]] = {row: [] for row in range(4)}
    for row in range(4):
        driver.begin(row, prompts[row], sampling[row])
        counts = dict.fromkeys(range(row), 1) | {row: PROMPT_TOKENS}
        for step in (counts, dict.fromkeys(range(row + 1), 1)):
            result = runner.execute(driver.plan(step))
            for r, token in tokens_of(result).items():
                ids[r].append(token)
                bits[r].append(logprob_bits(result)[r])
    runner.clear()
    for row in range(4):
        assert generate(runner, prompts[row], len(ids[row]), sampling[row], chunk=23) == (ids[row], bits[row])
