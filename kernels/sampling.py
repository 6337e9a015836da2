"""From logits to ids: masks, penalties, filters, drawing, log-probabilities. Every row is computed by itself.

The order of the steps is the caller's (and the public contract's): allowed ids, min_tokens and logit bias, penalties,
temperature, min-p, top-k, top-p.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.philox import gumbel

GREEDY_BELOW = 1e-5
"""Temperatures below this draw the most likely id."""

NEGATIVE_INFINITY = float("-inf")
_SMALL_SORT = 1024
"""Ids that the nucleus is looked for among before the whole vocabulary is sorted."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one drawn token under the raw logits."""

    logprob: float
    rank: int  # from 1
    top_ids: Tensor  # [k] int64, most likely first
    top_logprobs: Tensor  # [k] float32


def has_nonfinite(logits: Tensor) -> Tensor:
    """Say for each row whether it holds a NaN or an infinity.

    Args:
        logits: [num_rows, vocab] float32, before any mask.

    Returns:
        [num_rows] bool.
    """
    # The sum of finite float32 numbers could overflow; that of their halves' exponents cannot: use min and max instead.
    return ~(torch.isfinite(logits.amax(-1)) & torch.isfinite(logits.amin(-1)))


def keep_only(logits: Tensor, ids: Tensor) -> None:
    """Mask all ids but these, in place.

    Args:
        logits: [vocab] float32.
        ids: [n] int64.
    """
    kept = logits[ids]
    logits.fill_(NEGATIVE_INFINITY)
    logits[ids] = kept


def apply_penalties(
    logits: Tensor, seen: Tensor, output_counts: Tensor, presence: float, frequency: float, repetition: float
) -> None:
    """Make ids less likely that were seen, in place.

    Repetition (arXiv:1909.05858) divides positive and multiplies negative logits of ids in prompt or output; frequency
    is subtracted for each time that the output holds an id, presence once if it does.

    Args:
        logits: [vocab] float32.
        seen: [vocab] bool: ids in prompt or output.
        output_counts: [vocab] int64: how often the output holds each id.
        presence: factor.
        frequency: factor.
        repetition: factor, 1 changes nothing.
    """
    if repetition != 1.0:
        penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
        torch.where(seen, penalised, logits, out=logits)
    if frequency != 0.0 or presence != 0.0:
        logits.sub_(frequency * output_counts + presence * (output_counts > 0))


def survivors(logits: Tensor, min_p: float, top_k: int, top_p: float) -> Tensor:
    """Return the ids that the filters leave, in ascending order; at least one.

    min-p keeps ids of at least min_p times the highest probability; top-k the k most likely (lower ids first among
    equals); top-p the smallest set of the most likely of these whose share reaches top_p (arXiv:1904.09751).

    Args:
        logits: [vocab] float32, after the temperature; masked ids are -inf, at least one is finite.
        min_p: in [0, 1]; 0 keeps all.
        top_k: 0 keeps all.
        top_p: in (0, 1]; 1 keeps all.

    Returns:
        [n] int64.
    """
    floor = logits.max() + torch.log(logits.new_tensor(min_p)) if min_p > 0.0 else logits.new_tensor(NEGATIVE_INFINITY)
    ids = torch.nonzero((logits >= floor) & (logits > NEGATIVE_INFINITY)).flatten()
    if 0 < top_k < ids.numel():
        ids = _most_likely(logits, ids, top_k)
    if top_p < 1.0:
        ids = _nucleus(logits, ids, top_p)
    return ids.sort().values


def _most_likely(logits: Tensor, ids: Tensor, count: int) -> Tensor:
    """Return the `count` most likely of these ascending ids, most likely first, lower ids first among equals."""
    values = logits[ids]
    least = torch.topk(values, count).values[-1]
    candidates = ids[values >= least]
    order = torch.sort(logits[candidates], descending=True, stable=True).indices
    return candidates[order[:count]]


def _nucleus(logits: Tensor, ids: Tensor, top_p: float) -> Tensor:
    ascending = ids.sort().values
    total = torch.logsumexp(logits[ascending].double(), 0)
    count = min(_SMALL_SORT, ascending.numel())
    while True:
        ranked = _most_likely(logits, ascending, count)
        share = torch.exp(logits[ranked].double() - total)
        before = share.cumsum(0) - share  # what the more likely ids make together
        kept = int((before < top_p).sum())
        if kept < count or count == ascending.numel():
            return ranked[: max(kept, 1)]
        count = ascending.numel()


def draw(logits: Tensor, ids: Tensor, seed: int, choice: int, position: int) -> int:
    """Draw one of the ids from softmax(logits[ids]) by the Gumbel-max trick.

    Args:
        logits: [vocab] float32, after the temperature.
        ids: [n] int64, ascending: the ids that the filters left.
        seed: 64 bits.
        choice: index among the request's choices.
        position: place of the token in the output.
    """
    if ids.numel() == 1:
        return int(ids[0])
    return int(ids[torch.argmax(logits[ids] + gumbel(seed, choice, position, ids))])


def greedy(logits: Tensor) -> Tensor:
    """Return the most likely id of each row, the lowest among equals.

    Args:
        logits: [num_rows, vocab] float32.

    Returns:
        [num_rows] int64.
    """
    return torch.argmax(logits, dim=-1)


def token_logprobs(raw_logits: Tensor, drawn: int, top: int) -> TokenLogprobs:
    """Return the log-probabilities of a drawn id and of the most likely ones.

    Args:
        raw_logits: [vocab] float32, before masks and penalties.
        drawn: the id.
        top: how many of the most likely ids; lower ids come first among equals.
    """
    logprobs = torch.log_softmax(raw_logits, dim=-1)
    own = logprobs[drawn]
    rank = int((logprobs > own).sum()) + 1
    everything: Sequence[int] = raw_logits.shape
    ids = torch.arange(everything[0], device=raw_logits.device)
    best = _most_likely(logprobs, ids, min(top, everything[0])) if top else ids[:0]
    return TokenLogprobs(float(own), rank, best, logprobs[best])
