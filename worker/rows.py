"""The persistent batch: what the worker knows of each row, kept up to date by the deltas of plans.

Rows owns ids and block tables (tensors, one row a slot; the tables also as lists) and the counts that say how much of
them is valid. The counts never depend on sampled values, so a plan can be applied before the ids of the one before it
are known to anybody else.
Everything a plan names is checked here again; a contradiction is a PlanError, since guessing would damage other rows.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from octavo.wire.columns import unpack_ints
from octavo.wire.errors import MalformedMessage
from octavo.wire.plan import FLAG_SAMPLE, NewRow, StepPlan
from octavo.worker.blocks import BlockUse
from octavo.worker.errors import PlanError
from octavo.worker.models.decoder import Batch
from octavo.worker.sampler import RowSampler


@dataclass
class RowState:
    """Counts and block table of one live row."""

    request: str
    num_prompt: int
    num_known: int  # ids in the row, sampled ones included
    num_computed: int  # tokens whose keys and values are in the cache
    sampler: RowSampler
    table: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class RowLimits:
    """What rows can hold; ids and blocks of plans are checked against it."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    vocab_size: int


@dataclass(frozen=True)
class PlannedBatch:
    """A forward pass and the rows that sample after it: those of the plan in its order, then the forked ones."""

    batch: Batch
    sampling_rows: list[int]
    logits_of: Tensor | None = None  # [sampling rows] int64: which line of the logits each takes; None: its own


