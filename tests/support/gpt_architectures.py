"""Tiny models of the architectures that came before Llama or stand beside it: layer norms, plain MLPs, fused projections."""

from typing import Any

_SIZES = {"vocab_size": 97, "pad_token_id": None}
BASES: dict[str, dict[str, Any]] = {
    "falcon": {
        **_SIZES,
        "hidden_size": 48,
        "ffn_hidden_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    "gpt2": {**_SIZES, "n_embd": 48, "n_inner": 80, "n_layer": 2, "n_head": 6, "n_positions": 128},
    "opt": {
        **_SIZES,
        "hidden_size": 48,
        "ffn_dim": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "max_position_embeddings": 128,
    },
}
"""Kind of model -> its config, which cases change."""

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": ("falcon", {}),
    "falcon-new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": False}),
    "falcon-new-one-norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1, "bias": True},
    ),
    "falcon-old": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "gpt2": ("gpt2", {}),
    "gpt2-relu": (
        "gpt2",
        {
            "n_inner": None,
            "n_head": 3,
            "activation_function": "relu",
            "scale_attn_weights": False,
            "tie_word_embeddings": False,
        },
    ),
    "opt": ("opt", {}),
    "opt-no-bias": ("opt", {"enable_bias": False, "activation_function": "gelu", "tie_word_embeddings": False}),
}
"""Name of a case -> kind of model and how its config differs from that of BASES."""

KINDS: dict[str, str] = {"falcon": "Falcon", "gpt2": "GPT2", "opt": "OPT"}
"""Kind of model -> what the names of its config and its model in transformers begin with."""
ARCHITECTURES: dict[str, str] = {
    "falcon": "FalconForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "opt": "OPTForCausalLM",
}
"""Kind of model -> what config.json calls it."""


def config_of(kind: str, **changes: Any) -> dict[str, Any]:
    """Return a config.json of a kind, written without transformers."""
    return {"architectures": [ARCHITECTURES[kind]], **BASES[kind], **changes}
