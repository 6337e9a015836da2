"""Sampling operations on logits [S, V], the same code for the CPU backends.

The order in which a step applies them: ``apply_allowed``, ``apply_logit_bias`` (also minus infinity for ids that may
not come yet), ``apply_penalties``, ``filter_logits``, ``sample``. Log-probabilities and the check for non-finite values
take the raw logits. A row's result depends on that row alone, bit for bit: what reduces over the vocabulary does so
row by row or in chunks of fixed size.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from octavo.kernels.philox import exponential_noise, noise_words, words_to_noise

GREEDY_BELOW = 1e-5
"""Temperatures below this mean: the most likely id."""

_SUM_CHUNK = 1024
_TOP_P_TRIES = (1024, 8192)
"""Most likely ids among which top-p looks for its set before it sorts all."""

_SPARSE_SHARE = 8  # noise is drawn id by id when fewer than one id in this many survives


def apply_allowed(logits: Tensor, rows: Tensor, ids: Tensor) -> None:
    """In the rows named by the pairs (rows [n], ids [n]) int64, set to -inf every id that no pair names. In place."""
    kept = logits[rows, ids]
    logits[torch.unique(rows)] = float("-inf")  # each row once, however many pairs name it
    logits[rows, ids] = kept


def apply_token_mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Set to -inf, in the rows [G] int64 (each once) of logits [S, V], the ids whose bit is not set. In place.

    Bit i of words[g, j], int32 [G, W], stands for id 32 j + i; ids beyond the words have no bit.
    """
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    allowed = ((words[:, :, None] >> bits) & 1).flatten(1).bool()
    allowed = torch.nn.functional.pad(allowed, (0, max(0, logits.shape[1] - allowed.shape[1])))[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))


def apply_logit_bias(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add values [n] fp32 (finite, or -inf to forbid) at (rows [n], ids [n]) int64 of logits [S, V]. In place."""
    logits.index_put_((rows, ids), values, accumulate=True)


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> None:
    """Penalise tokens that occurred, in the P rows of logits [S, V] that ``rows`` [P] int64 names (each once). In place.

    prompt_mask [P, V] bool: the id is in the prompt; output_counts [P, V] int32: how often it was generated; presence,
    frequency, repetition [P] fp32. Repetition (> 0, 1 is none; Keskar et al. 2019, arXiv 1909.05858) looks at prompt
    and output: positive logits are divided by it, others multiplied. Then ``frequency * count`` and, where the count is
    not 0, ``presence`` are subtracted; these look at the output only.
    """
    chosen = logits[rows]
    generated = output_counts > 0
    factor = torch.where(prompt_mask | generated, repetition[:, None], 1.0)
    chosen = torch.where(chosen > 0, chosen / factor, chosen * factor)
    chosen -= frequency[:, None] * output_counts
    chosen -= presence[:, None] * generated
    logits[rows] = chosen


def filter_logits(logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Set to -inf what min-p, then top-k, then top-p leave out, judged at the row's temperature. In place.

    logits [S, V] stay unscaled (``sample`` divides by the temperature). temperature, min_p (0 is off), top_p (1 is off)
    are [S] fp32, top_k [S] integer (0 or below is off). min-p keeps the ids whose probability is at least min_p times
    the greatest. top-k keeps exactly k, of equal ones those with lower ids. top-p keeps the smallest set, from the most
    likely down, whose mass within what is left reaches top_p (Holtzman et al. 2020, arXiv 1904.09751): at least one
    id. Greedy rows, rows with all filters off, and rows with NaN, +inf or no id left stay as they are.
    """
    vocabulary = logits.shape[1]
    parameters = zip(temperature.tolist(), min_p.tolist(), top_k.tolist(), top_p.tolist(), strict=True)
    has_any = logits.amax(dim=-1).isfinite().tolist()
    for index, (row_temperature, row_min_p, row_top_k, row_top_p) in enumerate(parameters):
        if row_temperature < GREEDY_BELOW or not has_any[index]:
            continue
        row = logits[index]
        if row_min_p > 0.0:
            # p >= min_p * p_max, as a threshold on unscaled logits.
            row.masked_fill_(row.double() < row.max().double() + row_temperature * math.log(row_min_p), float("-inf"))
        if 0 < row_top_k < vocabulary:
            row.masked_fill_(~top_mask(row[None], row_top_k)[0], float("-inf"))
        if row_top_p < 1.0:
            _filter_top_p(row, row_temperature, row_top_p)


def _filter_top_p(row: Tensor, temperature: float, top_p: float) -> None:
    scaled = row.double() / temperature
    norm = scaled.logsumexp(0)
    left = row > float("-inf")
    for tried in (*_TOP_P_TRIES, row.numel()):
        among = left & (row >= row.topk(tried).values[-1]) if tried < row.numel() else left
        candidates = among.nonzero().squeeze(-1)
        order = row[candidates].argsort(descending=True, stable=True)
        ranked = candidates[order]
        mass = (scaled[ranked] - norm).exp().cumsum(0)
        # An id stays while the mass before it has not reached top_p.
        num_kept = 1 + int((mass[:-1] < top_p).sum())
        if num_kept < ranked.numel() or tried >= row.numel():
            break
    kept = ranked[:num_kept]
    values = row[kept]
    row.fill_(float("-inf"))
    row[kept] = values


def top_mask(values: Tensor, k: int) -> Tensor:
    """Mark the k greatest of each row of values [S, V] (no NaN, 1 <= k <= V), of equal ones those with lower ids."""
    kth = values.topk(k, dim=-1).values[:, -1:]
    above, equal = values > kth, values == kth
    room = k - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1) <= room))


