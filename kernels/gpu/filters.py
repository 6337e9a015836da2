"""Min-p, top-k and top-p without sorting the vocabulary and without a host synchronisation.

Three kernels: the greatest logit and the mass of every group of ids, over chunks of the vocabulary; one program a row
that finds the last id to keep (``octavo.kernels.gpu.sampling_search``), reading only groups that may hold it; and the
masking, over chunks again, which reads only groups that hold something to keep. Rows without filters end at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu.sampling import GROUP, finite_or_inf, is_drawn
from octavo.kernels.gpu.sampling_search import (
    BUFFER,
    CAPACITY,
    MAX_VOCABULARY,
    bracket,
    last_place,
    list_groups,
    nearly_kth,
    ordered,
    place_of_value,
)

_GROUPS_A_PROGRAM = 32
_TILE = 32  # groups that are looked through at a time
_LENGTH = 2048  # logits that a pass of the search reads at a time, twice
_GROUP = tl.constexpr(GROUP)
_CAPACITY = tl.constexpr(CAPACITY)
_BUFFER = tl.constexpr(BUFFER)
_ID_BITS = tl.constexpr(24)
_ID_MASK = tl.constexpr(MAX_VOCABULARY - 1)
_KEEP_ALL = tl.constexpr(-9223372036854775808)
_MASKED_KEY = tl.constexpr(-2139095041)
_LOG2_E = tl.constexpr(1.4426950408889634)
_IDS_A_GROUP = tl.constexpr(16)  # guess of how many ids of a listed group matter to top-p


@triton.jit
def _is_filtered(temperature, min_p, top_k, top_p, vocabulary):
    return is_drawn(temperature) & ((min_p > 0.0) | ((top_k > 0) & (top_k < vocabulary)) | (top_p < 1.0))


@triton.jit(do_not_specialize_on_alignment=["temperature", "min_p", "top_k", "top_p"])
def _group_stats_kernel(
    logits,
    maxima,
    masses,
    temperature,
    min_p,
    top_k,
    top_p,
    logits_stride,
    vocabulary,
    num_groups,
    GROUPS: tl.constexpr,
):
    """Greatest logit m (+inf with NaN or +inf among them) and ``sum exp((logit - m) / temperature)`` of each group."""
    row = tl.program_id(0).to(tl.int64)
    row_temperature = tl.load(temperature + row)
    if _is_filtered(row_temperature, tl.load(min_p + row), tl.load(top_k + row), tl.load(top_p + row), vocabulary):
        groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        ids = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        values = tl.load(logits + row * logits_stride + ids, mask=ids < vocabulary, other=float("-inf"))
        greatest = tl.max(finite_or_inf(values), axis=1)
        shift = tl.where(greatest > float("-inf"), greatest, 0.0)
        mass = tl.sum(tl.exp2((values - shift[:, None]) * (_LOG2_E / row_temperature)), axis=1)
        tl.store(maxima + row * num_groups + groups, greatest, mask=groups < num_groups)
        tl.store(masses + row * num_groups + groups, mass, mask=groups < num_groups)


@triton.jit
def _row_cut(
    row_logits,
    maxima,
    masses,
    listed,
    near,
    counter,
    temperature,
    min_p,
    top_k,
    top_p,
    vocabulary,
    num_groups,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """The place of the last id that stays, int64; ``_KEEP_ALL`` where the row has NaN, +inf or no id left."""
    groups = tl.arange(0, GROUPS)
    greatest = tl.load(maxima + groups, mask=groups < num_groups, other=float("-inf"))
    top = tl.max(greatest, axis=0)
    cut = top_k * 0 + _KEEP_ALL
    if (top > float("-inf")) & (top < float("inf")):
        scale = _LOG2_E / temperature
        end = ordered(top).to(tl.int64) + 1
        everything = top_k * 0 + ((_MASKED_KEY + 1) << _ID_BITS)
        cut = everything
        if min_p > 0.0:
            # p >= min_p * p_max, as a threshold on unscaled logits.
            threshold = top.to(tl.float64) + temperature.to(tl.float64) * tl.log(min_p.to(tl.float64))
            cut = tl.maximum(cut, place_of_value(threshold))
        has_top_k = (top_k > 0) & (top_k < vocabulary)
        lo = cut >> _ID_BITS
        total = top.to(tl.float64) * 0.0 - 1.0
        if has_top_k:
            if top_k <= num_groups:
                # As many ids as there are groups at or above it are at or above a group's greatest.
                kth = nearly_kth(ordered(greatest), groups, num_groups, top_k.to(tl.int32), end, scale)
                lo = tl.maximum(lo, kth)
        else:
            if cut == everything:
                # Ids below this are too unlikely, all together, to be needed for top_p.
                mass = tl.load(masses + groups, mask=groups < num_groups, other=0.0).to(tl.float64)
                total = tl.sum(mass * tl.exp2((greatest - top) * scale).to(tl.float64), axis=0)
                depth = tl.log(vocabulary / ((1.0 - top_p.to(tl.float64)) * total)) + 0.1
                threshold = top.to(tl.float64) - temperature.to(tl.float64) * depth
                if top_p < 1.0:
                    lo = tl.maximum(lo, place_of_value(threshold) >> _ID_BITS)
        num_listed = list_groups(greatest, groups, lo.to(tl.int32), listed)

        is_complete = num_listed < 0  # the buffer holds all that is left
        number = num_listed * 0
        if has_top_k:
            target = top_k.to(tl.float64)
            guess = tl.where(top_k <= num_groups, num_listed, _CAPACITY + 1)
            lo, hi, above, number, target = bracket(
                row_logits, listed, num_listed, vocabulary, cut, near, counter, lo, end, guess, target, target, top, scale,
                True, TILE, LENGTH,
            )  # fmt: skip
            place = last_place(
                row_logits, vocabulary, cut, near, lo, hi, above, number, target, target, top, temperature,
                True, LENGTH,
            )  # fmt: skip
            is_complete = (hi == end) & (number <= _CAPACITY)
            cut = tl.maximum(cut, place)
            lo = cut >> _ID_BITS
        if top_p < 1.0:
            share = top_p.to(tl.float64)
            target = tl.where(total < 0, total, share * total)
            hi = end
            above = total * 0.0
            if not is_complete:
                guess = num_listed * _IDS_A_GROUP
                lo, hi, above, number, target = bracket(
                    row_logits, listed, num_listed, vocabulary, cut, near, counter, lo, end, guess, target, share, top, scale,
                    False, TILE, LENGTH,
                )  # fmt: skip
            place = last_place(
                row_logits, vocabulary, cut, near, lo, hi, above, number, target, share, top, temperature,
                False, LENGTH,
            )  # fmt: skip
            cut = tl.maximum(cut, place)
    return cut


@triton.jit(do_not_specialize_on_alignment=["temperature", "min_p", "top_k", "top_p"])
def _cut_kernel(
    logits,
    maxima,
    masses,
    cuts,
    listed,
    near,
    counters,
    temperature,
    min_p,
    top_k,
    top_p,
    logits_stride,
    vocabulary,
    num_groups,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """One program a row; ``GROUPS`` is the number of groups, rounded up to a power of two."""
    row = tl.program_id(0).to(tl.int64)
    row_temperature, row_min_p, row_top_p = tl.load(temperature + row), tl.load(min_p + row), tl.load(top_p + row)
    row_top_k = tl.load(top_k + row).to(tl.int64)
    cut = row_top_k * 0 + _KEEP_ALL
    if _is_filtered(row_temperature, row_min_p, row_top_k, row_top_p, vocabulary):
        cut = _row_cut(
            logits + row * logits_stride,
            maxima + row * num_groups,
            masses + row * num_groups,
            listed + row * num_groups,
            near + row * _BUFFER,
            counters + row,
            row_temperature,
            row_min_p,
            row_top_k,
            row_top_p,
            vocabulary,
            num_groups,
            GROUPS,
            TILE,
            LENGTH,
        )
    tl.store(cuts + row, cut)


@triton.jit
def _mask_kernel(logits, maxima, cuts, logits_stride, vocabulary, num_groups, GROUPS: tl.constexpr):
    """Set to -inf what comes after each row's cut; groups without anything to keep are not read."""
    row = tl.program_id(0).to(tl.int64)
    cut = tl.load(cuts + row)
    if cut != _KEEP_ALL:
        cut_key, cut_id = (cut >> _ID_BITS).to(tl.int32), _ID_MASK - (cut & _ID_MASK).to(tl.int32)
        groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        greatest = tl.load(maxima + row * num_groups + groups, mask=groups < num_groups, other=float("-inf"))
        ids = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        inside = ids < vocabulary
        place = logits + row * logits_stride + ids
        values = tl.load(place, mask=inside & (ordered(greatest) >= cut_key)[:, None], other=float("-inf"))
        keys = ordered(values)
        is_kept = (keys > cut_key) | ((keys == cut_key) & (ids <= cut_id))
        tl.store(place, tl.full(ids.shape, float("-inf"), tl.float32), mask=inside & ~is_kept)


