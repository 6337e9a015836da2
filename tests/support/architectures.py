"""Tiny random models of every architecture, written by transformers, and what both compute from them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.worker.models.interface import Batch, KVCache, Model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
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
    "llama-eps": ("llama", {"rms_norm_eps": 0.5}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-tied": ("qwen3", {"head_dim": 20, "tie_word_embeddings": True, "num_key_value_heads": 6}),
    "qwen3-biases": ("qwen3", {"head_dim": 8, "attention_bias": True, "rms_norm_eps": 0.5}),
    "qwen3-default-head": ("qwen3", {"num_hidden_layers": 1}),
}
"""Name of a case -> kind of model (a key of KINDS) and how its config differs from that of `base_values`."""

KINDS: dict[str, str] = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""Kind of model -> what the names of its config and its model in transformers begin with."""


def base_values(kind: str) -> dict[str, Any]:
    """Return the config of a kind that cases change."""
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
    }


def write_with_transformers(folder: Path, kind: str, changes: dict[str, Any]) -> Any:
    """Write a random model as transformers writes it; return it in fp32."""
    import transformers

    torch.manual_seed(0)
    config: Any = getattr(transformers, f"{KINDS[kind]}Config")(**(base_values(kind) | changes))
    model: Any = getattr(transformers, f"{KINDS[kind]}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # transformers' own start would hide mistakes in small logits
            parameter.normal_(0.0, 0.5 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5)
            if "norm" in name:
                parameter += 1.0
    model.eval()
    model.save_pretrained(folder)
    return model


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
