"""Counts what the scheduler does, beside what the core counts itself: additions only, in the loop's thread."""

from array import array
from bisect import bisect_left
from collections.abc import Sequence

from octavo.scheduler.figures import Figures
from octavo.wire.columns import unpack_ints
from octavo.wire.metrics_catalogue import CAUSES, ROLES, SCHEDULER, WAITING_FOR
from octavo.wire.plan import StepPlan, StepResult
from octavo.wire.requests import FailureCode, MetricsRow, RequestFailed, SubmitRequest

_FAILED = {code: SCHEDULER.failed.cell(code.name.lower()) for code in FailureCode}
_BEGUN = {role: SCHEDULER.begun.cell(role) for role in ROLES}
_ENDED = {(role, cause): SCHEDULER.ended.cell(role, cause) for role in ROLES for cause in CAUSES}
_NEW, _AGAIN = SCHEDULER.submitted.cell("new"), SCHEDULER.submitted.cell("again")
_WAITING_FOR = {reason: SCHEDULER.waiting_for.cell(reason) for reason in WAITING_FOR}
_STEP_SECONDS, _STEP_TOKENS, _PLAN_BYTES = SCHEDULER.step_seconds, SCHEDULER.step_tokens, SCHEDULER.plan_bytes

_WORDS = (
    ("the worker's rows", "adoption"),
    ("rows", "rows"),
    ("blocks", "blocks"),
    ("tokens of a step", "tokens"),
    ("ids of its own", "own_ids"),
    ("room in a plan", "plan_size"),
    ("a worker", "worker"),
    ("the next plan", "next_plan"),
)
"""What the words of a reason to wait say -> its name as a label."""


class SchedulerMetrics:
    """The row of one life of the scheduler."""

    def __init__(self) -> None:
        self.cells = array("d", bytes(SCHEDULER.num_bytes))
        self._epoch: int | None = None  # of the plans under way
        self._num_under_way = 0
        self._progress_at = 0.0
        self._counts: bytes = b""  # of the newest plan: the same object while the same rows decode, ...
        self._num_tokens = 0.0  # ... which is their sum

    def plan_sent(self, plan: StepPlan, num_bytes: int, now: float) -> None:
        """Count a plan."""
        cells = self.cells
        if plan.num_tokens is not self._counts:
            self._counts = plan.num_tokens
            self._num_tokens = float(sum(unpack_ints(plan.num_tokens)))
        if plan.epoch != self._epoch:
            self._epoch, self._num_under_way = plan.epoch, 0
        if not self._num_under_way:
            self._progress_at = now
        self._num_under_way += 1
        _STEP_TOKENS.observe(cells, self._num_tokens)
        _PLAN_BYTES.observe(cells, float(num_bytes))

    def step_completed(self, result: StepResult, now: float) -> None:
        """Count a result."""
        if result.epoch != self._epoch or not self._num_under_way:
            return
        self._num_under_way -= 1
        took, self._progress_at = now - self._progress_at, now
        cells, first, bounds = self.cells, _STEP_SECONDS.first, _STEP_SECONDS.bounds
        cells[first + bisect_left(bounds, took)] += 1.0
        cells[first + len(bounds) + 1] += took

    def submitted(self, request: SubmitRequest) -> None:
        """Count a request that a frontend brought."""
        self.cells[_AGAIN if request.output_ids else _NEW] += 1.0

    def failed(self, requests: Sequence[RequestFailed]) -> None:
        """Count requests that get no answer."""
        for request in requests:
            self.cells[_FAILED[request.code]] += 1.0

    def session_began(self, role: str) -> None:
        """Count a session."""
        self.cells[_BEGUN[role]] += 1.0

    def session_ended(self, role: str, cause: str) -> None:
        """Count a session's end, by one of CAUSES."""
        self.cells[_ENDED[role, cause]] += 1.0

    def hello_refused(self, role: str) -> None:
        """Count a peer that was turned away for good."""
        self.cells[SCHEDULER.refused.cell(role)] += 1.0

    def row(self, figures: Figures, num_frontends: int, dropped: tuple[int, int, int]) -> MetricsRow:
        """Return the row as it is now.

        Args:
            figures: of the core.
            num_frontends: in session.
            dropped: stray messages, malformed frames, connections without a key.
        """
        cells = self.cells
        for reason, cell in _WAITING_FOR.items():
            cells[cell] = float(reason == waiting_for(figures.waiting_reason))
        strays, malformed, shut_out = dropped
        for metric, value in (
            (SCHEDULER.waiting_tokens, figures.num_waiting_tokens),
            (SCHEDULER.frontends, num_frontends),
            (SCHEDULER.strays, strays),
            (SCHEDULER.malformed, malformed),
            (SCHEDULER.shut_out, shut_out),
            (SCHEDULER.old_results, figures.num_old_results),
        ):
            cells[metric.first] = float(value)
        return MetricsRow(SCHEDULER.digest, cells.tobytes())


def waiting_for(reason: str) -> str:
    """Return the name, one of WAITING_FOR, of what the next waiting sequence waits for; '' if none waits."""
    if not reason:
        return ""
    return next((name for words, name in _WORDS if words in reason), "other")
