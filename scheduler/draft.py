"""A plan in the making: what has been chosen so far, and what of the step's budget is left."""

from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.scheduler.config import Limits
from octavo.scheduler.errors import InvariantViolation
from octavo.scheduler.pipeline import Chunk, PlanRecord, PromptPart
from octavo.scheduler.sequence import Request, Sequence
from octavo.wire.codec import MAX_MESSAGE_BYTES
from octavo.wire.columns import column_length, pack_ints
from octavo.wire.ids import BlockId, Row, SessionId
from octavo.wire.plan import FLAG_SAMPLE, NewRow, StepPlan

MAX_NEW_IDS = MAX_MESSAGE_BYTES // 8
"""Most column elements (4 bytes each) that the new rows of one plan bring, unless one row has more: half a message."""


_DECODE = (1, FLAG_SAMPLE)


class Fork(NamedTuple):
    """A sequence that starts from the state of a sibling that draws its first token in this plan."""

    source: Sequence
    target: Sequence


class Seat(NamedTuple):
    """A beam that goes on with an id that was chosen for it, itself or, in a new row, from the state of another one."""

    beam: Sequence
    source: Sequence
    token: int


@dataclass(slots=True)
class Draft:
    """The sequences of a step, and its deltas. It dies with the step.

    Nearly all sequences of a step decode: they compute one token and draw the next. What another one does stands in
    `chunks`.
    """

    step: int
    num_left: int
    """Tokens that may still be given."""
    max_chunk_tokens: int
    alone: Request | None = None
    """The only request that the plan may name; None: any."""
    sequences: list[Sequence] = field(default_factory=list)
    chunks: dict[Sequence, tuple[int, int]] = field(default_factory=dict)
    """Tokens computed and flags of the sequences that do something else than compute one token and draw another."""
    first_draws: list[Sequence] = field(default_factory=list)
    """Sequences that caught up with what is known of them in this plan, and may draw their first token."""
    grown: dict[Sequence, None] = field(default_factory=dict)
    """Sequences whose tables have blocks that the worker has not been told."""
    filled: list[Sequence] = field(default_factory=list)
    """Running sequences that may have filled a block."""
    copies: dict[Sequence, tuple[BlockId, BlockId]] = field(default_factory=dict)
    leaders: list[Sequence] = field(default_factory=list)
    """Sequences that draw their first token while siblings wait for that."""
    entered: list[Sequence] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    prompt_parts: list[PromptPart] = field(default_factory=list)
    beams: list[Sequence] = field(default_factory=list)
    """Beams that draw in this plan."""
    seats: list[Seat] = field(default_factory=list)
    seated: set[Request] = field(default_factory=set)
    """Whose beams these are: the worker does not know their rows before this plan, so that none of them gives way in it."""
    num_new_ids: int = 0

    @classmethod
    def begin(cls, step: int, limits: Limits, alone: Request | None) -> "Draft":
        """Begin a step."""
        return cls(step, limits.max_num_batched_tokens, limits.max_chunk_tokens, alone)

    def offer(self, wanted: int) -> int:
        """Return how many of `wanted` tokens one sequence can have."""
        return min(wanted, self.max_chunk_tokens, self.num_left)

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Give a sequence tokens; it draws another one if these reach the end of what is known or being drawn."""
        sequence.num_planned += num_tokens
        samples = sequence.num_planned == sequence.num_expected
        sequence.num_expected += samples
        self.num_left -= num_tokens
        self.sequences.append(sequence)
        if num_tokens != 1 or not samples:
            self.chunks[sequence] = (num_tokens, FLAG_SAMPLE if samples else 0)
        if samples and sequence.first_token_at is None:
            self.first_draws.append(sequence)
        if sequence.first_told < sequence.num_prompt:
            self._tell(sequence, sequence.num_planned - num_tokens)
        if samples and sequence.request.group is not None:
            self.beams.append(sequence)

    def take_back(self, sequence: Sequence) -> None:
        """Undo whatever this plan would have done for a running sequence, which gives way."""
        self.copies.pop(sequence, None)
        self.grown.pop(sequence, None)
        if sequence not in self.sequences:
            return
        self.sequences.remove(sequence)
        num_tokens, flag = self.chunks.pop(sequence, _DECODE)
        self.num_left += num_tokens
        sequence.num_planned -= num_tokens
        sequence.num_expected -= flag == FLAG_SAMPLE
        self.prompt_parts = [part for part in self.prompt_parts if part.sequence is not sequence]
        for chosen in (self.filled, self.leaders, self.first_draws, self.beams):
            if sequence in chosen:
                chosen.remove(sequence)

    def _tell(self, s: Sequence, begin: int) -> None:
        """Expect what a sequence tells of its prompt: each token's logits predict the one behind it."""
        first, end = max(begin + 1, s.first_told), min(s.num_planned + 1, s.num_prompt)
        if first < end:
            self.prompt_parts.append(PromptPart(s, s.residency, row_of(s), first, end - first))

    def columns(self) -> "Columns":
        """Return what the plan says of its rows."""
        chunks = [self.chunks.get(s, _DECODE) for s in self.sequences]
        counts, flags = [n for n, _ in chunks], [flag for _, flag in chunks]
        return Columns(
            self.sequences,
            [s.residency for s in self.sequences],
            counts,
            flags,
            pack_ints([row_of(s) for s in self.sequences]),
            pack_ints(counts),
            pack_ints(flags),
        )

    def to_plan(
        self,
        epoch: SessionId,
        columns: "Columns",
        append_row: list[Row],
        append_block: list[BlockId],
        freed_rows: list[Row],
    ) -> StepPlan:
        """Return the plan as the worker is told it, with the blocks that tables have got and the rows that are free."""
        rows, grammars = new_rows(self.entered)
        return StepPlan(
            epoch=epoch,
            step=self.step,
            row=columns.packed_rows,
            num_tokens=columns.packed_counts,
            flags=columns.packed_flags,
            new_rows=rows,
            grammars=grammars,
            copy_row=pack_ints([row_of(s) for s in self.copies]),
            copy_src=pack_ints([source for source, _ in self.copies.values()]),
            copy_dst=pack_ints([target for _, target in self.copies.values()]),
            append_row=pack_ints(append_row),
            append_block=pack_ints(append_block),
            fork_src=pack_ints([row_of(fork.source) for fork in self.forks]),
            fork_dst=pack_ints([row_of(fork.target) for fork in self.forks]),
            fork_choice=pack_ints([fork.target.choice for fork in self.forks]),
            freed_rows=pack_ints(freed_rows),
            beam_row=pack_ints([row_of(seat.beam) for seat in self.seats]),
            beam_src=pack_ints([row_of(seat.source) for seat in self.seats]),
            beam_token=pack_ints([seat.token for seat in self.seats]),
        )

    def record(self, columns: "Columns") -> PlanRecord:
        """Return what the result of the plan will be matched with."""
        if not self.chunks and not self.forks and not self.beams:
            return PlanRecord(
                self.step,
                columns.packed_rows,
                columns.sequences,
                columns.residencies,
                columns.counts,
                [],
                self.first_draws,
            )
        rows = list(zip(columns.sequences, columns.residencies, columns.counts, columns.flags, strict=True))
        drawing = [(s, residency, n) for s, residency, n, flag in rows if flag]
        forked = [fork.target for fork in self.forks]
        drawing += [(s, s.residency, s.num_planned - s.num_confirmed) for s in forked]
        return PlanRecord(
            self.step,
            pack_ints([row_of(s) for s, _, _ in drawing]),
            [s for s, _, _ in drawing],
            [residency for _, residency, _ in drawing],
            [n for _, _, n in drawing],
            [Chunk(s, residency, n) for s, residency, n, flag in rows if not flag],
            self.first_draws + forked,
            self.prompt_parts,
            self._places([s for s, _, _ in drawing]),
        )

    def _places(self, drawing: list[Sequence]) -> list[int]:
        """Return which of the sequences that draw are beams."""
        beams = set(self.beams)
        return [index for index, s in enumerate(drawing) if s in beams] if beams else []


