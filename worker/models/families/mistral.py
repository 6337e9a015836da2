"""Mistral and Ministral: Llama with a sliding window, in all layers or in some."""

from collections.abc import Callable

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

_DEFAULT_WINDOW = 4096
"""transformers' where config.json does not name one; null there means none."""


def _mistral(architecture: str, fields: Fields) -> ModelConfig:
    num_layers = read_num_layers(fields)
    window = read_window(fields, _DEFAULT_WINDOW)
    types = read_layer_types(fields, num_layers) or (SLIDING if window else FULL,) * num_layers
    mlp = llama_mlp(fields)
    layers = tuple(LayerConfig(mlp, window=w, rope=0) for w in windows_of(fields, types, window))
    return llama_like(architecture, fields, layers)


ARCHITECTURES: dict[str, Callable[[str, Fields], ModelConfig]] = dict.fromkeys(
    ("MistralForCausalLM", "MinistralForCausalLM"), _mistral
)
