"""What the host knows of each row: counts, block tables, parameters; kept up to date by the deltas of plans.

The counts never depend on sampled values, so a plan can be applied before the ids of the one before it are known to
anybody. Everything a plan names is checked here again; a contradiction is a PlanError, since guessing would damage other
rows. The tensors of the rows belong to others (`rows.py`, `gpu/device_rows.py`), who follow what `apply` and `advance`
say.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from octavo.wire.columns import unpack_ints
from octavo.wire.errors import MalformedMessage
from octavo.wire.held_rows import HeldRow
from octavo.wire.plan import FLAG_SAMPLE, NewRow, RowSampling, StepPlan
from octavo.worker.blocks import BlockUse
from octavo.worker.errors import PlanError
from octavo.worker.held import HeldBlocks, LeftRow, bounded
from octavo.worker.sampling_ids import check_sampling_ids


@dataclass(slots=True)
class RowState:
    """Counts and block table of one live row."""

    request: str
    num_prompt: int
    num_known: int  # ids in the row, sampled ones included
    num_computed: int  # tokens whose keys and values are in the cache
    sampling: RowSampling
    choice: int
    first_told: int  # position of the prompt from which on log-probabilities are told; none from num_prompt on
    table: list[int] = field(default_factory=list)
    is_lost: bool = False  # nobody goes on from it in another session: it faulted, or is a beam

    @property
    def num_output(self) -> int:
        """Tokens of the output before the next one: its position."""
        return self.num_known - self.num_prompt


@dataclass(frozen=True)
class RowLimits:
    """What rows can hold; ids and blocks of plans are checked against it."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    vocab_size: int

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest row."""
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True)
class BegunRow:
    """A row that begins with these ids."""

    row: int
    ids: Sequence[int]
    state: RowState


@dataclass(frozen=True)
class Delta:
    """What a plan changes before its forward pass, in this order."""

    begun: list[BegunRow]
    beams: list["Beam"]
    copies: list[tuple[int, int]]  # source, target
    cells: list[tuple[int, int, int]]  # of the block tables: row, place, block


@dataclass(frozen=True)
class Beam:
    """A row that goes on with an id that was chosen for it, itself or as a free row that starts from another one.

    No row is both a source and the target of another one, so that the order in which they are copied does not matter.
    """

    row: int
    source: int
    place: int  # of the id
    token: int


@dataclass(frozen=True)
class Fork:
    """A row that starts from what another one was before its new id."""

    source: int
    target: int
    choice: int


@dataclass(frozen=True)
class PromptPart:
    """Tokens of a prompt whose log-probabilities are told: those that the logits of this step's tokens predict."""

    place: int  # of the row in the plan
    row: int
    offset: int  # among the row's tokens of this step: the one that predicts the first
    first: int  # position of the first
    count: int
    top: int  # likeliest ids for each


@dataclass(frozen=True)
class Step:
    """The forward pass of a plan: columns over its rows, then what is sampled from it."""

    rows: list[int]
    counts: list[int]  # tokens to compute
    starts: list[int]  # where they begin
    sampling: list[int]  # places in `rows` of those that sample, in the plan's order
    forks: list[Fork]
    prompt_parts: list[PromptPart] = field(default_factory=list)

    @cached_property
    def sampling_rows(self) -> list[int]:
        """Rows that get an id: those of the plan in its order, then the forked ones."""
        return [self.rows[place] for place in self.sampling] + [fork.target for fork in self.forks]


