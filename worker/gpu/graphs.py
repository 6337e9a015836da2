"""Steps as captured graphs: cells of the tables, input preparation, forward pass, draw, in one replay.

A graph is captured for each of a list of shapes; a step takes the smallest that holds it, and what is left over is
padding. All graphs read one column of int32, which the host sends before the replay, and the tensors of the rows.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
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
from octavo.worker.models.decoder import Batch, Decoder, KVCache

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Captured:
    """The graphs of one shape. They share memory: what one left is gone when the next is replayed."""

    whole: torch.cuda.CUDAGraph  # draws by the temperature alone
    tokens: Tensor  # [lines] int64: what it drew
    forward: torch.cuda.CUDAGraph  # ends with the logits, for rows that want more


class StepGraphs:
    """Captured steps: all of decodes alone, and those with prompts that are small enough to be worth it."""

    def __init__(
        self,
        model: Decoder,
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

    def capture(self, stream: torch.cuda.Stream) -> None:
        """Capture every shape, the greatest first; the current stream must be the given one."""
        started = time.monotonic()
        shapes = self._decodes + self._mixed
        longest = max(sum(shape.sizes) for shape in shapes)
        self._column = torch.zeros(longest, dtype=torch.int32, device=self._device)
        self._logits = self._model.empty_logits(self._limits.max_num_seqs)
        memory = _BatchMemory(shapes, self._limits, self._device)
        pool = torch.cuda.graph_pool_handle()
        for shape in sorted(shapes, reverse=True):
            batch, parts = memory.batch(shape, self._column), parts_of(self._column, shape)
            self._send_padding(shape)
            self._draw(parts, self._forward(batch, parts))  # compiles what this shape needs, outside of the capture
            stream.synchronize()
            whole, forward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with _capturing(whole, pool):
                tokens = self._draw(parts, self._forward(batch, parts))
            with _capturing(forward, pool):
                self._logits[: shape.num_lines].copy_(self._forward(batch, parts))
            self._captured[shape] = _Captured(whole, tokens, forward)
        stream.synchronize()
        logger.info("captured steps of %d shapes in %.1f s", len(shapes), time.monotonic() - started)

    def shape_for(self, layout: Layout) -> Shape | None:
        """Return the smallest captured shape that holds a step; None: there is none."""
        if not self._captured:
            return None
        num_rows = layout.rows.size
        if layout.num_decodes == num_rows == layout.logits_index.size:
            return self._decodes[bisect_left(self._decodes, num_rows, key=lambda shape: shape.num_decodes)]
        place = bisect_left(self._mixed, layout.num_tokens, key=lambda shape: shape.num_tokens)
        if place == len(self._mixed):
            return None
        shape = self._mixed[place]
        return shape if num_rows - layout.num_decodes <= shape.num_prompts else None

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
        captured = self._captured[shape]
        captured.whole.replay()
        return captured.tokens[: len(rows)]

    def replay_forward(self, shape: Shape, layout: Layout, cells: list[tuple[int, int, int]]) -> Tensor:
        """Enqueue the forward pass of a step.

        Returns:
            [S, vocab] in the model's dtype: logits of rows that sample, valid until the next replay.
        """
        self._send(shape, layout, [], [], cells)
        self._captured[shape].forward.replay()
        return self._logits[: layout.logits_index.size]

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
        column = fill(shape, layout, rows, places, cells, self._rows.scratch, pinned=True)
        self._column[: column.numel()].copy_(column, non_blocking=True)

    def _send_padding(self, shape: Shape) -> None:
        """Send a step of nothing but padding."""
        parts = parts_of(self._column, shape)
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
            max_query_len=0 if shape.is_decode else shape.num_tokens,
        )


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture what happens on the current stream; torch.cuda.graph would collect garbage each time."""
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield
    finally:
        graph.capture_end()
