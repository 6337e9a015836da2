"""OPT: learned positions that begin with the third line of their table, ReLU."""

from collections.abc import Callable

from octavo.worker.errors import ModelConfigError
from octavo.worker.models.description import (
    LayerConfig,
    LearnedPositions,
    MlpConfig,
    ModelConfig,
    NormConfig,
    TensorNames,
)
from octavo.worker.models.families.common import equal_heads, read_activation, read_dtype
from octavo.worker.models.fields import Fields

_OFFSET = 2
_NAMES = TensorNames(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    layer="model.decoder.layers.{}",
    final_norm="model.decoder.final_layer_norm",
    input_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    output="self_attn.out_proj",
    up=("fc1",),
    down="fc2",
    optional_prefix="model.",
)


def _opt(architecture: str, fields: Fields) -> ModelConfig:
    heads = equal_heads(fields, rotates=False)
    hidden_size, num_positions = fields.count("hidden_size"), fields.count("max_position_embeddings", 2048)
    _refuse_unsupported(fields, hidden_size)
    has_bias = fields.flag("enable_bias", True)
    mlp = MlpConfig(
        size=fields.count("ffn_dim"),
        activation=read_activation(fields, "activation_function", "relu"),
        is_gated=False,
        has_bias=has_bias,
    )
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_size,
        max_positions=num_positions,
        norm=NormConfig("layer", 1e-5),
        layers=(LayerConfig(mlp, rope=None),) * fields.count("num_hidden_layers"),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        dtype=read_dtype(fields),
        positions=LearnedPositions(num_positions + _OFFSET, _OFFSET),
        qkv_bias=has_bias,
        output_bias=has_bias,
        names=_NAMES,
        quantization=fields.raw("quantization_config"),
    )


def _refuse_unsupported(fields: Fields, hidden_size: int) -> None:
    if not fields.flag("do_layer_norm_before", True):
        raise ModelConfigError("do_layer_norm_before = false is not supported")
    if fields.flag("_remove_final_layer_norm", False):
        raise ModelConfigError("_remove_final_layer_norm = true is not supported")
    if not fields.flag("layer_norm_elementwise_affine", True):
        raise ModelConfigError("layer_norm_elementwise_affine = false is not supported")
    embedded = fields.count("word_embed_proj_dim", hidden_size)
    if embedded != hidden_size:
        raise fields.refusal("word_embed_proj_dim", embedded, f"only hidden_size = {hidden_size} is supported")


ARCHITECTURES: dict[str, Callable[[str, Fields], ModelConfig]] = {"OPTForCausalLM": _opt}
