"""Sampling: from the logits of a step to one id a row, by each row's own parameters.

Order: allowed ids, min_tokens and logit bias, penalties, temperature, min-p, top-k, top-p, then a draw whose noise
depends on seed, choice and output position alone. Log-probabilities are of the raw logits. Rows that use none of this
cost nothing more than the most likely id.
"""

from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.ops import Ops
from octavo.kernels.sampling import GREEDY_BELOW
from octavo.wire.columns import unpack_floats, unpack_ints
from octavo.wire.plan import RowSampling
from octavo.worker.errors import PlanError

_NEGATIVE_INFINITY = float("-inf")


class RowSampler:
    """One row's parameters, as tensors where they are lists of ids.

    Raises (on construction):
        PlanError: an id lies outside the vocabulary.
    """

    def __init__(self, parameters: RowSampling, choice: int, vocab_size: int, device: torch.device) -> None:
        self.parameters = parameters
        self.choice = choice

        def ids(column: bytes, what: str) -> Tensor:
            values = unpack_ints(column)
            if values and not (min(values) >= 0 and max(values) < vocab_size):
                raise PlanError(f"{what} holds an id outside of [0, {vocab_size})")
            return torch.tensor(values, dtype=torch.int64, device=device)

        self.stop_ids = ids(parameters.stop_token_ids, "stop_token_ids")
        self.allowed_ids = ids(parameters.allowed_token_ids, "allowed_token_ids")
        self.bias_ids = ids(parameters.logit_bias_ids, "logit_bias")
        self.bias = torch.tensor(unpack_floats(parameters.logit_bias_values), dtype=torch.float32, device=device)
        self.is_greedy = parameters.temperature < GREEDY_BELOW
        self.has_filters = parameters.min_p > 0 or parameters.top_k > 0 or parameters.top_p < 1
        self.has_penalties = (
            parameters.presence_penalty != 0 or parameters.frequency_penalty != 0 or parameters.repetition_penalty != 1
        )

    def fork(self, choice: int) -> "RowSampler":
        """Return a sampler with the same parameters for another choice."""
        other = copy(self)
        other.choice = choice
        return other

    def holds_back_stops(self, num_output: int) -> bool:
        """Say whether stop ids must not be drawn yet."""
        return num_output < self.parameters.min_tokens and self.stop_ids.numel() > 0


@dataclass(frozen=True)
class SamplingRow:
    """A row that samples in this step."""

    sampler: RowSampler
    known_ids: Tensor  # [num_known] int64: prompt, then output
    num_prompt: int

    @property
    def num_output(self) -> int:
        """Tokens of the output before the one to draw: its position."""
        return self.known_ids.numel() - self.num_prompt


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of one drawn token under the raw logits."""

    logprob: float
    rank: int  # from 1
    top_ids: list[int]  # most likely first
    top_logprobs: list[float]


@dataclass(frozen=True)
class Sampled:
    """What became of one row; without a token either `nonfinite`, or no id was left to draw."""

    token: int | None
    nonfinite: bool = False
    logprobs: Logprobs | None = None


def sample(ops: Ops, logits: Tensor, rows: list[SamplingRow], valid_vocab_size: int) -> list[Sampled]:
    """Sample one id for each row.

    Args:
        ops: the backend's operations.
        logits: [S, vocab] float32; changed in place.
        rows: the S rows.
        valid_vocab_size: ids from here on pad the embedding and are never drawn.
    """
    if not rows:
        return []
    nonfinite_rows = ops.first_nonfinite(logits)
    nonfinite = nonfinite_rows.tolist()
    if any(nonfinite):
        logits[nonfinite_rows] = 0.0  # what these rows draw is thrown away; a NaN would break rules of the filters
    logits[:, valid_vocab_size:] = _NEGATIVE_INFINITY
    wants_logprobs = [i for i, row in enumerate(rows) if row.sampler.parameters.logprobs >= 0]
    raw = logits[wants_logprobs] if wants_logprobs else None  # a copy: the rest happens in place
    _apply_masks(ops, logits, rows)
    _apply_penalties(ops, logits, rows)
    tokens = _draw(ops, logits, rows).tolist()
    results = [
        Sampled(None if bad or token < 0 else token, nonfinite=bad)
        for token, bad in zip(tokens, nonfinite, strict=True)
    ]
    if raw is not None:
        _add_logprobs(ops, raw, wants_logprobs, rows, results)
    return results


def _apply_masks(ops: Ops, logits: Tensor, rows: list[SamplingRow]) -> None:
    allowed = [(i, row.sampler.allowed_ids) for i, row in enumerate(rows) if row.sampler.allowed_ids.numel()]
    if allowed:
        ops.apply_allowed(logits, *_pairs(allowed))
    held_back = [
        (i, row.sampler.stop_ids) for i, row in enumerate(rows) if row.sampler.holds_back_stops(row.num_output)
    ]
    if held_back:
        places = _pairs(held_back)
        ops.apply_logit_bias(logits, *places, logits.new_full(places[0].shape, _NEGATIVE_INFINITY))
    biased = [(i, row.sampler.bias_ids) for i, row in enumerate(rows) if row.sampler.bias_ids.numel()]
    if biased:
        values = torch.cat([rows[i].sampler.bias for i, _ in biased])
        ops.apply_logit_bias(logits, *_pairs(biased), values)


def _pairs(ids_of_rows: list[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return row and id of each pair, both [n] int64."""
    rows = torch.cat([torch.full_like(ids, i) for i, ids in ids_of_rows])
    return rows, torch.cat([ids for _, ids in ids_of_rows])


