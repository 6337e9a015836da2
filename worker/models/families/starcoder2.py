"""Starcoder2: layer norms, a plain MLP, biases, a sliding window in all layers or in none."""

from collections.abc import Callable

from octavo.worker.models.description import LayerConfig, MlpConfig, ModelConfig, TensorNames
from octavo.worker.models.families.common import (
    ROTARY_TABLES,
    layer_norm,
    read_activation,
    read_common,
    read_heads,
    read_num_layers,
    read_window,
)
from octavo.worker.models.fields import Fields
from octavo.worker.models.rope_config import given_rope, parse_rope


def _starcoder2(architecture: str, fields: Fields) -> ModelConfig:
    heads = read_heads(fields)
    rope = parse_rope(fields, given_rope(fields))
    has_bias = fields.flag("use_bias", True)
    mlp = MlpConfig(
        size=fields.count("intermediate_size"),
        activation=read_activation(fields, "hidden_act", "gelu_pytorch_tanh"),
        is_gated=False,
        has_bias=has_bias,
    )
    return ModelConfig(
        **read_common(architecture, fields, heads),
        max_positions=rope.longest(fields.count("max_position_embeddings")),
        norm=layer_norm(fields, "norm_epsilon"),
        layers=(LayerConfig(mlp, window=read_window(fields, None)),) * read_num_layers(fields),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        ropes=(rope,),
        qkv_bias=has_bias,
        output_bias=has_bias,
        names=TensorNames(up=("mlp.c_fc",), down="mlp.c_proj"),
        ignored=ROTARY_TABLES,
    )


ARCHITECTURES: dict[str, Callable[[str, Fields], ModelConfig]] = {"Starcoder2ForCausalLM": _starcoder2}
