"""Which experts a token goes to, and which tokens an expert gets: both without a word to the host, so that graphs hold them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu.launch import overlaps, wait_for_inputs

_PAIRS = 1024
"""Pairs that a program of the sort looks at in a turn."""


@triton.jit
def _route_kernel(
    logits,
    ids,
    weights,
    stride,
    num_experts,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One token a program; EXPERTS and SLOTS are the powers of two from num_experts and TOP_K on."""
    token = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    inside = expert < num_experts
    wait_for_inputs(OVERLAP)
    raw = tl.load(logits + token * stride + expert, inside, other=float("-inf")).to(tl.float32)
    is_bad = raw != raw
    key = tl.where(is_bad, float("-inf"), raw)
    masses = tl.exp(raw - tl.max(key))
    # One integer for both, logit and id: its order is that of the logits, and of equal ones the lower id is higher.
    bits = tl.where(key == 0.0, 0.0, key).to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    rank = tl.where(inside, ordered * EXPERTS + (EXPERTS - 1 - expert), -(1 << 62))
    chosen_ids = tl.zeros([SLOTS], tl.int32)
    chosen_masses = tl.zeros([SLOTS], tl.float32)
    for place in tl.static_range(TOP_K):
        chosen = EXPERTS - 1 - (tl.max(rank) & (EXPERTS - 1)).to(tl.int32)
        mass = tl.sum(tl.where(expert == chosen, masses, 0.0))
        chosen_ids = tl.where(slot == place, chosen, chosen_ids)
        chosen_masses = tl.where(slot == place, mass, chosen_masses)
        rank = tl.where(expert == chosen, -(1 << 62), rank)
    total = tl.sum(chosen_masses) if RENORMALIZE else tl.sum(masses)
    total = tl.where(tl.sum(is_bad.to(tl.int32)) > 0, float("nan"), total)
    place = token * TOP_K + slot
    tl.store(ids + place, chosen_ids, slot < TOP_K)
    tl.store(weights + place, chosen_masses / total, slot < TOP_K)


def route(logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Choose experts: logits [T, E] -> ids [T, top_k] int32 and weights [T, top_k] fp32.

    A token's result depends on its logits alone. The reference is ``octavo.kernels.experts.route``.
    """
    num_tokens, num_experts = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    if num_tokens:
        overlap = overlaps(logits)
        _route_kernel[(num_tokens,)](
            logits,
            ids,
            weights,
            logits.stride(0),
            num_experts,
            TOP_K=top_k,
            RENORMALIZE=renormalize,
            EXPERTS=triton.next_power_of_2(num_experts),
            SLOTS=triton.next_power_of_2(top_k),
            OVERLAP=overlap,
            num_warps=1,
            launch_pdl=overlap,
        )
    return ids, weights


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_kernel(ids, pairs, starts, num_pairs, num_experts, PAIRS: tl.constexpr, OVERLAP: tl.constexpr):
    """Program e finds the pairs of expert e, and where they begin by counting those of lower experts."""
    expert = tl.program_id(0)
    lane = tl.arange(0, PAIRS)
    wait_for_inputs(OVERLAP)
    lower = tl.zeros([PAIRS], tl.int32)
    for first in range(0, num_pairs, PAIRS):
        found = tl.load(ids + first + lane, lane < num_pairs - first, other=num_experts)
        lower += (found < expert).to(tl.int32)
    begin = tl.sum(lower)
    end = begin
    for first in range(0, num_pairs, PAIRS):
        found = tl.load(ids + first + lane, lane < num_pairs - first, other=num_experts)
        mine = (found == expert).to(tl.int32)
        tl.store(pairs + end + tl.cumsum(mine) - mine, first + lane, mine > 0)
        end += tl.sum(mine)
    tl.store(starts + expert, begin)
    if expert == num_experts - 1:
        tl.store(starts + num_experts, end)


def sort_pairs(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort the pairs of a token and one of its experts by expert; pair ``t * k + j`` is token t and its j-th expert.

    expert_ids [T, k] int32, contiguous -> pairs [T * k] int32, those of an expert in ascending order, and starts
    [num_experts + 1] int32: expert e has the pairs ``pairs[starts[e] : starts[e + 1]]``.
    """
    pairs = torch.empty(expert_ids.numel(), dtype=torch.int32, device=expert_ids.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=expert_ids.device)
    overlap = overlaps(expert_ids)
    _sort_kernel[(num_experts,)](
        expert_ids,
        pairs,
        starts,
        expert_ids.numel(),
        num_experts,
        PAIRS=_PAIRS,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return pairs, starts
