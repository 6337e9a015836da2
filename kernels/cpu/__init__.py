"""The fast CPU backend: the operations of ``octavo.kernels.reference``, without its promise about bits."""

from octavo.kernels.cpu.attention import paged_attention
from octavo.kernels.cpu.dense import (
    act,
    act_and_mul,
    layer_norm,
    linear,
    linear_act_and_mul,
    prepare_weight,
    soft_cap,
)
from octavo.kernels.cpu.experts import experts, prepare_experts
from octavo.kernels.cpu.pointwise import rms_norm, rotary_and_write_kv
from octavo.kernels.experts import route
from octavo.kernels.reference import copy_blocks, rotary_cos_sin
from octavo.kernels.sampling import (
    apply_allowed,
    apply_logit_bias,
    apply_penalties,
    apply_token_mask,
    filter_logits,
    first_nonfinite,
    logprobs,
    sample,
)

__all__ = [
    "act",
    "act_and_mul",
    "apply_allowed",
    "apply_logit_bias",
    "apply_penalties",
    "apply_token_mask",
    "copy_blocks",
    "experts",
    "filter_logits",
    "first_nonfinite",
    "layer_norm",
    "linear",
    "linear_act_and_mul",
    "logprobs",
    "paged_attention",
    "prepare_experts",
    "prepare_weight",
    "rms_norm",
    "rotary_and_write_kv",
    "rotary_cos_sin",
    "route",
    "sample",
    "soft_cap",
]
