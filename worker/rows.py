"""The persistent batch of an eager backend: ids and block tables as tensors, one line a row, beside the mirror.

Rows owns the tensors; the mirror says how much of them is valid and has checked what a plan asks for.
"""

from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from octavo.wire.held_rows import HeldRow
from octavo.wire.plan import StepPlan
from octavo.worker.mirror import Mirror, PromptPart, RowLimits, RowState, Step
from octavo.worker.models.interface import Batch
from octavo.worker.sampler import RowSampler, SamplingRow


@dataclass(frozen=True)
class PlannedBatch:
    """A forward pass and the rows that sample after it: those of the plan in its order, then the forked ones."""

    batch: Batch
    sampling_rows: list[int]
    logits_of: Tensor | None = None  # [sampling rows] int64: which line of the logits each takes; None: its own
    prompt_parts: list[PromptPart] = field(default_factory=list)
    first_tokens: list[int] = field(default_factory=list)  # by place in the plan: where a row's tokens begin


class Rows:
    """The rows of one worker; empty at the start of each session."""

    def __init__(self, limits: RowLimits, device: torch.device) -> None:
        self.limits = limits
        self._mirror = Mirror(limits)
        self._device = device
        self._samplers: dict[int, RowSampler] = {}
        # empty: a row's ids are written before they are read, and on the CPU what is never written costs nothing.
        self.ids = torch.empty(limits.max_num_seqs, limits.max_model_len, dtype=torch.int64, device=device)
        self._tables = torch.zeros(limits.max_num_seqs, limits.max_blocks, dtype=torch.int32, device=device)

    def clear(self) -> None:
        """Forget every row, and what the cache holds of any."""
        self._mirror.clear()
        self._samplers.clear()

    def hold(self) -> list[HeldRow]:
        """Forget every row: the session is over. Return those that the next one may go on from."""
        held = self._mirror.hold(lambda row, count: self.ids[row, :count].tolist())
        self._samplers.clear()
        return held

    def lose(self, row: int) -> None:
        """Let nobody go on from a live row in another session: what it holds is broken."""
        self._mirror.lose(row)

    def __len__(self) -> int:
        return len(self._mirror)

    def state(self, row: int) -> RowState:
        """Return the state of a live row.

        Raises:
            PlanError: the row is not live.
        """
        return self._mirror.state(row)

    def known_ids(self, row: int) -> Tensor:
        """Return a view of a row's ids: [num_known] int64."""
        return self.ids[row, : self.state(row).num_known]

    def sampling_row(self, row: int) -> SamplingRow:
        """Return what the sampler needs of a row."""
        state = self.state(row)
        return SamplingRow(self._samplers[row], row, state.num_prompt, state.num_known)

    def apply(self, plan: StepPlan) -> list[tuple[int, int]]:
        """Apply the delta of a plan; return the block copies (source, target) that must be done before its forward pass.

        Raises:
            PlanError: the plan contradicts the rows.
        """
        delta = self._mirror.apply(plan)
        for begun in delta.begun:
            self.ids[begun.row, : len(begun.ids)] = torch.tensor(begun.ids, device=self._device)
            self._samplers[begun.row] = RowSampler(begun.state.sampling, begun.state.choice, self._device)
        for beam in delta.beams:
            if beam.row != beam.source:
                self._copy_row(beam.source, beam.row, beam.place)
                self._samplers[beam.row] = self._samplers[beam.source]
        for beam in delta.beams:
            self.ids[beam.row, beam.place] = beam.token
        if delta.cells:
            rows, places, blocks = torch.tensor(delta.cells, device=self._device).unbind(1)
            self._tables[rows, places] = blocks.int()
        return delta.copies

    def batch(self, plan: StepPlan) -> PlannedBatch:
        """Build the forward pass of a plan whose delta was applied, count its tokens as computed, and fork rows.

        Raises:
            PlanError: see `Mirror.advance`.
        """
        step = self._mirror.advance(plan)
        planned = PlannedBatch(self._forward_pass(step), step.sampling_rows)
        if step.prompt_parts:
            first_tokens = [0, *accumulate(step.counts)]
            planned = replace(planned, prompt_parts=step.prompt_parts, first_tokens=first_tokens)
        return self._forked(planned, step) if step.forks else planned

    def _forked(self, planned: PlannedBatch, step: Step) -> PlannedBatch:
        places = {step.rows[place]: line for line, place in enumerate(step.sampling)}  # row -> its line of the logits
        for fork in step.forks:
            self._samplers[fork.target] = self._samplers[fork.source].fork(fork.choice)
            self._copy_row(fork.source, fork.target, self.state(fork.target).num_known)
            places[fork.target] = places[fork.source]
        logits_of = torch.tensor(list(places.values()), device=self._device)
        return replace(planned, sampling_rows=list(places), logits_of=logits_of)

    def store(self, row: int, token: int) -> None:
        """Append a sampled id to a row that sampled in this step."""
        self.ids[row, self._mirror.sampled(row)] = token

    def _copy_row(self, source: int, target: int, num_ids: int) -> None:
        self.ids[target, :num_ids] = self.ids[source, :num_ids]
        self._tables[target] = self._tables[source]

    def _forward_pass(self, step: Step) -> Batch:
        device, block_size = self._device, self.limits.block_size
        row = torch.tensor(step.rows, dtype=torch.int64, device=device)
        count = torch.tensor(step.counts, dtype=torch.int64, device=device)
        start = torch.tensor(step.starts, dtype=torch.int64, device=device)
        query_start = torch.nn.functional.pad(count.cumsum(0), (1, 0))
        owner = torch.repeat_interleave(torch.arange(len(step.rows), device=device), count)
        positions = torch.arange(sum(step.counts), device=device) - query_start[owner] + start[owner]
        row_of_token = row[owner]
        blocks = self._tables[row_of_token, positions // block_size].long()
        longest = max((s + c for s, c in zip(step.starts, step.counts, strict=True)), default=0)
        sampling = torch.tensor(step.sampling, dtype=torch.int64, device=device)
        return Batch(
            input_ids=self.ids[row_of_token, positions],
            positions=positions,
            slot_mapping=blocks * block_size + positions % block_size,
            block_tables=self._tables[row, : -(-longest // block_size)],
            query_start=query_start.int(),
            seq_lens=(start + count).int(),
            logits_index=query_start[sampling + 1] - 1,
        )
