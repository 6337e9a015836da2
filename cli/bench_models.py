"""Shapes of models that are benchmarked with random weights: folders that hold a config and nothing else."""

import json
from pathlib import Path
from typing import Any

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}

_LLAMA_31_8B: dict[str, Any] = _LLAMA | {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
_GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


def _quantized(config: dict[str, Any], quantization: dict[str, Any]) -> dict[str, Any]:
    """Return a model's config as tools write it that quantise to 4 bits; their models run in float16."""
    return config | {"torch_dtype": "float16", "quantization_config": quantization}


CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA_31_8B,
    "llama-3.1-8b-awq": _quantized(
        _LLAMA_31_8B, {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    ),
    "llama-3.1-8b-gptq": _quantized(_LLAMA_31_8B, _GPTQ),
    "llama-3.1-8b-gptq-act": _quantized(_LLAMA_31_8B, _GPTQ | {"desc_act": True}),
    "llama-3.1-8b-squeezellm": _quantized(_LLAMA_31_8B, {"quant_method": "squeezellm", "wbits": 4}),
    "llama-2-7b": _LLAMA
    | {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 28,
        "torch_dtype": "bfloat16",
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
    },
    "tiny": _LLAMA
    | {
        "vocab_size": 32_000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 8192,
    },
}
"""config.json by name; Llama-3.1's rotary scaling is left out, as in the peers' runs (contexts stay below 8192)."""

VOCABULARIES: dict[str, int] = {name: config["vocab_size"] for name, config in CONFIGS.items()}
"""Size by model."""


def write_config_folder(name: str, parent: Path) -> Path:
    """Write the config-only folder of a model of CONFIGS; return the folder."""
    folder = parent / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name], indent=1), encoding="utf-8")
    return folder
