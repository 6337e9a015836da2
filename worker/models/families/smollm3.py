"""SmolLM3: Llama without a rotary embedding in every fourth layer."""

from collections.abc import Callable
from dataclasses import replace

from octavo.worker.models.description import LayerConfig, ModelConfig
from octavo.worker.models.families.common import (
    FULL,
    SLIDING,
    read_layer_types,
    read_num_layers,
    read_window,
    windows_of,
)
from octavo.worker.models.families.llama import llama_like, llama_mlp
from octavo.worker.models.fields import Fields

_THETA = 2e6


def _smollm3(architecture: str, fields: Fields) -> ModelConfig:
    num_layers = read_num_layers(fields)
    rotates = fields.flags("no_rope_layers", num_layers)  # despite its name: 1 where there is a rotary embedding
    if rotates is None:
        interval = fields.count("no_rope_layer_interval", 4)
        rotates = tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    window = read_window(fields, None) if fields.flag("use_sliding_window", False) else 0
    types = read_layer_types(fields, num_layers)
    if types is None:
        types = tuple(SLIDING if window and not rotated else FULL for rotated in rotates)
    mlp = llama_mlp(fields, has_bias=fields.flag("mlp_bias", False))
    layers = tuple(
        LayerConfig(mlp, window=window, rope=0 if rotated else None)
        for window, rotated in zip(windows_of(fields, types, window), rotates, strict=True)
    )
    config = llama_like(architecture, fields, layers, theta=_THETA)
    bias = fields.flag("attention_bias", False)
    tied = fields.flag("tie_word_embeddings", True)
    return replace(config, qkv_bias=bias, output_bias=bias, tied_embeddings=tied)


ARCHITECTURES: dict[str, Callable[[str, Fields], ModelConfig]] = {"SmolLM3ForCausalLM": _smollm3}
