"""Plans on a GPU: launched as they come, their results taken when the GPU has come so far.

Everything runs on one stream, in the order of the plans. A step of decodes, or one with few tokens, is one graph replay;
any other runs the same code launch by launch. The host never waits for the device while plans come: it sends columns
through pinned memory, and looks at an event behind each step. Only rows with a grammar make it wait for the step before,
between forward pass and draw, while the device computes the former.
"""

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels.ops import Ops
from octavo.wire.columns import pack_ints, unpack_ints
from octavo.wire.held_rows import HeldRow
from octavo.wire.plan import StepPlan, StepResult
from octavo.worker.gpu.device_rows import DeviceRows
from octavo.worker.gpu.graphs import StepGraphs
from octavo.worker.gpu.layout import Layout, eager_batch, lay_out
from octavo.worker.gpu.moment import Moment
from octavo.worker.grammar import Follower, Grammars, Masks, settle
from octavo.worker.mirror import Delta, Mirror, RowLimits, Step
from octavo.worker.models.interface import Hidden, KVCache, Model
from octavo.worker.prompt_logprobs import Told, tell, try_telling
from octavo.worker.rehearsal import MANY_LOGPROBS, draw_everything
from octavo.worker.results import step_result
from octavo.worker.runner import profile_batch
from octavo.worker.sampler import Drawn, RowSampler, Sampled, SamplingRow, draw
from octavo.worker.transfer import to_device, to_host


@dataclass(frozen=True)
class _PlainDraw:
    """Ids of rows that drew by their temperature alone: on their way to the host, -1 where logits are not finite."""

    tokens: Tensor  # [S] int64


@dataclass(frozen=True)
class _GuidedDraw:
    """Ids of rows some of which have a grammar: these followers go on by what is drawn, once the host knows it."""

    drawn: Drawn
    followers: list[tuple[int, Follower]]
    masks: Masks | None

    @cached_property
    def settled(self) -> list[Sampled]:
        """What became of each row; the caller has waited for it. The followers go on when it is first asked for."""
        return settle(self.followers, self.masks, self.drawn.collect())


@dataclass(frozen=True)
class _InFlight:
    """A plan that was launched."""

    plan: StepPlan
    rows: list[int]  # that sample
    drawn: _PlainDraw | _GuidedDraw | None
    told: Told | None  # of prompts
    done: Moment
    launched_ns: int


