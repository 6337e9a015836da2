"""Sampling: the winner of ``octavo.kernels.sampling.sample``, found without a host synchronisation.

Two kernels. The first runs over chunks of the vocabulary and keeps the greatest near score (fp32) of every ``GROUP``
ids. The second, one program a row, computes exact scores (fp64) only in groups whose greatest is so near the best that
the winner may be there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu.launch import overlaps, wait_for_inputs
from octavo.kernels.gpu.philox import NEAR_NOISE_ERROR, gumbel, near_gumbel_bits, philox_words, words_of_ids

GROUP = 256
"""Ids that share one greatest score."""

_GROUPS_A_PROGRAM = 16
_GROUP = tl.constexpr(GROUP)
_GREEDY_BELOW = tl.constexpr(1e-5)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LARGEST = tl.constexpr(3e38)
_MARGIN = tl.constexpr(4 * NEAR_NOISE_ERROR)  # twice the error is needed
# Of the best: four times the rounding of logit / temperature * log2(e).
_RELATIVE_MARGIN = tl.constexpr(2.0**-19)


@triton.jit
def is_drawn(temperature):
    """``temperature >= 1e-5`` as float64 sees it: the fp32 value next to 1e-5 lies below it. False for NaN."""
    return temperature > _GREEDY_BELOW


@triton.jit
def finite_or_inf(values):
    """Replace NaN by +inf, so that a maximum shows both; -inf stays."""
    return tl.where(values < float("inf"), values, float("inf"))


@triton.jit
def _near_greatest(row_logits, groups, vocabulary, temperature, position, choice, seed, GROUPS: tl.constexpr):
    """Greatest ``score / log(2)`` [GROUPS] of each group: +inf with NaN or +inf among them, -inf with nothing left."""
    # Four ids share a call of the generator: [GROUPS, quads, 4].
    quads = groups[:, None] * (_GROUP // 4) + tl.arange(0, _GROUP // 4)[None, :]
    ids = quads[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    values = tl.load(row_logits + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
    w0, w1, w2, w3 = philox_words(quads.to(tl.uint32), position, choice, seed)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(GROUPS, _GROUP // 4, 4)
    scores = values * (_LOG2_E / temperature) + near_gumbel_bits(words)
    greatest = tl.max(tl.max(finite_or_inf(values), axis=2), axis=1)
    best = tl.max(tl.max(finite_or_inf(scores), axis=2), axis=1)
    # Quotients beyond fp32 must not look like faults, nor like ids that are masked.
    best = tl.minimum(tl.maximum(best, -_LARGEST), _LARGEST)
    is_finite = (greatest < float("inf")) & (greatest > float("-inf"))
    return tl.where(is_finite, best, greatest)


@triton.jit(do_not_specialize_on_alignment=["temperature", "seeds", "choice_index", "positions"])
def group_maxima_kernel(
    logits,
    maxima,
    temperature,
    seeds,
    choice_index,
    positions,
    logits_stride,
    vocabulary,
    num_groups,
    GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Programs run over the rows, then over ``GROUPS`` groups each."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    row_logits = logits + row * logits_stride
    wait_for_inputs(OVERLAP)
    row_temperature = tl.load(temperature + row)
    if is_drawn(row_temperature):
        position, choice, seed = tl.load(positions + row), tl.load(choice_index + row), tl.load(seeds + row)
        best = _near_greatest(row_logits, groups, vocabulary, row_temperature, position, choice, seed, GROUPS)
    else:
        ids = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        values = tl.load(row_logits + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
        best = tl.max(finite_or_inf(values), axis=1)
    tl.store(maxima + row * num_groups + groups, best, mask=groups < num_groups)


@triton.jit
def _exact_winner(row_logits, maxima, best, groups, vocabulary, temperature, position, choice, seed):
    """The id with the greatest fp64 score in the groups near the best, the lowest of equal ones."""
    none = 2147483647
    is_near = maxima >= best - (_MARGIN + _RELATIVE_MARGIN * tl.abs(best))
    group = tl.min(tl.where(is_near, groups, none), axis=0)
    # Scalars that a loop carries are tensors from the start.
    score = best.to(tl.float64) * 0.0 - float("inf")
    winner = group * 0 - 1
    while group < none:
        ids = group * _GROUP + tl.arange(0, _GROUP)
        values = tl.load(row_logits + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float64)
        scores = values / temperature.to(tl.float64) + gumbel(words_of_ids(ids, position, choice, seed))
        scores = tl.where(values > float("-inf"), scores, float("-inf"))
        group_score = tl.max(scores, axis=0)
        group_winner = tl.min(tl.where(scores == group_score, ids, none), axis=0)
        is_better = group_score > score  # groups come in order: an equal score has a lower id already
        winner = tl.where(is_better, group_winner, winner)
        score = tl.where(is_better, group_score, score)
        group = tl.min(tl.where(is_near & (groups > group), groups, none), axis=0)
    return winner


@triton.jit(do_not_specialize_on_alignment=["temperature", "seeds", "choice_index", "positions"])
def _pick_kernel(
    logits,
    maxima,
    out,
    temperature,
    seeds,
    choice_index,
    positions,
    logits_stride,
    vocabulary,
    num_groups,
    GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program a row; ``GROUPS`` is the number of groups, rounded up to a power of two."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    row_logits = logits + row * logits_stride
    wait_for_inputs(OVERLAP)
    greatest = tl.load(maxima + row * num_groups + groups, mask=groups < num_groups, other=float("-inf"))
    best = tl.max(greatest, axis=0)
    row_temperature = tl.load(temperature + row)
    winner = tl.program_id(0) * 0 - 1
    if (best < float("inf")) & (best > float("-inf")):
        if is_drawn(row_temperature):
            position, choice, seed = tl.load(positions + row), tl.load(choice_index + row), tl.load(seeds + row)
            winner = _exact_winner(
                row_logits, greatest, best, groups, vocabulary, row_temperature, position, choice, seed
            )
        else:
            group = tl.min(tl.where(greatest == best, groups, GROUPS), axis=0)
            ids = group * _GROUP + tl.arange(0, _GROUP)
            values = tl.load(row_logits + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
            winner = tl.min(tl.where(values == best, ids, 2147483647), axis=0)
    tl.store(out + row, winner.to(tl.int64))


def sample(logits: Tensor, temperature: Tensor, seeds: Tensor, choice_index: Tensor, positions: Tensor) -> Tensor:
    """Draw one id a row: logits [S, V] fp32, bf16 or fp16, after all masks -> ids [S] int64.

    temperature [S] fp32; seeds [S] int64 (the bits of an unsigned 64-bit seed); choice_index and positions [S] integer.
    Rows of the logits are contiguous, any distance apart. Below 1e-5 the greatest logit wins, of equal ones the lowest
    id. Else the greatest of ``logit / temperature + Gumbel noise`` in fp64 wins, with the noise of
    ``octavo.kernels.philox``. A row in which no id is left, or that holds NaN or +inf, gives -1.

    The ids are those of ``octavo.kernels.sampling.sample`` on the same logits, unless two exact scores differ by no more
    than the last bit of a logarithm. Quotients beyond fp32 are compared exactly. Temperatures up to 2^64.

    Raises:
        ValueError: a row of the logits is not contiguous.
    """
    rows, vocabulary = logits.shape
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return ids
    if vocabulary > 1 and logits.stride(1) != 1:
        raise ValueError(f"rows of logits must be contiguous, not {logits.stride(1)} elements apart")
    num_groups = triton.cdiv(vocabulary, GROUP)
    maxima = torch.empty(rows, num_groups, dtype=torch.float32, device=logits.device)
    parameters = (temperature, seeds, choice_index, positions, logits.stride(0), vocabulary, num_groups)
    overlap = overlaps(logits)
    group_maxima_kernel[(rows, triton.cdiv(num_groups, _GROUPS_A_PROGRAM))](
        logits, maxima, *parameters, GROUPS=_GROUPS_A_PROGRAM, OVERLAP=overlap, num_warps=4, launch_pdl=overlap
    )
    groups = triton.next_power_of_2(num_groups)
    _pick_kernel[(rows,)](
        logits, maxima, ids, *parameters, GROUPS=groups, OVERLAP=overlap, num_warps=4, launch_pdl=overlap
    )
    return ids


def first_nonfinite(logits: Tensor) -> Tensor:
    """Tell which rows of raw logits [S, V] hold NaN or +inf, or nothing above -inf -> [S] bool."""
    return ~logits.amax(dim=-1).isfinite()