def filter_logits(logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Set to -inf what min-p, then top-k, then top-p leave out, judged at the row's temperature. In place.

    logits [S, V] fp32 stay unscaled (``sample`` divides by the temperature); rows are contiguous, any distance apart.
    temperature, min_p (0 is off), top_p (1 is off) are [S] fp32, top_k [S] integer (0 or below is off). min-p keeps the
    ids whose probability is at least min_p times the greatest. top-k keeps exactly k, of equal ones those with lower
    ids. top-p keeps the smallest set, from the most likely down, whose mass within what is left reaches top_p: at least
    one id, of equal ones those with lower ids. Greedy rows, rows with all filters off, and rows with NaN, +inf or no id
    left stay as they are.

    The sets are those of ``octavo.kernels.sampling.filter_logits`` up to the rounding of sums. min-p and top-k sets are
    the same. In a top-p set the last id may differ where the mass up to an id equals top_p within 1e-10 of the whole if
    no more than ``CAPACITY`` ids are left before it (a top-k up to that, say), and within about 1e-6 otherwise: masses of
    a whole vocabulary are summed in fp32 over parts of it. A row's set depends on that row alone.

    Raises:
        ValueError: logits are not fp32, their rows are not contiguous, or V exceeds 2^24.
    """
    rows, vocabulary = logits.shape
    if logits.dtype != torch.float32 or (vocabulary > 1 and logits.stride(1) != 1) or vocabulary > MAX_VOCABULARY:
        raise ValueError(f"filters take contiguous rows of at most {MAX_VOCABULARY} fp32 logits")
    if rows == 0:
        return
    device, num_groups = logits.device, triton.cdiv(vocabulary, GROUP)
    # Two allocations: halves of one would be aligned differently for different numbers of rows.
    maxima = torch.empty(rows, num_groups, dtype=torch.float32, device=device)
    masses = torch.empty(rows, num_groups, dtype=torch.float32, device=device)
    listed = torch.empty(rows, num_groups, dtype=torch.int32, device=device)
    cuts = torch.empty(rows, dtype=torch.int64, device=device)
    near = torch.empty(rows, BUFFER, dtype=torch.int64, device=device)
    counters = torch.empty(rows, dtype=torch.int32, device=device)
    parameters = (temperature, min_p, top_k, top_p, logits.stride(0), vocabulary, num_groups)
    chunks = (rows, triton.cdiv(num_groups, _GROUPS_A_PROGRAM))
    _group_stats_kernel[chunks](logits, maxima, masses, *parameters, GROUPS=_GROUPS_A_PROGRAM, num_warps=8)
    _cut_kernel[(rows,)](
        logits,
        maxima,
        masses,
        cuts,
        listed,
        near,
        counters,
        *parameters,
        GROUPS=triton.next_power_of_2(num_groups),
        TILE=_TILE,
        LENGTH=_LENGTH,
        num_warps=16,
    )
    _mask_kernel[chunks](
        logits, maxima, cuts, logits.stride(0), vocabulary, num_groups, GROUPS=_GROUPS_A_PROGRAM, num_warps=8
    )
