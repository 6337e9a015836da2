"""Command-R and Aya (Cohere, Cohere 2): attention and MLP side by side, norms without bias, neighbours rotated."""

from collections.abc import Callable

from octavo.worker.models.description import LayerConfig, MlpConfig, ModelConfig, NormConfig, TensorNames
from octavo.worker.models.families.common import (
    FULL,
    ROTARY_TABLES,
    SLIDING,
    read_activation,
    read_common,
    read_heads,
    read_layer_types,
    read_num_layers,
    read_window,
    refuse_true,
    windows_of,
)
from octavo.worker.models.fields import Fields
from octavo.worker.models.rope_config import given_rope, parse_rope

_THETA = {"CohereForCausalLM": 500000.0, "Cohere2ForCausalLM": 10000.0}
_WINDOW = 4096


def _cohere(architecture: str, fields: Fields) -> ModelConfig:
    refuse_true(fields, "use_qk_norm")
    heads = read_heads(fields)
    rope = parse_rope(fields, given_rope(fields), _THETA[architecture])
    has_bias = fields.flag("attention_bias", False)
    mlp = MlpConfig(fields.count("intermediate_size"), read_activation(fields, "hidden_act", "silu"))
    num_layers = read_num_layers(fields)
    layers = (
        _windowed(fields, mlp, num_layers) if architecture == "Cohere2ForCausalLM" else (LayerConfig(mlp),) * num_layers
    )
    return ModelConfig(
        **read_common(architecture, fields, heads),
        max_positions=rope.longest(fields.count("max_position_embeddings")),
        norm=NormConfig("layer", fields.number("layer_norm_eps", 1e-5, above=0.0), has_bias=False),
        layers=layers,
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        ropes=(rope,),
        rotates_neighbours=True,
        residual="parallel",
        qkv_bias=has_bias,
        output_bias=has_bias,
        logit_scale=fields.number("logit_scale", 0.0625, above=0.0),
        names=TensorNames(mlp_norm=""),
        ignored=ROTARY_TABLES,
    )


def _windowed(fields: Fields, mlp: MlpConfig, num_layers: int) -> tuple[LayerConfig, ...]:
    """Return layers of which those without a window have no rotary embedding either: every fourth, if nothing is said."""
    pattern = fields.count("sliding_window_pattern", 4)
    every = tuple(SLIDING if (i + 1) % pattern else FULL for i in range(num_layers))
    types = read_layer_types(fields, num_layers) or every
    windows = windows_of(fields, types, read_window(fields, _WINDOW))
    return tuple(LayerConfig(mlp, window=window, rope=0 if window else None) for window in windows)


ARCHITECTURES: dict[str, Callable[[str, Fields], ModelConfig]] = dict.fromkeys(_THETA, _cohere)
