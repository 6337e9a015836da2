"""The fast CPU backend: the operations of ``octavo.kernels.reference``, without its promise about bits."""

from octavo.kernels.cpu.attention import paged_attention
from octavo.kernels.cpu.dense import linear, linear_silu_and_mul, prepare_weight, rms_norm, silu_and_mul
from octavo.kernels.reference import copy_blocks, rotary_and_write_kv, rotary_cos_sin
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
    "apply_allowed",
    "apply_logit_bias",
    "apply_penalties",
    "apply_token_mask",
    "copy_blocks",
    "filter_logits",
    "first_nonfinite",
    "linear",
    "linear_silu_and_mul",
    "logprobs",
    "paged_attention",
    "prepare_weight",
    "rms_norm",
    "rotary_and_write_kv",
    "rotary_cos_sin",
    "sample",
    "silu_and_mul",
]
