"""What is new for each frontend, gathered until the end of a call of the core."""

from dataclasses import dataclass, field

from msgspec.structs import replace

from octavo.scheduler.sequence import Request, Sequence
from octavo.wire.columns import deinterleave
from octavo.wire.ids import SessionId
from octavo.wire.plan import RowLogprobs
from octavo.wire.prompt_logprobs import PromptLogprobs
from octavo.wire.requests import ChoiceFinished, ChoiceLogprobs, FinishReason, RequestFailed, RequestStarted, StepOutput


@dataclass(slots=True)
class _Gathered:
    started: list[RequestStarted] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # handle, choice, position and id of each
    logprobs: list[ChoiceLogprobs] = field(default_factory=list)
    finished: list[ChoiceFinished] = field(default_factory=list)
    failed: list[RequestFailed] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)

    def build(self) -> StepOutput:
        handle, choice, position, token = deinterleave(self.tokens, 4)
        return StepOutput(
            tuple(self.started),
            handle,
            choice,
            position,
            token,
            tuple(self.logprobs),
            tuple(self.finished),
            tuple(self.failed),
            tuple(self.prompt_logprobs),
        )


class Outputs:
    """One message in the making for each frontend that has news."""

    def __init__(self) -> None:
        self._by_frontend: dict[SessionId, _Gathered] = {}

    def start(self, request: Request, num_cached_tokens: int, now: float) -> None:
        """Tell that the first plan that names a request has been built."""
        started = RequestStarted(request.handle, num_cached_tokens, queue_s=now - request.submitted_at)
        self._of(request.frontend).started.append(started)

    def tokens_of(self, frontend: SessionId) -> list[int]:
        """Return where a frontend's new tokens are gathered: handle, choice, position and id of each."""
        return self._of(frontend).tokens

    def emit_logprobs(self, sequence: Sequence, logprobs: RowLogprobs) -> None:
        """Tell the log-probabilities of a sequence's next token, before it is confirmed."""
        self._of(sequence.frontend).logprobs.append(
            ChoiceLogprobs(
                sequence.handle,
                sequence.choice,
                sequence.num_known - sequence.num_prompt,
                logprobs.logprob,
                logprobs.rank,
                logprobs.top_ids,
                logprobs.top_logprobs,
            )
        )

    def tell_prompt(self, request: Request, told: PromptLogprobs) -> None:
        """Tell log-probabilities of a part of a prompt, as far as they have not been told before."""
        num_known = request.num_prompt_told - told.first_position
        if num_known < told.count:
            new = told.without(num_known) if num_known else told
            self._of(request.frontend).prompt_logprobs.append(replace(new, of=request.handle))
            request.num_prompt_told = new.first_position + new.count

    def finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """Tell that a choice has ended."""
        first = sequence.first_token_at
        began = sequence.first_planned_at
        self._of(sequence.request.frontend).finished.append(
            ChoiceFinished(
                sequence.request.handle,
                sequence.choice,
                reason,
                len(sequence.output_ids),
                prefill_s=first - began if first is not None and began is not None else 0.0,
                decode_s=now - first if first is not None else 0.0,
            )
        )

    def fail(self, frontend: SessionId, failed: RequestFailed) -> None:
        """Tell that a request has ended without an answer."""
        self._of(frontend).failed.append(failed)

    def drop(self, frontend: SessionId) -> None:
        """Forget what a lost frontend would have been told."""
        self._by_frontend.pop(frontend, None)

    def take(self) -> list[tuple[SessionId, StepOutput]]:
        """Take all messages."""
        gathered, self._by_frontend = self._by_frontend, {}
        return [(frontend, out.build()) for frontend, out in gathered.items()]

    def _of(self, frontend: SessionId) -> _Gathered:
        return self._by_frontend.setdefault(frontend, _Gathered())
