"""GLM-4: Llama with neighbours rotated in half of each head, biases of queries, keys and values, and a fused MLP.

GLM-4-0414 (Glm4) has norms behind attention and MLP as well.
"""

from collections.abc import Callable
from dataclasses import replace

from octavo.worker.models.description import LayerConfig, ModelConfig, TensorNames
from octavo.worker.models.families.common import read_heads, read_num_layers
from octavo.worker.models.families.llama import llama_like, llama_mlp
from octavo.worker.models.fields import Fields

_HEAD_SIZE = 128
_DEFAULTS = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07}
_NAMES = TensorNames(up=("mlp.gate_up_proj",))


def _glm(architecture: str, fields: Fields) -> ModelConfig:
    layers = (LayerConfig(llama_mlp(fields)),) * read_num_layers(fields)
    heads = read_heads(fields, _HEAD_SIZE)
    config = llama_like(architecture, fields.with_defaults(_DEFAULTS), layers, heads=heads, rotates_whole=False)
    config = replace(config, names=_NAMES, rotates_neighbours=True, qkv_bias=fields.flag("attention_bias", True))
    if architecture == "GlmForCausalLM":
        return config
    names = replace(_NAMES, post_attention_norm="post_self_attn_layernorm", post_mlp_norm="post_mlp_layernorm")
    return replace(config, names=names, residual="sandwich")


ARCHITECTURES: dict[str, Callable[[str, Fields], ModelConfig]] = dict.fromkeys(
    ("GlmForCausalLM", "Glm4ForCausalLM"), _glm
)
