"""The scheduler's core: events in, instructions out. No sockets, clock, threads or randomness in here."""

from collections.abc import Sequence as Several

from octavo.scheduler.admission import RETRY_AFTER_S, refusal, size_error
from octavo.scheduler.config import Limits, SchedulerConfig, resolve_limits
from octavo.scheduler.deadlines import Deadlines
from octavo.scheduler.errors import BadResult
from octavo.scheduler.events import (
    CacheResetRequested,
    ChoiceStopped,
    Event,
    FrontendLost,
    RequestCancelled,
    RequestSubmitted,
    StepCompleted,
    WorkerLost,
    WorkerReady,
)
from octavo.scheduler.faults import sort_faults
from octavo.scheduler.figures import Figures, Totals, figures_of
from octavo.scheduler.instructions import (
    AnswerCacheReset,
    EmitOutput,
    EndFrontendSession,
    EndWorkerSession,
    Instruction,
    SendPlan,
    TellAdopted,
)
from octavo.scheduler.intake import Intake
from octavo.scheduler.invariants import check_state
from octavo.scheduler.outputs import Outputs
from octavo.scheduler.pipeline import Matched, Pipeline, PlanRecord
from octavo.scheduler.planner import Planner
from octavo.scheduler.policy import POLICIES, Policy
from octavo.scheduler.queues import WaitingQueue
from octavo.scheduler.roster import Roster, Worker
from octavo.scheduler.sequence import Request, Sequence, Status
from octavo.scheduler.state import RequestTable
from octavo.scheduler.suspects import Suspects, given_up
from octavo.wire.columns import unpack_ints
from octavo.wire.ids import SessionId
from octavo.wire.plan import RowLogprobs, StepResult
from octavo.wire.requests import (
    MAX_REQUESTS_OF_FRONTEND,
    FailureCode,
    FinishReason,
    PrefixCacheReset,
    RequestFailed,
    ResetPrefixCache,
    SubmitRequest,
)


