"""Phi-3, 3.5 and 4: Llama with fused projections, longrope and, in Phi-4-mini, a partial rotary embedding."""

from collections.abc import Callable
from dataclasses import replace

from octavo.worker.models.description import LayerConfig, ModelConfig, TensorNames
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

_NAMES = TensorNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))


def _phi3(architecture: str, fields: Fields) -> ModelConfig:
    num_layers = read_num_layers(fields)
    window = read_window(fields, None)
    types = read_layer_types(fields, num_layers) or (SLIDING if window else FULL,) * num_layers
    mlp = llama_mlp(fields)
    layers = tuple(LayerConfig(mlp, window=w, rope=0) for w in windows_of(fields, types, window))
    return replace(llama_like(architecture, fields, layers, rotates_whole=False), names=_NAMES)


ARCHITECTURES: dict[str, Callable[[str, Fields], ModelConfig]] = {"Phi3ForCausalLM": _phi3}