class Mirror:
    """The host's view of one worker's rows; empty at the start of each session."""

    def __init__(self, limits: RowLimits) -> None:
        self.limits = limits
        self._states: dict[int, RowState] = {}
        self._blocks = BlockUse(limits.num_blocks, limits.block_size)
        self._telling: set[int] = set()  # rows with something to tell of their prompts
        self._held = HeldBlocks(limits.block_size)  # of rows whose session is over

    def clear(self) -> None:
        """Forget every row, and what blocks hold."""
        self._states.clear()
        self._blocks.clear()
        self._telling.clear()
        self._held.clear()

    def hold(self, ids_of: Callable[[int, int], list[int]]) -> list[HeldRow]:
        """Forget every row: the session is over. Return those that the next one may go on from, the oldest first.

        Args:
            ids_of: returns the first ids of a row, so many.
        """
        left = (
            LeftRow(
                state.request,
                state.choice,
                array("i", ids_of(row, state.num_known)),
                state.num_prompt,
                state.num_computed,
                tuple(state.table),
            )
            for row, state in self._states.items()
            if state.num_computed and not state.is_lost and row not in self._telling
        )
        kept, told = bounded(left)
        self.clear()
        self._blocks.keep(self._held.keep(kept))
        return told

    def lose(self, row: int) -> None:
        """Let nobody go on from a live row in another session: what it holds is broken."""
        self._states[row].is_lost = True

    def __len__(self) -> int:
        return len(self._states)

    def state(self, row: int) -> RowState:
        """Return the state of a live row.

        Raises:
            PlanError: the row is not live.
        """
        if row not in self._states:
            raise PlanError(f"row {row} is not live")
        return self._states[row]

    def apply(self, plan: StepPlan) -> Delta:
        """Apply the delta of a plan.

        Raises:
            PlanError: the plan contradicts the rows.
        """
        self._blocks.begin_plan()
        for row in unpack_ints(plan.freed_rows):
            self._blocks.release(self.state(row).table)
            del self._states[row]
            self._telling.discard(row)
        beams = self._go_on(plan) if plan.beam_row else []
        begun = [self._begin(new) for new in plan.new_rows]
        copies = list(zip(*map(unpack_ints, (plan.copy_row, plan.copy_src, plan.copy_dst)), strict=True))
        cells = [self._copy(*copy) for copy in copies]
        cells += [
            self._append(row, block)
            for row, block in zip(unpack_ints(plan.append_row), unpack_ints(plan.append_block), strict=True)
        ]
        for new in plan.new_rows:
            self._check_computed(new)
        return Delta(begun, beams, [(source, target) for _, source, target in copies], cells)

    def advance(self, plan: StepPlan) -> Step:
        """Count the tokens of a plan whose delta was applied as computed, and fork rows; `sampled` counts what is drawn.

        Raises:
            PlanError: the plan asks for tokens that are not known, or have no block, or one that others read; or it
                forks a row that does not sample, or into one that is live.
        """
        rows, counts = list(unpack_ints(plan.row)), list(unpack_ints(plan.num_tokens))
        if sum(counts) > self.limits.max_num_batched_tokens:
            raise PlanError(f"plan of {sum(counts)} tokens, limit {self.limits.max_num_batched_tokens}")
        starts, sampling = [], []
        parts: list[PromptPart] = []
        for place, (row, count, flags) in enumerate(zip(rows, counts, unpack_ints(plan.flags), strict=True)):
            if flags not in (0, FLAG_SAMPLE):
                raise PlanError(f"row {row} has flags {flags}, known are 0 and {FLAG_SAMPLE}")
            starts.append(self._advance(row, count, bool(flags)))
            if flags:
                sampling.append(place)
            if self._telling and row in self._telling:
                parts += self._told(place, row, starts[-1], count)
        self._blocks.check_hits()
        forks = []
        if plan.fork_src:
            columns = map(unpack_ints, (plan.fork_src, plan.fork_dst, plan.fork_choice))
            forks = [Fork(*fork) for fork in zip(*columns, strict=True)]
            self._fork_all(forks, {rows[place] for place in sampling})
        return Step(rows, counts, starts, sampling, forks, parts)

    def sampled(self, row: int) -> int:
        """Count an id that was, or is being, drawn for a row; `advance` has seen that it has room. Return its place."""
        state = self.state(row)
        state.num_known += 1
        return state.num_known - 1

    def _begin(self, new: NewRow) -> BegunRow:
        limits = self.limits
        self._check_free_row(new.row)
        try:
            ids = unpack_ints(new.token_ids)
            check_sampling_ids(new.sampling, limits.vocab_size)
        except (MalformedMessage, PlanError) as error:
            raise PlanError(f"row {new.row} ({new.request}): {error}") from error
        if not 0 < len(ids) <= limits.max_model_len:
            raise PlanError(f"row {new.row} begins with {len(ids)} tokens, limit {limits.max_model_len}")
        if not (0 < new.num_prompt_tokens <= len(ids) and new.num_computed_tokens < len(ids)):
            raise PlanError(
                f"row {new.row}: {len(ids)} tokens, {new.num_prompt_tokens} of the prompt, {new.num_computed_tokens} computed"
            )
        if min(ids) < 0 or max(ids) >= limits.vocab_size:
            raise PlanError(f"row {new.row} holds an id outside of [0, {limits.vocab_size})")
        state = RowState(
            new.request,
            new.num_prompt_tokens,
            len(ids),
            new.num_computed_tokens,
            new.sampling,
            new.choice,
            max(1, new.first_prompt_logprob),
        )
        if new.sampling.prompt_logprobs >= 0 and state.first_told < state.num_prompt:
            if new.num_computed_tokens >= state.first_told:
                raise PlanError(
                    f"row {new.row} is to tell what was computed before it: {new.num_computed_tokens} tokens"
                )
            self._telling.add(new.row)
        self._states[new.row] = state
        return BegunRow(new.row, ids, state)

    def _told(self, place: int, row: int, begin: int, count: int) -> list[PromptPart]:
        """Return what a row tells of its prompt after it has computed `count` tokens from `begin` on."""
        state = self._states[row]
        first, end = max(begin + 1, state.first_told), min(begin + count + 1, state.num_prompt)
        if end == state.num_prompt:
            self._telling.discard(row)
        if first >= end:
            return []
        return [PromptPart(place, row, first - 1 - begin, first, end - first, state.sampling.prompt_logprobs)]

    def _go_on(self, plan: StepPlan) -> list[Beam]:
        """Let rows go on with chosen ids; all sources are live before, all other targets free."""
        columns = map(unpack_ints, (plan.beam_row, plan.beam_src, plan.beam_token))
        beams: list[Beam] = []
        for row, source, token in zip(*columns, strict=True):
            state = self.state(source)
            if not 0 <= token < self.limits.vocab_size:
                raise PlanError(f"row {row} goes on with id {token}, outside of [0, {self.limits.vocab_size})")
            if state.num_known != state.num_computed + 1 or state.num_output < 1:
                raise PlanError(
                    f"row {row} goes on from row {source}, whose newest of {state.num_known} ids was not drawn, or is "
                    f"computed"
                )
            beams.append(Beam(row, source, state.num_computed, token))
            state.is_lost = True
        for beam in beams:
            if beam.row != beam.source:
                self._check_free_row(beam.row)
                state = self._states[beam.source]
                self._states[beam.row] = replace(state, table=list(state.table))
                self._blocks.share(state.table)
        return beams

    def _check_free_row(self, row: int) -> None:
        if not 0 <= row < self.limits.max_num_seqs:
            raise PlanError(f"row {row}, limit {self.limits.max_num_seqs}")
        if row in self._states:
            raise PlanError(f"row {row} is live and cannot begin anew")

    def _copy(self, row: int, source: int, target: int) -> tuple[int, int, int]:
        """Replace the last block of a row; return the changed cell of the tables: row, place, block."""
        table = self.state(row).table
        if not table or table[-1] != source:
            raise PlanError(f"block {source} of row {row} is copied, but its last of {len(table)} is {table[-1:]}")
        self._blocks.copy(row, source, target)
        self._held.drop(target)
        table[-1] = target
        return row, len(table) - 1, target

    def _append(self, row: int, block: int) -> tuple[int, int, int]:
        """Append a block to the table of a row; return the changed cell of the tables: row, place, block."""
        state = self.state(row)
        if len(state.table) >= self.limits.max_blocks:
            raise PlanError(f"the table of row {row} is full ({len(state.table)} blocks)")
        # A table is shorter than what is computed only while the plan in which the row begins hands over cached blocks.
        num_computed = state.num_computed - len(state.table) * self.limits.block_size
        if num_computed >= self.limits.block_size:
            self._blocks.hit(row, block)
        elif num_computed > 0:
            if not self._held.has(block):
                raise PlanError(f"row {row} begins within block {block}, which nobody has left")
            self._blocks.go_on(row, block, num_computed)
        else:
            self._blocks.take(row, block)
            self._held.drop(block)
        state.table.append(block)
        return row, len(state.table) - 1, block

    def _check_computed(self, new: NewRow) -> None:
        table = self._states[new.row].table
        num_cached = -(-new.num_computed_tokens // self.limits.block_size)
        if len(table) < num_cached:
            raise PlanError(
                f"row {new.row} begins with {new.num_computed_tokens} computed tokens and {len(table)} blocks "
                f"of {self.limits.block_size}"
            )
        if len(set(table[:num_cached])) != num_cached:
            raise PlanError(f"row {new.row} begins with a block twice: {table[:num_cached]}")
        if self._held and num_cached:
            name = f"row {new.row} ({new.request})"
            self._held.check(name, unpack_ints(new.token_ids), table[:num_cached], new.num_computed_tokens)

    def _fork_all(self, forks: list[Fork], sampling: set[int]) -> None:
        for fork in forks:
            if fork.source not in sampling:
                raise PlanError(f"row {fork.source} is forked into row {fork.target} and does not sample")
            self._check_free_row(fork.target)
            if fork.choice < 0:
                raise PlanError(f"row {fork.source} is forked into row {fork.target} as choice {fork.choice}")
            state = self._states[fork.source]
            self._states[fork.target] = replace(state, choice=fork.choice, table=list(state.table))
            self._blocks.share(state.table)
            sampling.add(fork.target)

    def _advance(self, row: int, count: int, samples: bool) -> int:
        """Count tokens as computed; return where they begin."""
        state = self.state(row)
        begin, end = state.num_computed, state.num_computed + count
        if end > state.num_known or samples != (end == state.num_known):
            sampling = "samples" if samples else "does not sample"
            raise PlanError(
                f"row {row} knows {state.num_known} tokens, the plan computes {begin} to {end} and {sampling}"
            )
        if samples and end == self.limits.max_model_len:
            raise PlanError(f"row {row} has {end} tokens, the limit, and cannot take another")
        size = self.limits.block_size
        if end > len(state.table) * size:
            raise PlanError(f"row {row} has {len(state.table)} blocks, too few for {end} tokens")
        if begin % size:
            self._held.drop(state.table[begin // size])
        for place in range(begin // size, -(-end // size)):
            self._blocks.write(row, state.table[place], min(end - place * size, size))
        state.num_computed = end
        return begin
