"""GGUF files as converters write them, made from the values of config.json and the tensors of a transformers checkpoint."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from torch import Tensor

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "tie_word_embeddings": True,
}
"""Every row of a matrix is a multiple of 32: of the blocks that most types have."""

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAMES_OF_SANDWICH = _NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    extra: Mapping[str, Tensor] | None = None,
    general: Mapping[str, Any] | None = None,
) -> Path:
    """Write a file; matrices are stored as `kind`, everything else as F32.

    Args:
        path: of the file.
        config: values of config.json.
        tensors: of the checkpoint.
        kind: of matrices.
        metadata: added to the architecture's own, or in their place; None as a value leaves one out.
        tokenizer: metadata behind "tokenizer.".
        general: metadata behind "general.".
        extra: tensors by the names that they have in the file.

    Returns:
        The path.
    """
    architecture = config["model_type"].removesuffix("_text")
    writer = GGUFWriter(path, architecture)
    described: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }
    for name, value in (described | dict(metadata or {})).items():
        _add(writer, f"{architecture}.{name}", value)
    for name, value in (general or {}).items():
        _add(writer, f"general.{name}", value)
    for name, value in (tokenizer or {}).items():
        _add(writer, f"tokenizer.{name}", value)
    for name, tensor in tensors.items():
        _add_tensor(writer, architecture, name, tensor, config, kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tensor(
    writer: GGUFWriter,
    architecture: str,
    name: str,
    tensor: Tensor,
    config: Mapping[str, Any],
    kind: GGMLQuantizationType,
) -> None:
    stem, _, suffix = name.rpartition(".")
    numbers = tensor.float().numpy()
    if architecture == "llama" and (match := re.search(r"\.([qk])_proj\.", name)):
        heads = config["num_attention_heads"] if match[1] == "q" else config["num_key_value_heads"]
        numbers = numbers.reshape(heads, 2, -1, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        numbers = numbers + np.float32(1)
    if numbers.ndim > 1:
        writer.add_tensor(f"{gguf_name(architecture, stem)}.{suffix}", quantize(numbers, kind), raw_dtype=kind)
    else:
        writer.add_tensor(f"{gguf_name(architecture, stem)}.{suffix}", np.ascontiguousarray(numbers))


def gguf_name(architecture: str, stem: str) -> str:
    """Return what GGUF calls a tensor of a transformers checkpoint, both without .weight and .bias."""
    names = _NAMES_OF_SANDWICH if architecture in ("gemma2", "gemma3") else _NAMES
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem):
        return f"blk.{match[1]}.{names[match[2]]}"
    return names[stem]


def stored(numbers: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """Return what is left of a matrix that was stored as a kind."""
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(quantize(numbers.float().numpy(), kind), kind))