def _apply_penalties(ops: Ops, logits: Tensor, rows: list[SamplingRow]) -> None:
    penalised = [i for i, row in enumerate(rows) if row.sampler.has_penalties]
    if not penalised:
        return
    vocab = logits.shape[1]
    counts = torch.stack([torch.bincount(rows[i].known_ids[rows[i].num_prompt :], minlength=vocab) for i in penalised])
    in_prompt = torch.zeros(len(penalised), vocab, dtype=torch.bool, device=logits.device)
    for place, i in enumerate(penalised):
        in_prompt[place].index_fill_(0, rows[i].known_ids[: rows[i].num_prompt], True)
    parameters = [rows[i].sampler.parameters for i in penalised]
    ops.apply_penalties(
        logits,
        torch.tensor(penalised, device=logits.device),
        in_prompt,
        counts.int(),
        logits.new_tensor([p.presence_penalty for p in parameters]),
        logits.new_tensor([p.frequency_penalty for p in parameters]),
        logits.new_tensor([p.repetition_penalty for p in parameters]),
    )


def _draw(ops: Ops, logits: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Return one id a row, -1 where none is left: [S] int64."""
    parameters = [row.sampler.parameters for row in rows]
    temperature = logits.new_tensor([p.temperature for p in parameters])
    if any(row.sampler.has_filters and not row.sampler.is_greedy for row in rows):
        ops.filter_logits(
            logits,
            temperature,
            logits.new_tensor([p.min_p for p in parameters]),
            torch.tensor([p.top_k for p in parameters], device=logits.device),
            logits.new_tensor([p.top_p for p in parameters]),
        )
    return ops.sample(
        logits,
        temperature,
        torch.tensor([_as_int64(p.seed) for p in parameters], device=logits.device),
        torch.tensor([row.sampler.choice for row in rows], device=logits.device),
        torch.tensor([row.num_output for row in rows], device=logits.device),
    )


def _as_int64(seed: int) -> int:
    """Return the int64 that has the bits of an unsigned 64-bit seed."""
    return seed - 2**64 if seed >= 2**63 else seed


def _add_logprobs(ops: Ops, raw: Tensor, places: list[int], rows: list[SamplingRow], results: list[Sampled]) -> None:
    drawn = [results[i].token for i in places]
    ids = torch.tensor([0 if token is None else token for token in drawn], device=raw.device)
    top = max(rows[i].sampler.parameters.logprobs for i in places)
    logprob, rank, top_ids, top_logprobs = (part.tolist() for part in ops.logprobs(raw, ids, top))
    for n, (i, token) in enumerate(zip(places, drawn, strict=True)):
        if token is not None:
            own = rows[i].sampler.parameters.logprobs
            logprobs = Logprobs(logprob[n], rank[n], top_ids[n][:own], top_logprobs[n][:own])
            results[i] = Sampled(token, logprobs=logprobs)
