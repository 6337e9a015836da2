"""Sampling: from the logits of a step to one id a row, by each row's own parameters.

Order: allowed ids, bad words, min_tokens and logit bias, penalties, grammar, temperature, min-p, top-k, top-p, then a
draw whose noise depends on seed, choice and output position alone. Log-probabilities are of the raw logits. Rows that
use none of this cost nothing more than the most likely id.

`draw` only enqueues work on the device of the logits; `Drawn.collect` looks at what came of it, once the caller has
waited for that.
"""

from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels.ops import Ops
from octavo.kernels.sampling import GREEDY_BELOW
from octavo.wire.columns import unpack_floats, unpack_ints
from octavo.wire.plan import RowSampling
from octavo.worker.bad_words import completing_ids, words_table
from octavo.worker.transfer import to_device, to_host, upload

_NEGATIVE_INFINITY = float("-inf")


class RowSampler:
    """One row's parameters, as tensors where they are lists of ids; the mirror has checked the ids."""

    def __init__(self, parameters: RowSampling, choice: int, device: torch.device) -> None:
        self.parameters = parameters
        self.choice = choice
        self._device = device
        self.is_greedy = parameters.temperature < GREEDY_BELOW
        self.has_filters = parameters.min_p > 0 or parameters.top_k > 0 or parameters.top_p < 1
        self.has_penalties = (
            parameters.presence_penalty != 0 or parameters.frequency_penalty != 0 or parameters.repetition_penalty != 1
        )

    # Most rows have no such lists: the tensors are made when they are needed.

    @cached_property
    def stop_ids(self) -> Tensor:
        """[n] int64: what min_tokens holds back."""
        return to_device(unpack_ints(self.parameters.stop_token_ids), torch.int64, self._device)

    @cached_property
    def allowed_ids(self) -> Tensor:
        """[n] int64: nothing else may be drawn, unless there are none."""
        return to_device(unpack_ints(self.parameters.allowed_token_ids), torch.int64, self._device)

    @cached_property
    def bias_ids(self) -> Tensor:
        """[n] int64: ids with a bias."""
        return to_device(unpack_ints(self.parameters.logit_bias_ids), torch.int64, self._device)

    @cached_property
    def bias(self) -> Tensor:
        """[n] float32: their biases."""
        return to_device(unpack_floats(self.parameters.logit_bias_values), torch.float32, self._device)

    @cached_property
    def bad_words(self) -> Tensor:
        """[W, MAX_BAD_WORD_TOKENS] int64: see `words_table`."""
        ids, lengths = unpack_ints(self.parameters.bad_word_ids), unpack_ints(self.parameters.bad_word_lengths)
        return words_table(ids, lengths, self._device)

    def fork(self, choice: int) -> "RowSampler":
        """Return a sampler with the same parameters for another choice."""
        other = copy(self)
        other.choice = choice
        return other

    def holds_back_stops(self, num_output: int) -> bool:
        """Say whether stop ids must not be drawn yet."""
        return num_output < self.parameters.min_tokens and len(self.parameters.stop_token_ids) > 0

    def is_plain(self, num_output: int) -> bool:
        """Say whether nothing but the temperature decides, and nobody asks for log-probabilities."""
        return not (
            (self.has_filters and not self.is_greedy)
            or self.has_penalties
            or self.parameters.logprobs >= 0
            or self.parameters.allowed_token_ids
            or self.parameters.logit_bias_ids
            or self.parameters.bad_word_ids
            or self.holds_back_stops(num_output)
        )


@dataclass(frozen=True)
class SamplingRow:
    """A row that samples in this step."""

    sampler: RowSampler
    line: int  # of the ids: its own are the first num_known there, prompt, then output
    num_prompt: int
    num_known: int

    @property
    def num_output(self) -> int:
        """Tokens of the output before the one to draw: its position."""
        return self.num_known - self.num_prompt


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
    dead_end: bool = False  # its grammar cannot go on


@dataclass(frozen=True)
class TokenMask:
    """What rows with a grammar may draw."""

    lines: list[int]  # places among the rows of the draw
    words: NDArray[np.int32]  # [lines, W]: bit i of word j stands for id 32 j + i


