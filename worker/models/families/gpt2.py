"""GPT-2: learned positions, matrices stored as [inputs, outputs], one for queries, keys and values.

GPT-BigCode (StarCoder 1, SantaCoder) has plain matrices, and may have one KV head.
"""

from collections.abc import Callable

from octavo.worker.models.description import LayerConfig, LearnedPositions, MlpConfig, ModelConfig, TensorNames
from octavo.worker.models.families.common import (
    equal_heads,
    layer_norm,
    read_activation,
    read_common,
    read_num_layers,
    refuse_true,
)
from octavo.worker.models.fields import Fields

NAMES = TensorNames(
    embedding="transformer.wte",
    positions="transformer.wpe",
    layer="transformer.h.{}",
    final_norm="transformer.ln_f",
    input_norm="ln_1",
    mlp_norm="ln_2",
    qkv=("attn.c_attn",),
    output="attn.c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    optional_prefix="transformer.",
)
MASKS = (".attn.bias", ".attn.masked_bias")
"""Which tokens a token sees, as old checkpoints carry it."""


def _gpt2(architecture: str, fields: Fields) -> ModelConfig:
    refuse_true(fields, "scale_attn_by_inverse_layer_idx", "add_cross_attention")
    big_code = architecture == "GPTBigCodeForCausalLM"
    num_kv_heads = 1 if big_code and fields.flag("multi_query", True) else None
    heads = equal_heads(fields, num_kv_heads, hidden="n_embd", heads="n_head", rotates=False)
    hidden_size, num_positions = fields.count("n_embd"), fields.count("n_positions", 1024)
    mlp = MlpConfig(
        size=fields.count("n_inner", 4 * hidden_size),
        activation=read_activation(fields, "activation_function", "gelu_pytorch_tanh" if big_code else "gelu_new"),
        is_gated=False,
        has_bias=True,
    )
    return ModelConfig(
        **read_common(architecture, fields, heads, hidden="n_embd"),
        max_positions=num_positions,
        norm=layer_norm(fields, "layer_norm_epsilon"),
        layers=(LayerConfig(mlp, rope=None),) * read_num_layers(fields, "n_layer"),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        positions=LearnedPositions(num_positions),
        qkv_bias=True,
        output_bias=True,
        qkv_by_group=big_code,
        attention_scale=None if fields.flag("scale_attn_weights", True) else 1.0,
        transposed=not big_code,
        names=NAMES,
        ignored=MASKS,
    )


ARCHITECTURES: dict[str, Callable[[str, Fields], ModelConfig]] = dict.fromkeys(
    ("GPT2LMHeadModel", "GPTBigCodeForCausalLM"), _gpt2
)
