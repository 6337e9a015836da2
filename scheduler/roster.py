"""The way of requests into the scheduler and out of it: every end, good or bad, goes through here."""

from dataclasses import dataclass

from octavo.scheduler.deadlines import Deadlines
from octavo.scheduler.groups import group_of
from octavo.scheduler.outputs import Outputs
from octavo.scheduler.pipeline import Matched, Pipeline
from octavo.scheduler.planner import Planner
from octavo.scheduler.policy import Policy
from octavo.scheduler.queues import WaitingQueue
from octavo.scheduler.sequence import Request, Sequence, Status
from octavo.scheduler.state import RequestTable
from octavo.scheduler.suspects import Suspects
from octavo.wire.columns import unpack_ints
from octavo.wire.ids import BootId, SessionId
from octavo.wire.requests import FailureCode, FinishReason, RequestFailed, SubmitRequest


@dataclass(slots=True)
class Worker:
    """The worker that is ready: its epoch and process, the plans to come and those under way."""

    epoch: SessionId
    boot_id: BootId
    planner: Planner
    pipeline: Pipeline
    alone: Request | None = None
    """Whom alone the newest plans name, if they were to name one request only."""


class Roster:
    """Where requests stand: they enter table, queue and deadlines at once, and leave these and the worker's rows at once.

    Attributes:
        worker: the one that is ready; None while there is none.
    """

    def __init__(
        self,
        requests: RequestTable,
        waiting: WaitingQueue,
        deadlines: Deadlines,
        policy: Policy,
        outputs: Outputs,
        suspects: Suspects,
    ) -> None:
        self.worker: Worker | None = None
        self._requests = requests
        self._waiting = waiting
        self._deadlines = deadlines
        self._policy = policy
        self._outputs = outputs
        self._suspects = suspects

    def admit(self, request: Request, message: SubmitRequest, now: float) -> None:
        """Take a request in; choices that its message says have ended, or that need nothing more, end at once."""
        finished = set(unpack_ints(message.finished_choices))
        request.num_unfinished = len(request.sequences)
        self._requests.add(request)
        self._deadlines.add(request)
        self._policy.on_admitted(request)
        has_output = any(sequence.output_ids for sequence in request.sequences)
        for sequence in request.sequences:
            # The first choice computes the prompt for all, unless they have gone on from it already.
            if sequence.choice == 0 or has_output:
                self._waiting.add(sequence)
            else:
                sequence.status = Status.HELD
        for sequence in request.sequences:
            if sequence.choice in finished:
                self.finish(sequence)
            elif request.max_output_tokens == 0 and request.tells_prompt:
                continue  # it ends when all is told
            elif (reason := sequence.finish_reason()) is not None:
                # Its last token arrived before the old session ended, but not the message that it was the last.
                self._outputs.finish(sequence, reason, now)
                self.finish(sequence)

    def finish_all(self, request: Request, reason: FinishReason, now: float) -> None:
        """End all choices that have not ended."""
        for sequence in request.sequences:
            if sequence.status is not Status.FINISHED:
                self._outputs.finish(sequence, reason, now)
        self.end(request)

    def finish_search(self, request: Request, now: float, cut: FinishReason | None = None) -> None:
        """End a search and give its best continuations; those that go on are cut for a reason, if there is one."""
        found = group_of(request).search.best(request.num_choices, cut)
        if len(found) < request.num_choices:
            reason = f"the search has found {len(found)} of {request.num_choices} continuations"
            self.fail(request, FailureCode.INTERNAL, reason)
            return
        self._outputs.answer(request, found, now)
        self.end(request)

    def hold_siblings(self) -> None:
        """Let choices that wait wait for the first one again, where the prompt is still to be told: it comes first."""
        for request in self._requests:
            if request.group is None and request.tells_prompt:
                left = [s for s in request.sequences if s.status is Status.WAITING]
                for sibling in left[1:]:
                    self._waiting.remove(sibling)
                    sibling.status = Status.HELD

    def finish(self, sequence: Sequence) -> None:
        """End a choice, and its request with the last one."""
        if sequence.status is Status.FINISHED:
            return
        self._withdraw(sequence)
        request = sequence.request
        request.num_unfinished -= 1
        if request.num_unfinished == 0:
            self._forget(request)
        elif len(held := request.held) == request.num_unfinished:
            # Who would have computed the prompt for them is gone: the next one does.
            held[0].status = Status.WAITING
            self._waiting.add(held[0])

    def end(self, request: Request) -> None:
        """End a request without a word."""
        if request.group is not None and self.worker is not None and request.group.beams:
            self.worker.planner.groups.leave(request, Status.FINISHED, self.worker.pipeline.num_sent)
        for sequence in request.sequences:
            if sequence.status is not Status.FINISHED:
                self._withdraw(sequence)
        self._forget(request)

    def fail(self, request: Request, code: FailureCode, reason: str, retry_after_s: float = 0.0) -> None:
        """End a request and tell its caller why."""
        if self._requests.find(request.frontend, request.handle) is not request:
            return  # it has failed for another choice
        self.end(request)
        self._outputs.fail(request.frontend, RequestFailed(request.handle, code, reason, retry_after_s))

    def tell_prompts(self, matched: Matched, now: float) -> None:
        """Pass on what sequences tell of their prompts; requests that want nothing else end with it."""
        for part, told in matched.told:
            s, request = part.sequence, part.sequence.request
            is_live = self._requests.find(request.frontend, request.handle) is request
            if not is_live or matched.record.step <= s.void_through:
                continue
            if told.first_position > request.num_prompt_told:
                self.fail(request, FailureCode.INTERNAL, "log-probabilities of the prompt were lost")
                continue
            self._outputs.tell_prompt(request, told)
            if request.max_output_tokens == 0 and not request.tells_prompt:
                s.first_token_at = now
                self.finish_all(request, FinishReason.LENGTH, now)

    def _withdraw(self, sequence: Sequence) -> None:
        if sequence.status is Status.RUNNING and self.worker is not None:
            self.worker.planner.remove(sequence, Status.FINISHED, self.worker.pipeline.num_sent)
            return
        if sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        sequence.status = Status.FINISHED

    def _forget(self, request: Request) -> None:
        self._requests.remove(request)
        self._deadlines.remove(request)
        self._suspects.forget(request)
        self._policy.on_ended(request)
        # Each names the other: what has ended would stay until the collector finds it, which for what has lived a while
        # is after thousands of requests. Outstanding plans name sequences, and these their request, a little longer.
        request.sequences = []
