"""Frontend to scheduler and back: requests, their tokens and their ends.

Everything here is integers: text stays in the frontend, blocks in the scheduler. A frontend names a request by its
`handle`; session and numbering are in the channel's header, so ids of an older session never reach a stream.
"""

from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from octavo.wire.columns import same_length
from octavo.wire.errors import MalformedMessage
from octavo.wire.grammar import MAX_BODY_BYTES
from octavo.wire.metrics import MAX_ROW_BYTES
from octavo.wire.plan import NonNegative, RowSampling
from octavo.wire.prefix import check_keys
from octavo.wire.process_stats import ProcessSample
from octavo.wire.prompt_logprobs import Int31, PromptLogprobs

Int32 = Annotated[int, Meta(ge=-(2**31), lt=2**31)]

MAX_LENGTH_PENALTY = 10.0

MAX_REQUESTS_OF_FRONTEND = 4096
"""That one frontend has at a time. It keeps to this itself, so a request that it has once begun there is always room for."""


class FinishReason(IntEnum):
    """Why a sequence ended."""

    STOP = 1
    """A stop id (end of sequence among them) was drawn, or the frontend found a stop string."""
    LENGTH = 2
    """max_tokens or the end of the context."""
    TIME_LIMIT = 3
    """The request's time limit has passed; the frontend's to say, as stop strings are."""


class FailureCode(IntEnum):
    """What a caller can do about a failed request; the frontend maps it to a status."""

    INVALID = 1
    """The request can never run here (lengths, ids): change it."""
    QUEUE_FULL = 2
    """The waiting queue is full: come back later."""
    UNAVAILABLE = 3
    """No worker, or draining: come back later."""
    DEADLINE = 4
    """The caller's deadline has passed."""
    INTERNAL = 5
    """This request failed inside (non-finite logits)."""
    CALLER_LIMIT = 6
    """The caller has as much here as one caller may have: come back when less of it is running or waiting."""


class BeamParams(msgspec.Struct, frozen=True, array_like=True):
    """A search for the likeliest continuations, in place of draws."""

    width: Annotated[int, Meta(ge=1, le=256)]  # continuations that are followed
    length_penalty: float = 1.0  # they are ranked by log-probability / length ** this
    early_stopping: bool = False  # end with `width` ended ones, rather than when none that goes on can become better

    def __post_init__(self) -> None:
        """Check the penalty.

        Raises:
            MalformedMessage: powers of lengths could overflow.
        """
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:
            raise MalformedMessage(f"length_penalty = {self.length_penalty} is out of range")


def num_candidates(beams: BeamParams, num_stop_ids: int) -> int:
    """Return how many ids of each beam are enough to choose from: `width` of them are no ends, whatever comes before."""
    return beams.width + num_stop_ids


