"""What a worker tells of traced rows in spans: the steps that computed their prompt, and those that drew their tokens.

It reads plans and results as they pass. A plan that names no traced row costs one look at it.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.wire.columns import unpack_ints
from octavo.wire.handshake import WorkerFacts
from octavo.wire.plan import FLAG_SAMPLE, NewRow, StepPlan, StepResult
from octavo.wire.tracing import SpanClock

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from octavo.wire.tracing_export import Attributes, Tracing

IDLE_S = 1.0
"""Without a step for so long, rows are told of: the scheduler frees the last ones only with its next plan."""


@dataclass(slots=True)
class _Phase:
    """Steps of one row; times are monotonic seconds."""

    began_at: float = 0.0
    ended_at: float = 0.0
    first_step: int = 0
    last_step: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    compute_us: int = 0
    min_batch: int = 0
    max_batch: int = 0

    def add(self, run: "_Run", num_tokens: int) -> None:
        """Count steps that have ended, in each of which the row computed so many tokens."""
        if not self.num_steps:
            self.began_at, self.first_step, self.min_batch = run.began_at, run.first_step, run.batch_size
        self.ended_at, self.last_step = run.ended_at, run.last_step
        self.num_steps += run.num_steps
        self.num_tokens += num_tokens * run.num_steps
        self.compute_us += run.compute_us
        self.min_batch = min(self.min_batch, run.batch_size)
        self.max_batch = max(self.max_batch, run.batch_size)


@dataclass(slots=True)
class _Row:
    parent: "Context"
    clock: SpanClock
    choice: int
    draws: bool = False  # it has drawn a token: what follows is decode
    prefill: _Phase = field(default_factory=_Phase)
    decode: _Phase = field(default_factory=_Phase)


@dataclass(slots=True)
class _Run:
    """Plans in a row that differ in nothing, as decodes do: they are counted once, however many rows there are."""

    columns: tuple[bytes, bytes, bytes]
    batch_size: int
    parts: list[tuple[_Phase, int]]  # and tokens that the row computes in each
    may_go_on: bool  # no row begins to decode with it
    began_at: float = 0.0
    ended_at: float = 0.0
    first_step: int = 0
    last_step: int = 0
    num_steps: int = 0
    compute_us: int = 0

    def add(self, step: int, compute_us: int, now: float) -> None:
        """Count a step that has ended."""
        if not self.num_steps:
            self.began_at, self.first_step = now - compute_us / 1e6, step
        self.ended_at, self.last_step = now, step
        self.num_steps += 1
        self.compute_us += compute_us

    def settle(self) -> None:
        """Tell the rows' phases what has been counted."""
        if self.num_steps:
            for phase, num_tokens in self.parts:
                phase.add(self, num_tokens)
            self.num_steps = self.compute_us = 0


@dataclass(slots=True)
class _Launched:
    step: int
    run: _Run
    freed: list[_Row]


