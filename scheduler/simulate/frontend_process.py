"""A simulated frontend: the real Peer, journals without text, and the promises that a stream relies on."""

import math
from collections import deque
from typing import cast

from octavo.scheduler.config import Limits, SchedulerConfig
from octavo.scheduler.simulate.links import DealerLink, Network
from octavo.scheduler.simulate.model import told_of_prompt
from octavo.scheduler.simulate.scenario import DIGEST, VOCAB_SIZE, Traffic
from octavo.scheduler.simulate.workload import NOT_AGAIN, Choice, Job, Workload
from octavo.scheduler.simulate.world import Process, Violation, World
from octavo.wire.channel import HEARTBEAT_INTERVAL_S, DealerChannel
from octavo.wire.codec import FromFrontend, FromScheduler
from octavo.wire.columns import unpack_ints
from octavo.wire.handshake import PROTOCOL_VERSION, FrontendHello, FrontendWelcome, ServiceFacts, WorkerState
from octavo.wire.ids import BootId
from octavo.wire.peer import Peer, PeerEvent, PeerRefused, SessionBegan, SessionEnded, Waiting
from octavo.wire.prompt_logprobs import PromptLogprobs
from octavo.wire.requests import (
    CancelRequest,
    ChoiceFinished,
    ChoiceLogprobs,
    FinishChoice,
    FinishReason,
    PrefixCacheReset,
    RequestFailed,
    RequestStarted,
    ResetPrefixCache,
    StatusReport,
    StatusRequest,
    StepOutput,
)

SEEK_INTERVAL_S = 0.1
"""How often a frontend without a session looks whether the scheduler is there."""


POLL_INTERVAL_S = 0.01
"""How soon a frontend looks again whether there is room for what it has to say."""

TURNED_AWAY = ("no scheduler", "failed QUEUE_FULL", "failed CALLER_LIMIT", "failed UNAVAILABLE")
"""Outcomes after which callers come back later."""