def sample(logits: Tensor, temperature: Tensor, seeds: Tensor, choice_index: Tensor, positions: Tensor) -> Tensor:
    """Draw one id a row: logits [S, V] fp32, after all masks -> ids [S] int64.

    temperature [S] fp32; seeds [S] int64 (the bits of an unsigned 64-bit seed); choice_index and positions [S] integer.
    Below ``GREEDY_BELOW`` the greatest logit wins, of equal ones the lowest id. Else the greatest of
    ``logit / temperature + Gumbel noise`` (Maddison et al. 2014, arXiv 1411.0030) wins, with the noise of
    ``octavo.kernels.philox`` in float64: a pure function of (seed, choice index, position, id). A row in which no id is
    left, or that holds NaN or +inf, gives -1.
    """
    greatest, ids = logits.max(dim=-1)
    has_any = greatest.isfinite()
    ids = ids.masked_fill(~has_any, -1)
    settings = zip(temperature.tolist(), seeds.tolist(), choice_index.tolist(), positions.tolist(), strict=True)
    for index, (is_drawn, (row_temperature, seed, choice, position)) in enumerate(zip(has_any.tolist(), settings)):
        if is_drawn and row_temperature >= GREEDY_BELOW:
            ids[index] = _draw(logits[index], row_temperature, seed, choice, position)
    return ids


def _draw(row: Tensor, temperature: float, seed: int, choice_index: int, position: int) -> Tensor:
    left = row > float("-inf")
    if int(left.sum()) * _SPARSE_SHARE < row.numel():
        candidates = left.nonzero().squeeze(-1)
        noise = exponential_noise(seed, choice_index, position, candidates)
    else:
        candidates, noise = _likely_winners(row, temperature, seed, choice_index, position)
    return candidates[(row[candidates].double() / temperature - noise.log()).argmax()]


def _likely_winners(
    row: Tensor, temperature: float, seed: int, choice_index: int, position: int
) -> tuple[Tensor, Tensor]:
    """Ids [n], ascending, among which the winner of the exact float64 scores is, and their noise [n] float64.

    These are the ids whose score in fp32 is near the best.

    A uniform that fp32 rounds to 1 is clamped to 1 - 2^-24, which raises its score by at most log(22.9 / 16.6) < 0.33;
    all else in a score is off by a few units in its last place.
    """
    groups = torch.arange(-(-row.numel() // 4), device=row.device)
    words = noise_words(seed, choice_index, position, groups).flatten()[: row.numel()]
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24)
    scores = row / temperature - torch.log(-torch.log1p(-uniform))
    best = scores.max()
    margin = 0.5 + 2.0**-20 * best.abs()
    candidates = (scores >= best - margin).nonzero().squeeze(-1)
    return candidates, words_to_noise(words[candidates])


def log_softmax_rows(logits: Tensor) -> Tensor:
    """Log-softmax of [S, V] along V in fp32, each row's bits independent of the number of rows and of threads."""
    wide = logits.float()
    shifted = wide - wide.amax(dim=-1, keepdim=True)
    padded = functional.pad(shifted.exp(), (0, -wide.shape[-1] % _SUM_CHUNK))
    parts = padded.view(wide.shape[0], padded.shape[1] // _SUM_CHUNK, _SUM_CHUNK).sum(dim=-1)
    normalised: Tensor = shifted - parts.sum(dim=-1, keepdim=True).log()
    return normalised


def logprobs(raw_logits: Tensor, ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of chosen ids and of the most likely ones, from raw logits [S, V].

    ids [S] int64, ``top`` >= 0 (at most V are returned). Returns ``logprob`` [S] fp32, ``rank`` [S] int64 (1 + the
    number of strictly greater logits), ``top_ids`` [S, k] int64 and ``top_logprobs`` [S, k] fp32 with k = min(top, V),
    sorted by log-probability descending, then id ascending.
    """
    normalised = log_softmax_rows(raw_logits)
    chosen = ids[:, None]
    rank = 1 + (raw_logits > raw_logits.gather(1, chosen)).sum(dim=-1)
    logprob = normalised.gather(1, chosen).squeeze(1)
    k = min(top, raw_logits.shape[1])
    if k == 0 or raw_logits.shape[0] == 0:
        empty = ids.new_empty(raw_logits.shape[0], k)
        return logprob, rank, empty, normalised.new_empty(raw_logits.shape[0], k)
    # A row with NaN is at fault and reported elsewhere; here it must only not disturb its neighbours.
    ordered = raw_logits.masked_fill(raw_logits.isnan(), float("-inf"))
    top_ids = top_mask(ordered, k).nonzero()[:, 1].view(-1, k)  # ascending in each row
    order = ordered.gather(1, top_ids).argsort(dim=-1, descending=True, stable=True)
    top_ids = top_ids.gather(1, order)
    return logprob, rank, top_ids, normalised.gather(1, top_ids)


def first_nonfinite(logits: Tensor) -> Tensor:
    """Tell which rows of raw logits [S, V] hold NaN or +inf, or nothing above -inf -> [S] bool."""
    return ~logits.amax(dim=-1).isfinite()