class RowTraces:
    """Traced rows of the present session; there are no more than rows.

    Args:
        tracing: makes spans.
        facts: of this worker.
        clock: monotonic seconds.
    """

    def __init__(self, tracing: "Tracing", facts: WorkerFacts, clock: Callable[[], float] = time.monotonic) -> None:
        self._tracing = tracing
        self._where = {"octavo.device": facts.device, "octavo.backend": facts.backend}
        self._clock = clock
        self._rows: dict[int, _Row] = {}
        self._launched: deque[_Launched] = deque()
        self._newest: _Run | None = None  # of the plan that was launched last
        self._counted: _Run | None = None  # of the step that was completed last
        self._active_at = 0.0

    def __len__(self) -> int:
        return len(self._rows)

    def launched(self, plan: StepPlan) -> None:
        """Take note of a plan that has been launched."""
        if not self._rows and not any(new.trace for new in plan.new_rows):
            self._newest = None
            return
        columns = (plan.row, plan.num_tokens, plan.flags)
        changes = plan.freed_rows or plan.new_rows or plan.fork_src or plan.beam_row
        if not changes and (run := self._newest) is not None and run.may_go_on and run.columns == columns:
            self._launched.append(_Launched(plan.step, run, []))
            return
        freed = [row for index in unpack_ints(plan.freed_rows) if (row := self._rows.pop(index, None)) is not None]
        self._inherit(plan.beam_src, plan.beam_row, b"")
        for new in plan.new_rows:
            if new.trace:
                self._begin(new)
        self._newest = run = self._new_run(columns)
        self._inherit(plan.fork_src, plan.fork_dst, plan.fork_choice)
        self._launched.append(_Launched(plan.step, run, freed))

    def completed(self, result: StepResult) -> None:
        """Count a step whose result is there."""
        if not self._launched or self._launched[0].step != result.step:
            return
        launched = self._launched.popleft()
        self._active_at = now = self._clock()
        if launched.run is not self._counted:
            self._settle()
            self._counted = launched.run
        launched.run.add(result.step, result.compute_us, now)
        for row in launched.freed:
            self._tell(row)

    def rest(self) -> None:
        """Tell of rows that may have ended, if nothing has been computed for a while."""
        if self._rows and not self._launched and self._clock() - self._active_at >= IDLE_S:
            self._settle()
            self._newest = None  # its phases are told
            for row in self._rows.values():
                self._tell(row)

    def forget(self) -> None:
        """Tell of all rows, as far as they have come: the session is over."""
        self._settle()
        self._newest = self._counted = None
        for row in [*self._rows.values(), *(row for launched in self._launched for row in launched.freed)]:
            self._tell(row)
        self._rows.clear()
        self._launched.clear()

    def _settle(self) -> None:
        if self._counted is not None:
            self._counted.settle()

    def _new_run(self, columns: tuple[bytes, bytes, bytes]) -> _Run:
        rows, counts, flags = map(unpack_ints, columns)
        run = _Run(columns, len(rows), [], may_go_on=True)
        for index, num_tokens, flag in zip(rows, counts, flags, strict=True):
            if (row := self._rows.get(index)) is not None:
                run.parts.append((row.decode if row.draws else row.prefill, num_tokens))
                if not row.draws and flag & FLAG_SAMPLE:
                    row.draws, run.may_go_on = True, False
        return run

    def _begin(self, new: NewRow) -> None:
        self._rows[new.row] = _Row(self._tracing.remote(new.trace), SpanClock(), new.choice)

    def _inherit(self, sources: bytes, targets: bytes, choices: bytes) -> None:
        """Let free rows that start from traced ones be traced as well."""
        if not sources:
            return
        found = unpack_ints(choices) or [-1] * len(unpack_ints(sources))
        for source, target, choice in zip(unpack_ints(sources), unpack_ints(targets), found, strict=True):
            if (row := self._rows.get(source)) is not None and target not in self._rows:
                own = row.choice if choice < 0 else choice
                self._rows[target] = _Row(row.parent, row.clock, own, draws=True)

    def _tell(self, row: _Row) -> None:
        """Tell of what a row has computed since it was last told of."""
        for name, phase in (("octavo.worker.prefill", row.prefill), ("octavo.worker.decode", row.decode)):
            if phase.num_steps:
                attributes: Attributes = {
                    **self._where,
                    "octavo.choice": row.choice,
                    "octavo.first_step": phase.first_step,
                    "octavo.last_step": phase.last_step,
                    "octavo.num_steps": phase.num_steps,
                    "octavo.num_tokens": phase.num_tokens,
                    "octavo.compute_us": phase.compute_us,
                    "octavo.batch_size.min": phase.min_batch,
                    "octavo.batch_size.max": phase.max_batch,
                }
                begin, end = row.clock.at(phase.began_at), row.clock.at(phase.ended_at)
                self._tracing.record(name, row.parent, begin, end, attributes)
        row.prefill, row.decode = _Phase(), _Phase()
