"""The GPU backend: Triton kernels for the operations of ``octavo.kernels.reference``, one file an operation."""

from octavo.kernels.gpu.activation import silu_and_mul
from octavo.kernels.gpu.attention import paged_attention
from octavo.kernels.gpu.copy import copy_blocks
from octavo.kernels.gpu.norm import rms_norm
from octavo.kernels.gpu.rotary import rotary_and_write_kv
from octavo.kernels.gpu.sampling import first_nonfinite, sample
from octavo.kernels.reference import prepare_weight, rotary_cos_sin
from octavo.kernels.sampling import (
    apply_allowed,
    apply_logit_bias,
    apply_penalties,
    filter_logits,
    logprobs,
)
from torch.nn.functional import linear

__all__ = [
    "apply_allowed",
    "apply_logit_bias",
    "apply_penalties",
    "copy_blocks",
    "filter_logits",
    "first_nonfinite",
    "linear",
    "logprobs",
    "paged_attention",
    "prepare_weight",
    "rms_norm",
    "rotary_and_write_kv",
    "rotary_cos_sin",
    "sample",
    "silu_and_mul",
]
