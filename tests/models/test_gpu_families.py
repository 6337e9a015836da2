"""Decoders unlike Llama on the GPU backend: what the reference draws. Without a GPU Triton's interpreter runs them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.worker.gpu.runner import GpuRunner
from tests.support.gpt_architectures import config_of
from tests.support.plan_driver import GREEDY, generate
from tests.support.tiny_models import load_eager, load_worker, random_tensors, write_model

CUDA = torch.cuda.is_available()
HEAD_SIZE = 64 if CUDA else 16  # the interpreter takes any
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32]
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 2 * HEAD_SIZE, "n_head": 2, "n_inner": 40, "n_layer": 1, "n_positions": 32},
    "phi": {
        "hidden_size": 2 * HEAD_SIZE,
        "num_attention_heads": 2,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "max_position_embeddings": 32,
    },
}


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("kind", SHAPES)
def test_a_sequence_draws_what_the_reference_draws(tmp_path: Path, kind: str) -> None:
    config = config_of(kind, **SHAPES[kind])
    folder = write_model(tmp_path, config, random_tensors(config))
    expected, _ = generate(load_eager(folder), PROMPT, 3, GREEDY, chunk=4)
    device = "cuda" if CUDA else "cpu"
    few = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 17}
    runner = load_worker(folder, backend="triton", device=device, dtype="float32", **few).runner
    assert isinstance(runner, GpuRunner)
    assert generate(runner, PROMPT, 3, GREEDY, chunk=4)[0] == expected
