"""The demo model on the GPU against transformers. OCTAVO_TEST_MODEL names its folder; demo_model.sh makes one offline."""

import os
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tests.support.gpu import DEVICE, ON_GPU, load_gpu
from tests.support.parity import Oracle, run_together

pytestmark = [
    *ON_GPU,
    pytest.mark.skipif("OCTAVO_TEST_MODEL" not in os.environ, reason="OCTAVO_TEST_MODEL names no model folder"),
    pytest.mark.filterwarnings("default"),  # transformers and what it imports may warn
]

NUM_PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 20, 64, 64
TEXT = Path(__file__).parents[2] / "LICENSE"


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(os.environ["OCTAVO_TEST_MODEL"])


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    """Return passages of a text; the last two begin as the first one does."""
    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT.read_text()).ids
    stride = (len(ids) - PROMPT_TOKENS) // (NUM_PROMPTS - 1)
    passages = [ids[i * stride : i * stride + PROMPT_TOKENS] for i in range(NUM_PROMPTS - 2)]
    return [*passages, passages[0], passages[0][:40] + passages[1][:24]]


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ids_and_log_probabilities_agree(
    folder: Path, prompts: list[list[int]], dtype: str, enforce_eager: bool
) -> None:
    runner = load_gpu(
        folder,
        dtype=dtype,
        enforce_eager=enforce_eager,
        block_size=16,
        max_num_seqs=NUM_PROMPTS,
        max_num_batched_tokens=256,
        max_model_len=256,
        num_gpu_blocks_override=400,
    )
    oracle = Oracle(folder, getattr(torch, dtype), DEVICE)
    for logprobs in (False, True):
        oracle.check(run_together(runner, prompts, OUTPUT_TOKENS, logprobs=logprobs, longest_chunk=50))
