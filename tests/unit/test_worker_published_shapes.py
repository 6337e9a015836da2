"""Configs as the hub has them, shortened to what counts: each gives the parameters that its model is known to have."""

from typing import Any

import pytest

from octavo.worker.models.config import parse_model_config
from octavo.worker.models.sizes import num_parameters

LLAMA32 = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
MISTRAL = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}
QWEN25 = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}
QWEN3 = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "sliding_window": None,
    "tie_word_embeddings": True,
}
SMOLLM3 = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 128256,
    "max_position_embeddings": 65536,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "rope_theta": 5e6,
}
PHI3 = {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32064,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "sliding_window": 262144,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    "tie_word_embeddings": False,
}
PHI4_MINI = PHI3 | {
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "vocab_size": 200064,
    "partial_rotary_factor": 0.75,
    "tie_word_embeddings": True,
}
GEMMA = {
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": None,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
}
GEMMA2 = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "cache_implementation": "hybrid",
}
GEMMA3 = {
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "rope_local_base_freq": 10000,
    "rope_theta": 1000000,
}
GEMMA3_4B = {
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
SHAPES: list[tuple[str, dict[str, Any], int]] = [
    ("LlamaForCausalLM", LLAMA32, 1_235_814_400),
    ("MistralForCausalLM", MISTRAL, 7_241_732_096),
    ("Qwen2ForCausalLM", QWEN25, 7_615_616_512),
    ("Qwen3ForCausalLM", QWEN3, 596_049_920),
    ("SmolLM3ForCausalLM", SMOLLM3, 3_075_098_624),
    ("Phi3ForCausalLM", PHI3, 3_821_079_552),
    ("Phi3ForCausalLM", PHI4_MINI, 3_836_021_760),
    ("GemmaForCausalLM", GEMMA, 2_506_172_416),
    ("Gemma2ForCausalLM", GEMMA2, 2_614_341_888),
    ("Gemma3ForCausalLM", GEMMA3, 999_885_952),
    ("Gemma3ForConditionalGeneration", GEMMA3_4B, 3_880_263_168),
]


@pytest.mark.parametrize(("architecture", "values", "expected"), SHAPES)
def test_published_shapes_have_their_number_of_parameters(
    architecture: str, values: dict[str, Any], expected: int
) -> None:
    config = parse_model_config({"architectures": [architecture], **values})
    assert num_parameters(config) == expected
