"""Falcon: the 7B form (one KV head, attention and MLP side by side), the new one (groups, two norms), and the old one."""

from collections.abc import Callable
from dataclasses import replace

from octavo.worker.errors import ModelConfigError
from octavo.worker.models.description import LayerConfig, MlpConfig, ModelConfig, TensorNames
from octavo.worker.models.families.common import (
    ROTARY_TABLES,
    equal_heads,
    layer_norm,
    read_activation,
    read_common,
    read_num_layers,
)
from octavo.worker.models.fields import Fields
from octavo.worker.models.rope_config import given_rope, parse_rope

_NAMES = TensorNames(
    embedding="transformer.word_embeddings",
    layer="transformer.h.{}",
    final_norm="transformer.ln_f",
    mlp_norm="",
    qkv=("self_attention.query_key_value",),
    output="self_attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    optional_prefix="transformer.",
)


def _falcon(architecture: str, fields: Fields) -> ModelConfig:
    if fields.flag("alibi", False):
        raise ModelConfigError("alibi = true is not supported; only the rotary embedding is")
    fields = fields.with_defaults({"max_position_embeddings": 2048})  # the first files do not name it
    heads = equal_heads(fields, _num_kv_heads(fields))
    hidden_size, has_bias = fields.count("hidden_size"), fields.flag("bias", False)
    rope, is_parallel = parse_rope(fields, given_rope(fields)), _is_parallel(fields)
    mlp = MlpConfig(
        size=fields.count("ffn_hidden_size", 4 * hidden_size),
        activation=read_activation(fields, "activation", "gelu"),
        is_gated=False,
        has_bias=has_bias,
    )
    return ModelConfig(
        **read_common(architecture, fields, heads),
        max_positions=rope.longest(fields.count("max_position_embeddings")),
        norm=layer_norm(fields, "layer_norm_epsilon"),
        layers=(LayerConfig(mlp),) * read_num_layers(fields),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        ropes=(rope,),
        residual="parallel" if is_parallel else "pre",
        qkv_bias=has_bias,
        output_bias=has_bias,
        qkv_by_group=True,
        names=_names(fields, is_parallel),
        ignored=ROTARY_TABLES,
    )


def _num_kv_heads(fields: Fields) -> int:
    """Return the KV heads, each of which stands behind its query heads in the fused projection."""
    num_heads = fields.count("num_attention_heads")
    given = fields.count("num_kv_heads", num_heads)
    if fields.flag("new_decoder_architecture", False):
        return given
    if fields.flag("multi_query", True):
        return 1
    if given != num_heads:
        raise fields.refusal(
            "num_kv_heads", given, f"expected num_attention_heads = {num_heads} without new_decoder_architecture"
        )
    return given


def _is_parallel(fields: Fields) -> bool:
    is_parallel = fields.flag("parallel_attn", True)
    if fields.flag("new_decoder_architecture", False) and not is_parallel:
        raise fields.refusal("parallel_attn", False, "expected true with new_decoder_architecture")
    return is_parallel


def _names(fields: Fields, is_parallel: bool) -> TensorNames:
    is_new = fields.flag("new_decoder_architecture", False)
    num_norms = fields.count("num_ln_in_parallel_attn", 2 if is_new else 1)
    if num_norms > (2 if is_new else 1):
        raise fields.refusal("num_ln_in_parallel_attn", num_norms, "expected 1, or 2 with new_decoder_architecture")
    if num_norms == 2:
        return replace(_NAMES, input_norm="ln_attn", mlp_norm="ln_mlp")
    return _NAMES if is_parallel else replace(_NAMES, mlp_norm="post_attention_layernorm")


ARCHITECTURES: dict[str, Callable[[str, Fields], ModelConfig]] = {"FalconForCausalLM": _falcon}
