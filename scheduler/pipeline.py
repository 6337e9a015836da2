"""Plans under way at the worker: the record of each, and the check of its result against that record."""

from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.scheduler.errors import BadResult, InvariantViolation
from octavo.scheduler.sequence import Request, Sequence, Status
from octavo.wire.columns import pack_ints, unpack_ints
from octavo.wire.ids import Row
from octavo.wire.plan import RowLogprobs, StepResult
from octavo.wire.prompt_logprobs import PromptLogprobs


class Chunk(NamedTuple):
    """A row of a sent plan that computes tokens and draws none."""

    sequence: Sequence
    residency: int
    num_tokens: int


class PromptPart(NamedTuple):
    """A row of a sent plan that tells of its prompt: the positions, and whose they are."""

    sequence: Sequence
    residency: int
    row: Row
    first: int
    num_positions: int


@dataclass(slots=True)
class PlanRecord:
    """What a sent plan asked for. Its sequences may have left their rows since: a result is matched through this alone.

    The lists of what is drawn are parallel: one entry a row of `rows`.
    """

    step: int
    rows: bytes
    """int32: rows that draw a token, forked ones last."""
    sequences: list[Sequence]
    residencies: list[int]
    num_tokens: list[int]
    """Computed for each; for a forked one, those of its source that are not confirmed."""
    chunks: list[Chunk]
    first_draws: list[Sequence]
    """Sequences that draw their first token, perhaps: who was preempted draws its next one."""
    prompt_parts: list[PromptPart] = field(default_factory=list)
    beams: list[int] = field(default_factory=list)
    """Which of those that draw are beams: what they draw does not count, but the candidates that come with it."""

    def counts(self, sequence: Sequence, residency: int) -> bool:
        """Say whether what the plan draws for a sequence, in that stay in the batch, still counts."""
        return sequence.residency == residency or (
            sequence.status is not Status.FINISHED and self.step > sequence.void_through
        )


class Matched(NamedTuple):
    """A result and its record; `tokens` are those of the sequences that did not fault, in order."""

    record: PlanRecord
    tokens: Several[int]
    faults: dict[int, int]
    """Index among the record's sequences -> FAULT_*."""
    logprobs: dict[int, RowLogprobs]
    """Index among the record's sequences -> what came with its token."""
    told: Several[tuple[PromptPart, PromptLogprobs]] = ()
    broken: Several[tuple[Sequence, int]] = ()
    """Sequences, and their stays in the batch, that draw nothing and whose values broke: they could not tell."""

    def drawn(self) -> tuple[Several[Sequence], Several[int], Several[int]]:
        """Return the sequences that drew a token, which counts if they do, their stays in the batch, and the tokens."""
        record, faults = self.record, self.faults
        if not faults and not record.beams:
            return record.sequences, record.residencies, self.tokens
        good = [index for index in range(len(record.sequences)) if index not in faults]
        left_out = set(record.beams)
        drawn = [(index, token) for index, token in zip(good, self.tokens, strict=True) if index not in left_out]
        places = [index for index, _ in drawn]
        return (
            [record.sequences[i] for i in places],
            [record.residencies[i] for i in places],
            [token for _, token in drawn],
        )

    def candidates(self) -> dict[Request, dict[Sequence, RowLogprobs]]:
        """Return what the beams that still run and did not fault may go on with, by request."""
        found: dict[Request, dict[Sequence, RowLogprobs]] = {}
        for index in self.record.beams:
            s = self.record.sequences[index]
            if index not in self.faults and s.residency == self.record.residencies[index]:
                found.setdefault(s.request, {})[s] = self.logprobs[index]
        return found


