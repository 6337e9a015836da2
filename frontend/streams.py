"""One request that this frontend holds, and what the scheduler's messages do to it."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from octavo.frontend.choice import ChoiceEnd, ChoiceOutput, Chunk
from octavo.frontend.detokenizer import Detokenizer
from octavo.frontend.errors import ServiceError, SlowReader
from octavo.frontend.journal import Journal
from octavo.frontend.positions import PositionGap
from octavo.frontend.tools.choice import ParsedChoice
from octavo.frontend.tools.parser import OutputForm
from octavo.wire.failpoints import failpoint
from octavo.wire.handshake import ServiceFacts
from octavo.wire.prompt_logprobs import PromptLogprobs
from octavo.wire.requests import ChoiceFinished, FinishReason, RequestStarted, SubmitRequest


class SchedulerLink(Protocol):
    """What a stream says to the scheduler."""

    def submit(self, request: SubmitRequest) -> None:
        """Begin a request or go on with it."""
        ...

    def cancel(self, handle: int) -> None:
        """End a request without an answer."""
        ...

    def finish_choice(self, handle: int, choice: int, num_tokens: int) -> bool:
        """End one choice at its `num_tokens`-th token, or a search; say whether there is somebody to tell."""
        ...


class StreamWatcher(Protocol):
    """Who tells of a stream in spans."""

    def on_begin(self) -> None:
        """It is submitted, perhaps again."""
        ...

    def event(self, name: str, attributes: dict[str, str]) -> None:
        """Something has happened to it."""
        ...

    def end(self) -> None:
        """It is let go of."""
        ...


@dataclass(frozen=True)
class Timings:
    """Seconds of a request's phases."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class Stream:
    """One request from its submission to its one end.

    The law: it ends once, by all choices having ended or by `fail`; nothing is taken in afterwards. One task waits for
    it (`changed`) and takes what is new; `interrupt` reaches that task where it is blocked in a write.

    Args:
        handle: its number in this frontend.
        journal: the request.
        make_detokenizer: makes the decoder of one choice; None if no text is wanted.
        form: what reads the text; None if it is plain, or there is none.
        max_unsent_tokens: tokens that may wait for a slow client; None if nothing is sent before the end.
        deadline: when the caller's time is over, on the event loop's clock; None for never.
        link: the way to the scheduler.
        message_cost_s: CPU time of a message to the client, about.
    """

    def __init__(
        self,
        handle: int,
        journal: Journal,
        make_detokenizer: Callable[[], Detokenizer] | None,
        form: OutputForm | None,
        max_unsent_tokens: int | None,
        deadline: float | None,
        link: SchedulerLink,
        message_cost_s: float = 0.0,
    ) -> None:
        self.handle = handle
        self.journal = journal
        self.deadline = deadline
        self.num_cached_tokens = 0
        self.error: ServiceError | None = None
        self.interrupt: Callable[[], object] | None = None
        self.on_flush: Callable[[], None] | None = None  # called before what is new is taken
        self.watcher: StreamWatcher | None = None
        self.message_cost_s = message_cost_s
        self._prompt = journal.prompt
        self._make_detokenizer = make_detokenizer
        self._form = form
        # All that a search finds comes at its end, and is shown whole or not at all.
        self._is_search = journal.call.params.beams is not None
        self._is_cut = False
        self.choices = self._make_choices()
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._max_unsent_tokens = max_unsent_tokens
        self._num_received = 0
        self._num_running = len(self.choices)
        self._ends_to_tell: list[int] = []
        self._waiter: asyncio.Future[None] | None = None
        self._news = False
        self._queue_s = 0.0
        self._marks: list[float] = []  # of this frontend's clock: started, first token, last token
        self._phases: tuple[float, float] | None = None  # prefill and decode, as the scheduler measured them

    @property
    def ended(self) -> bool:
        """Whether all choices have ended or the request has failed."""
        return self._num_running == 0 or self.error is not None

    @property
    def timings(self) -> Timings:
        """How long the phases took; decode until now if the request runs."""
        if self._phases is not None:
            return Timings(self._queue_s, *self._phases)
        marks = self._marks
        if len(marks) < 2:
            return Timings(self._queue_s)
        return Timings(self._queue_s, marks[1] - marks[0], marks[-1] - marks[1])

    @property
    def first_token_at(self) -> float | None:
        """When the first token came, on the event loop's clock; None before that."""
        return self._marks[1] if len(self._marks) > 1 else None

    async def changed(self) -> None:
        """Wait until there is something new; at most one task waits."""
        if not self._news:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._news = False

    def take(self, limit: int) -> Iterator[Chunk | tuple[int, ChoiceEnd]]:
        """Yield what is new: chunks of at most `limit` tokens, and each choice's end once, after its last chunk.

        Nothing comes before the whole prompt has been told, where that is wanted.
        """
        if self._is_search and not self.ended:
            return
        if self._prompt is not None and not self._prompt.is_whole and not self.ended:
            return
        if self.on_flush is not None:
            self.on_flush()
        for choice in self.choices:
            yield from choice.take(limit)
        while self._ends_to_tell:
            index = self._ends_to_tell.pop(0)
            # More may have come while the caller was busy with what was yielded above.
            yield from self.choices[index].take(limit)
            end = self.choices[index].end
            if end is not None:
                yield index, end

    def begin(self, facts: ServiceFacts) -> None:
        """Tell the scheduler of the request, or of what is left of it, in a session with these facts."""
        left = None if self.deadline is None else max(0.0, self.deadline - self._loop.time())
        if self._is_search:
            self._begin_search_anew()
        else:
            self._finish_full_choices()
        if not self.ended:
            if self.watcher is not None:
                self.watcher.on_begin()
            self._link.submit(self.journal.to_request(self.handle, left, facts))

    @property
    def started(self) -> bool:
        """Whether a plan has named the request, in this or an earlier session."""
        return self.journal.is_started

    def on_started(self, event: RequestStarted) -> None:
        """The first plan names the request; said again after a replay, when only the first counts."""
        if not self.started:
            self.num_cached_tokens = event.num_cached_tokens
            self._queue_s = event.queue_s
            self._start()

    def on_told(self, told: PromptLogprobs) -> None:
        """Take log-probabilities of a part of the prompt.

        Raises:
            PositionGap: positions before it are missing, or nobody asked.
        """
        if self.ended:
            return
        if self._prompt is None:
            raise PositionGap(f"log-probabilities of a prompt from {told.first_position} on, which nobody asked for")
        if not self.started:
            self._start()
        self._prompt.push(told)
        self.wake()

    @property
    def may_wait(self) -> bool:
        """Whether new tokens may wait for the next ones: the first has been shown, and it has not ended."""
        return len(self._marks) > 2 and not self.ended

    def on_token(self, choice: int, position: int, token_id: int) -> bool:
        """Take one id of a choice; say whether its task is to be woken for it.

        Raises:
            PositionGap: ids before it are missing, or there is no such choice.
        """
        output = self._choice(choice)
        if output.end is not None or self.error is not None:
            return False
        if not self.started:
            self._start()
        if self._prompt is not None and not self._prompt.is_whole:
            raise PositionGap(f"token {position} of choice {choice} came before all log-probabilities of the prompt")
        stopped = output.push(position, token_id)
        self._num_received += 1
        if len(self._marks) < 3:
            self._marks.append(self._loop.time())
        else:
            self._marks[2] = self._loop.time()
        if stopped:
            self._link.finish_choice(self.handle, choice, len(output.ids))
            self._on_end(choice)
        if self._max_unsent_tokens is None or self._is_search:
            return False
        if self._num_received > self._max_unsent_tokens:
            self._check_unsent(self._max_unsent_tokens)
        return True

    def on_finished(self, event: ChoiceFinished) -> None:
        """A choice has ended at the scheduler.

        Raises:
            PositionGap: fewer ids came than were sent, or there is no such choice.
        """
        output = self._choice(event.choice)
        if output.end is not None or self.error is not None:
            return
        if self._prompt is not None and not self._prompt.is_whole:
            raise PositionGap(f"choice {event.choice} ended before all log-probabilities of the prompt came")
        if not self.started:
            self._start()
        output.finish(event.reason, event.num_tokens, event.cumulative_logprob)
        prefill_s, decode_s = self._phases or (event.prefill_s, 0.0)
        self._phases = (min(prefill_s, event.prefill_s), max(decode_s, event.decode_s))
        self._on_end(event.choice)

    def on_failed(self, error: ServiceError) -> None:
        """The request has ended at the scheduler without an answer."""
        self._end_with(error)

    def end_by_time_limit(self) -> None:
        """End all choices with what there is of them, the request's time limit having passed."""
        if self.ended:
            return
        if self._is_search and self.started and not self._is_cut:
            self._is_cut = True
            if self._link.finish_choice(self.handle, 0, 0):
                return  # the answer is the best that has been found until now
        self._link.cancel(self.handle)
        self._end_with_what_there_is()

    def _end_with_what_there_is(self) -> None:
        if not self.started:
            self._queue_s = self.journal.call.params.time_limit_s or 0.0
            self._start()
        for index, output in enumerate(self.choices):
            if output.end is None:
                output.finish(FinishReason.TIME_LIMIT, len(output.ids))
                self._on_end(index)

    def fail(self, error: ServiceError) -> None:
        """End the request from this side, unless it has ended."""
        if not self.ended:
            self._link.cancel(self.handle)
            self._end_with(error)

    def _make_choices(self) -> list[ChoiceOutput]:
        params, choices = self.journal.call.params, list[ChoiceOutput]()
        for i, ids in enumerate(self.journal.outputs):
            detokenizer = self._make_detokenizer() if self._make_detokenizer else None
            if self._form is None or detokenizer is None:
                choices.append(ChoiceOutput(i, ids, params, detokenizer, self.journal.call.echo))
            else:
                parser, echo = self._form.parser(), self.journal.call.echo
                choices.append(ParsedChoice(i, ids, params, detokenizer, parser, echo))
        return choices

    def _begin_search_anew(self) -> None:
        """Forget what came of an answer whose rest was lost with a session: the next search may find another one."""
        if self.ended:
            return
        self.journal.forget_output()
        self.choices = self._make_choices()
        self._num_running = len(self.choices)
        self._ends_to_tell.clear()
        if self._is_cut:
            self._end_with_what_there_is()

    def _choice(self, index: int) -> ChoiceOutput:
        if index >= len(self.choices):
            raise PositionGap(f"choice {index} of a request with {len(self.choices)}")
        return self.choices[index]

    def _start(self) -> None:
        self.journal.is_started = True
        self._marks.append(self._loop.time())
        self.wake()

    def _on_end(self, choice: int) -> None:
        self.journal.finished.add(choice)
        self._ends_to_tell.append(choice)
        self._num_running -= 1
        self.wake()

    def _end_with(self, error: ServiceError) -> None:
        if self.ended:
            return
        self.error = error
        self.wake()
        if self.interrupt is not None:
            self.interrupt()

    def _finish_full_choices(self) -> None:
        """End choices whose last id came but whose end was lost with a session: there is nothing left to ask for."""
        call = self.journal.call
        for index, output in enumerate(self.choices):
            if output.end is not None or not output.ids:
                continue
            by_id = output.ids[-1] in call.params.ending_ids and len(output.ids) >= call.params.min_tokens
            if by_id or len(output.ids) >= call.max_tokens:
                output.finish(FinishReason.STOP if by_id else FinishReason.LENGTH, len(output.ids))
                self._on_end(index)

    def _check_unsent(self, limit: int) -> None:
        num_unsent = sum(choice.num_unsent for choice in self.choices)
        # Counted anew only when the limit could have been passed since.
        self._num_received = num_unsent
        if num_unsent > limit:
            self.fail(SlowReader(f"the client left {num_unsent} tokens unread, limit {limit}"))

    def wake(self) -> None:
        """Let the task that waits take what is new."""
        self._news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Writing:
    """Entered while what a stream has is written: then the stream can interrupt the task, where a slow client blocks a write.

    Such an interruption is swallowed, and the stream's error is left to be raised; any other cancellation goes on.
    """

    __slots__ = ("_stream", "_task")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._task = asyncio.current_task()

    def __enter__(self) -> None:
        failpoint("frontend.before_reply")
        self._stream.interrupt = self._task.cancel if self._task is not None else None

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> bool:
        self._stream.interrupt = None
        failpoint("frontend.after_reply")
        is_own = isinstance(error, asyncio.CancelledError) and self._stream.error is not None
        if not is_own or self._task is None:
            return False
        # The stream itself interrupted the write; it is not the caller going away.
        self._task.uncancel()
        return True