class Rows:
    """The rows of one worker; empty at the start of each session."""

    def __init__(self, limits: RowLimits, device: torch.device) -> None:
        self.limits = limits
        self._device = device
        max_blocks = -(-limits.max_model_len // limits.block_size)
        # empty: a row's ids are written before they are read, and on the CPU what is never written costs nothing.
        self._ids = torch.empty(limits.max_num_seqs, limits.max_model_len, dtype=torch.int64, device=device)
        self._tables = torch.zeros(limits.max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        self._states: dict[int, RowState] = {}
        self._blocks = BlockUse(limits.num_blocks, limits.block_size)

    def clear(self) -> None:
        """Forget every row: the session is over."""
        self._states.clear()
        self._blocks.clear()

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

    def known_ids(self, row: int) -> Tensor:
        """Return a view of a row's ids: [num_known] int64."""
        return self._ids[row, : self.state(row).num_known]

    def apply(self, plan: StepPlan) -> list[tuple[int, int]]:
        """Apply the delta of a plan; return the block copies (source, target) that must be done before its forward pass.

        Raises:
            PlanError: the plan contradicts the rows.
        """
        self._blocks.begin_plan()
        for row in unpack_ints(plan.freed_rows):
            self._blocks.release(self.state(row).table)
            del self._states[row]
        for new in plan.new_rows:
            self._begin(new)
        copies = list(zip(*map(unpack_ints, (plan.copy_row, plan.copy_src, plan.copy_dst)), strict=True))
        cells = [self._copy(*copy) for copy in copies]
        cells += [
            self._append(row, block)
            for row, block in zip(unpack_ints(plan.append_row), unpack_ints(plan.append_block), strict=True)
        ]
        if cells:
            rows, places, blocks = torch.tensor(cells, device=self._device).unbind(1)
            self._tables[rows, places] = blocks.int()
        for new in plan.new_rows:
            self._check_computed(new)
        return [(source, target) for _, source, target in copies]

    def batch(self, plan: StepPlan) -> PlannedBatch:
        """Build the forward pass of a plan whose delta was applied, count its tokens as computed, and fork rows.

        Raises:
            PlanError: the plan asks for tokens that are not known, or have no block, or one that others read; or it
                forks a row that does not sample, or into one that is live.
        """
        rows, counts = list(unpack_ints(plan.row)), list(unpack_ints(plan.num_tokens))
        if sum(counts) > self.limits.max_num_batched_tokens:
            raise PlanError(f"plan of {sum(counts)} tokens, limit {self.limits.max_num_batched_tokens}")
        starts, sampling_rows, logits_index = [], [], []
        end = 0
        for row, count, flags in zip(rows, counts, unpack_ints(plan.flags), strict=True):
            if flags not in (0, FLAG_SAMPLE):
                raise PlanError(f"row {row} has flags {flags}, known are 0 and {FLAG_SAMPLE}")
            starts.append(self._advance(row, count, bool(flags & FLAG_SAMPLE)))
            end += count
            if flags & FLAG_SAMPLE:
                sampling_rows.append(row)
                logits_index.append(end - 1)
        self._blocks.check_hits()
        forward_pass = self._forward_pass(rows, counts, starts, logits_index)
        if not plan.fork_src:
            return PlannedBatch(forward_pass, sampling_rows)
        places = {row: place for place, row in enumerate(sampling_rows)}  # in the logits, of rows in their order
        for source, target, choice in zip(
            *map(unpack_ints, (plan.fork_src, plan.fork_dst, plan.fork_choice)), strict=True
        ):
            if source not in places:
                raise PlanError(f"row {source} is forked into row {target} and does not sample")
            self._fork(source, target, choice)
            places[target] = places[source]
        return PlannedBatch(forward_pass, list(places), torch.tensor(list(places.values()), device=self._device))

    def store(self, row: int, token: int) -> None:
        """Append a sampled id to a row that sampled in this step; `batch` has seen that it has room."""
        state = self.state(row)
        self._ids[row, state.num_known] = token
        state.num_known += 1

    def _begin(self, new: NewRow) -> None:
        limits = self.limits
        self._check_free_row(new.row)
        try:
            ids = unpack_ints(new.token_ids)
            sampler = RowSampler(new.sampling, new.choice, limits.vocab_size, self._device)
        except (MalformedMessage, PlanError) as error:
            raise PlanError(f"row {new.row} ({new.request}): {error}") from error
        if not 0 < len(ids) <= limits.max_model_len:
            raise PlanError(f"row {new.row} begins with {len(ids)} tokens, limit {limits.max_model_len}")
        if not (0 < new.num_prompt_tokens <= len(ids) and new.num_computed_tokens < len(ids)):
            raise PlanError(
                f"row {new.row}: {len(ids)} tokens, {new.num_prompt_tokens} of the prompt, {new.num_computed_tokens} computed"
            )
        if new.num_computed_tokens % limits.block_size:
            raise PlanError(
                f"row {new.row} begins with {new.num_computed_tokens} computed tokens, not whole blocks of {limits.block_size}"
            )
        if min(ids) < 0 or max(ids) >= limits.vocab_size:
            raise PlanError(f"row {new.row} holds an id outside of [0, {limits.vocab_size})")
        self._ids[new.row, : len(ids)] = torch.tensor(ids, device=self._device)
        self._states[new.row] = RowState(new.request, new.num_prompt_tokens, len(ids), new.num_computed_tokens, sampler)

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
        table[-1] = target
        return row, len(table) - 1, target

    def _append(self, row: int, block: int) -> tuple[int, int, int]:
        """Append a block to the table of a row; return the changed cell of the tables: row, place, block."""
        state = self.state(row)
        if len(state.table) >= self._tables.shape[1]:
            raise PlanError(f"the table of row {row} is full ({len(state.table)} blocks)")
        # A table is shorter than what is computed only while the plan in which the row begins hands over cached blocks.
        if len(state.table) * self.limits.block_size < state.num_computed:
            self._blocks.hit(row, block)
        else:
            self._blocks.take(row, block)
        state.table.append(block)
        return row, len(state.table) - 1, block

    def _check_computed(self, new: NewRow) -> None:
        table = self._states[new.row].table
        num_cached = new.num_computed_tokens // self.limits.block_size
        if len(table) < num_cached:
            raise PlanError(
                f"row {new.row} begins with {new.num_computed_tokens} computed tokens and {len(table)} blocks "
                f"of {self.limits.block_size}"
            )
        if len(set(table[:num_cached])) != num_cached:
            raise PlanError(f"row {new.row} begins with a block twice: {table[:num_cached]}")

    def _fork(self, source: int, target: int, choice: int) -> None:
        self._check_free_row(target)
        if choice < 0:
            raise PlanError(f"row {source} is forked into row {target} as choice {choice}")
        state = self._states[source]
        self._states[target] = replace(state, sampler=state.sampler.fork(choice), table=list(state.table))
        self._blocks.share(state.table)
        self._ids[target, : state.num_known] = self._ids[source, : state.num_known]
        self._tables[target, : len(state.table)] = self._tables[source, : len(state.table)]

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
        for place in range(begin // size, -(-end // size)):
            self._blocks.write(row, state.table[place], min(end - place * size, size))
        state.num_computed = end
        return begin

    def _forward_pass(self, rows: list[int], counts: list[int], starts: list[int], logits_index: list[int]) -> Batch:
        device, block_size = self._device, self.limits.block_size
        row = torch.tensor(rows, dtype=torch.int64, device=device)
        count = torch.tensor(counts, dtype=torch.int64, device=device)
        start = torch.tensor(starts, dtype=torch.int64, device=device)
        query_start = torch.nn.functional.pad(count.cumsum(0), (1, 0))
        owner = torch.repeat_interleave(torch.arange(len(rows), device=device), count)
        positions = torch.arange(sum(counts), device=device) - query_start[owner] + start[owner]
        row_of_token = row[owner]
        blocks = self._tables[row_of_token, positions // block_size].long()
        longest = max((s + c for s, c in zip(starts, counts, strict=True)), default=0)
        return Batch(
            input_ids=self._ids[row_of_token, positions],
            positions=positions,
            slot_mapping=blocks * block_size + positions % block_size,
            block_tables=self._tables[row, : -(-longest // block_size)],
            query_start=query_start.int(),
            seq_lens=(start + count).int(),
            logits_index=torch.tensor(logits_index, dtype=torch.int64, device=device),
        )
