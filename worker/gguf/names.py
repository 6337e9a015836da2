"""How the tensors of GGUF files are called in transformers' checkpoints."""

import re

from octavo.worker.gguf.config import ROPE_FACTORS, GgufArchitecture

_WHOLE_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH = _OF_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""With norms behind attention and MLP too."""
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)")
_IGNORED = frozenset({ROPE_FACTORS})
"""What the config was made from: the tables are computed."""


def checkpoint_name(architecture: GgufArchitecture, name: str) -> str | None:
    """Return what transformers calls a tensor of a GGUF file, None where it has no such tensor."""
    if match := _LAYER.fullmatch(name):
        layer, part, kind = match.groups()
        names = _SANDWICH if architecture.sandwich else _OF_LAYER
        return f"model.layers.{layer}.{names[part]}.{kind}" if part in names else None
    stem, _, kind = name.rpartition(".")
    return f"{_WHOLE_MODEL[stem]}.{kind}" if stem in _WHOLE_MODEL and kind in ("weight", "bias") else None


def is_ignored(name: str) -> bool:
    """Say whether a tensor of a GGUF file is none of the model's."""
    return name in _IGNORED


def rotated_heads(architecture: GgufArchitecture, name: str, num_heads: int, num_kv_heads: int) -> int | None:
    """Return the number of heads whose rows a tensor holds in the order of interleaved rotary pairs, None if it does not.

    Args:
        architecture: of the file.
        name: in the file.
        num_heads: of the queries.
        num_kv_heads: of the keys.
    """
    match = _LAYER.fullmatch(name)
    if match is None or not architecture.interleaved_rope:
        return None
    return {"attn_q": num_heads, "attn_k": num_kv_heads}.get(match.group(2))


def has_unit_offset(architecture: GgufArchitecture, name: str) -> bool:
    """Say whether 1 was added to the numbers of a tensor: they are the factors, transformers has the weights of 1 + weight."""
    return architecture.unit_offset and name.endswith("norm.weight")
