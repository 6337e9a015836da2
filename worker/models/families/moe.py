"""Decoders of Llama's kind with experts in place of MLPs: Mixtral, Qwen2-MoE, Qwen3-MoE."""

from collections.abc import Callable
from dataclasses import replace

from octavo.worker.errors import ModelConfigError
from octavo.worker.models.description import (
    ExpertsConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    TensorNames,
)
from octavo.worker.models.families.common import FULL, read_activation, read_num_layers, read_window, refuse_true
from octavo.worker.models.families.llama import llama_like
from octavo.worker.models.fields import Fields

_MIXTRAL_THETA, _MIXTRAL_EPS = 1_000_000.0, 1e-5
"""Of a Mixtral config without rope_theta, without rms_norm_eps."""

_QWEN_WINDOW = 4096
"""Of a Qwen3-MoE config without sliding_window."""

_MOST_EXPERTS = 2**12

_MIXTRAL_NAMES = TensorNames(
    router="block_sparse_moe.gate", expert="block_sparse_moe.experts.{}", expert_up=("w1", "w3"), expert_down="w2"
)


def _mixtral(architecture: str, fields: Fields) -> ModelConfig:
    layer = LayerConfig(_experts(fields, "intermediate_size", renormalize=True), read_window(fields, None), rope=0)
    layers = (layer,) * read_num_layers(fields)
    config = llama_like(architecture, fields, layers, theta=_MIXTRAL_THETA)
    norm = NormConfig("rms", fields.number("rms_norm_eps", _MIXTRAL_EPS, above=0.0))
    return replace(config, norm=norm, names=_MIXTRAL_NAMES)


def _qwen2_moe(architecture: str, fields: Fields) -> ModelConfig:
    refuse_true(fields, "use_sliding_window")
    fields.choices("layer_types", read_num_layers(fields), (FULL,))
    experts = _experts(fields, "moe_intermediate_size", renormalize=fields.flag("norm_topk_prob", False))
    shared = MlpConfig(fields.count("shared_expert_intermediate_size"), experts.activation)
    layers = _qwen_layers(fields, replace(experts, shared=shared), window=0)
    config = llama_like(architecture, fields, layers)
    return replace(config, qkv_bias=fields.flag("qkv_bias", True))


def _qwen3_moe(architecture: str, fields: Fields) -> ModelConfig:
    experts = _experts(fields, "moe_intermediate_size", renormalize=fields.flag("norm_topk_prob", False))
    window = read_window(fields, _QWEN_WINDOW) if fields.flag("use_sliding_window", False) else 0
    config = llama_like(architecture, fields, _qwen_layers(fields, experts, window))
    bias = fields.flag("attention_bias", False)
    return replace(config, qk_norm=config.norm, qkv_bias=bias, output_bias=bias)


def _experts(fields: Fields, size: str, *, renormalize: bool) -> ExpertsConfig:
    # transformers 5 writes num_local_experts where files on the hub have num_experts.
    name = "num_local_experts" if fields.has("num_local_experts") else "num_experts"
    num_experts, top_k = fields.count(name), fields.count("num_experts_per_tok")
    if num_experts > _MOST_EXPERTS:  # each has tensors of its own
        raise fields.refusal(name, num_experts, f"expected at most {_MOST_EXPERTS}")
    if top_k > num_experts:
        raise ModelConfigError(f"num_experts_per_tok = {top_k} is above {name} = {num_experts}")
    return ExpertsConfig(
        num_experts, top_k, fields.count(size), renormalize, read_activation(fields, "hidden_act", "silu")
    )


def _qwen_layers(fields: Fields, experts: ExpertsConfig, window: int) -> tuple[LayerConfig, ...]:
    """Every decoder_sparse_step-th layer has experts, but for those of mlp_only_layers."""
    step, dense = fields.count("decoder_sparse_step", 1), fields.raw("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(isinstance(place, int) and place >= 0 for place in dense):
        raise fields.refusal("mlp_only_layers", dense, "expected a list of layers")
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(read_num_layers(fields))]
    mlp = experts if all(sparse) else MlpConfig(fields.count("intermediate_size"), experts.activation)
    return tuple(LayerConfig(experts if is_sparse else mlp, window, rope=0) for is_sparse in sparse)


ARCHITECTURES: dict[str, Callable[[str, Fields], ModelConfig]] = {
    "MixtralForCausalLM": _mixtral,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
