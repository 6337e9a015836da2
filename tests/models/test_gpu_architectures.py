"""Traits that the GPU runner's own tests lack, whole model by whole model: same plans as the reference, same tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.wire.plan import RowSampling
from octavo.worker.gpu.runner import GpuRunner
from octavo.worker.runner import EagerRunner
from tests.support.gpt_architectures import config_of
from tests.support.plan_driver import PlanDriver, tokens_of
from tests.support.tiny_models import TINY_LLAMA, TINY_QWEN2_MOE, load_worker, write_model

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
GEMMA3: dict[str, Any] = TINY_LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 256 if CUDA else 8,
    "num_key_value_heads": 1,
    "sliding_window": 4,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 12,
    "final_logit_softcapping": 20.0,
}
MISTRAL: dict[str, Any] = TINY_LLAMA | {
    "architectures": ["MistralForCausalLM"],
    "head_dim": 128 if CUDA else 8,
    "sliding_window": 3,
    "num_hidden_layers": 1,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4},
}
HEAD_SIZE = 64 if CUDA else 16
GPT2 = config_of("gpt2", n_embd=2 * HEAD_SIZE, n_head=2, n_inner=40, n_layer=1, n_positions=32)
PHI = config_of(
    "phi", hidden_size=2 * HEAD_SIZE, num_attention_heads=2, intermediate_size=40, num_hidden_layers=1
)  # fmt: skip
QWEN2_MOE = TINY_QWEN2_MOE | ({"head_dim": 64} if CUDA else {"num_hidden_layers": 1})
SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 16}
SAMPLING = RowSampling(seed=0, temperature=0.0, logprobs=3)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize(
    ("config", "eager"),
    [(GEMMA3, True), (MISTRAL, True), (GPT2, False), (PHI, True), (QWEN2_MOE, not CUDA)],
    ids=["gemma3", "mistral", "gpt2", "phi", "qwen2-moe"],
)
def test_whole_models_draw_what_the_reference_draws(tmp_path: Path, config: dict[str, Any], eager: bool) -> None:
    folder = write_model(tmp_path, config)
    theirs = load_worker(folder, **SMALL).runner
    ours = load_worker(folder, backend="triton", device=DEVICE, dtype="float32", enforce_eager=eager, **SMALL).runner
    assert isinstance(theirs, EagerRunner)
    assert isinstance(ours, GpuRunner)
    driver = PlanDriver.of(ours)
    driver.begin(0, list(range(1, 9)), SAMPLING)
    driver.begin(1, list(range(30, 35)), SAMPLING)
    # Both prompts in chunks; then one decodes, far behind the window, beside the other's last chunk.
    plans = [driver.plan(counts) for counts in ({0: 5, 1: 2}, {0: 3, 1: 2}, {0: 1, 1: 1})]
    for plan in plans:
        found, expected = ours.execute(plan), theirs.execute(plan)
        assert tokens_of(found) == tokens_of(expected)
        for mine, wanted in zip(found.logprobs, expected.logprobs, strict=True):
            assert (mine.row, mine.top_ids) == (wanted.row, wanted.top_ids)
            assert mine.logprob == pytest.approx(wanted.logprob, abs=1e-3)
