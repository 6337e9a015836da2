"""GPT-Neo: GPT-2 with plain matrices, queries that are not scaled, and a window in every second layer."""

from collections.abc import Callable
from dataclasses import replace

from octavo.worker.models.description import LayerConfig, LearnedPositions, MlpConfig, ModelConfig
from octavo.worker.models.families.common import equal_heads, layer_norm, read_activation, read_common, read_num_layers
from octavo.worker.models.families.gpt2 import NAMES
from octavo.worker.models.fields import Fields

_KINDS = ("global", "local")
_NAMES = replace(
    NAMES,
    qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    output="attn.attention.out_proj",
)
_MASKS = (".attn.attention.bias", ".attn.attention.masked_bias")
"""Which tokens a token sees, as old checkpoints carry it."""


def _gpt_neo(architecture: str, fields: Fields) -> ModelConfig:
    heads = equal_heads(fields, heads="num_heads", rotates=False)
    hidden_size, num_positions = fields.count("hidden_size"), fields.count("max_position_embeddings", 2048)
    mlp = MlpConfig(
        size=fields.count("intermediate_size", 4 * hidden_size),
        activation=read_activation(fields, "activation_function", "gelu_new"),
        is_gated=False,
        has_bias=True,
    )
    window = fields.count("window_size", 256)
    return ModelConfig(
        **read_common(architecture, fields, heads),
        max_positions=num_positions,
        norm=layer_norm(fields, "layer_norm_epsilon"),
        layers=tuple(
            LayerConfig(mlp, window=window if kind == "local" else 0, rope=None) for kind in _layer_kinds(fields)
        ),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        positions=LearnedPositions(num_positions),
        output_bias=True,
        attention_scale=1.0,
        names=_NAMES,
        ignored=_MASKS,
    )


def _layer_kinds(fields: Fields) -> tuple[str, ...]:
    """Read attention_types: pairs of a list of kinds, and how often the list comes."""
    num_layers, given = (
        read_num_layers(fields, "num_layers"),
        fields.raw("attention_types") or [[["global", "local"], 12]],
    )
    pairs: list[tuple[list[str], int]] = []
    for pair in given if isinstance(given, list) else [given]:
        match pair:
            case [[_, *_] as names, int(times)] if times >= 0 and all(name in _KINDS for name in names):
                pairs.append((names, times))
            case _:
                raise fields.refusal(
                    "attention_types", given, "expected pairs of a list of global and local, and a count"
                )
    if sum(len(names) * times for names, times in pairs) != num_layers:
        raise fields.refusal("attention_types", given, f"expected a kind for each of {num_layers} layers")
    return tuple(kind for names, times in pairs for _ in range(times) for kind in names)


ARCHITECTURES: dict[str, Callable[[str, Fields], ModelConfig]] = {"GPTNeoForCausalLM": _gpt_neo}
