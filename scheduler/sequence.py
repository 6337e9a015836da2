"""Requests and their sequences: what is known of each, what has been planned, what has been confirmed.

A sequence is a list of tokens and a few counts. Each step it is given some of the tokens that are not planned yet, so
prefill, chunked prefill, decode and recomputation are one case.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from octavo.wire.columns import pack_ints
from octavo.wire.ids import Handle, Row, SessionId
from octavo.wire.plan import RowSampling


class Status(Enum):
    """Where a sequence is."""

    WAITING = auto()
    """In the waiting queue, without a row: new, preempted, or put back after a worker's loss."""
    RUNNING = auto()
    """In the batch, with a row and blocks."""
    FINISHED = auto()
    """Ended, with or without an answer; results that still name it are dropped."""


@dataclass(slots=True, eq=False)
class Request:
    """A caller's request; `max_output_tokens` is already cut to the context."""

    frontend: SessionId
    handle: Handle
    arrival: int
    """Place among all requests of this scheduler, by the order in which they came."""
    prompt_ids: bytes
    num_prompt_tokens: int
    max_output_tokens: int
    sampling: RowSampling
    stop_ids: frozenset[int]
    submitted_at: float
    deadline: float
    """Monotonic time; infinite without one."""
    is_replay: bool
    sequences: list["Sequence"] = field(default_factory=list)
    num_unfinished: int = 0
    is_started: bool = False
    """A plan has named it, and its frontend has been told."""

    @property
    def name(self) -> str:
        """Name for plans and logs."""
        return f"{self.frontend:x}-{self.handle}"

    @property
    def num_queued_tokens(self) -> int:
        """What it counts in the bound of the waiting queue."""
        return self.num_prompt_tokens * len(self.sequences)


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request.

    The law: num_confirmed <= num_planned <= num_known + num_sampling, where `num_known` counts prompt and confirmed
    output, and `num_sampling` the tokens that outstanding plans draw.
    """

    request: Request
    choice: int
    number: int
    """Unique among all sequences of this scheduler."""
    output_ids: list[int]
    num_known: int
    status: Status = Status.WAITING
    row: Row | None = None
    num_planned: int = 0
    """Tokens from position 0 on whose computation has been planned for the present row."""
    num_confirmed: int = 0
    """Of these, tokens whose results are back."""
    num_sampling: int = 0
    num_blocks_sent: int = 0
    """Blocks of its table that the worker has been told."""
    residency: int = 0
    """Counts the rows it has had: the result of an earlier one confirms nothing of the present one."""
    newest_step: int = 0
    """Newest plan of this epoch that names it."""
    num_preemptions: int = 0
    first_planned_at: float | None = None
    first_token_at: float | None = None

    @property
    def num_plannable(self) -> int:
        """Tokens that can be planned now: up to the end of what is known or being drawn.

        The last token that it may output is never computed: nothing follows it.
        """
        if len(self.output_ids) + self.num_sampling >= self.request.max_output_tokens:
            return 0
        return self.num_known + self.num_sampling - self.num_planned

    @property
    def max_stored_tokens(self) -> int:
        """Most tokens whose keys and values it can ever need at once."""
        return self.request.num_prompt_tokens + self.request.max_output_tokens - 1

    def token_ids(self) -> bytes:
        """Return prompt and confirmed output as a column."""
        return self.request.prompt_ids + pack_ints(self.output_ids)

    def confirm(self, token: int) -> None:
        """Append a drawn token whose result is back."""
        self.output_ids.append(token)
        self.num_known += 1

    def take_row(self, row: Row) -> None:
        """Enter the batch."""
        self.status = Status.RUNNING
        self.row = row

    def leave_row(self, status: Status) -> None:
        """Leave the batch; nothing is computed any more, tokens that outstanding plans draw still count."""
        self.status = status
        self.row = None
        self.num_planned = self.num_confirmed = self.num_blocks_sent = 0
        self.residency += 1

    def forget_epoch(self) -> None:
        """Void what outstanding plans would have drawn: their worker is gone."""
        self.num_sampling = 0
        self.newest_step = 0