class GpuRunner:
    """Executes plans ahead of their results. Owns the rows; weights, caches and graphs outlive its sessions."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        caches: list[KVCache],
        limits: RowLimits,
        device: torch.device,
        valid_vocab: int,
        grammars: Grammars | None = None,
    ) -> None:
        self.rows = Mirror(limits)
        self._model = model
        self._ops = ops
        self._caches = caches
        self._limits = limits
        self._device = device
        self._valid_vocab = valid_vocab
        self._samplers: dict[int, RowSampler] = {}
        self._grammars = grammars or Grammars(None)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with self._on_stream(), torch.inference_mode():
            self._device_rows = DeviceRows(limits, device)
            self._graphs = StepGraphs(model, ops, caches, limits, self._device_rows, device, valid_vocab)
        self._in_flight: deque[_InFlight] = deque()
        self._last_done_ns = 0

    @property
    def num_in_flight(self) -> int:
        """Plans that were launched and whose results were not taken."""
        return len(self._in_flight)

    @torch.inference_mode()
    def rehearse(self, *, prompts: bool) -> None:
        """Have the kernels of the captured steps compiled: see `StepGraphs.rehearse`. One thread may do it for each kind."""
        with self._on_stream():
            self._graphs.rehearse(prompts=prompts)
            self._finish()

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture what steps are small enough for; before that each runs launch by launch."""
        with self._on_stream():
            self._graphs.capture(self._stream)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Apply a plan and enqueue what it asks for.

        Raises:
            PlanError: it contradicts the rows; they must not be used any more.
        """
        launched = time.monotonic_ns()
        delta = self.rows.apply(plan)
        step = self.rows.advance(plan)
        self._grammars.apply(plan)
        with self._on_stream():
            self._begin(delta)
            drawn, told = self._run(plan, step, delta.cells) if step.rows else (None, None)
            if not step.rows:
                self._device_rows.write_cells(delta.cells)
            self._in_flight.append(_InFlight(plan, step.sampling_rows, drawn, told, Moment(self._stream), launched))

    def take_results(self) -> list[StepResult]:
        """Return the results that are there, in the order of the plans."""
        results: list[StepResult] = []
        while self._in_flight and self._in_flight[0].done.has_come():
            results.append(self._result(self._in_flight.popleft()))
        return results

    def execute(self, plan: StepPlan) -> StepResult:
        """Launch a plan while none is in flight, and wait for its result.

        Raises:
            PlanError: see `launch`.
        """
        self.launch(plan)
        (flight,) = self._in_flight
        flight.done.wait()
        self._in_flight.clear()
        return self._result(flight)

    def hold(self) -> list[HeldRow]:
        """Forget rows, and plans in flight once the device is done with them; return the rows to go on from.

        Raises:
            DeviceHung: it does not come to an end with them.
        """
        while self._in_flight:
            flight = self._in_flight.popleft()
            flight.done.wait()
            self._result(flight)  # nobody is told, but rows that faulted are known then
        with self._on_stream():
            held = self.rows.hold(lambda row, count: self._device_rows.ids[row, :count].tolist())
        self._samplers.clear()
        self._grammars.clear()
        return held

    def clear(self) -> None:
        """Forget rows, plans in flight, and what the cache holds; returns when the device is done with them.

        Raises:
            DeviceHung: it does not come to an end with them.
        """
        for flight in self._in_flight:
            flight.done.wait()
        self._in_flight.clear()
        self.rows.clear()
        self._samplers.clear()
        self._grammars.clear()

    @torch.inference_mode()
    def profile(self) -> None:
        """Run the largest step once, without touching any row or block: what it takes at its peak is then known."""
        with self._on_stream():
            batch = profile_batch(self._limits, self._device)
            hidden = self._model.hidden(batch, self._caches)
            try_telling(self._model, self._ops, hidden, self._device_rows.ids, self._valid_vocab)
            self._model.logits(hidden, batch.logits_index)
            self._finish()

    @torch.inference_mode()
    def profile_sampling(self) -> None:
        """Draw an id for as many rows as there can be, each of which wants everything and is as long as it may be."""
        with self._on_stream():
            logits = self._model.empty_logits(self._limits.max_num_seqs).zero_().float()
            draw_everything(self._ops, logits, self._device_rows.ids[:1], self._valid_vocab, MANY_LOGPROBS)
            self._finish()

    def _finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _begin(self, delta: Delta) -> None:
        self._device_rows.begin(delta.begun)
        for begun in delta.begun:
            state = begun.state
            self._samplers[begun.row] = RowSampler(state.sampling, state.choice, self._device)
        self._device_rows.go_on(delta.beams)
        for beam in delta.beams:
            self._samplers[beam.row] = self._samplers[beam.source]
        if delta.copies:
            sources, targets = zip(*delta.copies, strict=True)
            source, target = to_device([*sources, *targets], torch.int64, self._device).view(2, -1)
            for cache in self._caches:
                self._ops.copy_blocks(cache.keys, cache.values, source, target)

    def _run(
        self, plan: StepPlan, step: Step, cells: list[tuple[int, int, int]]
    ) -> tuple[_PlainDraw | _GuidedDraw | None, Told | None]:
        """Enqueue a step; return what it draws, and what it tells of prompts."""
        is_plain = (
            not step.forks
            and not self._grammars.has_any(step.sampling_rows)
            and all(
                self._samplers[step.rows[i]].is_plain(self.rows.state(step.rows[i]).num_output) for i in step.sampling
            )
        )
        layout = lay_out(step)
        # Captured steps keep no hidden states.
        shape = None if step.prompt_parts else self._graphs.shape_for(layout)
        if shape is None:
            self._device_rows.write_cells(cells)
            batch = eager_batch(self._device_rows, layout, self._limits.block_size, self._device)
            if not step.prompt_parts:
                return self._draw(plan, step, self._model.forward(batch, self._caches), is_plain), None
            hidden = self._model.hidden(batch, self._caches)
            told = self._tell(step, hidden, layout)
            return self._draw(plan, step, self._model.logits(hidden, batch.logits_index), is_plain), told
        if is_plain:
            rows = step.sampling_rows
            places = [self.rows.sampled(row) for row in rows]
            return _PlainDraw(to_host(self._graphs.replay_whole(shape, layout, rows, places, cells))), None
        return self._draw(plan, step, self._graphs.replay_forward(shape, layout, cells), is_plain), None

    def _tell(self, step: Step, hidden: Hidden, layout: Layout) -> Told:
        """Enqueue the log-probabilities of the step's parts of prompts."""
        first_tokens = layout.first_tokens.tolist()
        ids = self._device_rows.ids
        return tell(self._model, self._ops, hidden, ids, step.prompt_parts, first_tokens, self._valid_vocab)

    def _draw(self, plan: StepPlan, step: Step, logits: Tensor, is_plain: bool) -> _PlainDraw | _GuidedDraw | None:
        """Enqueue the draws of rows that sample, from their logits in the plan's order."""
        if not step.sampling:
            return None
        device_rows = self._device_rows
        if step.forks:
            self._fork(step)
            lines = {step.rows[place]: line for line, place in enumerate(step.sampling)}
            for fork in step.forks:
                lines[fork.target] = lines[fork.source]
            logits = logits[to_device(list(lines.values()), torch.int64, self._device)]
        rows = step.sampling_rows
        chosen = [] if is_plain else [self._sampling_row(row) for row in rows]
        places = [self.rows.sampled(row) for row in rows]
        rows_column, places_column = to_device(rows + places, torch.int32, self._device).view(2, -1)
        if is_plain:
            logits = logits[:, : self._valid_vocab]
            return _PlainDraw(to_host(device_rows.draw(self._ops, logits, rows_column, places_column)))
        followers, masks = self._next_masks(plan, rows)
        mask = masks.mask if masks else None
        drawn = draw(self._ops, logits.float(), device_rows.ids, chosen, self._valid_vocab, mask)
        device_rows.store(rows_column, places_column, drawn.tokens)
        return _GuidedDraw(drawn, followers, masks)

    def _next_masks(self, plan: StepPlan, rows: list[int]) -> tuple[list[tuple[int, Follower]], Masks | None]:
        """Return the followers of rows, and what these may draw now.

        The forward pass of the step has been enqueued: the device computes it while the host waits here for the ids of
        the steps before, and fills the masks.
        """
        if not self._grammars.has_any(rows):
            return [], None
        for flight in self._in_flight:
            if isinstance(flight.drawn, _GuidedDraw) and flight.drawn.followers:
                flight.done.wait()
                _ = flight.drawn.settled
        followers = self._grammars.of_step(plan, rows)
        return followers, self._grammars.masks(followers)

    def _fork(self, step: Step) -> None:
        self._device_rows.fork(step.forks)
        for fork in step.forks:
            self._samplers[fork.target] = self._samplers[fork.source].fork(fork.choice)

    def _sampling_row(self, row: int) -> SamplingRow:
        state = self.rows.state(row)
        return SamplingRow(self._samplers[row], row, state.num_prompt, state.num_known)

    def _result(self, flight: _InFlight) -> StepResult:
        now = time.monotonic_ns()
        # Steps overlap with the launch of the next: one has been computed since the one before it was done.
        compute_us = (now - max(flight.launched_ns, self._last_done_ns)) // 1000
        self._last_done_ns = now
        match flight.drawn:
            case None:
                sampled: list[Sampled] = []
            case _GuidedDraw():
                sampled = flight.drawn.settled
            case _PlainDraw():
                tokens = flight.drawn.tokens.numpy()
                if tokens.size and tokens.min() >= 0 and flight.told is None:
                    return _plain_result(flight, tokens.astype(np.int32), compute_us)
                # Nothing was masked, so only logits that are not finite leave no id.
                sampled = [Sampled(None if t < 0 else t, nonfinite=t < 0) for t in tokens.tolist()]
        told = flight.told.collect() if flight.told is not None else []
        result = step_result(flight.plan, flight.rows, sampled, told, compute_us)
        for row in unpack_ints(result.fault_row):
            # A plan that was launched since may have given it to somebody else.
            if not any(row in unpack_ints(later.plan.freed_rows) for later in self._in_flight):
                self.rows.lose(row)
        return result


def _plain_result(flight: _InFlight, tokens: "NDArray[np.int32]", us: int) -> StepResult:
    return StepResult(
        epoch=flight.plan.epoch,
        step=flight.plan.step,
        row=pack_ints(flight.rows),
        token=tokens.astype("<i4").tobytes(),
        compute_us=us,
    )
