"""StableLM: Llama with layer norms and a partly rotated head."""

from collections.abc import Callable

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

_ROTATED_SHARE = 0.25


def _stablelm(architecture: str, fields: Fields) -> ModelConfig:
    refuse_true(fields, "qk_layernorm")
    heads = read_heads(fields)
    rope = parse_rope(fields.with_defaults({"partial_rotary_factor": _ROTATED_SHARE}), given_rope(fields))
    is_parallel = fields.flag("use_parallel_residual", False)
    mlp = MlpConfig(fields.count("intermediate_size"), read_activation(fields, "hidden_act", "silu"))
    return ModelConfig(
        **read_common(architecture, fields, heads),
        max_positions=rope.longest(fields.count("max_position_embeddings")),
        norm=layer_norm(fields, "layer_norm_eps"),
        layers=(LayerConfig(mlp),) * read_num_layers(fields),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        ropes=(rope,),
        residual="parallel" if is_parallel else "pre",
        qkv_bias=fields.flag("use_qkv_bias", False),
        names=TensorNames(mlp_norm="") if is_parallel else TensorNames(),
        ignored=ROTARY_TABLES,
    )


ARCHITECTURES: dict[str, Callable[[str, Fields], ModelConfig]] = {"StableLmForCausalLM": _stablelm}
