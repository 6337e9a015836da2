"""Scheduler to worker and back: the plan of one step, as a delta against the worker's rows, and its result.

A worker applies the parts of a plan in this order: `freed_rows`, beams, `new_rows`, block copies, appended blocks; then
it runs the forward pass over the rows of the step, forks rows, and samples. So a row or block that one plan frees can be
taken again by the same plan. Plans are numbered from 1 within an epoch and executed in order.

Blocks may stand in the tables of several rows, but a plan writes only to blocks that the writing row alone names, beside
new rows that find them in this very plan: each layer writes the keys and values of the whole step before it attends, so
a row may read what another one writes in the same step.
"""

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from octavo.wire.columns import same_length, unpack_floats, unpack_ints
from octavo.wire.errors import MalformedMessage
from octavo.wire.prompt_logprobs import Int31, PromptLogprobs

FLAG_SAMPLE = 1
"""The row samples a token in this step: its planned tokens reach the end of what is known of it."""

FAULT_NONFINITE_LOGITS = 1
"""The row's logits held a NaN or an infinity: no token was drawn."""

FAULT_NO_CANDIDATE = 2
"""Masks and filters left no id that could be drawn (min_tokens holds back all that is allowed, say)."""

MAX_BAD_WORD_TOKENS = 8
"""Ids of one bad word."""

MAX_BAD_WORDS = 64
"""Of a row: 32, each with and without a space before it."""

FAULT_GRAMMAR = 3
"""The row's grammar cannot be used, or nothing that the tokenizer knows goes on with what the row holds."""

NonNegative = Annotated[int, Meta(ge=0)]


