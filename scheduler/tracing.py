"""What the scheduler tells of traced requests in spans: their wait, their prefill, their decode.

It watches what the core is told and what it asks for, and changes nothing. Requests whose trace nobody wants are not
looked at.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from octavo.scheduler.events import (
    ChoiceStopped,
    Event,
    FrontendLost,
    RequestCancelled,
    RequestSubmitted,
    WorkerLost,
)
from octavo.scheduler.instructions import EmitOutput, EndFrontendSession, EndWorkerSession, Instruction, SendPlan
from octavo.wire.columns import column_length, unpack_ints
from octavo.wire.plan import NewRow, StepPlan
from octavo.wire.requests import StepOutput, SubmitRequest
from octavo.wire.tracing import MAX_SPAN_EVENTS, SpanClock

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from octavo.wire.tracing_export import Attributes, Tracing

_Key: TypeAlias = tuple[int, int]
"""Session of the frontend and handle."""


@dataclass(slots=True)
class _Traced:
    """A request from its admission to its end. Times are monotonic seconds, plans are counted over all epochs."""

    trace: str
    parent: "Context"
    clock: SpanClock
    submitted_at: float
    num_prompt: int
    num_replayed: int
    unfinished: set[int]
    is_search: bool
    planned_at: float | None = None
    first_token_at: float | None = None
    num_cached: int = 0
    num_output: int = 0
    num_preemptions: int = 0
    first_plan: int = 0
    first_token_plan: int = 0
    choices_planned: set[int] = field(default_factory=set)
    rows: set[int] = field(default_factory=set)
    events: "list[tuple[str, float, Attributes]]" = field(default_factory=list)

    def tell(self, name: str, now: float, attributes: "Attributes") -> None:
        """Keep an event for the span that it falls in."""
        if len(self.events) < MAX_SPAN_EVENTS:
            self.events.append((name, now, attributes))


class RequestTraces:
    """Traced requests that are live.

    The law: a request is here from the turn that admits it to the turn that ends it, if its message names a span; so what
    is held is bounded by the live requests.

    Args:
        tracing: makes spans.
    """

    def __init__(self, tracing: "Tracing") -> None:
        self._tracing = tracing
        self._live: dict[_Key, _Traced] = {}
        self._by_trace: dict[str, _Key] = {}
        self._untold: set[_Key] = set()  # planned, without a token yet
        self._rows: dict[int, tuple[_Key, int]] = {}  # of the present worker: request and choice
        self._num_plans = 0

    def __len__(self) -> int:
        return len(self._live)

    def observe(self, events: Iterable[Event], instructions: Iterable[Instruction], now: float) -> None:
        """Take note of one turn of the core."""
        for event in events:
            self._on_event(event, now)
        # Ends before plans: a row that is freed because its request has ended was not preempted.
        for instruction in instructions:
            if isinstance(instruction, EmitOutput) and self._live:
                self._on_output(instruction.frontend, instruction.output, now)
        for instruction in instructions:
            match instruction:
                case SendPlan(plan):
                    self._num_plans += 1
                    if self._live:
                        self._on_plan(plan, now)
                case EndWorkerSession():
                    self._on_worker_lost(now)
                case EndFrontendSession(frontend, _):
                    self._on_frontend_lost(frontend, now)

    def _on_event(self, event: Event, now: float) -> None:
        match event:
            case RequestSubmitted(frontend, message):
                if message.trace and (frontend, message.handle) not in self._live:
                    self._add((frontend, message.handle), message, now)
            case RequestCancelled(frontend, cancel):
                self._end((frontend, cancel.handle), now, "cancelled")
            case ChoiceStopped(frontend, stopped):
                traced = self._live.get((frontend, stopped.handle))
                if traced is not None and not traced.is_search:
                    self._finish((frontend, stopped.handle), stopped.choice, stopped.num_tokens, now)
            case FrontendLost(frontend):
                self._on_frontend_lost(frontend, now)
            case WorkerLost():
                self._on_worker_lost(now)

    def _add(self, key: _Key, message: SubmitRequest, now: float) -> None:
        unfinished = set(range(message.num_choices)).difference(unpack_ints(message.finished_choices))
        if not unfinished:
            return
        self._live[key] = _Traced(
            trace=message.trace,
            parent=self._tracing.remote(message.trace),
            clock=SpanClock(),
            submitted_at=now,
            num_prompt=column_length(message.prompt_ids),
            num_replayed=sum(map(column_length, message.output_ids)),
            unfinished=unfinished,
            is_search=message.beams is not None,
        )
        self._by_trace[message.trace] = key

    def _on_output(self, frontend: int, output: StepOutput, now: float) -> None:
        for started in output.started:
            key = (frontend, started.handle)
            if (traced := self._live.get(key)) is not None:
                traced.planned_at, traced.num_cached = now, started.num_cached_tokens
                self._untold.add(key)
        if self._untold and output.handle:
            for handle in set(unpack_ints(output.handle)):
                if (key := (frontend, handle)) in self._untold:
                    self._untold.remove(key)
                    self._live[key].first_token_at = now
                    self._live[key].first_token_plan = self._num_plans
        for finished in output.finished:
            self._finish((frontend, finished.handle), finished.choice, finished.num_tokens, now)
        for failed in output.failed:
            self._end((frontend, failed.handle), now, "failed")

    def _on_plan(self, plan: StepPlan, now: float) -> None:
        if plan.freed_rows and self._rows:
            for row in unpack_ints(plan.freed_rows):
                self._on_freed(row, now)
        for new in plan.new_rows:
            if new.trace and (key := self._by_trace.get(new.trace)) is not None:
                self._on_new_row(key, new, now)
        if plan.fork_src and self._rows:
            columns = map(unpack_ints, (plan.fork_src, plan.fork_dst, plan.fork_choice))
            for source, target, choice in zip(*columns, strict=True):
                if source in self._rows:
                    self._take_row(self._rows[source][0], target, choice)

    def _on_new_row(self, key: _Key, new: NewRow, now: float) -> None:
        traced = self._live[key]
        num_known = column_length(new.token_ids)
        traced.first_plan = traced.first_plan or self._num_plans
        name = "octavo.recompute" if new.choice in traced.choices_planned else "octavo.scheduled"
        if new.choice not in traced.choices_planned and traced.num_replayed:
            name = "octavo.replay"
        self._take_row(key, new.row, new.choice)
        found = {"octavo.num_cached_tokens": new.num_computed_tokens, "octavo.num_tokens": num_known}
        traced.tell(name, now, {"octavo.choice": new.choice, **found})

    def _take_row(self, key: _Key, row: int, choice: int) -> None:
        traced = self._live[key]
        self._rows[row] = key, choice
        traced.rows.add(row)
        traced.choices_planned.add(choice)

    def _on_freed(self, row: int, now: float) -> None:
        if (held := self._rows.pop(row, None)) is None:
            return
        traced, choice = self._live[held[0]], held[1]
        traced.rows.discard(row)
        # The rows of a search come and go with its beams.
        if choice in traced.unfinished and not traced.is_search:
            traced.num_preemptions += 1
            traced.tell("octavo.preempted", now, {"octavo.choice": choice})

    def _on_worker_lost(self, now: float) -> None:
        for key in {key for key, _ in self._rows.values()}:
            self._live[key].rows.clear()
            self._live[key].tell("octavo.worker_lost", now, {})
        self._rows.clear()

    def _on_frontend_lost(self, frontend: int, now: float) -> None:
        for key in [key for key in self._live if key[0] == frontend]:
            self._end(key, now, "cancelled")

    def _finish(self, key: _Key, choice: int, num_tokens: int, now: float) -> None:
        if (traced := self._live.get(key)) is None or choice not in traced.unfinished:
            return
        traced.unfinished.remove(choice)
        traced.num_output += num_tokens
        if not traced.unfinished:
            self._end(key, now, "finished")

    def _end(self, key: _Key, now: float, outcome: str) -> None:
        if (traced := self._live.pop(key, None)) is None:
            return
        self._untold.discard(key)
        if self._by_trace.get(traced.trace) == key:
            del self._by_trace[traced.trace]
        for row in traced.rows:
            del self._rows[row]
        self._emit(traced, now, outcome)

    def _emit(self, traced: _Traced, now: float, outcome: str) -> None:
        planned, first = traced.planned_at, traced.first_token_at
        spans: list[tuple[str, float, float, Attributes]] = []
        waiting = {"octavo.num_prompt_tokens": traced.num_prompt, "octavo.num_replayed_tokens": traced.num_replayed}
        spans.append(("octavo.queue", traced.submitted_at, now if planned is None else planned, waiting))
        if planned is not None:
            last_plan = self._num_plans if first is None else traced.first_token_plan
            steps = max(0, last_plan - traced.first_plan + 1)
            prefill = {"octavo.num_cached_tokens": traced.num_cached, "octavo.num_steps": steps}
            spans.append(("octavo.prefill", planned, now if first is None else first, prefill))
        if first is not None:
            decode = {
                "octavo.num_output_tokens": traced.num_output,
                "octavo.num_steps": self._num_plans - traced.first_token_plan,
                "octavo.num_preemptions": traced.num_preemptions,
            }
            spans.append(("octavo.decode", first, now, decode))
        for index, (name, begin, end, attributes) in enumerate(spans):
            is_last = index == len(spans) - 1
            # An event on the border belongs to the span that begins there.
            events = [e for e in traced.events if begin <= e[1] < end or (is_last and e[1] >= end)]
            told = [(event, traced.clock.at(at), details) for event, at, details in events]
            if is_last:
                attributes = {**attributes, "octavo.outcome": outcome}
            self._tracing.record(name, traced.parent, traced.clock.at(begin), traced.clock.at(end), attributes, told)
