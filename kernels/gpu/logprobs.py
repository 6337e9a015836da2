"""Log-probabilities, ranks and the most likely ids of raw logits, without a host synchronisation.

The k most likely ids lie in the k groups of ids that come first by (greatest logit descending, group ascending), so
only these are looked through.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu.sampling import GROUP, finite_or_inf
from octavo.kernels.gpu.sampling_search import MAX_VOCABULARY, ordered, place_of

_GROUPS_A_PROGRAM = 16
_GROUP = tl.constexpr(GROUP)
_LOG2_E = tl.constexpr(1.4426950408889634)
_NO_PLACE = tl.constexpr(-9223372036854775808)


@triton.jit
def _chosen_logit(row_logits, chosen, vocabulary):
    """The logit of the chosen id; -inf for none (-1)."""
    exists = (chosen >= 0) & (chosen < vocabulary)
    return tl.load(row_logits + chosen, mask=exists, other=float("-inf")).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["ids"])
def _group_stats_kernel(
    logits, ids, maxima, masses, numbers, logits_stride, vocabulary, num_groups, GROUPS: tl.constexpr
):
    """Of each group: greatest logit m, ``sum exp(logit - m)``, and the number of logits above the chosen one."""
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * logits_stride
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    places = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    values = tl.load(row_logits + places, mask=places < vocabulary, other=float("-inf")).to(tl.float32)
    greatest = tl.max(finite_or_inf(values), axis=1)
    shift = tl.where(greatest > float("-inf"), greatest, 0.0)
    mass = tl.sum(tl.exp2((values - shift[:, None]) * _LOG2_E), axis=1)
    number = tl.sum((values > _chosen_logit(row_logits, tl.load(ids + row), vocabulary)).to(tl.int32), axis=1)
    inside = groups < num_groups
    tl.store(maxima + row * num_groups + groups, greatest, mask=inside)
    tl.store(masses + row * num_groups + groups, mass, mask=inside)
    tl.store(numbers + row * num_groups + groups, number, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["ids"])
def _row_kernel(
    logits,
    ids,
    maxima,
    masses,
    numbers,
    logprob,
    rank,
    norms,
    orders,
    logits_stride,
    vocabulary,
    num_groups,
    GROUPS: tl.constexpr,
):
    """One program a row: log-probability and rank of the chosen id, ``logsumexp`` fp64, the groups' places in order."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    inside = groups < num_groups
    greatest = tl.load(maxima + row * num_groups + groups, mask=inside, other=float("-inf"))
    mass = tl.load(masses + row * num_groups + groups, mask=inside, other=0.0)
    number = tl.load(numbers + row * num_groups + groups, mask=inside, other=0)
    top = tl.max(greatest, axis=0)
    total = tl.sum((mass * tl.exp2((greatest - top) * _LOG2_E)).to(tl.float64), axis=0)
    norm = top.to(tl.float64) + tl.log(total)
    chosen = _chosen_logit(logits + row * logits_stride, tl.load(ids + row), vocabulary)
    tl.store(logprob + row, (chosen.to(tl.float64) - norm).to(tl.float32))
    tl.store(rank + row, tl.sum(number, axis=0).to(tl.int64) + 1)
    tl.store(norms + row, norm)
    tl.store(orders + row * num_groups + groups, place_of(ordered(greatest), groups), mask=inside)


@triton.jit(do_not_specialize=["num_chosen"])
def _candidates_kernel(logits, order, candidates, logits_stride, vocabulary, num_chosen, ID_MASK: tl.constexpr):
    """Places of the ids of one chosen group."""
    row, index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = ID_MASK - (tl.load(order + row * num_chosen + index) & ID_MASK).to(tl.int32)
    lane = tl.arange(0, _GROUP)
    ids = group * _GROUP + lane
    inside = ids < vocabulary
    values = tl.load(logits + row * logits_stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    # A row with NaN is at fault and reported elsewhere; here it must only not disturb its neighbours.
    values = tl.where(values == values, values, float("-inf"))
    places = tl.where(inside, place_of(ordered(values), ids), _NO_PLACE)
    tl.store(candidates + (row * num_chosen + index) * _GROUP + lane, places)


def logprobs(raw_logits: Tensor, ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of chosen ids and of the most likely ones, from raw logits [S, V] fp32, bf16 or fp16.

    ids [S] int64, ``top`` >= 0 (at most V are returned). Returns ``logprob`` [S] fp32, ``rank`` [S] int64 (1 + the
    number of strictly greater logits), ``top_ids`` [S, k] int64 and ``top_logprobs`` [S, k] fp32 with k = min(top, V),
    sorted by log-probability descending, then id ascending. An id of -1 (nothing was drawn) has log-probability -inf
    or NaN. Rows are contiguous, any distance apart.

    Raises:
        ValueError: a row is not contiguous, or V exceeds 2^24.
    """
    rows, vocabulary = raw_logits.shape
    if (vocabulary > 1 and raw_logits.stride(1) != 1) or vocabulary > MAX_VOCABULARY:
        raise ValueError(f"log-probabilities are taken of contiguous rows of at most {MAX_VOCABULARY} logits")
    k = min(top, vocabulary)
    device, stride, num_groups = raw_logits.device, raw_logits.stride(0), triton.cdiv(vocabulary, GROUP)
    logprob = torch.empty(rows, dtype=torch.float32, device=device)
    rank = torch.empty(rows, dtype=torch.int64, device=device)
    top_ids = torch.empty(rows, k, dtype=torch.int64, device=device)
    if rows == 0:
        return logprob, rank, top_ids, logprob.new_empty(rows, k)
    # Two allocations: halves of one would be aligned differently for different numbers of rows.
    maxima = torch.empty(rows, num_groups, dtype=torch.float32, device=device)
    masses = torch.empty(rows, num_groups, dtype=torch.float32, device=device)
    numbers = torch.empty(rows, num_groups, dtype=torch.int32, device=device)
    orders = torch.empty(rows, num_groups, dtype=torch.int64, device=device)
    norms = torch.empty(rows, dtype=torch.float64, device=device)
    sizes = (stride, vocabulary, num_groups)
    _group_stats_kernel[(rows, triton.cdiv(num_groups, _GROUPS_A_PROGRAM))](
        raw_logits, ids, maxima, masses, numbers, *sizes, GROUPS=_GROUPS_A_PROGRAM, num_warps=4
    )
    _row_kernel[(rows,)](
        raw_logits,
        ids,
        maxima,
        masses,
        numbers,
        logprob,
        rank,
        norms,
        orders,
        *sizes,
        GROUPS=triton.next_power_of_2(num_groups),
        num_warps=4,
    )
    if k == 0:
        return logprob, rank, top_ids, logprob.new_empty(rows, 0)
    num_chosen = min(k, num_groups)
    order = orders.topk(num_chosen, dim=-1).values
    candidates = torch.empty(rows, num_chosen * GROUP, dtype=torch.int64, device=device)
    _candidates_kernel[(rows, num_chosen)](
        raw_logits, order, candidates, stride, vocabulary, num_chosen, ID_MASK=MAX_VOCABULARY - 1, num_warps=2
    )
    mask = MAX_VOCABULARY - 1
    top_ids = mask - (candidates.topk(k, dim=-1, sorted=True).values & mask)
    top_logprobs = (raw_logits.gather(1, top_ids).double() - norms[:, None]).float()
    return logprob, rank, top_ids, top_logprobs
