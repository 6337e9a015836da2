"""OPT: learned positions that begin with the third line of their table, ReLU; OPT-350m has its norms behind the parts."""

from collections.abc import Callable
from dataclasses import replace

from octavo.worker.errors import ModelConfigError
from octavo.worker.models.description import (
    LayerConfig,
    LearnedPositions,
    MlpConfig,
    ModelConfig,
    NormConfig,
    TensorNames,
)
from octavo.worker.models.families.common import equal_heads, read_activation, read_common, read_num_layers
from octavo.worker.models.fields import Fields

_OFFSET = 2
_NAMES = TensorNames(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    layer="model.decoder.layers.{}",
    final_norm="model.decoder.final_layer_norm",
    input_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    output="self_attn.out_proj",
    up=("fc1",),
    down="fc2",
    optional_prefix="model.",
)


def _opt(architecture: str, fields: Fields) -> ModelConfig:
    heads = equal_heads(fields, rotates=False)
    hidden_size, num_positions = fields.count("hidden_size"), fields.count("max_position_embeddings", 2048)
    if not fields.flag("layer_norm_elementwise_affine", True):
        raise ModelConfigError("layer_norm_elementwise_affine = false is not supported")
    embedding_size = fields.count("word_embed_proj_dim", hidden_size)
    has_bias = fields.flag("enable_bias", True)
    mlp = MlpConfig(
        size=fields.count("ffn_dim"),
        activation=read_activation(fields, "activation_function", "relu"),
        is_gated=False,
        has_bias=has_bias,
    )
    return ModelConfig(
        **read_common(architecture, fields, heads),
        max_positions=num_positions,
        norm=NormConfig("layer", 1e-5),
        layers=(LayerConfig(mlp, rope=None),) * read_num_layers(fields),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        positions=LearnedPositions(num_positions + _OFFSET, _OFFSET),
        residual="pre" if fields.flag("do_layer_norm_before", True) else "post",
        qkv_bias=has_bias,
        output_bias=has_bias,
        embedding_size=embedding_size,
        names=_names(fields, has_projections=embedding_size != hidden_size),
    )


def _names(fields: Fields, *, has_projections: bool) -> TensorNames:
    is_pre = fields.flag("do_layer_norm_before", True)
    names = _NAMES if is_pre else replace(_NAMES, input_norm="", mlp_norm="", final_norm="")
    if not is_pre:
        names = replace(names, post_attention_norm=_NAMES.input_norm, post_mlp_norm=_NAMES.mlp_norm)
    if fields.flag("_remove_final_layer_norm", False):
        names = replace(names, final_norm="")
    if has_projections:
        names = replace(names, project_in="model.decoder.project_in", project_out="model.decoder.project_out")
    return names


ARCHITECTURES: dict[str, Callable[[str, Fields], ModelConfig]] = {"OPTForCausalLM": _opt}
