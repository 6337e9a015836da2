"""Tiny random models of every architecture, written by transformers, and what both compute from them."""

import inspect
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.worker.models.interface import Batch, KVCache, Model
from tests.support import gpt_architectures

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.1, 1.2, 1.5],
    "long_factor": [1.0, 2.0, 3.5, 5.0],
    "original_max_position_embeddings": 32,
}
SOME_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA2 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 14,
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 6.0,
    "tie_word_embeddings": True,
}
GEMMA3 = {
    "head_dim": 16,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 24,
    "sliding_window": 11,
    "sliding_window_pattern": 3,
    "rope_parameters": None,
    "rope_theta": 500.0,
    "rope_local_base_freq": 50.0,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "llama-no-gqa": ("llama", {"num_key_value_heads": 6}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("llama", {"head_dim": 20}),
    "llama-head-80": ("llama", {"head_dim": 80, "num_hidden_layers": 1}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 100.0}}),
    "llama-dynamic": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0},
            "max_position_embeddings": 32,
        },
    ),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-all": (
        "llama",
        {
            "rope_parameters": YARN
            | {"beta_fast": 4.0, "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
            "max_position_embeddings": 32,
        },
    ),
    "llama-yarn-factor": ("llama", {"rope_parameters": YARN | {"attention_factor": 0.8}}),
    "llama-longrope": ("llama", {"rope_parameters": LONGROPE | {"attention_factor": 1.3}}),
    "llama-eps": ("llama", {"rms_norm_eps": 0.5}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-tied": ("qwen3", {"head_dim": 20, "tie_word_embeddings": True, "num_key_value_heads": 6}),
    "qwen3-biases": ("qwen3", {"head_dim": 8, "attention_bias": True, "rms_norm_eps": 0.5}),
    "qwen3-default-head": ("qwen3", {"num_hidden_layers": 1}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3-windows": ("qwen3", {"use_sliding_window": True, "sliding_window": 20, "layer_types": SOME_WINDOWS}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("mistral", {"sliding_window": 17, "tie_word_embeddings": True}),
    "ministral": ("ministral", {"sliding_window": 6, "head_dim": 8, "layer_types": SOME_WINDOWS}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2, "attention_bias": True, "mlp_bias": True}),
    "smollm3-window": (
        "smollm3",
        {"no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": 12, "tie_word_embeddings": True},
    ),
    "gemma": ("gemma", {"head_dim": 16, "num_key_value_heads": 1, "hidden_act": "gelu"}),
    "gemma-biases": ("gemma", {"head_dim": 20, "attention_bias": True, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", GEMMA2),
    "gemma2-no-caps": (
        "gemma2",
        {
            "head_dim": 20,
            "sliding_window": 33,
            "layer_types": SOME_WINDOWS[1:] + SOME_WINDOWS[:1],
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "gemma3": ("gemma3", GEMMA3),
    "gemma3-layers": (
        "gemma3",
        {
            "head_dim": 20,
            "sliding_window": 9,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
            "layer_types": SOME_WINDOWS,
            "final_logit_softcapping": 4.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3-of-images": ("gemma3-of-images", GEMMA3),
    "phi3": ("phi3", {"sliding_window": 19}),
    "phi3-longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "phi3-partial": (
        "phi3",
        {
            "rope_parameters": LONGROPE
            | {"partial_rotary_factor": 0.75, "short_factor": [1.0] * 3, "long_factor": [1.0, 2.0, 3.0]},
            "original_max_position_embeddings": 32,
        },
    ),
    **gpt_architectures.CONFIGS,
    "mixtral": ("mixtral", {"num_local_experts": 5}),
    "mixtral-window": ("mixtral", {"sliding_window": 17, "num_local_experts": 8, "num_experts_per_tok": 3}),
    "qwen3-moe": ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3-moe-sparse": ("qwen3_moe", {"decoder_sparse_step": 2, "attention_bias": True, "hidden_act": "gelu"}),
    "qwen2-moe": ("qwen2_moe", {"num_hidden_layers": 2}),
}
"""Name of a case -> kind of model (a key of KINDS) and how its config differs from that of `base_values`."""

KINDS: dict[str, str] = {
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "gemma3-of-images": "Gemma3",
    "llama": "Llama",
    "ministral": "Ministral",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "phi3": "Phi3",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2Moe",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "smollm3": "SmolLM3",
    **gpt_architectures.KINDS,
}
"""Kind of model -> what the names of its config and its model in transformers begin with."""

_CLASSES = {
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gemma3-of-images": ("Gemma3Config", "Gemma3ForConditionalGeneration"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
}
"""Config and model of kinds whose names end otherwise than most."""


_QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "head_dim": 8}
_OF_KINDS: dict[str, dict[str, Any]] = {
    "qwen2_moe": _QWEN_EXPERTS | {"shared_expert_intermediate_size": 36},
    "qwen3_moe": _QWEN_EXPERTS,
}


def base_values(kind: str) -> dict[str, Any]:
    """Return the config of a kind that cases change."""
    if kind in gpt_architectures.BASES:
        return deepcopy(gpt_architectures.BASES[kind])  # transformers writes into what it is given
    return {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "tie_word_embeddings": False,
        "pad_token_id": None,  # transformers' defaults lie behind the vocabulary
    } | _OF_KINDS.get(kind, {})


def write_with_transformers(folder: Path, kind: str, changes: dict[str, Any]) -> Any:
    """Write a random model as transformers writes it; return it in fp32."""
    import transformers

    torch.manual_seed(0)
    values = base_values(kind) | deepcopy(changes)
    if kind == "gemma3-of-images":
        images = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        values = {"text_config": values, "vision_config": images}
    of_config, of_model = _CLASSES.get(kind, (f"{KINDS[kind]}Config", f"{KINDS[kind]}ForCausalLM"))
    config: Any = getattr(transformers, of_config)(**values)
    model: Any = getattr(transformers, of_model)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # transformers' own start would hide mistakes in small logits
            parameter.normal_(0.0, 0.5 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5)
            if "norm" in name or ".ln_" in name:
                parameter += 1.0
    model.eval()
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def expected_logits(theirs: Any, ids: list[int]) -> Tensor:
    """Return transformers' logits at every position of one sequence: [len(ids), vocab_size].

    It is computed whole; but where the rotary embedding grows with the sequence (dynamic), token by token, as it would
    be generated: transformers' keys are then those that a longer sequence finds in its cache.
    """
    if (getattr(theirs.config.get_text_config(), "rope_parameters", None) or {}).get("rope_type") != "dynamic":
        return theirs(torch.tensor([ids])).logits[0]  # type: ignore[no-any-return]
    import transformers

    name = "cache" if "cache" in inspect.signature(theirs.forward).parameters else "past_key_values"
    cache = {name: transformers.DynamicCache(config=theirs.config)}
    return torch.cat([theirs(torch.tensor([[token]]), **cache).logits[0] for token in ids])


def logits_of(model: Model, caches: list[KVCache], ids: list[int], chunks: list[int], block_size: int) -> Tensor:
    """Return the logits at every position of one sequence that is computed in chunks."""
    blocks = list(range(1, 1 - (-len(ids) // block_size)))[::-1]
    table = torch.tensor([blocks], dtype=torch.int32)
    parts, begin = [], 0
    for chunk in chunks:
        positions = torch.arange(begin, begin + chunk)
        slots = table[0, positions // block_size].long() * block_size + positions % block_size
        batch = Batch(
            input_ids=torch.tensor(ids[begin : begin + chunk]),
            positions=positions,
            slot_mapping=slots,
            block_tables=table,
            query_start=torch.tensor([0, chunk], dtype=torch.int32),
            seq_lens=torch.tensor([begin + chunk], dtype=torch.int32),
            logits_index=torch.arange(chunk),
        )
        parts.append(model.forward(batch, caches))
        begin += chunk
    assert begin == len(ids)
    return torch.cat(parts)