class SubmitRequest(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """A request, new or replayed from a journal."""

    handle: Int31
    prompt_ids: bytes  # int32, at least one
    num_choices: Annotated[int, Meta(ge=1, le=1024)]
    max_tokens: Int31  # of each choice, resolved by the frontend; 0: it ends when its prompt is computed and told
    sampling: RowSampling  # logprobs and min_tokens included; the same for every choice
    stop_token_ids: bytes = b""  # int32: ids that end a choice, end of sequence included unless ignored
    output_ids: tuple[bytes, ...] = ()  # replay: int32 ids that each choice has received, perhaps none; else empty
    finished_choices: bytes = b""  # replay: int32 choices that have ended already
    deadline_s: float | None = None  # time that is left
    caller: Annotated[str, Meta(max_length=256)] = ""  # whom the request counts against in limits and fairness
    trace: Annotated[str, Meta(max_length=256)] = ""  # traceparent of the span that tells of it; empty: none
    priority: Int32 = 0  # lower runs earlier; only 0 unless the service takes priorities
    prefix_root: bytes = b""  # root_key() of the prefix cache; empty: nothing of the request is shared or found
    prefix_keys: bytes = b""  # prompt_keys(): one for each full block of the prompt
    grammar: Annotated[bytes, Meta(max_length=MAX_BODY_BYTES)] = (
        b""  # what each choice must be (grammar.py); empty: anything
    )
    num_prompt_told: Int31 = 0  # replay: positions of the prompt whose log-probabilities have been received
    beams: BeamParams | None = None  # the choices are the best that a search finds; all come at its end, with no replay
    request_id: Annotated[str, Meta(max_length=128)] = ""  # the caller's name for it, for logs alone

    def __post_init__(self) -> None:
        """Check what one field says against another.

        Raises:
            MalformedMessage: no prompt, or a replay that does not name every choice.
        """
        if same_length("prompt", self.prompt_ids) == 0:
            raise MalformedMessage("a request without prompt ids")
        if self.output_ids and len(self.output_ids) != self.num_choices:
            raise MalformedMessage(f"{len(self.output_ids)} outputs for {self.num_choices} choices")
        if self.beams is not None:
            self._check_beams(self.beams)
        same_length("stop_token_ids", self.stop_token_ids)
        same_length("finished_choices", self.finished_choices)
        for ids in self.output_ids:
            same_length("output", ids)
        check_keys(self.prefix_root, self.prefix_keys)

    def _check_beams(self, beams: BeamParams) -> None:
        if self.num_choices > beams.width:
            raise MalformedMessage(f"{self.num_choices} choices of {beams.width} beams")
        if self.finished_choices or any(self.output_ids):
            raise MalformedMessage("a search for beams cannot go on from output")
        if self.grammar:
            raise MalformedMessage("a search for beams follows no grammar")
        if self.sampling.logprobs < num_candidates(beams, same_length("stop_token_ids", self.stop_token_ids)):
            raise MalformedMessage(f"{beams.width} beams are chosen from {self.sampling.logprobs} candidates")


class CancelRequest(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """The caller is gone: nothing more of this request is wanted, no answer follows."""

    handle: Int31


class FinishChoice(msgspec.Struct, frozen=True, array_like=True, tag="finish"):
    """The frontend ended a choice itself (stop string) at its `num_tokens`-th token; no answer follows.

    Of a search it ends all: its choices are the best that has been found until then, and end with TIME_LIMIT.
    """

    handle: Int31
    choice: Int31
    num_tokens: Int31


class StatusRequest(msgspec.Struct, frozen=True, array_like=True, tag="status?"):
    """Ask for a StatusReport."""

    tag_id: Int31  # comes back in the report
    with_metrics: bool = False  # what costs more than a look: rows of metrics, samples of processes


class ResetPrefixCache(msgspec.Struct, frozen=True, array_like=True, tag="reset-prefix-cache"):
    """Forget all that could be found in the prefix cache; a PrefixCacheReset answers. Running requests go on."""

    tag_id: Int31  # comes back in the answer


class PrefixCacheReset(msgspec.Struct, frozen=True, array_like=True, tag="prefix-cache-reset"):
    """Nothing that was computed before can be found any more."""

    tag_id: Int31
    num_blocks: Int31  # that could be found until then


class DrainService(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """All frontends are to take no new requests; ServiceDrains goes to each of them, those that come later included."""

    tag_id: Int31 | None = None  # comes back in DrainBegun; None: no answer is wanted


class DrainBegun(msgspec.Struct, frozen=True, array_like=True, tag="drain-begun"):
    """All frontends in session have been told."""

    tag_id: Int31
    num_requests: Int31  # that have begun and not ended


class ReplaceScheduler(msgspec.Struct, frozen=True, array_like=True, tag="replace-scheduler"):
    """The scheduler is to leave, so that whoever supervises starts the next one; SchedulerLeaves answers, then Goodbye."""

    tag_id: Int31  # comes back in the answer


class SchedulerLeaves(msgspec.Struct, frozen=True, array_like=True, tag="scheduler-leaves"):
    """The scheduler is about to say Goodbye to all its peers and to end."""

    tag_id: Int31
    num_requests: Int31  # that have begun and not ended


class ServiceDrains(msgspec.Struct, frozen=True, array_like=True, tag="service-drains"):
    """The frontend is to take no new requests any more. Only a new scheduler that nobody tells of the drain forgets it."""


class FrontendDrains(msgspec.Struct, frozen=True, array_like=True, tag="frontend-drains"):
    """The frontend takes no new requests any more, for whatever reason; no answer follows."""

    drained: bool  # nor does it have any


class ProcessInfo(msgspec.Struct, frozen=True, array_like=True):
    """One process of the service, as the scheduler knows it."""

    role: str
    pid: NonNegative
    boot_id: str
    epoch: NonNegative
    state: str  # connecting, loading, ready, draining, drained or lost
    sample: ProcessSample | None = None  # what it takes of its machine, if metrics were asked for and it told


class MetricsRow(msgspec.Struct, frozen=True, array_like=True):
    """The numbers of a process, cell by cell (metrics.py)."""

    layout: Annotated[str, Meta(max_length=64)]  # its digest: rows of another one are not read
    cells: Annotated[bytes, Meta(max_length=MAX_ROW_BYTES)]  # float64, little-endian


class WorkerFigures(msgspec.Struct, frozen=True, array_like=True, tag="figures"):
    """What a worker counts, and what it takes of its machine; it tells them about once a second, unasked."""

    row: MetricsRow
    sample: ProcessSample | None = None


class QueueLimits(msgspec.Struct, frozen=True, array_like=True):
    """Bounds of the scheduler's queue; 0: none for each caller."""

    max_waiting_requests: NonNegative
    max_waiting_tokens: NonNegative
    max_requests_per_caller: NonNegative = 0
    max_waiting_tokens_per_caller: NonNegative = 0


class StatusReport(msgspec.Struct, frozen=True, array_like=True, tag="status"):
    """What the scheduler holds at one moment."""

    tag_id: Int31
    processes: tuple[ProcessInfo, ...]
    running: Int31
    waiting: Int31
    total_blocks: Int31
    free_blocks: Int31
    block_size: Int31
    steps: NonNegative
    preemptions: NonNegative
    cached_blocks: Int31 = 0  # that can be found in the prefix cache, in use or free
    prompt_tokens: NonNegative = 0  # of all requests that have started
    cached_prompt_tokens: NonNegative = 0  # of these, found in the prefix cache
    recomputed_tokens: NonNegative = 0  # computed again after preemptions, faults and losses of a worker
    failed_checks: NonNegative = 0  # times that the state was found to contradict itself while idle
    waiting_reason: str = ""  # what the next waiting sequence waits for
    limits: QueueLimits | None = None
    waiting_tokens: NonNegative = 0  # prompt tokens, times choices, of requests that wait for their first step
    row: MetricsRow | None = None  # of the scheduler, if metrics were asked for
    worker_row: MetricsRow | None = None  # the newest that the worker told
    adopted_rows: NonNegative = 0  # rows of an earlier session that sequences went on from
    adopted_tokens: NonNegative = 0  # of these rows, tokens that were not computed again


class ChoiceLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of one emitted token; the i-th of `top_ids` has rank i + 1."""

    handle: Int31
    choice: Int31
    position: Int31
    logprob: float
    rank: NonNegative
    top_ids: bytes = b""
    top_logprobs: bytes = b""


class RequestStarted(msgspec.Struct, frozen=True, array_like=True):
    """The first plan that names the request has been built."""

    handle: Int31
    num_cached_tokens: NonNegative
    queue_s: float


class ChoiceFinished(msgspec.Struct, frozen=True, array_like=True):
    """A choice has ended; all its tokens have been sent, in this or earlier messages."""

    handle: Int31
    choice: Int31
    reason: FinishReason
    num_tokens: NonNegative  # of the output, the stop id included
    prefill_s: float = 0.0  # from the first plan to the first token
    decode_s: float = 0.0  # from the first token to the last
    cumulative_logprob: float | None = None  # of beams: the sum of the tokens' log-probabilities


class RequestFailed(msgspec.Struct, frozen=True, array_like=True):
    """The request has ended without an answer; nothing of it follows."""

    handle: Int31
    code: FailureCode
    message: str
    retry_after_s: float = 0.0  # with QUEUE_FULL, CALLER_LIMIT and UNAVAILABLE
    figures: tuple[tuple[str, NonNegative], ...] = ()  # with CALLER_LIMIT: the limit's name and value, and what is held


class StepOutput(msgspec.Struct, frozen=True, array_like=True, tag="output"):
    """All that is new for one frontend.

    Order: started, prompt log-probabilities, tokens with log-probabilities, finished, failed.
    """

    started: tuple[RequestStarted, ...] = ()
    handle: bytes = b""  # int32 [T]
    choice: bytes = b""  # int32 [T]
    position: bytes = b""  # int32 [T]: place in the choice's output, from 0
    token: bytes = b""  # int32 [T]
    logprobs: tuple[ChoiceLogprobs, ...] = ()
    finished: tuple[ChoiceFinished, ...] = ()
    failed: tuple[RequestFailed, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()  # of each request contiguous, all before its first token

    def __post_init__(self) -> None:
        """Check the columns against each other.

        Raises:
            MalformedMessage: lengths differ.
        """
        same_length("tokens", self.handle, self.choice, self.position, self.token)
