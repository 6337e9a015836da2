"""The GPU backend: Triton kernels for the operations of ``octavo.kernels.reference``, one file an operation."""

from octavo.kernels.gpu.activation import act, act_and_mul, soft_cap
from octavo.kernels.gpu.attention import paged_attention
from octavo.kernels.gpu.copy import copy_blocks
from octavo.kernels.gpu.experts import experts, prepare_experts
from octavo.kernels.gpu.filters import filter_logits
from octavo.kernels.gpu.linear import linear, linear_act_and_mul, prepare_weight
from octavo.kernels.gpu.logprobs import logprobs
from octavo.kernels.gpu.norm import layer_norm, rms_norm
from octavo.kernels.gpu.penalties import apply_penalties
from octavo.kernels.gpu.rotary import rotary_and_write_kv
from octavo.kernels.gpu.routing import route
from octavo.kernels.gpu.sampling import first_nonfinite, sample
from octavo.kernels.gpu.sampling_masks import apply_allowed, apply_logit_bias, apply_token_mask
from octavo.kernels.reference import rotary_cos_sin

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
