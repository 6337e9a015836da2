"""Phi-1, 1.5 and 2: one layer norm before attention and MLP side by side, a partly rotated head, biases everywhere."""

from collections.abc import Callable

from octavo.worker.errors import ModelConfigError
from octavo.worker.models.description import LayerConfig, MlpConfig, ModelConfig, TensorNames
from octavo.worker.models.families.common import (
    ROTARY_TABLES,
    layer_norm,
    read_activation,
    read_common,
    read_heads,
    read_num_layers,
    refuse_true,
)
from octavo.worker.models.fields import Fields
from octavo.worker.models.rope_config import given_rope, parse_rope

_ROTATED_SHARE = 0.5
_NAMES = TensorNames(
    final_norm="model.final_layernorm", mlp_norm="", output="self_attn.dense", up=("mlp.fc1",), down="mlp.fc2"
)


def _phi(architecture: str, fields: Fields) -> ModelConfig:
    refuse_true(fields, "qk_layernorm")
    if fields.flag("tie_word_embeddings", False):
        raise ModelConfigError("tie_word_embeddings = true is not supported: the output head has a bias of its own")
    heads = read_heads(fields)
    rope = parse_rope(fields.with_defaults({"partial_rotary_factor": _ROTATED_SHARE}), given_rope(fields))
    mlp = MlpConfig(
        size=fields.count("intermediate_size"),
        activation=read_activation(fields, "hidden_act", "gelu_new"),
        is_gated=False,
        has_bias=True,
    )
    return ModelConfig(
        **read_common(architecture, fields, heads),
        max_positions=rope.longest(fields.count("max_position_embeddings")),
        norm=layer_norm(fields, "layer_norm_eps"),
        layers=(LayerConfig(mlp),) * read_num_layers(fields),
        tied_embeddings=False,
        ropes=(rope,),
        residual="parallel",
        qkv_bias=True,
        output_bias=True,
        head_bias=True,
        names=_NAMES,
        ignored=ROTARY_TABLES,
    )


ARCHITECTURES: dict[str, Callable[[str, Fields], ModelConfig]] = {"PhiForCausalLM": _phi}