class Drawn:
    """What `draw` has enqueued; on its way to the host since."""

    def __init__(self, tokens: Tensor, nonfinite: Tensor, logprobs: "_DrawnLogprobs | None") -> None:
        self.tokens = tokens  # [S] int64, -1 without one; on the device
        self._tokens = to_host(tokens)
        self._nonfinite = to_host(nonfinite)
        self._logprobs = logprobs

    def collect(self) -> list[Sampled]:
        """Return what became of each row; on a GPU the caller has waited for the work behind it."""
        results = [
            Sampled(None if bad or token < 0 else token, nonfinite=bad)
            for token, bad in zip(self._tokens.tolist(), self._nonfinite.tolist(), strict=True)
        ]
        if self._logprobs is not None:
            self._logprobs.add_to(results)
        return results


def draw(
    ops: Ops,
    logits: Tensor,
    ids: Tensor,
    rows: list[SamplingRow],
    valid_vocab_size: int,
    mask: TokenMask | None = None,
) -> Drawn:
    """Draw one id for each row.

    Args:
        ops: the backend's operations.
        logits: [S, vocab] float32; changed in place.
        ids: [N, L] integer: known ids, of which each row has a line.
        rows: the S rows.
        valid_vocab_size: ids from here on pad the embedding and are never drawn.
        mask: of rows with a grammar.
    """
    nonfinite = ops.first_nonfinite(logits[:, :valid_vocab_size])
    if logits.is_cuda or bool(nonfinite.any()):
        # What these rows draw is thrown away; a NaN would break rules of the filters.
        logits.masked_fill_(nonfinite[:, None], 0.0)
    logits[:, valid_vocab_size:] = _NEGATIVE_INFINITY
    wants_logprobs = [i for i, row in enumerate(rows) if row.sampler.parameters.logprobs >= 0]
    raw = logits[to_device(wants_logprobs, torch.int64, logits.device)] if wants_logprobs else None  # a copy
    _apply_masks(ops, logits, ids, rows)
    _apply_penalties(ops, logits, ids, rows)
    if mask is not None and mask.lines:
        lines = to_device(mask.lines, torch.int64, logits.device)
        ops.apply_token_mask(logits, lines, upload(mask.words, logits.device))
    tokens = _draw(ops, logits, rows)
    logprobs = None if raw is None else _DrawnLogprobs(ops, raw, tokens, wants_logprobs, rows)
    return Drawn(tokens, nonfinite, logprobs)


def _apply_masks(ops: Ops, logits: Tensor, ids: Tensor, rows: list[SamplingRow]) -> None:
    allowed = [(i, row.sampler.allowed_ids) for i, row in enumerate(rows) if row.sampler.parameters.allowed_token_ids]
    if allowed:
        ops.apply_allowed(logits, *_pairs(allowed))
    _forbid_bad_words(ops, logits, ids, rows)
    held_back = [
        (i, row.sampler.stop_ids) for i, row in enumerate(rows) if row.sampler.holds_back_stops(row.num_output)
    ]
    if held_back:
        places = _pairs(held_back)
        ops.apply_logit_bias(logits, *places, logits.new_full(places[0].shape, _NEGATIVE_INFINITY))
    biased = [(i, row.sampler.bias_ids) for i, row in enumerate(rows) if row.sampler.parameters.logit_bias_ids]
    if biased:
        values = torch.cat([rows[i].sampler.bias for i, _ in biased])
        ops.apply_logit_bias(logits, *_pairs(biased), values)


def _forbid_bad_words(ops: Ops, logits: Tensor, ids: Tensor, rows: list[SamplingRow]) -> None:
    having = [(i, row, row.sampler.bad_words) for i, row in enumerate(rows) if row.sampler.parameters.bad_word_ids]
    if not having:
        return
    words = torch.cat([table for _, _, table in having])
    columns = [(i, row.line, row.num_prompt, row.num_known) for i, row, table in having for _ in range(table.shape[0])]
    flat = [value for column in zip(*columns, strict=True) for value in column]
    places, lines, num_prompt, num_known = to_device(flat, torch.int64, logits.device).view(4, -1)
    is_next = completing_ids(words, ids, lines, num_prompt, num_known)
    ops.apply_logit_bias(logits, places, words[:, -1].contiguous(), torch.where(is_next, _NEGATIVE_INFINITY, 0.0))


