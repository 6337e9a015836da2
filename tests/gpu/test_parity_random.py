"""Random models of real proportions against transformers: chunks beside decodes, prefix hits, graphs and without."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.architectures import write_with_transformers
from tests.support.gpu import CUDA, DEVICE, ON_GPU_OR_INTERPRETED, load_gpu
from tests.support.parity import Oracle, run_together

pytestmark = [
    *ON_GPU_OR_INTERPRETED,
    pytest.mark.filterwarnings("default"),  # transformers and what it imports may warn
]

VOCABULARY = 2048 if CUDA else 97
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, 4 heads a KV head, of 128": (
        "llama",
        {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 128},
    ),
    "llama, 3 heads a KV head, of 64, tied": (
        "llama",
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2": (
        "qwen2",
        {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "use_sliding_window": False},
    ),
    "qwen3": (
        "qwen3",
        {"hidden_size": 768, "intermediate_size": 1024, "num_attention_heads": 6, "head_dim": 128},
    ),
}
EXPERTS = {"num_experts": 24, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True}
MODELS["qwen3-moe"] = ("qwen3_moe", {"hidden_size": 512, "num_attention_heads": 8, "head_dim": 64} | EXPERTS)
INTERPRETED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-moe": ("qwen3_moe", {"num_hidden_layers": 1}),
}
COMMON = {"vocab_size": VOCABULARY, "num_hidden_layers": 4, "max_position_embeddings": 512} if CUDA else {}


def prompts() -> list[list[int]]:
    """Return prompts of which some begin as earlier ones do, a whole one twice."""
    generator = torch.Generator().manual_seed(1)

    def random(count: int) -> list[int]:
        return [int(i) for i in torch.randint(VOCABULARY, (count,), generator=generator)]

    size = 10 if CUDA else 1
    first = random(17 * size)
    return [first, random(5), first[: 12 * size] + random(3 * size), random(1), random(30 * size), first]


IN_FLOAT32 = ("llama, 3 heads a KV head, of 64, tied", "qwen3", "qwen3-moe")
"""The others would only compile more. Rounding to bfloat16 may send a token to other experts, so these are not compared so."""
CASES = [(name, "bfloat16") for name in MODELS if name != "qwen3-moe"] + [(name, "float32") for name in IN_FLOAT32]


@pytest.mark.parametrize(("name", "dtype"), CASES if CUDA else [(name, "float32") for name in INTERPRETED])
def test_ids_and_log_probabilities_agree(tmp_path: Path, name: str, dtype: str) -> None:
    kind, changes = (MODELS if CUDA else INTERPRETED)[name]
    write_with_transformers(tmp_path, kind, COMMON | changes)
    oracle = Oracle(tmp_path, getattr(torch, dtype), DEVICE)
    for enforce_eager in (False, True) if CUDA else (True,):
        runner = load_gpu(
            tmp_path,
            dtype=dtype,
            enforce_eager=enforce_eager,
            block_size=16 if CUDA else 4,
            max_num_batched_tokens=256 if CUDA else 64,
        )
        for logprobs in (False, True):  # without, a captured step draws as well
            oracle.check(
                run_together(runner, prompts(), 32 if CUDA else 3, logprobs=logprobs, longest_chunk=90 if CUDA else 9)
            )
