"""Plans under way at the worker: the record of each, and the check of its result against that record."""

from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from octavo.scheduler.errors import BadResult, InvariantViolation
from octavo.scheduler.sequence import Sequence, Status
from octavo.wire.columns import pack_ints, unpack_ints
from octavo.wire.ids import Row
from octavo.wire.plan import RowLogprobs, StepResult


class PlannedRow(NamedTuple):
    """One row of a sent plan. The sequence may have left the row since; the result is still its own."""

    sequence: Sequence
    row: Row
    num_tokens: int
    samples: bool
    residency: int


class PlanRecord(NamedTuple):
    """What a sent plan asked for."""

    step: int
    rows: list[PlannedRow]
    sampled_rows: bytes  # int32


class RowResult(NamedTuple):
    """What came back for one row of a plan: a token, a fault, or neither if the row did not sample."""

    planned: PlannedRow
    token: int | None
    fault: int | None
    logprobs: RowLogprobs | None


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

    def complete(self, result: StepResult, now: float) -> list[RowResult]:
        """Match a result with the record of its plan.

        Raises:
            BadResult: it does not answer the oldest outstanding plan.
        """
        if not self._records or self._records[0].step != result.step:
            expected = self._records[0].step if self._records else "none"
            raise BadResult(f"result of plan {result.step}, expected {expected}")
        record = self._records.popleft()
        self.num_completed = record.step
        self._progress_at = now
        return _match(record, result)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Prove the counts of live sequences against the outstanding plans.

        Raises:
            InvariantViolation: a sequence expects more or less than is under way.
        """
        tokens: Counter[Sequence] = Counter()
        samples: Counter[Sequence] = Counter()
        for planned in (planned for record in self._records for planned in record.rows):
            samples[planned.sequence] += planned.samples
            if planned.residency == planned.sequence.residency:
                tokens[planned.sequence] += planned.num_tokens
        for s in sequences:
            expected = (s.num_planned - s.num_confirmed, s.num_sampling)
            if s.status is not Status.FINISHED and expected != (tokens[s], samples[s]):
                raise InvariantViolation(
                    f"{s.request.name}/{s.choice} expects {expected} tokens computed and drawn, "
                    f"{(tokens[s], samples[s])} are under way"
                )


def _match(record: PlanRecord, result: StepResult) -> list[RowResult]:
    faults = dict(zip(unpack_ints(result.fault_row), unpack_ints(result.fault), strict=True))
    expected = record.sampled_rows
    if faults:
        sampled = unpack_ints(expected)
        if not set(faults) <= set(sampled):
            raise BadResult(f"plan {record.step}: rows {sorted(faults)} fault, but {list(sampled)} sampled")
        expected = pack_ints(row for row in sampled if row not in faults)
    if result.row != expected:
        raise BadResult(
            f"plan {record.step}: tokens for rows {list(unpack_ints(result.row))}, expected {list(unpack_ints(expected))}"
        )
    tokens = iter(unpack_ints(result.token))
    logprobs = {entry.row: entry for entry in result.logprobs}
    found: list[RowResult] = []
    for planned in record.rows:
        if not planned.samples:
            found.append(RowResult(planned, None, None, None))
        elif planned.row in faults:
            found.append(RowResult(planned, None, faults[planned.row], None))
        else:
            found.append(RowResult(planned, next(tokens), None, logprobs.get(planned.row)))
    return found