class Pipeline:
    """Outstanding plans of one epoch, oldest first; results come in the same order."""

    def __init__(self, depth: int) -> None:
        self.num_sent = 0
        self.num_completed = 0
        self._depth = depth
        self._records: deque[PlanRecord] = deque()
        self._progress_at = 0.0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def records(self) -> Iterable[PlanRecord]:
        """Those whose results are not back, the oldest first."""
        return self._records

    @property
    def is_full(self) -> bool:
        """Whether no plan may be sent now."""
        return len(self._records) >= self._depth

    @property
    def waiting_since(self) -> float | None:
        """Since when the oldest outstanding plan has had the worker to itself; None if none is outstanding."""
        return self._progress_at if self._records else None

    def push(self, record: PlanRecord, now: float) -> None:
        """Take note of a plan that is being sent."""
        if not self._records:
            self._progress_at = now
        self._records.append(record)
        self.num_sent = record.step

    def complete(self, result: StepResult, now: float) -> Matched:
        """Match a result with the record of its plan.

        Raises:
            BadResult: it does not answer the oldest outstanding plan.
        """
        if not self._records or self._records[0].step != result.step:
            expected = self._records[0].step if self._records else "none"
            raise BadResult(f"result of plan {result.step}, expected {expected}")
        matched = _match(self._records[0], result)
        record = self._records.popleft()
        self.num_completed = record.step
        self._progress_at = now
        return matched

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Prove the counts of live sequences against the outstanding plans.

        Raises:
            InvariantViolation: a sequence expects more or less than is under way.
        """
        tokens: Counter[Sequence] = Counter()
        draws: Counter[Sequence] = Counter()
        for record in self._records:
            for s, residency, num_tokens in zip(record.sequences, record.residencies, record.num_tokens, strict=True):
                draws[s] += record.step > s.void_through
                tokens[s] += num_tokens if residency == s.residency else 0
            for chunk in record.chunks:
                current = chunk.residency == chunk.sequence.residency
                tokens[chunk.sequence] += chunk.num_tokens if current else 0
        for s in sequences:
            expected = (s.num_planned - s.num_confirmed, s.num_sampling)
            if s.status is not Status.FINISHED and expected != (tokens[s], draws[s]):
                raise InvariantViolation(
                    f"{s.request.name}/{s.choice} expects {expected} tokens computed and drawn, "
                    f"{(tokens[s], draws[s])} are under way"
                )


def _match(record: PlanRecord, result: StepResult) -> Matched:
    faults: dict[int, int] = {}
    faulty: dict[int, int] = {}
    broken: list[tuple[Sequence, int]] = []
    expected = record.rows
    if result.fault_row:
        rows = unpack_ints(record.rows)
        telling = {part.row for part in record.prompt_parts}
        faulty = dict(zip(unpack_ints(result.fault_row), unpack_ints(result.fault), strict=True))
        if not set(faulty) <= telling.union(rows):
            raise BadResult(f"plan {record.step}: rows {sorted(faulty)} fault, but {list(rows)} sampled")
        drawing = set(rows)
        broken = [(p.sequence, p.residency) for p in record.prompt_parts if p.row in faulty and p.row not in drawing]
        faults = {index: faulty[row] for index, row in enumerate(rows) if row in faulty}
        expected = pack_ints(row for row in rows if row not in faulty)
    if result.row != expected:
        raise BadResult(
            f"plan {record.step}: tokens for rows {list(unpack_ints(result.row))}, expected {list(unpack_ints(expected))}"
        )
    logprobs: dict[int, RowLogprobs] = {}
    if result.logprobs:
        by_row = {entry.row: entry for entry in result.logprobs}
        asked = zip(unpack_ints(record.rows), record.sequences, strict=True)
        logprobs = {
            index: by_row[row]
            for index, (row, s) in enumerate(asked)
            if row in by_row and s.request.sampling.logprobs >= 0
        }
    for index in record.beams:
        if index not in faults and (index not in logprobs or not logprobs[index].top_ids):
            raise BadResult(f"plan {record.step}: no candidates for a beam")
    told = _match_told(record, result, faulty) if record.prompt_parts or result.prompt_logprobs else ()
    return Matched(record, unpack_ints(result.token), faults, logprobs, told, broken)


def _match_told(
    record: PlanRecord, result: StepResult, faulty: dict[int, int]
) -> list[tuple[PromptPart, PromptLogprobs]]:
    """Match what rows tell of their prompts with what the plan had them compute."""
    parts: dict[int, PromptPart] = {part.row: part for part in record.prompt_parts if part.row not in faulty}
    expected = {
        row: (p.first, p.num_positions, p.sequence.request.sampling.prompt_logprobs) for row, p in parts.items()
    }
    told = {entry.of: (entry.first_position, entry.count, entry.num_top) for entry in result.prompt_logprobs}
    if told != expected or len(told) != len(result.prompt_logprobs):
        raise BadResult(f"plan {record.step}: prompt log-probabilities {told}, expected {expected}")
    return [(parts[entry.of], entry) for entry in result.prompt_logprobs]
