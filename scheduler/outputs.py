"""What is new for each frontend, gathered until the end of a call of the core."""

from dataclasses import dataclass, field

from msgspec.structs import replace

from octavo.scheduler.beams import Hypothesis
from octavo.scheduler.sequence import Request, Sequence
from octavo.wire.columns import deinterleave
from octavo.wire.ids import SessionId
from octavo.wire.plan import RowLogprobs
from octavo.wire.prompt_logprobs import PromptLogprobs
from octavo.wire.requests import ChoiceFinished, ChoiceLogprobs, FinishReason, RequestFailed, RequestStarted, StepOutput

MAX_TOKENS = 2**18
"""In one message: 4 MiB. One step of any batch has fewer, the answers of searches may have more."""


@dataclass(slots=True)
class _Gathered:
    started: list[RequestStarted] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # handle, choice, position and id of each
    logprobs: list[ChoiceLogprobs] = field(default_factory=list)
    finished: list[ChoiceFinished] = field(default_factory=list)
    failed: list[RequestFailed] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)

    def build(self) -> list[StepOutput]:
        """Return a message; where searches have large answers several, with the ends in the last."""
        most, started, outputs = 4 * MAX_TOKENS, tuple(self.started), list[StepOutput]()
        while len(self.tokens) > most:
            handle, choice, position, token = deinterleave(self.tokens[:most], 4)
            outputs.append(StepOutput(started, handle, choice, position, token))
            started, self.tokens = (), self.tokens[most:]
        handle, choice, position, token = deinterleave(self.tokens, 4)
        last = StepOutput(
            started,
            handle,
            choice,
            position,
            token,
            tuple(self.logprobs),
            tuple(self.finished),
            tuple(self.failed),
            tuple(self.prompt_logprobs),
        )
        return [*outputs, last]


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

    def answer(self, request: Request, found: list[Hypothesis], now: float) -> None:
        """Tell what a search has found: a choice each."""
        first = request.sequences[0]
        for sequence, hypothesis in zip(request.sequences, found, strict=False):
            sequence.output_ids = hypothesis.ids
            sequence.first_planned_at, sequence.first_token_at = first.first_planned_at, first.first_token_at
            tokens = self.tokens_of(request.frontend)
            for position, token in enumerate(hypothesis.ids):
                tokens += (request.handle, sequence.choice, position, token)
            self.finish(sequence, hypothesis.reason, now, hypothesis.logprob)

    def finish(self, sequence: Sequence, reason: FinishReason, now: float, logprob: float | None = None) -> None:
        """Tell that a choice has ended.

        Args:
            sequence: the choice.
            reason: why.
            now: monotonic seconds.
            logprob: sum of its log-probabilities, of a beam.
        """
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
                cumulative_logprob=logprob,
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
        return [(frontend, output) for frontend, out in gathered.items() for output in out.build()]

    def _of(self, frontend: SessionId) -> _Gathered:
        return self._by_frontend.setdefault(frontend, _Gathered())
