"""Llama, and what all that are built like it share."""

from collections.abc import Callable
from dataclasses import replace

from octavo.worker.models.description import LayerConfig, MlpConfig, ModelConfig, NormConfig
from octavo.worker.models.families.common import (
    FULL,
    ROTARY_TABLES,
    Heads,
    read_activation,
    read_common,
    read_heads,
    read_num_layers,
    refuse_true,
)
from octavo.worker.models.fields import Fields
from octavo.worker.models.rope_config import RopeConfig, given_rope, parse_rope


def _llama(architecture: str, fields: Fields) -> ModelConfig:
    refuse_true(fields, "use_sliding_window")
    num_layers = read_num_layers(fields)
    fields.choices("layer_types", num_layers, (FULL,))
    layer = LayerConfig(llama_mlp(fields, has_bias=fields.flag("mlp_bias", False)), rope=0)
    bias = fields.flag("attention_bias", False)
    return replace(llama_like(architecture, fields, (layer,) * num_layers), qkv_bias=bias, output_bias=bias)


def llama_mlp(fields: Fields, *, has_bias: bool = False) -> MlpConfig:
    """Read a gated MLP."""
    size, activation = fields.count("intermediate_size"), read_activation(fields, "hidden_act", "silu")
    return MlpConfig(size, activation, has_bias=has_bias)


def llama_like(
    architecture: str,
    fields: Fields,
    layers: tuple[LayerConfig, ...],
    *,
    heads: Heads | None = None,
    theta: float = 10000.0,
    ropes: tuple[RopeConfig, ...] | None = None,
    rotates_whole: bool = True,
) -> ModelConfig:
    """Describe a decoder of RMS norms and rotary embeddings, without biases.

    Args:
        architecture: its name.
        fields: of config.json.
        layers: of it.
        heads: None: as config.json has them.
        theta: of the rotary embedding where config.json has none.
        ropes: None: the one that config.json has, which may stretch the positions it is served for.
        rotates_whole: whether it has no partial rotary embedding: what config.json says of one is refused.

    Raises:
        ModelConfigError: a value is missing, malformed or unsupported.
    """
    heads = read_heads(fields) if heads is None else heads
    max_positions = fields.count("max_position_embeddings")
    if ropes is None:
        ropes = (parse_rope(fields, given_rope(fields), theta),)
        max_positions = ropes[0].longest(max_positions)
    for rope in ropes:
        if rotates_whole and rope.rotated_share != 1.0:
            raise fields.refusal("partial_rotary_factor", rope.rotated_share, f"not supported for {architecture}")
    return ModelConfig(
        **read_common(architecture, fields, heads),
        max_positions=max_positions,
        norm=NormConfig("rms", fields.number("rms_norm_eps", 1e-6, above=0.0)),
        layers=layers,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        ropes=ropes,
        ignored=ROTARY_TABLES,
    )


ARCHITECTURES: dict[str, Callable[[str, Fields], ModelConfig]] = {"LlamaForCausalLM": _llama}
