"""Tiny models of the architectures that came before Llama or stand beside it: layer norms, plain MLPs, fused projections."""

from typing import Any

_SIZES = {"vocab_size": 97, "pad_token_id": None}
_ROTATED = {
    **_SIZES,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
BASES: dict[str, dict[str, Any]] = {
    "cohere": {**_ROTATED, "num_key_value_heads": 2},
    "cohere2": {**_ROTATED, "num_hidden_layers": 3, "num_key_value_heads": 2, "sliding_window": 9},
    "falcon": {
        **_SIZES,
        "hidden_size": 48,
        "ffn_hidden_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    "glm": {**_ROTATED, "head_dim": 12, "num_key_value_heads": 2},
    "glm4": {**_ROTATED, "head_dim": 16, "num_attention_heads": 3, "num_key_value_heads": 1},
    "gpt2": {**_SIZES, "n_embd": 48, "n_inner": 80, "n_layer": 2, "n_head": 6, "n_positions": 128},
    "gpt_bigcode": {**_SIZES, "n_embd": 48, "n_inner": 80, "n_layer": 2, "n_head": 6, "n_positions": 128},
    "gpt_neo": {
        **_SIZES,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_layers": 3,
        "num_heads": 6,
        "attention_types": [[["global", "local"], 1], [["local"], 1]],
        "window_size": 11,
        "max_position_embeddings": 128,
    },
    "gpt_neox": {**_ROTATED, "num_attention_heads": 3},
    "gptj": {
        **_SIZES,
        "n_embd": 48,
        "n_inner": 80,
        "n_layer": 2,
        "n_head": 3,
        "n_positions": 128,
        "rotary_dim": 10,
        "tie_word_embeddings": False,
    },
    "opt": {
        **_SIZES,
        "hidden_size": 48,
        "ffn_dim": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "max_position_embeddings": 128,
    },
    "phi": {**_ROTATED, "num_attention_heads": 3},
    "stablelm": {**_ROTATED, "num_attention_heads": 3, "num_key_value_heads": 3},
    "starcoder2": {**_ROTATED, "num_key_value_heads": 2},
}
"""Kind of model -> its config, which cases change."""

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("cohere", {"logit_scale": 0.5}),
    "cohere2": ("cohere2", {"sliding_window_pattern": 2, "logit_scale": 0.5, "attention_bias": True}),
    "falcon": ("falcon", {}),
    "falcon-new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": False}),
    "falcon-new-one-norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1, "bias": True},
    ),
    "falcon-old": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {"attention_bias": False, "rms_norm_eps": 0.1}),
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
    "gpt-bigcode": ("gpt_bigcode", {}),
    "gpt-bigcode-heads": ("gpt_bigcode", {"multi_query": False, "n_inner": None}),
    "gpt-neo": ("gpt_neo", {}),
    "gpt-neox": ("gpt_neox", {}),
    "gpt-neox-in-turn": (
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_fast",
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 2.0,
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
            },
            "tie_word_embeddings": True,
        },
    ),
    "gptj": ("gptj", {}),
    "gptj-whole": ("gptj", {"rotary_dim": 8, "n_head": 6, "n_inner": None}),
    "opt": ("opt", {}),
    "opt-no-bias": ("opt", {"enable_bias": False, "activation_function": "gelu", "tie_word_embeddings": False}),
    "opt-350m": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-projected": (
        "opt",
        {"word_embed_proj_dim": 56, "_remove_final_layer_norm": True, "tie_word_embeddings": False},
    ),
    "phi": ("phi", {}),
    "phi-groups": ("phi", {"num_attention_heads": 6, "num_key_value_heads": 2, "layer_norm_eps": 0.1}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-parallel": (
        "stablelm",
        {
            "use_parallel_residual": True,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.5,
        },
    ),
    "starcoder2": ("starcoder2", {}),
    "starcoder2-window": ("starcoder2", {"sliding_window": 13, "use_bias": False, "tie_word_embeddings": False}),
}
"""Name of a case -> kind of model and how its config differs from that of BASES."""

KINDS: dict[str, str] = {
    "cohere": "Cohere",
    "cohere2": "Cohere2",
    "falcon": "Falcon",
    "glm": "Glm",
    "glm4": "Glm4",
    "gpt2": "GPT2",
    "gpt_bigcode": "GPTBigCode",
    "gpt_neo": "GPTNeo",
    "gpt_neox": "GPTNeoX",
    "gptj": "GPTJ",
    "opt": "OPT",
    "phi": "Phi",
    "stablelm": "StableLm",
    "starcoder2": "Starcoder2",
}
"""Kind of model -> what the names of its config and its model in transformers begin with."""
ARCHITECTURES: dict[str, str] = {
    kind: f"{name}LMHeadModel" if kind == "gpt2" else f"{name}ForCausalLM" for kind, name in KINDS.items()
}
"""Kind of model -> what config.json calls it."""


def config_of(kind: str, **changes: Any) -> dict[str, Any]:
    """Return a config.json of a kind, written without transformers."""
    return {"architectures": [ARCHITECTURES[kind]], **BASES[kind], **changes}