class Scheduler:
    """All requests and their way from admission to their end.

    `on_events` is the only mutator: it tells what has happened in one turn of the loop, and returns what to do. Every
    accepted request ends exactly once: all of its choices finish, or it fails, or its caller has gone.
    """

    def __init__(self, config: SchedulerConfig, policy: Policy | None = None) -> None:
        self._config = config
        self._policy = policy or POLICIES[config.scheduling_policy]()
        self._requests = RequestTable()
        self._waiting = WaitingQueue(self._policy)
        self._deadlines = Deadlines()
        self._outputs = Outputs()
        self._suspects = Suspects()
        self._roster = Roster(
            self._requests, self._waiting, self._deadlines, self._policy, self._outputs, self._suspects
        )
        self._limits: Limits | None = None  # of the newest worker; admission needs them while it is away
        self._lost_at: float | None = None
        self._progress_at = 0.0  # when a step finished last, or there was nothing to do
        self._is_stalled = False
        self._endings: list[Instruction] = []
        self._intake = Intake(config.enable_prefix_caching)
        self._totals = Totals()

    @property
    def limits(self) -> Limits | None:
        """What requests must respect; None until a worker was ready."""
        return self._limits

    @property
    def _worker(self) -> Worker | None:
        return self._roster.worker

    @property
    def has_outstanding_plans(self) -> bool:
        """Whether the worker owes a result."""
        return self._worker is not None and len(self._worker.pipeline) > 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way: no request, and no plan."""
        return not self.has_outstanding_plans and len(self._requests) == 0

    @property
    def next_timer(self) -> float | None:
        """When `on_events` must be called again at the latest, with no event if there is none."""
        timers = [self._deadlines.next, self._step_timeout_at, self._recovery_timeout_at, self._stall_at]
        timers.append(self._worker.planner.adoption.due if self._worker else None)
        return min((timer for timer in timers if timer is not None), default=None)

    @property
    def stall(self) -> str:
        """Why the service is not ready, though a worker may be: there is work and no step finishes; '' if it is ready."""
        if not self._is_stalled or self._limits is None:
            return ""
        return f"requests wait, and no step has finished for {self._limits.step_timeout_s:g} s"

    @property
    def figures(self) -> Figures:
        """What it holds now."""
        worker = self._worker
        parts = (worker.planner, worker.pipeline) if worker else None
        return figures_of(self._totals, self._requests, self._waiting, parts, self._limits)

    def on_event(self, event: Event, now: float) -> list[Instruction]:
        """Handle one event; see `on_events`."""
        return self.on_events((event,), now)

    def on_events(self, events: Several[Event], now: float) -> list[Instruction]:
        """Handle what has happened, in order, and what is due at `now`; then plan as far ahead as the pipeline allows.

        Args:
            events: none, if only time has passed.
            now: monotonic seconds.
        """
        if len(self._requests) == 0:
            self._progress_at, self._is_stalled = now, False
        self._expire(now, has_result=any(isinstance(event, StepCompleted) for event in events))
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
        worker = (self._worker.planner, self._worker.pipeline) if self._worker else None
        check_state(self._requests, self._waiting, self._deadlines, worker, self._config.max_waiting_requests)

    # Time

    @property
    def _step_timeout_at(self) -> float | None:
        if (worker := self._worker) is None or (since := worker.pipeline.waiting_since) is None:
            return None
        return since + worker.planner.limits.step_timeout_s

    @property
    def _stall_at(self) -> float | None:
        if self._is_stalled or self._limits is None or len(self._requests) == 0:
            return None
        return self._progress_at + self._limits.step_timeout_s

    @property
    def _recovery_timeout_at(self) -> float | None:
        if self._lost_at is None or len(self._requests) == 0:
            return None
        return self._lost_at + self._config.recovery_timeout_s

    def _expire(self, now: float, *, has_result: bool) -> None:
        for request in self._deadlines.expired(now):
            self._roster.fail(request, FailureCode.DEADLINE, "the deadline has passed")
        # A result that has come is progress, even if this process was kept from seeing it until now.
        if self._worker is not None and not has_result and (due := self._step_timeout_at) is not None and due <= now:
            limit_s = self._worker.planner.limits.step_timeout_s
            self._give_up_worker(f"no step finished for {limit_s:g} s", now, "step_timeout")
        if not has_result and (due := self._stall_at) is not None and due <= now:
            self._is_stalled = True
        if (worker := self._worker) is not None and (adopted := worker.planner.adoption.expire(now)) is not None:
            self._endings.append(TellAdopted(adopted, worker.planner.num_recomputed_tokens))
        if (due := self._recovery_timeout_at) is not None and due <= now:
            for request in list(self._requests):
                self._roster.fail(request, FailureCode.UNAVAILABLE, self._no_worker_reason, RETRY_AFTER_S)

    @property
    def _no_worker_reason(self) -> str:
        return f"no worker for {self._config.recovery_timeout_s:g} s"

    # Events

    def _handle(self, event: Event, now: float) -> None:
        match event:
            case StepCompleted(result):
                self._on_result(result, now)
            case RequestSubmitted(frontend, message, owner):
                self._on_submitted(frontend, message, owner, now)
            case RequestCancelled(frontend, cancel):
                if (request := self._requests.find(frontend, cancel.handle)) is not None:
                    self._roster.end(request)
            case ChoiceStopped(frontend, finish):
                request = self._requests.find(frontend, finish.handle)
                if request is not None and request.group is not None:
                    self._roster.finish_search(request, now, FinishReason.TIME_LIMIT)
                elif request is not None and finish.choice < len(request.sequences):
                    self._roster.finish(request.sequences[finish.choice])
            case CacheResetRequested(frontend, reset):
                self._on_cache_reset(frontend, reset)
            case FrontendLost(frontend):
                self._on_frontend_lost(frontend)
            case WorkerReady():
                self._on_worker_ready(event, now)
            case WorkerLost(epoch, _, is_orderly):
                if self._worker is not None and self._worker.epoch == epoch:
                    self._lose_worker(now, self._worker.boot_id, may_blame=not is_orderly)

    def _on_submitted(self, frontend: SessionId, message: SubmitRequest, owner: str, now: float) -> None:
        if self._requests.find(frontend, message.handle) is not None:
            self._endings.append(EndFrontendSession(frontend, f"handle {message.handle} is in use already"))
            self._on_frontend_lost(frontend)
            return
        if self._requests.num_of_frontend(frontend) >= MAX_REQUESTS_OF_FRONTEND:
            reason = f"more than {MAX_REQUESTS_OF_FRONTEND} requests at a time"
            self._endings.append(EndFrontendSession(frontend, reason))
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
        self._roster.admit(self._intake.make_request(frontend, message, now, owner), message, now)

    def _recovery_is_over(self, now: float) -> bool:
        return self._lost_at is not None and now >= self._lost_at + self._config.recovery_timeout_s

    def _on_frontend_lost(self, frontend: SessionId) -> None:
        for request in self._requests.of_frontend(frontend):
            self._roster.end(request)
        self._outputs.drop(frontend)

    def _on_cache_reset(self, frontend: SessionId, message: ResetPrefixCache) -> None:
        planner = self._worker.planner if self._worker else None
        num_blocks = planner.cache.clear(planner.batch) if planner else 0
        for request in self._requests:
            for sequence in request.sequences:
                sequence.publishes = False  # what it may go on from after a worker's loss, too
        if planner is not None:
            planner.adoption.unpublish()
        self._endings.append(AnswerCacheReset(frontend, PrefixCacheReset(message.tag_id, num_blocks)))

    def _on_worker_ready(self, event: WorkerReady, now: float) -> None:
        if self._worker is not None:
            self._lose_worker(now, self._worker.boot_id)
        old_limits = self._limits
        self._limits = limits = resolve_limits(self._config, event.facts)
        if old_limits is not None and old_limits.block_size != limits.block_size:
            for request in self._requests:
                request.forget_keys()  # they are of blocks of another size
        for request, num_deaths in self._suspects.settle(event.boot_id, now):
            self._roster.fail(request, FailureCode.INTERNAL, given_up(num_deaths))
        planner = Planner(event.epoch, limits, self._waiting, self._policy, self._config.max_preemptions)
        planner.adoption.begin(event.held_rows, limits.vocab_size, now)
        self._roster.worker = Worker(event.epoch, event.boot_id, planner, Pipeline(self._config.pipeline_depth))
        self._lost_at = None
        for request in list(self._requests):
            if (reason := size_error(request, limits)) is not None:
                self._roster.fail(request, FailureCode.UNAVAILABLE, f"the new worker is smaller: {reason}")

    def _give_up_worker(self, reason: str, now: float, cause: str = "protocol") -> None:
        if self._worker is not None:
            self._endings.append(EndWorkerSession(self._worker.epoch, reason, cause))
            self._lose_worker(now, None)

    def _lose_worker(self, now: float, boot_id: str | None, *, may_blame: bool = True) -> None:
        """Put back what the worker had, and take note of what it may have died of; see `Suspects.note_loss`."""
        if (worker := self._worker) is None:
            return
        if may_blame:
            self._suspects.note_loss(worker.pipeline.records, boot_id)
        self._roster.worker = None
        self._lost_at = now
        for sequence in list(worker.planner.batch):
            if sequence.request.group is None:
                sequence.leave_row(Status.WAITING, newest_step=0)
                self._waiting.add(sequence)
            elif sequence.row is not None:
                worker.planner.put_back(sequence.request, newest_step=0)
        for request in self._requests:
            for sequence in request.sequences:
                sequence.void_draws(through=0)  # of this epoch; the next one counts its plans from 1
        self._roster.hold_siblings()
        self._totals.add(worker.planner, worker.pipeline)

    def _on_result(self, result: StepResult, now: float) -> None:
        worker = self._worker
        if worker is None or result.epoch != worker.epoch:
            self._totals.num_old_results += 1
            return
        try:
            matched = worker.pipeline.complete(result, now)
        except BadResult as error:
            self._give_up_worker(str(error), now)
            return
        self._progress_at, self._is_stalled = now, False
        for chunk in matched.record.chunks:
            if chunk.residency == chunk.sequence.residency:
                chunk.sequence.num_confirmed += chunk.num_tokens
        if len(self._suspects):
            self._suspects.note_result(matched.record, now)
        if matched.faults or matched.broken:
            self._on_faults(matched, worker)
        if matched.told:
            self._roster.tell_prompts(matched, now)
        self._on_tokens(matched, now)
        for request, candidates in matched.candidates().items():
            self._on_candidates(request, candidates, worker, now)

    def _on_tokens(self, matched: Matched, now: float) -> None:
        """Confirm the tokens of a step: one turn of this loop for each running sequence, so it is kept short."""
        record = matched.record
        sequences, residencies, tokens = matched.drawn()
        self._fail_wrong_ids(record, sequences, residencies, tokens)
        for index, logprobs in matched.logprobs.items():
            if index not in record.beams and record.counts(record.sequences[index], record.residencies[index]):
                self._outputs.emit_logprobs(record.sequences[index], logprobs)
        for s in record.first_draws:
            s.first_token_at = s.first_token_at or now
        frontend, emitted = None, []
        for s, residency, token in zip(sequences, residencies, tokens, strict=True):
            known = s.num_known
            if s.residency == residency:
                s.num_confirmed = known
            elif s.status is Status.FINISHED or record.step <= s.void_through:
                continue
            s.num_known = known + 1
            s.output_ids.append(token)
            if s.frontend != frontend:
                frontend = s.frontend
                emitted = self._outputs.tokens_of(frontend)
            emitted += (s.handle, s.choice, known - s.num_prompt, token)
            if (token in s.stop_ids or known >= s.plan_limit) and (reason := s.finish_reason()) is not None:
                self._outputs.finish(s, reason, now)
                self._roster.finish(s)

    def _fail_wrong_ids(
        self, record: PlanRecord, sequences: Several[Sequence], residencies: Several[int], tokens: Several[int]
    ) -> None:
        vocab_size = self._limits.vocab_size if self._limits else 0
        if not tokens or (min(tokens) >= 0 and max(tokens) < vocab_size):
            return
        for s, residency, token in zip(sequences, residencies, tokens, strict=True):
            if not 0 <= token < vocab_size and record.counts(s, residency):
                wrong = f"the worker drew id {token}, outside [0, {vocab_size})"
                self._roster.fail(s.request, FailureCode.INTERNAL, wrong)

    def _on_candidates(
        self, request: Request, candidates: dict[Sequence, RowLogprobs], worker: Worker, now: float
    ) -> None:
        """Let a search go on whose beams a step has computed."""
        vocab_size = self._limits.vocab_size if self._limits else 0
        if wrong := [i for c in candidates.values() for i in unpack_ints(c.top_ids) if not 0 <= i < vocab_size]:
            self._roster.fail(
                request, FailureCode.INTERNAL, f"the worker names id {wrong[0]}, outside [0, {vocab_size})"
            )
        elif worker.planner.groups.choose(request, candidates, worker.pipeline.num_sent).is_over:
            self._roster.finish_search(request, now)

    # Faults

    def _on_faults(self, matched: Matched, worker: Worker) -> None:
        found = sort_faults(matched)
        # Of all at once: one may have dropped what another published.
        suspect_blocks = worker.planner.cache.withdraw(found.broken, found.suspects)
        worker.planner.adoption.drop(suspect_blocks)
        for request, code, reason in found.failing:
            self._roster.fail(request, code, reason)
        for s in found.again:
            for each in (s,) if s.request.group is None else s.request.sequences:
                each.uses_cache = False
            self._recompute(s, worker)
        for holder in worker.planner.holders(suspect_blocks):
            self._recompute(holder, worker)

    def _recompute(self, sequence: Sequence, worker: Worker) -> None:
        """Drop a sequence's blocks and what is being drawn from them; its confirmed tokens stay."""
        if sequence.status is Status.FINISHED:  # its request has failed for another choice
            return
        request = sequence.request
        if request.group is not None:
            if request.group.beams:
                worker.planner.put_back(request, worker.pipeline.num_sent)
        elif sequence.status is Status.RUNNING:
            sequence.publishes = False
            worker.planner.remove(sequence, Status.WAITING, worker.pipeline.num_sent)
            self._waiting.add(sequence)
        sequence.void_draws(worker.pipeline.num_sent)

    # Plans

    def _plan(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        if (worker := self._worker) is None:
            return instructions
        while not worker.pipeline.is_full:
            alone = self._suspects.alone
            if alone is not None and alone is not worker.alone and len(worker.pipeline):
                break  # others are still under way, and it may not be laid to them what it does
            worker.alone = alone
            built = worker.planner.build(worker.pipeline.num_sent + 1, worker.pipeline.num_completed, alone)
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
            num_cached = min(sequence.num_hit, sequence.num_prompt)
            if not sequence.request.is_replay:  # an earlier scheduler has counted it, or earlier session
                self._totals.num_prompt_tokens += sequence.num_prompt
                self._totals.num_cached_prompt_tokens += num_cached
            self._requests.mark_started(sequence.request)
            self._outputs.start(sequence.request, num_cached, now)
