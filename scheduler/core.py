"""The scheduler's core: events in, instructions out. No sockets, clock, threads or randomness in here."""

from collections.abc import Sequence as Several
from dataclasses import dataclass

from octavo.scheduler.admission import RETRY_AFTER_S, length_error, refusal
from octavo.scheduler.config import Limits, SchedulerConfig, resolve_limits
from octavo.scheduler.deadlines import Deadlines
from octavo.scheduler.errors import BadResult, InvariantViolation
from octavo.scheduler.events import (
    ChoiceStopped,
    Event,
    FrontendLost,
    RequestCancelled,
    RequestSubmitted,
    StepCompleted,
    WorkerLost,
    WorkerReady,
)
from octavo.scheduler.instructions import (
    EmitOutput,
    EndFrontendSession,
    EndWorkerSession,
    Instruction,
    SendPlan,
)
from octavo.scheduler.outputs import Outputs
from octavo.scheduler.pipeline import Pipeline, RowResult
from octavo.scheduler.planner import Planner
from octavo.scheduler.policy import Policy
from octavo.scheduler.policy.fcfs import FirstComeFirstServed
from octavo.scheduler.queues import WaitingQueue
from octavo.scheduler.sequence import Request, Sequence, Status
from octavo.scheduler.state import RequestTable
from octavo.wire.columns import column_length, unpack_ints
from octavo.wire.handshake import WorkerFacts
from octavo.wire.ids import Handle, SessionId
from octavo.wire.plan import FAULT_NO_CANDIDATE, FAULT_NONFINITE_LOGITS, StepResult
from octavo.wire.requests import FailureCode, FinishReason, RequestFailed, SubmitRequest

_FAULTS = {
    FAULT_NONFINITE_LOGITS: "non-finite logits",
    FAULT_NO_CANDIDATE: "masks and filters left no id that could be drawn",
}


@dataclass(frozen=True, slots=True)
class Figures:
    """What the core holds at one moment, for reports."""

    num_requests: int
    num_running: int
    """Sequences with a row."""
    num_waiting: int
    """Sequences without one."""
    num_blocks: int
    """That can be used; 0 without a worker."""
    num_free_blocks: int
    block_size: int
    num_steps: int
    """Finished in all epochs."""
    num_preemptions: int
    num_old_results: int
    """Results of earlier epochs, ignored."""


@dataclass(slots=True)
class _Worker:
    epoch: SessionId
    planner: Planner
    pipeline: Pipeline


