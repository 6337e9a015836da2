"""The persistent batch: what the worker knows of each row, kept up to date by the deltas of plans.

Rows owns ids and block tables (tensors, one row a slot) and the counts that say how much of them is valid. The counts
never depend on sampled values, so a plan can be applied before the ids of the one before it are known to anybody else.
Everything a plan names is checked here again; a contradiction is a PlanError, since guessing would damage other rows.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.wire.columns import unpack_ints
from octavo.wire.errors import MalformedMessage
from octavo.wire.ids import NULL_BLOCK
from octavo.wire.plan import FLAG_SAMPLE, NewRow, StepPlan
from octavo.worker.errors import PlanError
from octavo.worker.models.decoder import Batch
from octavo.worker.sampler import RowSampler


@dataclass
class RowState:
    """Counts of one live row."""

    request: str
    num_prompt: int
    num_known: int  # ids in the row, sampled ones included
    num_computed: int  # tokens whose keys and values are in the cache
    sampler: RowSampler
    blocks: set[int] = field(default_factory=set)  # of the row's table


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
    """A forward pass and the rows that sample after it, in the order of the plan."""

    batch: Batch
    sampling_rows: list[int]


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

    def clear(self) -> None:
        """Forget every row: the session is over."""
        self._states.clear()

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
        if plan.fork_src:
            raise PlanError("the plan forks rows, which this worker does not support")
        for row in unpack_ints(plan.freed_rows):
            self.state(row)
            del self._states[row]
        for new in plan.new_rows:
            self._begin(new)
        for row, block in zip(unpack_ints(plan.append_row), unpack_ints(plan.append_block), strict=True):
            self._append(row, block)
        copies = list(zip(unpack_ints(plan.copy_src), unpack_ints(plan.copy_dst), strict=True))
        for source, target in copies:
            self._check_block(source)
            self._check_block(target)
        return copies

    def batch(self, plan: StepPlan) -> PlannedBatch:
        """Build the forward pass of a plan whose delta was applied, and count its tokens as computed.

        Raises:
            PlanError: the plan asks for tokens that are not known, or have no block.
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
        return PlannedBatch(self._forward_pass(rows, counts, starts, logits_index), sampling_rows)

    def store(self, row: int, token: int) -> None:
        """Append a sampled id to a row that sampled in this step; `batch` has seen that it has room."""
        state = self.state(row)
        self._ids[row, state.num_known] = token
        state.num_known += 1

    def _begin(self, new: NewRow) -> None:
        limits = self.limits
        if new.row >= limits.max_num_seqs:
            raise PlanError(f"row {new.row}, limit {limits.max_num_seqs}")
        if new.row in self._states:
            raise PlanError(f"row {new.row} is live and cannot begin anew")
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
        if min(ids) < 0 or max(ids) >= limits.vocab_size:
            raise PlanError(f"row {new.row} holds an id outside of [0, {limits.vocab_size})")
        self._ids[new.row, : len(ids)] = torch.tensor(ids, device=self._device)
        self._states[new.row] = RowState(new.request, new.num_prompt_tokens, len(ids), new.num_computed_tokens, sampler)

    def _append(self, row: int, block: int) -> None:
        state = self.state(row)
        self._check_block(block)
        if len(state.blocks) >= self._tables.shape[1]:
            raise PlanError(f"the table of row {row} is full ({len(state.blocks)} blocks)")
        if block in state.blocks:
            raise PlanError(f"block {block} is in the table of row {row} already")
        self._tables[row, len(state.blocks)] = block
        state.blocks.add(block)

    def _check_block(self, block: int) -> None:
        if not NULL_BLOCK < block < self.limits.num_blocks:
            raise PlanError(f"block {block} is outside of [1, {self.limits.num_blocks})")

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
        if end > len(state.blocks) * self.limits.block_size:
            raise PlanError(f"row {row} has {len(state.blocks)} blocks, too few for {end} tokens")
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
