"""GGUF files served as they are, against transformers, which makes a model of the same file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from octavo.kernels.ops import get_ops
from octavo.worker.errors import ModelConfigError
from octavo.worker.gguf.config import model_config_values
from octavo.worker.gguf.header import read_header
from octavo.worker.kv_cache import allocate, spec_of
from octavo.worker.models.config import parse_model_config
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.targets import Placement, ShardSpec
from octavo.worker.weights import load_weights, open_checkpoint
from tests.support.architectures import logits_of
from tests.support.gguf_files import TINY, write_gguf
from tests.support.tiny_models import random_tensors

# What transformers does not read from GGUF files stands at its defaults.
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 11, "head_dim": 256}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Kind]] = {
    "llama": ({}, {}, Kind.F32),
    "llama-q4": ({"tie_word_embeddings": False}, {}, Kind.Q4_1),
    "qwen2": ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, {}, Kind.Q8_0),
    "qwen3": ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}, {}, Kind.F16),
    "gemma2": (
        GEMMA | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "rope_theta": 1e4},
        {"attention.sliding_window": 11, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        Kind.BF16,
    ),
    "gemma3": (
        GEMMA | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "rope_theta": 1e6},
        {"attention.sliding_window": 11},
        Kind.Q5_0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_agree(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    changes, metadata, kind = CASES[name]
    config = TINY | changes
    path = write_gguf(tmp_path / "m.gguf", config, random_tensors(config), kind, metadata)
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    theirs.eval()
    described = parse_model_config(model_config_values(read_header(path)))
    placement, ops = Placement(torch.float32, torch.device("cpu")), get_ops("reference")
    ours = Decoder(described, ops, placement, ShardSpec(), 256)
    load_weights(open_checkpoint(tmp_path, path), ours.targets(), ours.is_ignored, lambda done, total: None)
    ours.finish_loading()
    caches = allocate(spec_of(described.cached, ShardSpec(), 4, torch.float32, placement.device, head_major=False), 40)
    ids = torch.randint(97, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.3
    assert (logits_of(ours, caches, ids, [7, 53], 4) - expected).abs().max() < 1e-3


def llama3_factors(theta: float, size: int, factor: float) -> torch.Tensor:
    """Frequencies over scaled ones, by transformers' own function."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(head_dim=size, rope_parameters=scaling, max_position_embeddings=131072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return 1.0 / theta ** (torch.arange(0, size, 2) / size) / scaled


@pytest.mark.parametrize("factor", [8.0, 32.0, 1.0])
def test_scaled_frequencies_of_llama3_are_recognised(tmp_path: Path, factor: float) -> None:
    """Files hold them as a tensor of factors, and say nothing else of them."""
    config = TINY | {"rope_theta": 500000.0, "head_dim": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
    factors = llama3_factors(500000.0, 64, factor) if factor != 1 else torch.ones(32)
    path = write_gguf(tmp_path / "m.gguf", config, random_tensors(config), extra={"rope_freqs.weight": factors})
    rope = model_config_values(read_header(path))["rope_parameters"]
    assert rope.get("factor", 1.0) == pytest.approx(factor)
    assert rope["rope_type"] == ("llama3" if factor != 1 else "default")


def test_other_factors_are_refused(tmp_path: Path) -> None:
    factors = torch.linspace(1, 3, 8)
    path = write_gguf(tmp_path / "m.gguf", TINY, random_tensors(TINY), extra={"rope_freqs.weight": factors})
    with pytest.raises(ModelConfigError, match=r"rope_freqs\.weight holds .* where llama3's scaling by 3 has"):
        model_config_values(read_header(path))
