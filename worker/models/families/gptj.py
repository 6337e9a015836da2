"""GPT-J: attention and MLP side by side behind one norm; neighbours are rotated against each other, not halves."""

import math
from collections.abc import Callable
from dataclasses import replace

from octavo.worker.errors import ModelConfigError
from octavo.worker.models.description import LayerConfig, MlpConfig, ModelConfig
from octavo.worker.models.families.common import equal_heads, layer_norm, read_activation, read_common, read_num_layers
from octavo.worker.models.families.gpt2 import MASKS, NAMES
from octavo.worker.models.fields import Fields
from octavo.worker.models.rope_config import RopeConfig

_NAMES = replace(
    NAMES,
    positions="",
    mlp_norm="",
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    output="attn.out_proj",
    up=("mlp.fc_in",),
    down="mlp.fc_out",
)


def _gptj(architecture: str, fields: Fields) -> ModelConfig:
    if fields.flag("tie_word_embeddings", False):
        raise ModelConfigError("tie_word_embeddings = true is not supported: the output head has a bias of its own")
    heads = equal_heads(fields, hidden="n_embd", heads="n_head")
    hidden_size, rotary_dim = fields.count("n_embd"), fields.count("rotary_dim", 64)
    if rotary_dim % 2 or rotary_dim > heads.head_size:
        raise fields.refusal("rotary_dim", rotary_dim, f"expected an even number up to the head's {heads.head_size}")
    # The next number up: the quotient alone may give one dimension less when it is multiplied by the head's again.
    share = min(1.0, math.nextafter(rotary_dim / heads.head_size, 2.0))
    mlp = MlpConfig(
        size=fields.count("n_inner", 4 * hidden_size),
        activation=read_activation(fields, "activation_function", "gelu_new"),
        is_gated=False,
        has_bias=True,
    )
    return ModelConfig(
        **read_common(architecture, fields, heads, hidden="n_embd"),
        max_positions=fields.count("n_positions", 2048),
        norm=layer_norm(fields, "layer_norm_epsilon"),
        layers=(LayerConfig(mlp),) * read_num_layers(fields, "n_layer"),
        tied_embeddings=False,
        ropes=(RopeConfig(10000.0, rotated_share=share),),
        rotates_neighbours=True,
        residual="parallel",
        head_bias=True,
        names=_NAMES,
        ignored=MASKS,
    )


ARCHITECTURES: dict[str, Callable[[str, Fields], ModelConfig]] = {"GPTJForCausalLM": _gptj}
