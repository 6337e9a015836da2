"""Llama and what is built like it: Qwen2, Qwen3."""

from collections.abc import Callable

from octavo.worker.errors import ModelConfigError
from octavo.worker.models.description import LayerConfig, MlpConfig, ModelConfig, NormConfig
from octavo.worker.models.families.common import ROTARY_TABLES, read_dtype, read_heads
from octavo.worker.models.fields import Fields
from octavo.worker.models.rope_config import given_rope, parse_rope

_QWEN3_HEAD_SIZE = 128
"""Of a Qwen3 config without head_dim: transformers' default, which does not follow from hidden_size."""


def _llama(architecture: str, fields: Fields) -> ModelConfig:
    qwen2, qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
    _refuse_unsupported(fields)
    heads = read_heads(fields, _QWEN3_HEAD_SIZE if qwen3 else None)
    norm = NormConfig("rms", fields.number("rms_norm_eps", 1e-6, above=0.0))
    attention_bias = fields.flag("attention_bias", qwen2)
    mlp = MlpConfig(
        size=fields.count("intermediate_size"), has_bias=fields.flag("mlp_bias", False) and not (qwen2 or qwen3)
    )
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_size,
        max_positions=fields.count("max_position_embeddings"),
        norm=norm,
        layers=(LayerConfig(mlp),) * fields.count("num_hidden_layers"),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=read_dtype(fields),
        ropes=(parse_rope(fields, given_rope(fields)),),
        qkv_bias=attention_bias,
        output_bias=attention_bias and not qwen2,
        qk_norm=norm if qwen3 else None,
        ignored=ROTARY_TABLES,
        quantization=fields.raw("quantization_config"),
    )


def _refuse_unsupported(fields: Fields) -> None:
    fields.choice("hidden_act", "silu", ("silu",))
    if fields.has("partial_rotary_factor") and fields.raw("partial_rotary_factor") != 1.0:
        raise ModelConfigError("partial_rotary_factor is not supported")
    if given_rope(fields).has("partial_rotary_factor") and given_rope(fields).raw("partial_rotary_factor") != 1.0:
        raise ModelConfigError("partial_rotary_factor is not supported")
    if fields.flag("use_sliding_window", False):
        raise ModelConfigError("use_sliding_window = true is not supported; only full attention is")
    fields.choices("layer_types", 0, ("full_attention",))


ARCHITECTURES: dict[str, Callable[[str, Fields], ModelConfig]] = dict.fromkeys(
    ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"), _llama
)