class RowSampling(msgspec.Struct, frozen=True, array_like=True):
    """How a row draws its tokens; every default is "off". Ranges were checked at the edge."""

    seed: NonNegative  # uint64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int31 = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: Int31 = 0  # before this many output tokens, stop_token_ids are masked
    stop_token_ids: bytes = b""  # int32: end of sequence and stop ids, what min_tokens holds back
    logit_bias_ids: bytes = b""  # int32
    logit_bias_values: bytes = b""  # float32
    allowed_token_ids: bytes = b""  # int32; empty: all
    logprobs: Annotated[int, Meta(ge=-1, le=1024)] = -1  # -1: none; k: the drawn id and the k most likely
    bad_word_ids: bytes = b""  # int32: of all words, one after the other; none of them is ever completed in the output
    bad_word_lengths: bytes = b""  # int32: ids of each word
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=1024)] = -1  # -1: none; k: each prompt token and the k most likely

    def __post_init__(self) -> None:
        """Check numbers and columns: what got past here and then failed in a worker would take every row with it.

        Raises:
            MalformedMessage: a number is not finite or out of its range, or a column has the wrong length.
        """
        self._check_ranges()
        same_length("logit_bias", self.logit_bias_ids, self.logit_bias_values)
        same_length("stop_token_ids", self.stop_token_ids)
        same_length("allowed_token_ids", self.allowed_token_ids)
        self._check_bad_words()

    def _check_ranges(self) -> None:
        in_range = {
            "seed": self.seed < 2**64,
            "temperature": 0 <= self.temperature < math.inf,
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1,
            "presence_penalty": math.isfinite(self.presence_penalty),
            "frequency_penalty": math.isfinite(self.frequency_penalty),
            "repetition_penalty": 0 < self.repetition_penalty < math.inf,
            "logit_bias": all(map(math.isfinite, unpack_floats(self.logit_bias_values))),
        }
        for name, fits in in_range.items():
            if not fits:
                raise MalformedMessage(f"{name} = {getattr(self, name, 'a value that is not finite')} is out of range")

    def _check_bad_words(self) -> None:
        num_ids, lengths = same_length("bad_word_ids", self.bad_word_ids), unpack_ints(self.bad_word_lengths)
        if not lengths and not num_ids:
            return
        if len(lengths) > MAX_BAD_WORDS or sum(lengths) != num_ids:
            raise MalformedMessage(f"bad words: {num_ids} ids, {len(lengths)} words of {sum(lengths)} ids together")
        if min(lengths) < 1 or max(lengths) > MAX_BAD_WORD_TOKENS:
            raise MalformedMessage(f"bad words: one has not 1 to {MAX_BAD_WORD_TOKENS} ids")


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that takes a row, at its first or any later admission.

    Penalties, min_tokens and whatever else depends on the past are rebuilt from `token_ids`.
    """

    row: Int31
    request: str  # names the request in logs and to a scheduler that comes back: its frontend's boot id and its handle
    choice: Int31  # index among the n choices; keys the noise
    num_prompt_tokens: Int31
    num_computed_tokens: (
        Int31  # tokens whose keys and values are in blocks that this plan appends first: cache hits, ...
    )
    # ... in whole blocks, or what the worker has reported of the row (held_rows.py)
    token_ids: bytes  # int32: prompt, then output so far
    sampling: RowSampling
    grammar: Int31 = 0  # 1 + its place among the plan's grammars; 0: none
    first_prompt_logprob: Int31 = (
        0  # with prompt_logprobs: position from which on they are told; none from the output on
    )
    trace: Annotated[str, Meta(max_length=256)] = ""  # traceparent of the span that tells of its request; empty: none


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """One step for a worker. Columns are int32 (columns.py)."""

    epoch: NonNegative
    step: NonNegative
    row: bytes  # [R] rows of this step
    num_tokens: bytes  # [R] tokens to compute for each, from where its computed tokens end
    flags: bytes  # [R] FLAG_*
    new_rows: tuple[NewRow, ...] = ()
    copy_row: bytes = b""  # [C] rows whose last block so far, which others share or may find, ...
    copy_src: bytes = b""  # [C] ... this one, ...
    copy_dst: bytes = b""  # [C] ... is copied to this one, which takes its place in the table
    append_row: bytes = b""  # [A] rows whose tables grow ...
    append_block: bytes = b""  # [A] ... by these blocks, in order
    fork_src: bytes = (
        b""  # [F] rows that sample in this step, and from whose ids, counts and table as they are before ...
    )
    fork_dst: bytes = b""  # [F] ... their new id these free rows start; these sample too, from the same logits, ...
    fork_choice: bytes = b""  # [F] ... as this choice
    freed_rows: bytes = b""  # [E] rows that end
    grammars: tuple[bytes, ...] = ()  # of the new rows (grammar.py)
    beam_row: bytes = (
        b""  # [B] rows that go on with an id that was chosen for them: itself, or a free row that starts ...
    )
    beam_src: bytes = (
        b""  # [B] ... from the ids and the table of this one, whose newest id was drawn and not computed, ...
    )
    beam_token: bytes = b""  # [B] ... with this id in place of the drawn one. All read what was there before the plan

    def __post_init__(self) -> None:
        """Check the columns against each other.

        Raises:
            MalformedMessage: lengths differ, a count is below 1, a row comes twice, or a block is copied from and to.
        """
        same_length("rows", self.row, self.num_tokens, self.flags)
        same_length("copies", self.copy_row, self.copy_src, self.copy_dst)
        same_length("appended blocks", self.append_row, self.append_block)
        same_length("forks", self.fork_src, self.fork_dst, self.fork_choice)
        same_length("freed rows", self.freed_rows)
        same_length("beams", self.beam_row, self.beam_src, self.beam_token)
        rows = unpack_ints(self.row)
        if len(set(rows)) != len(rows):
            raise MalformedMessage("a row comes twice in one plan")
        if rows and min(unpack_ints(self.num_tokens)) < 1:
            raise MalformedMessage("a row of a plan computes less than one token")
        if any(new.grammar > len(self.grammars) for new in self.new_rows):
            raise MalformedMessage(f"a new row has a grammar that is not among the plan's {len(self.grammars)}")
        if self.beam_row and len(set(unpack_ints(self.beam_row))) != len(unpack_ints(self.beam_row)):
            raise MalformedMessage("a row goes on with two ids")
        if self.copy_src:
            targets = unpack_ints(self.copy_dst)
            if len(set(targets)) != len(targets) or not set(targets).isdisjoint(unpack_ints(self.copy_src)):
                raise MalformedMessage("a block is the target of two copies, or source and target in one plan")


class RowLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of one drawn token under the raw logits; the i-th of `top_ids` has rank i + 1."""

    row: Int31
    logprob: float
    rank: Int31  # from 1
    top_ids: bytes = b""  # int32 [k]
    top_logprobs: bytes = b""  # float32 [k]

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            MalformedMessage: a log-probability is no number, or lengths differ.
        """
        if math.isnan(self.logprob) or any(map(math.isnan, unpack_floats(self.top_logprobs))):
            raise MalformedMessage(f"log-probabilities of row {self.row} are no numbers")
        same_length("top log-probabilities", self.top_ids, self.top_logprobs)


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag="result"):
    """What a step drew. A row is either among `row` with its token or among `fault_row` with its fault.

    A row that tells of its prompt does so in each step that computes a part of it, whether it draws or not; if it cannot,
    it is among `fault_row`.
    """

    epoch: NonNegative
    step: NonNegative
    row: bytes  # int32 [S]: sampling rows in the order of the plan, then forked ones in the order of the forks
    token: bytes  # int32 [S]
    fault_row: bytes = b""  # int32 [E]
    fault: bytes = b""  # int32 [E] FAULT_*
    logprobs: tuple[RowLogprobs, ...] = ()  # rows that asked for them
    compute_us: NonNegative = 0  # time that the step took in the worker
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()  # rows that asked for them and computed a part of their prompt

    def __post_init__(self) -> None:
        """Check the columns against each other.

        Raises:
            MalformedMessage: lengths differ.
        """
        same_length("tokens", self.row, self.token)
        same_length("faults", self.fault_row, self.fault)