def _pairs(ids_of_rows: list[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return row and id of each pair, both [n] int64."""
    rows = torch.cat([torch.full_like(ids, i) for i, ids in ids_of_rows])
    return rows, torch.cat([ids for _, ids in ids_of_rows])


def _apply_penalties(ops: Ops, logits: Tensor, ids: Tensor, rows: list[SamplingRow]) -> None:
    penalised = [i for i, row in enumerate(rows) if row.sampler.has_penalties]
    if not penalised:
        return
    device = logits.device
    chosen = [rows[i] for i in penalised]
    in_prompt, counts = _occurrences(ids, chosen, logits.shape[1])
    parameters = [row.sampler.parameters for row in chosen]
    ops.apply_penalties(
        logits,
        to_device(penalised, torch.int64, device),
        in_prompt,
        counts,
        to_device([p.presence_penalty for p in parameters], torch.float32, device),
        to_device([p.frequency_penalty for p in parameters], torch.float32, device),
        to_device([p.repetition_penalty for p in parameters], torch.float32, device),
    )


def _occurrences(ids: Tensor, rows: list[SamplingRow], vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return which ids are in each row's prompt, [P, vocab_size] bool, and how often each is in its output, int32.

    They are counted anew in each step: so there is no state that forks, preemption and replay would have to carry.
    """
    device = ids.device
    lines, prompts, known = (
        to_device(column, torch.int64, device)[:, None]
        for column in ([r.line for r in rows], [r.num_prompt for r in rows], [r.num_known for r in rows])
    )
    longest = max(row.num_known for row in rows)
    places = torch.arange(longest, device=device)[None]
    own = ids[lines, places].long()
    own = torch.where(places < known, own, vocab_size)  # what does not count goes to a column of its own
    in_prompt = torch.zeros(len(rows), vocab_size + 1, dtype=torch.bool, device=device)
    in_prompt.scatter_(1, torch.where(places < prompts, own, vocab_size), True)
    counts = torch.zeros(len(rows), vocab_size + 1, dtype=torch.int32, device=device)
    output = torch.where(places < prompts, vocab_size, own)
    counts.scatter_add_(1, output, torch.ones((), dtype=torch.int32, device=device).expand_as(output))
    return in_prompt[:, :-1], counts[:, :-1]


def _draw(ops: Ops, logits: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Return one id a row, -1 where none is left: [S] int64."""
    device = logits.device
    parameters = [row.sampler.parameters for row in rows]
    temperature = to_device([p.temperature for p in parameters], torch.float32, device)
    if any(row.sampler.has_filters and not row.sampler.is_greedy for row in rows):
        ops.filter_logits(
            logits,
            temperature,
            to_device([p.min_p for p in parameters], torch.float32, device),
            to_device([p.top_k for p in parameters], torch.int64, device),
            to_device([p.top_p for p in parameters], torch.float32, device),
        )
    return ops.sample(
        logits,
        temperature,
        to_device([as_int64(p.seed) for p in parameters], torch.int64, device),
        to_device([row.sampler.choice for row in rows], torch.int64, device),
        to_device([row.num_output for row in rows], torch.int64, device),
    )


def as_int64(seed: int) -> int:
    """Return the int64 that has the bits of an unsigned 64-bit seed."""
    return seed - 2**64 if seed >= 2**63 else seed


class _DrawnLogprobs:
    """Log-probabilities of the rows that want them, on their way to the host."""

    def __init__(self, ops: Ops, raw: Tensor, tokens: Tensor, places: list[int], rows: list[SamplingRow]) -> None:
        self._places = places
        self._numbers = [rows[i].sampler.parameters.logprobs for i in places]
        drawn = tokens[to_device(places, torch.int64, tokens.device)].clamp_min(0)
        self._columns = [to_host(part) for part in ops.logprobs(raw, drawn, max(self._numbers))]

    def add_to(self, results: list[Sampled]) -> None:
        columns = zip(self._places, self._numbers, *(column.tolist() for column in self._columns), strict=True)
        for place, number, logprob, rank, top_ids, top_logprobs in columns:
            if (token := results[place].token) is not None:
                logprobs = Logprobs(logprob, rank, top_ids[:number], top_logprobs[:number])
                results[place] = Sampled(token, logprobs=logprobs)
