"""The operations of ``octavo.kernels.gpu`` such that the bits of a row do not depend on the rest of the step.

A row's logits are the same alone and beside any others, whole, in chunks or computed again, as a prompt or token by token.
What that takes:

- ``linear`` adds each output up in one order, in tiles of one shape (``octavo.kernels.gpu.matmul``), also where weights
  are quantised; their inputs never are;
- experts' products run in tiles of one shape, and always on sorted pairs of a token and an expert;
- attention runs in one kernel for all rows, which goes through a row's keys in tiles that begin with its first one; a
  key that a query does not see adds exact zeros to its sums;
- all else works on one token, or one line of the logits, at a time, in programs that are alike for any number of them.
  The operations on logits are those that are Triton kernels: PyTorch's reductions choose their order by the number of
  lines.
"""

import torch
from torch import Tensor

from octavo.kernels.activations import Activation
from octavo.kernels.gpu import attention
from octavo.kernels.gpu.activation import act, act_and_mul, soft_cap
from octavo.kernels.gpu.copy import copy_blocks
from octavo.kernels.gpu.experts import Shape, Tile, prepare_experts, run_experts
from octavo.kernels.gpu.filters import filter_logits
from octavo.kernels.gpu.linear import prepare_weight
from octavo.kernels.gpu.logprobs import logprobs
from octavo.kernels.gpu.matmul import linear, linear_act_and_mul
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

_EXPERTS = Shape(Tile(64, 128, 64, 4, 4), Tile(64, 128, 64, 4, 4))
"""Of half precision, for few tokens and for many."""

_FLOAT32_EXPERTS = Shape(Tile(16, 32, 32, 4, 2), Tile(16, 32, 32, 4, 2))


def experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation = "silu",
) -> Tensor:
    """Do what ``octavo.kernels.gpu.experts`` does: a pair's sums are one chain each, wherever in a tile the pair is."""
    shape = _FLOAT32_EXPERTS if gate_up.dtype is torch.float32 else _EXPERTS
    return run_experts(x, expert_ids, expert_weights, gate_up, down, activation, shape)


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    num_decodes: int = 0,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Attend as ``octavo.kernels.gpu.paged_attention`` does, rows with one query in the same way as all others.

    ``num_decodes`` is not looked at. The kernel for rows with one query would share out a row's
    keys by the lengths of all rows.
    """
    return attention.paged_attention(
        q,
        key_cache,
        value_cache,
        block_tables,
        query_start,
        seq_lens,
        scale,
        num_decodes=0,
        window=window,
        softcap=softcap,
    )
