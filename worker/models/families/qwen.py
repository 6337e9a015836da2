"""Qwen 2, 2.5 and 3."""

from collections.abc import Callable
from dataclasses import replace

from octavo.worker.models.description import LayerConfig, ModelConfig
from octavo.worker.models.families.common import (
    FULL,
    SLIDING,
    read_heads,
    read_layer_types,
    read_num_layers,
    read_window,
    windows_of,
)
from octavo.worker.models.families.llama import llama_like, llama_mlp
from octavo.worker.models.fields import Fields

_QWEN3_HEAD_SIZE = 128
"""Of a Qwen3 config without head_dim: transformers' default, which does not follow from hidden_size."""

_DEFAULT_WINDOW, _DEFAULT_FULL_LAYERS = 4096, 28


def _qwen2(architecture: str, fields: Fields) -> ModelConfig:
    mlp = llama_mlp(fields)
    layers = tuple(LayerConfig(mlp, window=window, rope=0) for window in qwen_windows(fields))
    return replace(llama_like(architecture, fields, layers), qkv_bias=True)


def _qwen3(architecture: str, fields: Fields) -> ModelConfig:
    mlp = llama_mlp(fields)
    layers = tuple(LayerConfig(mlp, window=window, rope=0) for window in qwen_windows(fields))
    config = llama_like(architecture, fields, layers, heads=read_heads(fields, _QWEN3_HEAD_SIZE))
    bias = fields.flag("attention_bias", False)
    return replace(config, qkv_bias=bias, output_bias=bias, qk_norm=config.norm)


def qwen_windows(fields: Fields) -> tuple[int, ...]:
    """Return the window of each layer: where use_sliding_window says so, layers have one from max_window_layers on.

    Raises:
        ModelConfigError: the values do not go together.
    """
    num_layers = read_num_layers(fields)
    window = read_window(fields, _DEFAULT_WINDOW) if fields.flag("use_sliding_window", False) else 0
    num_full = fields.count("max_window_layers", _DEFAULT_FULL_LAYERS, least=0)
    types = read_layer_types(fields, num_layers)
    if types is None:
        types = tuple(SLIDING if window and layer >= num_full else FULL for layer in range(num_layers))
    return windows_of(fields, types, window)


ARCHITECTURES: dict[str, Callable[[str, Fields], ModelConfig]] = {
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}