class Scheduler:
    """All requests and their way from admission to their end.

    `on_events` is the only mutator: it tells what has happened in one turn of the loop, and returns what to do. Every
    accepted request ends exactly once: all of its choices finish, or it fails, or its caller has gone.
    """

    def __init__(self, config: SchedulerConfig, policy: Policy | None = None) -> None:
        self._config = config
        self._policy = policy or FirstComeFirstServed()
        self._requests = RequestTable()
        self._waiting = WaitingQueue(self._policy)
        self._deadlines = Deadlines()
        self._outputs = Outputs()
        self._worker: _Worker | None = None
        self._limits: Limits | None = None  # of the newest worker; admission needs them while it is away
        self._lost_at: float | None = None
        self._endings: list[Instruction] = []
        self._num_requests = self._num_sequences = 0  # ever
        self._num_steps = self._num_preemptions = self._num_old_results = 0  # of ended epochs, but for the last

    @property
    def limits(self) -> Limits | None:
        """What requests must respect; None until a worker was ready."""
        return self._limits

    @property
    def has_outstanding_plans(self) -> bool:
        """Whether the worker owes a result."""
        return self._worker is not None and len(self._worker.pipeline) > 0

    @property
    def next_timer(self) -> float | None:
        """When `on_events` must be called again at the latest, with no event if there is none."""
        timers = [self._deadlines.next, self._step_timeout_at, self._recovery_timeout_at]
        return min((timer for timer in timers if timer is not None), default=None)

    @property
    def figures(self) -> Figures:
        """What it holds now."""
        planner = self._worker.planner if self._worker else None
        return Figures(
            num_requests=len(self._requests),
            num_running=len(planner.batch) if planner else 0,
            num_waiting=len(self._waiting),
            num_blocks=planner.pool.num_blocks - 1 if planner else 0,
            num_free_blocks=planner.pool.num_free if planner else 0,
            block_size=self._limits.block_size if self._limits else 0,
            num_steps=self._num_steps + (self._worker.pipeline.num_completed if self._worker else 0),
            num_preemptions=self._num_preemptions + (planner.num_preemptions if planner else 0),
            num_old_results=self._num_old_results,
        )

    def on_event(self, event: Event, now: float) -> list[Instruction]:
        """Handle one event; see `on_events`."""
        return self.on_events((event,), now)

    def on_events(self, events: Several[Event], now: float) -> list[Instruction]:
        """Handle what has happened, in order, and what is due at `now`; then plan as far ahead as the pipeline allows.

        Args:
            events: none, if only time has passed.
            now: monotonic seconds.
        """
        self._expire(now)
        for event in events:
            self._handle(event, now)
        instructions = self._plan(now)
        instructions += [EmitOutput(frontend, output) for frontend, output in self._outputs.take()]
        instructions += self._endings
        self._endings = []
        return instructions

    def check(self) -> None:
        """Prove every invariant of the state; cheap enough for tests after each event, and for an idle service.

        Raises:
            InvariantViolation: one does not hold.
        """
        self._requests.check()
        self._waiting.check()
        running: set[int] = set()
        if self._worker is not None:
            self._worker.planner.check()
            self._worker.pipeline.check(s for r in self._requests for s in r.sequences)
            running = {s.number for s in self._worker.planner.batch}
        waiting = {s.number for s in self._waiting}
        alive = {s.number for r in self._requests for s in r.sequences if s.status is not Status.FINISHED}
        if waiting & running or waiting | running != alive:
            raise InvariantViolation(f"sequences alive {alive}, waiting {waiting}, running {running}")
        for request in self._requests:
            unfinished = sum(s.status is not Status.FINISHED for s in request.sequences)
            if unfinished != request.num_unfinished or unfinished == 0:
                raise InvariantViolation(f"{request.name} counts {request.num_unfinished} choices, has {unfinished}")
        timed = sum(r.deadline != float("inf") for r in self._requests)
        if timed != len(self._deadlines):
            raise InvariantViolation(f"{len(self._deadlines)} deadlines for {timed} requests")
        if self._requests.num_unstarted > self._config.max_waiting_requests:
            raise InvariantViolation(f"{self._requests.num_unstarted} requests wait")
        if self._worker is not None and not alive and self._worker.planner.pool.num_free != self.figures.num_blocks:
            raise InvariantViolation(f"idle, but only {self._worker.planner.pool.num_free} blocks are free")

    # Time

    @property
    def _step_timeout_at(self) -> float | None:
        since = self._worker.pipeline.waiting_since if self._worker else None
        return None if since is None else since + self._config.step_timeout_s

    @property
    def _recovery_timeout_at(self) -> float | None:
        if self._lost_at is None or len(self._requests) == 0:
            return None
        return self._lost_at + self._config.recovery_timeout_s

    def _expire(self, now: float) -> None:
        for request in self._deadlines.expired(now):
            self._fail(request, FailureCode.DEADLINE, "the deadline has passed")
        if self._worker is not None and (due := self._step_timeout_at) is not None and due <= now:
            self._give_up_worker(f"no step finished for {self._config.step_timeout_s:g} s", now)
        if (due := self._recovery_timeout_at) is not None and due <= now:
            for request in list(self._requests):
                self._fail(request, FailureCode.UNAVAILABLE, self._no_worker_reason, RETRY_AFTER_S)

    @property
    def _no_worker_reason(self) -> str:
        return f"no worker for {self._config.recovery_timeout_s:g} s"

    # Events

    def _handle(self, event: Event, now: float) -> None:
        match event:
            case StepCompleted(result):
                self._on_result(result, now)
            case RequestSubmitted(frontend, message):
                self._on_submitted(frontend, message, now)
            case RequestCancelled(frontend, cancel):
                if (request := self._requests.find(frontend, cancel.handle)) is not None:
                    self._end(request)
            case ChoiceStopped(frontend, finish):
                request = self._requests.find(frontend, finish.handle)
                if request is not None and finish.choice < len(request.sequences):
                    self._finish(request.sequences[finish.choice])
            case FrontendLost(frontend):
                self._on_frontend_lost(frontend)
            case WorkerReady(epoch, facts):
                self._on_worker_ready(epoch, facts, now)
            case WorkerLost(epoch, _):
                if self._worker is not None and self._worker.epoch == epoch:
                    self._on_worker_lost(now)

    def _on_submitted(self, frontend: SessionId, message: SubmitRequest, now: float) -> None:
        if self._requests.find(frontend, message.handle) is not None:
            self._endings.append(EndFrontendSession(frontend, f"handle {message.handle} is in use already"))
            self._on_frontend_lost(frontend)
            return
        if self._limits is None or self._recovery_is_over(now):
            reason = self._no_worker_reason if self._limits else "no worker has been ready yet"
            failed = RequestFailed(message.handle, FailureCode.UNAVAILABLE, reason, RETRY_AFTER_S)
            self._outputs.fail(frontend, failed)
            return
        if (refused := refusal(message, self._limits, self._config, self._requests)) is not None:
            self._outputs.fail(frontend, refused)
            return
        if message.deadline_s is not None and not message.deadline_s > 0:
            failed = RequestFailed(message.handle, FailureCode.DEADLINE, "the deadline has passed")
            self._outputs.fail(frontend, failed)
            return
        self._admit(self._make_request(frontend, message, now), message, now)

    def _recovery_is_over(self, now: float) -> bool:
        return self._lost_at is not None and now >= self._lost_at + self._config.recovery_timeout_s

    def _make_request(self, frontend: SessionId, message: SubmitRequest, now: float) -> Request:
        self._num_requests += 1
        request = Request(
            frontend=frontend,
            handle=Handle(message.handle),
            arrival=self._num_requests,
            prompt_ids=message.prompt_ids,
            num_prompt_tokens=column_length(message.prompt_ids),
            max_output_tokens=message.max_tokens,
            sampling=message.sampling,
            stop_ids=frozenset(unpack_ints(message.stop_token_ids)),
            submitted_at=now,
            deadline=float("inf") if message.deadline_s is None else now + message.deadline_s,
            is_replay=bool(message.output_ids),
        )
        for choice in range(message.num_choices):
            output = list(unpack_ints(message.output_ids[choice])) if message.output_ids else []
            self._num_sequences += 1
            num_known = request.num_prompt_tokens + len(output)
            request.sequences.append(Sequence(request, choice, self._num_sequences, output, num_known))
        return request

    def _admit(self, request: Request, message: SubmitRequest, now: float) -> None:
        finished = set(unpack_ints(message.finished_choices))
        request.num_unfinished = len(request.sequences)
        self._requests.add(request)
        self._deadlines.add(request)
        for sequence in request.sequences:
            self._waiting.add(sequence)
        for sequence in request.sequences:
            if sequence.choice in finished:
                self._finish(sequence)
            elif (reason := _finish_reason(sequence)) is not None:
                # Its last token arrived before the old session ended, but not the message that it was the last.
                self._outputs.finish(sequence, reason, now)
                self._finish(sequence)

    def _on_frontend_lost(self, frontend: SessionId) -> None:
        for request in self._requests.of_frontend(frontend):
            self._end(request)
        self._outputs.drop(frontend)

    def _on_worker_ready(self, epoch: SessionId, facts: WorkerFacts, now: float) -> None:
        if self._worker is not None:
            self._on_worker_lost(now)
        self._limits = limits = resolve_limits(self._config, facts)
        planner = Planner(epoch, limits, self._waiting, self._policy, self._config.max_preemptions)
        self._worker = _Worker(epoch, planner, Pipeline(self._config.pipeline_depth))
        self._lost_at = None
        for request in list(self._requests):
            if (reason := length_error(request.num_prompt_tokens, request.max_output_tokens, limits)) is not None:
                self._fail(request, FailureCode.UNAVAILABLE, f"the new worker is smaller: {reason}")

    def _give_up_worker(self, reason: str, now: float) -> None:
        if self._worker is not None:
            self._endings.append(EndWorkerSession(self._worker.epoch, reason))
            self._on_worker_lost(now)

    def _on_worker_lost(self, now: float) -> None:
        if (worker := self._worker) is None:
            return
        self._worker = None
        self._lost_at = now
        self._num_steps += worker.pipeline.num_completed
        self._num_preemptions += worker.planner.num_preemptions
        for sequence in list(worker.planner.batch):
            sequence.leave_row(Status.WAITING)
            self._waiting.add(sequence)
        for sequence in self._waiting:
            sequence.forget_epoch()

    def _on_result(self, result: StepResult, now: float) -> None:
        worker = self._worker
        if worker is None or result.epoch != worker.epoch:
            self._num_old_results += 1
            return
        try:
            rows = worker.pipeline.complete(result, now)
        except BadResult as error:
            self._give_up_worker(str(error), now)
            return
        for row in rows:
            self._on_row(row, now)

    def _on_row(self, row: RowResult, now: float) -> None:
        planned = row.planned
        sequence = planned.sequence
        if sequence.status is Status.FINISHED:
            return
        if sequence.residency == planned.residency:
            sequence.num_confirmed += planned.num_tokens
        if not planned.samples:
            return
        sequence.num_sampling -= 1
        if row.token is None:
            fault = _FAULTS.get(row.fault or 0, f"fault {row.fault}")
            self._fail(sequence.request, FailureCode.INTERNAL, fault)
        elif self._limits is not None and not 0 <= row.token < self._limits.vocab_size:
            wrong = f"the worker drew id {row.token}, outside [0, {self._limits.vocab_size})"
            self._fail(sequence.request, FailureCode.INTERNAL, wrong)
        else:
            sequence.confirm(row.token)
            if sequence.first_token_at is None:
                sequence.first_token_at = now
            self._outputs.emit(sequence, row.logprobs)
            if (reason := _finish_reason(sequence)) is not None:
                self._outputs.finish(sequence, reason, now)
                self._finish(sequence)

    # Ends

    def _finish(self, sequence: Sequence) -> None:
        """End a choice, and its request with the last one."""
        if sequence.status is Status.FINISHED:
            return
        self._withdraw(sequence)
        request = sequence.request
        request.num_unfinished -= 1
        if request.num_unfinished == 0:
            self._forget(request)

    def _end(self, request: Request) -> None:
        """End a request without a word."""
        for sequence in request.sequences:
            if sequence.status is not Status.FINISHED:
                self._withdraw(sequence)
        self._forget(request)

    def _fail(self, request: Request, code: FailureCode, reason: str, retry_after_s: float = 0.0) -> None:
        self._end(request)
        self._outputs.fail(request.frontend, RequestFailed(request.handle, code, reason, retry_after_s))

    def _withdraw(self, sequence: Sequence) -> None:
        if sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
            sequence.status = Status.FINISHED
        elif self._worker is not None:
            self._worker.planner.remove(sequence, Status.FINISHED)

    def _forget(self, request: Request) -> None:
        self._requests.remove(request)
        self._deadlines.remove(request)

    # Plans

    def _plan(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        if (worker := self._worker) is None:
            return instructions
        while not worker.pipeline.is_full:
            built = worker.planner.build(worker.pipeline.num_sent + 1, worker.pipeline.num_completed)
            if built is None:
                break
            worker.pipeline.push(built.record, now)
            for sequence in built.entered:
                self._on_entered(sequence, now)
            instructions.append(SendPlan(built.plan))
        return instructions

    def _on_entered(self, sequence: Sequence, now: float) -> None:
        if sequence.first_planned_at is None:
            sequence.first_planned_at = now
        if not sequence.request.is_started:
            self._requests.mark_started(sequence.request)
            self._outputs.start(sequence.request, now)


def _finish_reason(sequence: Sequence) -> FinishReason | None:
    """Return why a sequence is over after its newest token, None if it goes on."""
    output = sequence.output_ids
    request = sequence.request
    if output and output[-1] in request.stop_ids and len(output) > request.sampling.min_tokens:
        return FinishReason.STOP
    if len(output) >= request.max_output_tokens:
        return FinishReason.LENGTH
    return None