class BuiltPlan(NamedTuple):
    """A plan to send, the record to match its result with, and the sequences that take rows in it."""

    plan: StepPlan
    record: PlanRecord
    entered: list[Sequence]


class Columns(NamedTuple):
    """What a plan says of its rows; if the same sequences only decode, it serves again for the next plan."""

    sequences: list[Sequence]
    residencies: list[int]
    counts: list[int]
    flags: list[int]
    packed_rows: bytes
    packed_counts: bytes
    packed_flags: bytes


def row_of(sequence: Sequence) -> Row:
    """Return the row of a sequence that runs.

    Raises:
        InvariantViolation: it has none.
    """
    if (row := sequence.row) is None:
        raise InvariantViolation(f"{sequence.request.name}/{sequence.choice} is planned, but has no row")
    return row


def num_new_ids(sequence: Sequence) -> int:
    """Return the column elements (4 bytes each) that a sequence's new row brings: ids, sampling lists, its grammar."""
    sampling = sequence.request.sampling
    columns = (
        sampling.allowed_token_ids,
        sampling.stop_token_ids,
        sampling.logit_bias_ids,
        sampling.logit_bias_values,
        sampling.bad_word_ids,
    )
    return sequence.num_known + sum(map(column_length, columns)) + len(sequence.request.grammar) // 4


def new_rows(sequences: list[Sequence]) -> tuple[tuple[NewRow, ...], tuple[bytes, ...]]:
    """Return what the worker is told of sequences that take rows, and their grammars, each once."""
    places = {b"": 0}
    rows = [_new_row(s, places.setdefault(s.request.grammar, len(places))) for s in sequences]
    return tuple(rows), tuple(places)[1:]


def _new_row(sequence: Sequence, grammar: int) -> NewRow:
    request = sequence.request
    return NewRow(
        row=row_of(sequence),
        request=request.name,
        choice=sequence.choice,
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=sequence.num_cached,
        token_ids=sequence.token_ids(),
        sampling=request.sampling,
        grammar=grammar,
        first_prompt_logprob=sequence.first_told if request.sampling.prompt_logprobs >= 0 else 0,
        trace=request.trace,
    )
