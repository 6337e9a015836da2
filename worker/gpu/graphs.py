"""Steps as captured graphs: cells of the tables, input preparation, forward pass, draw, in one replay.

A graph is captured for each of a list of shapes; a step takes the smallest that holds it, and what is left over is
padding. All graphs read one column of int32, which the host sends before the replay, and the tensors of the rows.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.gpu import inputs
from octavo.kernels.ops import Ops
from octavo.worker.gpu.device_rows import DeviceRows
from octavo.worker.gpu.layout import Layout, prepare
from octavo.worker.gpu.shapes import Parts, Shape, decode_shapes, fill, mixed_shapes, parts_of
from octavo.worker.mirror import RowLimits
from octavo.worker.models.interface import Batch, KVCache, Model

logger = logging.getLogger(__name__)

_TIMED_REPLAYS = 2


@dataclass(frozen=True)
class _Captured:
    """The replays of one shape. They share memory: what one left is gone when the next is called."""

    whole: Callable[[], Tensor]  # draws by the temperature alone: [lines] int64
    forward: Callable[[], Tensor]  # leaves the logits, [lines, vocab], for rows that want more


class StepGraphs:
    """Captured steps: all of decodes alone, and those with prompts that are small enough to be worth it."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        caches: list[KVCache],
        limits: RowLimits,
        rows: DeviceRows,
        device: torch.device,
        valid_vocab: int,
    ) -> None:
        self._model, self._ops, self._caches, self._limits = model, ops, caches, limits
        self._rows = rows
        self._device = device
        self._valid_vocab = valid_vocab
        self._decodes, self._mixed = decode_shapes(limits), mixed_shapes(limits)
        self._captured: dict[Shape, _Captured] = {}
        self._column = torch.empty(0, dtype=torch.int32, device=device)
        self._logits = torch.empty(0, device=device)  # [max_num_seqs, vocab]: what the forward graphs leave
        # Graphs hold addresses, not tensors: what they read and write outside of their own pool is kept alive here.
        self._memory: _BatchMemory | None = None

    def rehearse(self, *, prompts: bool) -> None:
        """Run padding through shapes whose kernels differ, launch by launch: what a capture needs is then compiled.

        Args:
            prompts: those with prompts, not those of decodes alone.
        """
        of_kind = self._mixed if prompts else self._decodes
        shapes = [shape for shape in of_kind if shape.num_tokens.bit_count() == 1 or shape is of_kind[-1]]
        column = torch.zeros(max(sum(shape.sizes) for shape in shapes), dtype=torch.int32, device=self._device)
        memory = _BatchMemory(shapes, self._limits, self._device)
        for shape in shapes:
            parts = parts_of(column, shape)
            self._send_padding(parts, shape)
            self._draw(parts, self._forward(memory.batch(shape, column), parts))

    def capture(self, stream: torch.cuda.Stream | None) -> None:
        """Capture every shape, the greatest first.

        Args:
            stream: the current one; None on the CPU, where a step runs anew instead of being replayed.
        """
        started = time.monotonic()
        shapes = self._decodes + self._mixed
        longest = max(sum(shape.sizes) for shape in shapes)
        self._column = torch.zeros(longest, dtype=torch.int32, device=self._device)
        self._logits = self._model.empty_logits(self._limits.max_num_seqs)
        self._memory = memory = _BatchMemory(shapes, self._limits, self._device)
        record = _Recorder(stream)
        for shape in sorted(shapes, reverse=True):
            batch, parts = memory.batch(shape, self._column), parts_of(self._column, shape)
            logits = self._logits[: shape.num_lines]
            self._send_padding(parts, shape)
            self._captured[shape] = _Captured(
                record(lambda b=batch, p=parts: self._draw(p, self._forward(b, p))),  # type: ignore[misc]
                record(lambda b=batch, p=parts, kept=logits: kept.copy_(self._forward(b, p))),  # type: ignore[misc]
            )
        num_captured = len(shapes)
        if stream is not None:
            self._drop_slow(stream)
        logger.info(
            "captured steps of %d shapes in %.1f s, kept %d",
            num_captured,
            time.monotonic() - started,
            len(self._captured),
        )

    def _drop_slow(self, stream: torch.cuda.Stream) -> None:
        """Drop shapes that a larger one of their kind beats.

        Matrix products are not always faster for fewer tokens: on an H200 cuBLAS took 13.1 ms for the layers of
        Llama-3.1-8B at 448 tokens and 9.7 ms at 512. Every replay here is of padding alone, so the products decide.
        """
        for kind in (self._decodes, self._mixed):
            best: list[tuple[Shape, float]] = []  # kept shapes, the greatest first
            for shape in reversed(kind):
                self._send_padding(parts_of(self._column, shape), shape)
                taken = _time(self._captured[shape].whole, stream)
                if any(taken >= its_time for kept, its_time in best if kept.holds(shape)):
                    del self._captured[shape]
                else:
                    best.append((shape, taken))
            kind[:] = [shape for shape, _ in reversed(best)]

    def shape_for(self, layout: Layout) -> Shape | None:
        """Return the smallest captured shape that holds a step; None: there is none."""
        if not self._captured:
            return None
        num_rows = layout.rows.size
        if layout.num_decodes == num_rows == layout.logits_index.size:
            return self._decodes[bisect_left(self._decodes, num_rows, key=lambda shape: shape.num_decodes)]
        first = bisect_left(self._mixed, layout.num_tokens, key=lambda shape: shape.num_tokens)
        for shape in self._mixed[first:]:
            if (
                layout.num_decodes <= shape.num_decodes
                and num_rows - layout.num_decodes <= shape.num_prompts
                and layout.logits_index.size <= shape.num_lines
            ):
                return shape
        return None

    def replay_whole(
        self,
        shape: Shape,
        layout: Layout,
        rows: list[int],
        places: list[int],
        cells: list[tuple[int, int, int]],
    ) -> Tensor:
        """Enqueue a step whose rows draw by their temperature alone.

        Args:
            shape: from `shape_for`.
            layout: the step.
            rows: that sample.
            places: where the id of each goes.
            cells: of the block tables.

        Returns:
            [S] int64: ids drawn, -1 where logits are not finite; valid until the next replay.
        """
        self._send(shape, layout, rows, places, cells)
        return self._captured[shape].whole()[: len(rows)]

    def replay_forward(self, shape: Shape, layout: Layout, cells: list[tuple[int, int, int]]) -> Tensor:
        """Enqueue the forward pass of a step.

        Returns:
            [S, vocab] in the model's dtype: logits of rows that sample, valid until the next replay.
        """
        self._send(shape, layout, [], [], cells)
        return self._captured[shape].forward()[: layout.logits_index.size]

    def _send(
        self,
        shape: Shape,
        layout: Layout,
        rows: list[int],
        places: list[int],
        cells: list[tuple[int, int, int]],
    ) -> None:
        if len(cells) > shape.num_cells:  # rows that begin with cached blocks bring many
            self._rows.write_cells(cells)
            cells = []
        column = fill(shape, layout, rows, places, cells, self._rows.scratch, self._device.type == "cuda")
        self._column[: column.numel()].copy_(column, non_blocking=True)

    def _send_padding(self, parts: Parts, shape: Shape) -> None:
        """Write a step of nothing but padding."""
        for part in (parts.starts, parts.places, parts.cells):
            part.fill_(-1)
        for part in (parts.rows, parts.sampling_rows):
            part.fill_(self._rows.scratch)
        parts.logits_index.zero_()
        if shape.is_decode:
            torch.arange(shape.num_rows + 1, dtype=torch.int32, device=self._device, out=parts.query_start)
        else:
            parts.query_start.zero_()

    def _forward(self, batch: Batch, parts: Parts) -> Tensor:
        """Enqueue what comes before the draw; return [lines, vocab] logits."""
        inputs.write_cells(self._rows.tables, parts.cells)
        prepare(self._rows, parts.rows, parts.starts, batch, self._limits.block_size)
        return self._model.forward(batch, self._caches)

    def _draw(self, parts: Parts, logits: Tensor) -> Tensor:
        return self._rows.draw(self._ops, logits[:, : self._valid_vocab], parts.sampling_rows, parts.places)


