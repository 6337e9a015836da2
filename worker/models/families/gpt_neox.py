"""GPT-NeoX and Pythia: a fused projection by heads, a partly rotated head, attention and MLP side by side."""

from collections.abc import Callable

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

_ROTATED_SHARE, _THETA = 0.25, 10000.0
_NAMES = TensorNames(
    embedding="gpt_neox.embed_in",
    layer="gpt_neox.layers.{}",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
    qkv=("attention.query_key_value",),
    output="attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    optional_prefix="gpt_neox.",
    renamed=(("lm_head.", "embed_out."),),
)
_MASKS = (".attention.bias", ".attention.masked_bias")
"""Which tokens a token sees, as old checkpoints carry it."""


def _gpt_neox(architecture: str, fields: Fields) -> ModelConfig:
    heads = equal_heads(fields)
    given = given_rope(fields)
    share = fields.number("rotary_pct", _ROTATED_SHARE, above=0.0)
    theta = fields.number("rotary_emb_base", _THETA, above=0.0)
    rope = parse_rope(fields.with_defaults({"partial_rotary_factor": share}), given, theta)
    mlp = MlpConfig(
        size=fields.count("intermediate_size"),
        activation=read_activation(fields, "hidden_act", "gelu"),
        is_gated=False,
        has_bias=True,
    )
    has_bias = fields.flag("attention_bias", True)
    return ModelConfig(
        **read_common(architecture, fields, heads),
        max_positions=rope.longest(fields.count("max_position_embeddings")),
        norm=layer_norm(fields, "layer_norm_eps"),
        layers=(LayerConfig(mlp),) * read_num_layers(fields),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        ropes=(rope,),
        residual="parallel" if fields.flag("use_parallel_residual", True) else "pre",
        qkv_bias=has_bias,
        output_bias=has_bias,
        qkv_by_group=True,
        names=_NAMES,
        ignored=(*ROTARY_TABLES, *_MASKS),
    )


ARCHITECTURES: dict[str, Callable[[str, Fields], ModelConfig]] = {"GPTNeoXForCausalLM": _gpt_neox}