class SimFrontend(Process):
    """Submits jobs and receives their ids; after each new session it submits what lives again, from the journals.

    Every job ends exactly once: `outcome` is set once, and nothing but what was under way comes for it afterwards.

    Attributes:
        jobs: those that live, by handle.
        is_open: whether callers still come.
        refused: why the scheduler will not have it; the process is at its end.
    """

    def __init__(
        self,
        world: World,
        network: Network,
        boot_id: BootId,
        config: SchedulerConfig,
        traffic: Traffic,
        workload: Workload,
        limits: list[Limits],
        is_deadly_world: bool,
    ) -> None:
        super().__init__(world)
        self.boot_id = boot_id
        self.jobs: dict[int, Job] = {}
        self.is_open = True
        self.refused: str | None = None
        self.facts: ServiceFacts | None = None
        self.num_late = 0  # parts of messages for jobs that are gone
        self._config = config
        self._traffic = traffic
        self._workload = workload
        self._limits = limits
        self._is_deadly_world = is_deadly_world
        self._hello = FrontendHello(PROTOCOL_VERSION, DIGEST, boot_id, 1)
        self.link = DealerLink(network, boot_id, self.wake)
        self.peer = Peer(cast(DealerChannel, self.link), lambda: self._hello, world.clock)
        self._next_handle = 0
        self._next_job = world.now
        self._next_reset = world.now
        self._lost_since: float | None = None
        self._resets: set[int] = set()
        self._outbox: deque[FromFrontend] = deque()
        self.wake()

    def turn(self) -> None:
        """Handle what has come, let callers come and go."""
        try:
            for event in self.peer.step():
                self._on_event(event)
        except PeerRefused as error:
            self.refused = str(error)
            self.vanish()
            return
        self._expire()
        self._ask()
        self._flush()
        self.wake_at(self.world.now + (HEARTBEAT_INTERVAL_S if self.peer.session_id else SEEK_INTERVAL_S))

    def vanish(self) -> None:
        """Die, and all jobs with it."""
        super().vanish()
        self.link.close()
        for job in list(self.jobs.values()):
            self._end(job, "lost with its frontend")

    def leave(self) -> None:
        """Say Goodbye and end."""
        super().vanish()
        self.peer.leave("the frontend was told to stop")
        for job in list(self.jobs.values()):
            self._end(job, "lost with its frontend")

    def submit(self, job: Job) -> None:
        """Take a job in; without a session it begins with the next one."""
        self._take_in(job)
        self.wake()

    def _take_in(self, job: Job) -> None:
        job.handle = self._next_handle
        self._next_handle += 1
        job.submitted_at = self.world.now
        self.jobs[job.handle] = job
        self.world.stats["jobs"] += 1
        if self.peer.session_id and self.facts is not None:
            self._send(job.to_request(self.facts, self.world.now))
        for index, choice in enumerate(job.choices):
            if choice.stop_at == 0:
                self._send(FinishChoice(job.handle, index, 0))
                self._finish(job, choice)
        if job.outcome is None and job.cancel_at == 0:
            self._cancel(job)
        elif job.cancel_after_s is not None:
            self.wake_at(self.world.now + job.cancel_after_s)

    def _send(self, message: FromFrontend) -> None:
        """Send a message of the session, at the end of a turn and when there is room for it."""
        if self.peer.session_id:
            self._outbox.append(message)

    def _flush(self) -> None:
        while self._outbox and self.link.has_room:
            self.peer.send(self._outbox.popleft())
        if self._outbox:
            self.wake_at(self.world.now + POLL_INTERVAL_S)

    # What callers do

    def _ask(self) -> None:
        """Submit new jobs when it is their time."""
        now, traffic = self.world.now, self._traffic
        if not self.is_open or self.facts is None:
            return
        random = self.world.random
        while self._next_job <= now and len(self.jobs) < traffic.num_live:
            self._next_job = max(self._next_job, now - 1.0) + random.expovariate(1 / traffic.mean_gap_s)
            self._take_in(self._workload.make(self.facts))
        if len(self.jobs) < traffic.num_live:
            self.wake_at(self._next_job)
        if traffic.resets and self._next_reset <= now and self.peer.session_id:
            self._next_reset = now + random.expovariate(1 / traffic.resets)
            tag = random.randrange(2**31)
            self._resets.add(tag)
            self._send(ResetPrefixCache(tag) if random.random() < 0.7 else StatusRequest(tag))

    def _expire(self) -> None:
        """End what the callers wait for no longer."""
        now = self.world.now
        is_cut_off = self._lost_since is not None and now - self._lost_since > self._config.recovery_timeout_s
        for job in list(self.jobs.values()):
            if is_cut_off:
                self._end(job, "no scheduler")
            elif job.deadline_s is not None and now >= job.submitted_at + job.deadline_s:
                self._send(CancelRequest(job.handle))
                self._end(job, "deadline here")
            elif job.cancel_after_s is not None and now >= job.submitted_at + job.cancel_after_s:
                self._cancel(job)

    def _cancel(self, job: Job) -> None:
        self._send(CancelRequest(job.handle))
        self._end(job, "cancelled")

    def _end(self, job: Job, outcome: str) -> None:
        if job.outcome is not None:
            raise Violation(f"job {job.handle} ended {job.outcome}, and again {outcome}")
        job.outcome = outcome
        self.world.stats[f"jobs {outcome}"] += 1
        del self.jobs[job.handle]
        is_turned_away = outcome in TURNED_AWAY
        self._next_job = max(self._next_job, self.world.now + is_turned_away * self.world.random.random())
        if self.is_alive and self.is_open:
            self._workload.remember(job)
            self.wake_at(self._next_job)

    # What the scheduler says

    def _on_event(self, event: PeerEvent | FromScheduler) -> None:
        match event:
            case StepOutput():
                self._on_output(event)
            case SessionBegan(_, welcome):
                self._on_session_began(welcome)
            case SessionEnded():
                self.world.stats["frontend sessions ended"] += 1
                self._lost_since = self.world.now
                self._outbox.clear()
            case PrefixCacheReset(tag, _):
                self._take_answer(tag)
                self.world.stats["cache resets"] += 1
            case StatusReport():
                self._take_answer(event.tag_id)
                self._check_report(event)
            case WorkerState() | Waiting():
                pass
            case _:
                raise Violation(f"a frontend was sent {event}")

    def _on_session_began(self, welcome: object) -> None:
        if not isinstance(welcome, FrontendWelcome):
            raise Violation(f"a frontend was welcomed with {welcome}")
        self.world.stats["frontend sessions"] += 1
        self.facts = welcome.facts
        self._lost_since = None
        self._resets.clear()
        self._outbox.clear()
        for job in list(self.jobs.values()):
            self._finish_full_choices(job)
            if job.outcome is None:
                self._send(job.to_request(self.facts, self.world.now))
                self.world.stats["jobs resubmitted"] += any(choice.ids for choice in job.choices)

    def _finish_full_choices(self, job: Job) -> None:
        """End choices whose last id came, but whose end was lost with a session."""
        if job.beams is not None:
            job.forget_output()
            return
        for choice in job.choices:
            ids = choice.ids
            if not choice.is_finished and ids and (ids[-1] in job.stop_ids or len(ids) == job.max_tokens):
                self._finish(job, choice)

    def _on_output(self, output: StepOutput) -> None:
        for started in output.started:
            self._on_started(started)
        for told in output.prompt_logprobs:
            self._on_told(told)
        jobs = self.jobs
        columns = (output.handle, output.choice, output.position, output.token)
        for handle, choice, position, token in zip(*map(unpack_ints, columns), strict=True):
            if (job := jobs.get(handle)) is not None:
                self._on_token(job, choice, position, token)
            else:
                self.num_late += 1
        for logprobs in output.logprobs:
            self._on_logprobs(logprobs)
        for finished in output.finished:
            self._on_finished(finished)
        for failed in output.failed:
            self._on_failed(failed)

    def _on_started(self, event: RequestStarted) -> None:
        if (job := self.jobs.get(event.handle)) is None:
            return
        session = self.peer.session_id or 0
        if job.started_in == session:
            raise Violation(f"job {job.handle} started twice in one session")
        job.started_in = session
        num_cached = event.num_cached_tokens
        block_size = self.facts.block_size if self.facts else 1
        num_known = len(job.prompt) + max(len(choice.ids) for choice in job.choices)
        if num_cached % block_size or num_cached >= num_known or (num_cached and not job.root):
            raise Violation(f"job {job.handle} of {len(job.prompt)} tokens found {num_cached}, root {job.root!r}")
        self.world.stats["cached tokens told"] += num_cached

    def _on_told(self, told: PromptLogprobs) -> None:
        if (job := self.jobs.get(told.of)) is None:
            return
        top, end = job.sampling.prompt_logprobs, told.first_position + told.count
        if job.started_in != self.peer.session_id or told.first_position != job.num_prompt_told or top < 0:
            raise Violation(f"job {job.handle}: told of position {told.first_position} after {job.num_prompt_told}")
        if told != told_of_prompt(told.of, job.prompt, told.first_position, end, top, VOCAB_SIZE):
            raise Violation(f"job {job.handle}: its prompt is told wrong from {told.first_position} on")
        job.num_prompt_told = end
        self.world.stats["prompt positions told"] += told.count

    def _on_token(self, job: Job, index: int, position: int, token: int) -> None:
        choice = job.choices[index]
        if choice.is_finished:
            if choice.stop_at is None:
                raise Violation(f"token for choice {index} of job {job.handle}, which has ended")
            return
        name = f"job {job.handle}, choice {index}"
        if job.started_in != self.peer.session_id:
            raise Violation(f"{name}: a token before the start")
        if job.sampling.prompt_logprobs >= 0 and job.num_prompt_told < len(job.prompt):
            raise Violation(f"{name}: a token before the whole prompt was told")
        if position != len(choice.ids):
            raise Violation(f"{name}: position {position} after {len(choice.ids)} tokens")
        if len(choice.ids) >= job.max_tokens or job.is_wrong:
            raise Violation(f"{name}: more than {job.max_tokens} tokens, or a wrong request was run")
        if token != (expected := choice.oracle.next()):
            raise Violation(f"{name}: id {token} at position {position}, alone it is {expected}")
        if job.sick is not None and not job.is_deadly and (job.sick[0] == index or job.beams is not None):
            self._check_sickness(job, index, position)
        choice.ids.append(token)
        job.num_received += 1
        if choice.stop_at == len(choice.ids):
            self._send(FinishChoice(job.handle, index, len(choice.ids)))
            self.world.stats["stop strings"] += 1
            self._finish(job, choice)
        if job.cancel_at == job.num_received and job.outcome is None:
            self.world.stats["cancels at a token"] += 1
            self._cancel(job)

    def _check_sickness(self, job: Job, index: int, position: int) -> None:
        """A forked choice draws its first id from the values of choice 0; what comes after that is its own."""
        length = math.inf if job.sick is None else job.sick[1]
        if len(job.prompt) + position >= length and (index == 0 or position > 0 or job.beams is not None):
            raise Violation(f"job {job.handle}: choice {index} got id {position} from broken values")

    def _on_logprobs(self, logprobs: ChoiceLogprobs) -> None:
        if (job := self.jobs.get(logprobs.handle)) is None or (
            choice := job.choices[logprobs.choice]
        ).stop_at is not None:
            return
        if job.beams is not None:
            raise Violation(f"job {job.handle} is searched for, and was told {logprobs}")
        top = unpack_ints(logprobs.top_ids)
        position = logprobs.position
        is_next = position >= choice.num_logprobs and position < len(choice.ids)
        if not is_next or len(top) != job.sampling.logprobs or (top and top[0] != choice.ids[position]):
            raise Violation(f"job {job.handle}: log-probabilities {logprobs} after {len(choice.ids)} tokens")
        choice.num_logprobs = position + 1

    def _on_finished(self, event: ChoiceFinished) -> None:
        if (job := self.jobs.get(event.handle)) is None:
            return
        choice = job.choices[event.choice]
        name = f"job {job.handle}, choice {event.choice}"
        if choice.is_finished:
            if choice.stop_at is None:
                raise Violation(f"{name} ended twice")
            return
        ids = choice.ids
        if event.num_tokens != len(ids):
            raise Violation(f"{name} ended after {event.num_tokens} tokens, {len(ids)} came")
        is_stop = bool(ids) and ids[-1] in job.stop_ids and len(ids) > job.sampling.min_tokens
        if event.reason is not (FinishReason.STOP if is_stop else FinishReason.LENGTH):
            raise Violation(f"{name} ended {event.reason!r} with {list(ids)}, stop ids {job.stop_ids}")
        if not is_stop and len(ids) != job.max_tokens:
            raise Violation(f"{name} ended after {len(ids)} of {job.max_tokens} tokens")
        if job.sampling.prompt_logprobs >= 0 and job.num_prompt_told < len(job.prompt):
            raise Violation(f"{name} ended before the whole prompt was told")
        if job.beams is not None:
            job.check_logprob(event)
        elif job.sampling.logprobs >= 0 and choice.stop_at is None and choice.num_logprobs != len(ids):
            raise Violation(f"{name}: {choice.num_logprobs} log-probabilities for {len(ids)} tokens")
        self._finish(job, choice)

    def _finish(self, job: Job, choice: Choice) -> None:
        choice.is_finished = True
        if all(each.is_finished for each in job.choices):
            self._end(job, "finished")

    def _on_failed(self, event: RequestFailed) -> None:
        if (job := self.jobs.get(event.handle)) is None:
            return
        if event.message.endswith(NOT_AGAIN):
            self.world.stats["given up"] += 1
            self.world.stats["given up without guilt"] += not job.is_deadly
        objection = job.objection(event, self._limits, self.world.now, is_deadly_world=self._is_deadly_world)
        if objection is not None:
            raise Violation(f"job {job.handle} failed with {event}: {objection}")
        self._end(job, f"failed {event.code.name}")

    def _take_answer(self, tag: int) -> None:
        if tag not in self._resets:
            raise Violation(f"an answer for {tag}, which nobody asked")
        self._resets.discard(tag)

    def _check_report(self, report: StatusReport) -> None:
        if report.failed_checks:
            raise Violation("an idle check failed")
        if report.free_blocks > report.total_blocks or report.cached_prompt_tokens > report.prompt_tokens:
            raise Violation(f"odd figures: {report}")
        self.world.stats["status reports"] += 1
