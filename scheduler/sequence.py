"""Requests and their sequences: what is known of each, what has been planned, what has been confirmed.

A sequence is a list of tokens and a few counts. Each step it is given some of the tokens that are not planned yet, so
prefill, chunked prefill, decode and recomputation are one case.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from octavo.scheduler.beams import BeamSearch
from octavo.wire.columns import pack_ints
from octavo.wire.ids import Handle, Row, SessionId
from octavo.wire.plan import RowSampling
from octavo.wire.prefix import block_key, split_keys
from octavo.wire.requests import FinishReason


class Status(Enum):
    """Where a sequence is."""

    HELD = auto()
    """Waiting for the first choice's prompt to be computed, to start from its blocks."""
    WAITING = auto()
    """In the waiting queue, without a row: new, preempted, or put back after a worker's loss."""
    RUNNING = auto()
    """In the batch, with a row and blocks."""
    FINISHED = auto()
    """Ended, with or without an answer; results that still name it are dropped."""


@dataclass(slots=True, eq=False)
class BeamGroup:
    """What a request has that is searched for: its sequences are the beams, as many as the search is wide.

    The first one waits for a row, and holds those of the others; with its prompt computed the search begins. A beam is
    planned when the results of all are back, so these are planned together or not at all. The sequences without a row are
    held.
    """

    search: BeamSearch
    beams: list["Sequence"] = field(default_factory=list)
    """With rows, in the order of the search."""
    children: list[tuple["Sequence", int]] = field(default_factory=list)
    """The next beams, which are not planned yet: beam that each goes on from, and its id."""


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
    owner: str = ""
    """Boot id of the frontend, which stays the same over its sessions."""
    caller: str = ""
    priority: int = 0
    grammar: bytes = b""
    """What each choice must be; empty: anything. Requests with the same one share the object."""
    trace: str = ""
    """Traceparent of the span that tells of it; empty: nobody wants to know."""
    prefix_root: bytes = b""
    """Empty: nothing of it is shared or found."""
    prefix_keys: bytes = b""
    num_prompt_told: int = 1
    """Positions of the prompt whose log-probabilities the frontend has, where they are asked for; the first has none."""
    _split_keys: list[bytes] = field(default_factory=list)
    sequences: list["Sequence"] = field(default_factory=list)
    num_unfinished: int = 0
    num_choices: int = 1
    group: BeamGroup | None = None
    is_started: bool = False
    """A plan has named it, and its frontend has been told."""

    @property
    def name(self) -> str:
        """Name for plans and logs, the same over the sessions of its frontend."""
        return f"{self.owner or format(self.frontend, 'x')}-{self.handle}"

    def split_keys(self) -> list[bytes]:
        """Return the keys of the prompt's blocks one by one, the same list at each call."""
        if not self._split_keys:
            self._split_keys = split_keys(self.prefix_keys)
        return self._split_keys

    def forget_keys(self) -> None:
        """Take no part in the prefix cache any more."""
        self.prefix_root = self.prefix_keys = b""
        self._split_keys = []
        for sequence in self.sequences:
            sequence.keys = []

    @property
    def num_queued_tokens(self) -> int:
        """What it counts in the bound of the waiting queue."""
        return self.num_prompt_tokens * len(self.sequences)

    @property
    def tells_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to be told."""
        return self.sampling.prompt_logprobs >= 0 and self.num_prompt_told < self.num_prompt_tokens

    @property
    def held(self) -> list["Sequence"]:
        """Choices that wait for the prompt of another one, to go on from there by themselves."""
        return [] if self.group is not None else [s for s in self.sequences if s.status is Status.HELD]


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request.

    The law: num_confirmed <= num_planned <= num_expected; num_known counts prompt and confirmed output, num_expected
    also the tokens that outstanding plans draw. The fields are what a step touches for each of hundreds of sequences:
    those of the request that it needs are repeated here.
    """

    request: Request
    choice: int
    number: int
    """Unique among all sequences of this scheduler."""
    output_ids: list[int]
    num_known: int
    num_expected: int
    num_prompt: int
    plan_limit: int
    """Most tokens that are ever computed: the last one that it may output is not, since nothing follows it. Of a beam:
    the known ones, since what follows is chosen when all results are back."""
    handle: Handle
    frontend: SessionId
    stop_ids: frozenset[int]
    status: Status = Status.WAITING
    row: Row | None = None
    num_planned: int = 0
    """Tokens from position 0 on whose computation has been planned for the present row, or which were found."""
    num_confirmed: int = 0
    """Of these, tokens whose results are back."""
    num_fast: int = 0
    """Up to here one more token can be planned without a look at blocks, siblings or the end of the output."""
    num_blocks_sent: int = 0
    """Blocks of its table that the worker has been told."""
    residency: int = 0
    """Names its stay in the batch among all of an epoch, or, negative, the one that ended: what is drawn or published in
    one stay says nothing of another."""
    first_told: int = 0
    """Position from which on it tells of its prompt while it has its present row."""
    newest_step: int = 0
    """No plan of this epoch after this one names it; of use while it waits."""
    void_through: int = 0
    """What plans of this epoch up to this one draw for it does not count: it was drawn from broken blocks."""
    num_preemptions: int = 0
    num_furthest: int = 0
    """Most tokens that were ever planned for it, as far as is known: what is planned again below is recomputed."""
    keys: list[bytes] = field(default_factory=list)
    """Of its first blocks, as far as they are known."""
    num_published: int = 0
    """Blocks of the present table that can be found, or that need not be published."""
    num_cached: int = 0
    """Tokens that were found when it took its present row, in the prefix cache or in the worker's row of it."""
    num_hit: int = 0
    """Of these, tokens found in the prefix cache."""
    uses_cache: bool = True
    """Whether blocks are looked up for it; not after it faulted on blocks that it had found."""
    publishes: bool = True
    """Whether blocks of the present table are published; not after a reset of the cache, if they were computed before."""
    first_planned_at: float | None = None
    first_token_at: float | None = None

    @property
    def num_rows(self) -> int:
        """Rows that it needs to enter the batch: the first sequence of a group takes those of all beams."""
        return 1 if self.request.group is None else len(self.request.sequences)

    @property
    def num_sampling(self) -> int:
        """Tokens that outstanding plans draw."""
        return self.num_expected - self.num_known

    @property
    def num_plannable(self) -> int:
        """Tokens that can be planned now: up to the end of what is known or being drawn."""
        return min(self.num_expected, self.plan_limit) - self.num_planned

    @property
    def tells_prompt(self) -> bool:
        """Whether it is the one choice that computes and tells what is left to tell of the prompt."""
        if not self.request.tells_prompt:
            return False
        waiting_or_gone = (Status.HELD, Status.FINISHED)
        return next((s for s in self.request.sequences if s.status not in waiting_or_gone), None) is self

    def finish_reason(self) -> FinishReason | None:
        """Return why a sequence is over after its newest token, None if it goes on."""
        num_output = len(self.output_ids)
        if num_output and self.output_ids[-1] in self.stop_ids and num_output > self.request.sampling.min_tokens:
            return FinishReason.STOP
        if num_output >= self.request.max_output_tokens:
            return FinishReason.LENGTH
        return None

    def token_ids(self) -> bytes:
        """Return prompt and confirmed output as a column."""
        return self.request.prompt_ids + pack_ints(self.output_ids)

    def load_keys(self) -> None:
        """Make the keys that came with the request those of the first blocks."""
        self.keys = list(self.request.split_keys())

    def hash_block(self, index: int, block_size: int) -> bytes:
        """Return the key of a block whose ids are all known, as is the key of the block before it."""
        begin = index * block_size - self.num_prompt
        end = begin + block_size
        if begin >= 0:
            ids = pack_ints(self.output_ids[begin:end])
        else:
            ids = self.request.prompt_ids[4 * begin :][: 4 * block_size] + pack_ints(self.output_ids[: max(0, end)])
        return block_key(self.keys[index - 1] if index else self.request.prefix_root, ids)

    def take_row(self, row: Row, residency: int) -> None:
        """Enter the batch."""
        self.status = Status.RUNNING
        self.row = row
        self.residency = residency

    def fork_from(self, source: "Sequence") -> None:
        """Go on from a sibling's state, which has its whole prompt planned, and draw a first token like it."""
        self.num_planned, self.num_confirmed = source.num_planned, source.num_confirmed
        self.num_expected = self.num_known + 1
        self.num_cached, self.num_published = source.num_cached, source.num_published
        self.publishes = source.publishes
        self.first_told = self.num_prompt
        self.keys = list(source.keys)

    def leave_row(self, status: Status, newest_step: int) -> None:
        """Leave the batch; nothing is computed any more, tokens that outstanding plans draw still count."""
        self.status = status
        self.row = None
        self.num_furthest = max(self.num_furthest, self.num_planned)
        self.num_planned = self.num_confirmed = self.num_blocks_sent = self.num_fast = 0
        self.num_published = self.num_cached = 0
        self.newest_step = newest_step
        self.residency = -self.residency

    def void_draws(self, through: int) -> None:
        """Let nothing count that plans up to `through` would still draw."""
        self.num_expected = self.num_known
        self.void_through = through
        self.newest_step = 0
