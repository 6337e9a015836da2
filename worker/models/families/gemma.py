"""Gemma 1, 2 and 3: scaled embeddings, norms by 1 + weight, from 2 on norms behind each part and windows in some layers."""

from collections.abc import Callable
from dataclasses import replace

from octavo.kernels.activations import Activation
from octavo.worker.errors import ModelConfigError
from octavo.worker.models.description import LayerConfig, MlpConfig, ModelConfig, TensorNames
from octavo.worker.models.families.common import (
    FULL,
    SLIDING,
    read_activation,
    read_dtype,
    read_heads,
    read_layer_types,
    read_num_layers,
    read_window,
    refuse_true,
    windows_of,
)
from octavo.worker.models.families.llama import llama_like
from octavo.worker.models.fields import Fields
from octavo.worker.models.rope_config import RopeConfig, parse_rope

_HEAD_SIZE = 256
_WINDOW = 4096
_GEMMA2_KV_HEADS = 4
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
"""transformers' values, which published files leave out where they are these."""

_SANDWICH = TensorNames(
    post_attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)
_WITHIN = "language_model."
_IMAGE_PARTS = ("vision_tower.", "multi_modal_projector.")


def _gemma(architecture: str, fields: Fields) -> ModelConfig:
    # "gelu" is how the first files call the approximation by tanh that the models were trained with.
    activation = (
        "gelu_tanh" if fields.raw("hidden_act") == "gelu" else read_activation(fields, "hidden_act", "gelu_new")
    )
    mlp = _mlp(fields, activation)
    return _gemma_like(architecture, fields, (LayerConfig(mlp, rope=0),) * read_num_layers(fields))


def _gemma2(architecture: str, fields: Fields) -> ModelConfig:
    fields = fields.with_defaults({"num_key_value_heads": _GEMMA2_KV_HEADS})
    layers = _layers(fields, pattern=2, local_rope=0)
    return _sandwich(_gemma_like(architecture, fields, layers), fields, attention_softcap=50.0, final_softcap=30.0)


def _gemma3(architecture: str, fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(_GEMMA3_DEFAULTS)
    if fields.has("attn_logit_softcapping"):  # transformers has the field and leaves it out of the arithmetic
        cap = fields.raw("attn_logit_softcapping")
        raise fields.refusal("attn_logit_softcapping", cap, f"not supported for {architecture}")
    layers = _layers(fields, pattern=fields.count("sliding_window_pattern", 6), local_rope=1)
    config = _gemma_like(architecture, fields, layers, _gemma3_ropes(fields))
    config = _sandwich(config, fields, attention_softcap=0.0, final_softcap=0.0)
    return replace(config, qk_norm=config.norm)


def _gemma3_text_of(architecture: str, fields: Fields) -> ModelConfig:
    """Describe the part of a model of texts and images that reads and writes text."""
    text = fields.part("text_config")
    if text is None:
        raise ModelConfigError("text_config is missing")
    config = _gemma3(architecture, text)
    names = replace(
        config.names,
        embedding=_WITHIN + config.names.embedding,
        layer=_WITHIN + config.names.layer,
        final_norm=_WITHIN + config.names.final_norm,
        head=_WITHIN + config.names.head,
    )
    return replace(
        config,
        names=names,
        ignored_parts=_IMAGE_PARTS,
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        dtype=read_dtype(fields if fields.has("dtype", "torch_dtype") else text),
        quantization=fields.raw("quantization_config"),
    )


def _gemma_like(
    architecture: str, fields: Fields, layers: tuple[LayerConfig, ...], ropes: tuple[RopeConfig, ...] | None = None
) -> ModelConfig:
    refuse_true(fields, "use_bidirectional_attention")
    config = llama_like(architecture, fields, layers, heads=read_heads(fields, _HEAD_SIZE), ropes=ropes)
    bias = fields.flag("attention_bias", False)
    return replace(
        config,
        norm=replace(config.norm, unit_offset=True),
        embedding_scale=config.hidden_size**0.5,
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
    )


def _sandwich(config: ModelConfig, fields: Fields, attention_softcap: float, final_softcap: float) -> ModelConfig:
    return replace(
        config,
        residual="sandwich",
        names=_SANDWICH,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0, above=0.0) ** -0.5,
        attention_softcap=_cap(fields, "attn_logit_softcapping", attention_softcap),
        final_softcap=_cap(fields, "final_logit_softcapping", final_softcap),
    )


def _cap(fields: Fields, name: str, default: float) -> float:
    """Read a soft cap; null means none."""
    if fields.has(name):
        return fields.number(name, None, above=0.0)
    return 0.0 if fields.names(name) else default


def _mlp(fields: Fields, activation: Activation) -> MlpConfig:
    return MlpConfig(fields.count("intermediate_size"), activation)


def _layers(fields: Fields, pattern: int, local_rope: int) -> tuple[LayerConfig, ...]:
    """Return layers of which every `pattern`-th sees all, unless layer_types says otherwise."""
    num_layers = read_num_layers(fields)
    types = read_layer_types(fields, num_layers)
    if types is None:
        types = tuple(SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers))
    mlp = _mlp(fields, read_activation(fields, "hidden_activation", "gelu_pytorch_tanh"))
    windows = windows_of(fields, types, read_window(fields, _WINDOW))
    return tuple(LayerConfig(mlp, window, rope=local_rope if window else 0) for window in windows)


def _gemma3_ropes(fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotary embedding of layers that see all, and of those with a window."""
    newer, older = fields.part("rope_parameters"), fields.part("rope_scaling")
    if newer is None:
        whole, local = older, None
    else:
        if not newer.has(FULL, SLIDING):
            raise fields.refusal("rope_parameters", fields.raw("rope_parameters"), f"expected {FULL} and {SLIDING}")
        whole, local = newer.part(FULL), newer.part(SLIDING)
    nothing = Fields({})
    return (
        parse_rope(fields, whole or nothing, 1e6),
        parse_rope(fields, local or nothing, 1e4, older_theta="rope_local_base_freq"),
    )


ARCHITECTURES: dict[str, Callable[[str, Fields], ModelConfig]] = {
    "GemmaForCausalLM": _gemma,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3_text_of,
}