class _BatchMemory:
    """What captured steps compute in before the model, shared by all shapes: they run one after another."""

    def __init__(self, shapes: list[Shape], limits: RowLimits, device: torch.device) -> None:
        tokens = max(shape.num_tokens for shape in shapes)
        rows = max(shape.num_rows for shape in shapes)
        self._tokens = torch.zeros(2, tokens, dtype=torch.int32, device=device)  # ids, positions
        self._slots = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros(rows, limits.max_blocks, dtype=torch.int32, device=device)

    def batch(self, shape: Shape, column: Tensor) -> Batch:
        """Return the forward pass of a shape, whose row boundaries stand in a column."""
        parts = parts_of(column, shape)
        return Batch(
            input_ids=self._tokens[0, : shape.num_tokens],
            positions=self._tokens[1, : shape.num_tokens],
            slot_mapping=self._slots[: shape.num_tokens],
            block_tables=self._tables[: shape.num_rows],
            query_start=parts.query_start,
            seq_lens=self._lens[: shape.num_rows],
            logits_index=None if shape.is_decode else parts.logits_index,
            num_decodes=shape.num_decodes,
        )


class _Recorder:
    """Turns what enqueues work into what replays it."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._pool: Any = None if stream is None else torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        run()  # compiles what it needs, outside of the capture
        if self._stream is None:
            return run
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph, which would collect garbage each time.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            out = run()
        finally:
            graph.capture_end()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


def _time(replay: Callable[[], Tensor], stream: torch.cuda.Stream) -> float:
    """Return the time of a replay in ms, the least of a few."""
    replay()
    times = []
    for _ in range(_TIMED_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        replay()
        end.record(stream)
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return min(times)
