"""Decode steps as captured graphs: cells of the tables, input preparation, forward pass, draw, in one replay.

A graph is captured for each of a list of batch sizes; a step takes the smallest that holds it, and what is left over is
padding. All graphs read one column of int32, which the host sends before the replay, and the tensors of the rows.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.gpu import inputs
from octavo.kernels.ops import Ops
from octavo.worker.gpu.device_rows import DeviceRows
from octavo.worker.gpu.layout import prepare
from octavo.worker.mirror import RowLimits
from octavo.worker.models.decoder import Batch, Decoder, KVCache

logger = logging.getLogger(__name__)

_COLUMNS = 6  # of the input, each as long as the batch: rows, starts, places, and three of the cells


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes that are captured: 1, 2, 4, steps of 8 up to 256, of 32 above, and the greatest."""
    sizes = {1, 2, 4, *range(8, 257, 8), *range(288, max_num_seqs, 32)}
    return sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})


@dataclass(frozen=True)
class _Captured:
    """The graphs of one size. They share memory: what one left is gone when the next is replayed."""

    whole: torch.cuda.CUDAGraph  # draws by the temperature alone
    tokens: Tensor  # [size] int64: what it drew
    forward: torch.cuda.CUDAGraph  # ends with the logits, for rows that want more


class DecodeGraphs:
    """All decode steps of up to max_num_seqs rows."""

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
        most = limits.max_num_seqs
        self._model, self._ops, self._caches, self._limits = model, ops, caches, limits
        self._rows = rows
        self._device = device
        self._valid_vocab = valid_vocab
        self._input = torch.zeros(_COLUMNS * most, dtype=torch.int32, device=device)
        self._query_start = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._token_columns = torch.zeros(2, most, dtype=torch.int32, device=device)  # ids, positions
        self._slot_mapping = torch.zeros(most, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(most, dtype=torch.int32, device=device)
        self._tables = torch.zeros(most, limits.max_blocks, dtype=torch.int32, device=device)
        self._logits: Tensor | None = None  # [max_num_seqs, vocab]: what the forward graphs leave
        self._sizes = graph_sizes(most)
        self._captured: dict[int, _Captured] = {}

    def capture(self, stream: torch.cuda.Stream) -> None:
        """Capture every size, the greatest first; the current stream must be the given one."""
        started = time.monotonic()
        pool = torch.cuda.graph_pool_handle()
        self._logits = self._model.empty_logits(self._limits.max_num_seqs)
        for size in reversed(self._sizes):
            self._send(size, [], [], [], [])
            self._run(size)  # compiles what this size needs, outside of the capture
            stream.synchronize()
            whole, forward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with _capturing(whole, pool):
                tokens = self._draw(size, self._run(size))
            with _capturing(forward, pool):
                self._keep(size, self._run(size))
            self._captured[size] = _Captured(whole, tokens, forward)
        stream.synchronize()
        logger.info("captured decode steps of %d sizes in %.1f s", len(self._sizes), time.monotonic() - started)

    @property
    def is_ready(self) -> bool:
        """Whether the graphs are captured: there is one for every step of decodes then."""
        return bool(self._captured)

    def replay_whole(
        self, rows: list[int], starts: list[int], places: list[int], cells: list[tuple[int, int, int]]
    ) -> Tensor:
        """Enqueue a step whose rows draw by their temperature alone; places of -1 keep nothing of what is drawn.

        Returns:
            [R] int64: ids drawn, valid until the next replay.
        """
        captured = self._replayable(rows, starts, places, cells)
        captured.whole.replay()
        return captured.tokens[: len(rows)]

    def replay_forward(self, rows: list[int], starts: list[int], cells: list[tuple[int, int, int]]) -> Tensor:
        """Enqueue the forward pass of a step.

        Returns:
            [R, vocab] in the model's dtype: logits, valid until the next replay.
        """
        self._replayable(rows, starts, [-1] * len(rows), cells).forward.replay()
        if self._logits is None:
            raise RuntimeError("nothing was captured")
        return self._logits[: len(rows)]

    def _replayable(
        self, rows: list[int], starts: list[int], places: list[int], cells: list[tuple[int, int, int]]
    ) -> _Captured:
        size = self._sizes[bisect_left(self._sizes, len(rows))]
        if len(cells) > size:  # rows that begin with cached blocks bring many
            self._rows.write_cells(cells)
            cells = []
        self._send(size, rows, starts, places, cells)
        return self._captured[size]

    def _send(
        self, size: int, rows: list[int], starts: list[int], places: list[int], cells: list[tuple[int, int, int]]
    ) -> None:
        """Send the step's column; what is left over names the scratch row and computes nothing."""
        host = torch.empty(_COLUMNS * size, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        columns = host.numpy().reshape(_COLUMNS, size)
        count = len(rows)
        columns[0, count:] = self._rows.scratch
        columns[1:, count:] = -1
        columns[0, :count], columns[1, :count], columns[2, :count] = rows, starts, places
        flat = columns[3:].reshape(size, 3)
        flat[:, 0] = -1
        if cells:
            flat[: len(cells)] = np.array(cells, np.int32)
        self._input[: host.numel()].copy_(host, non_blocking=True)

    def _run(self, size: int) -> Tensor:
        """Enqueue what all steps of a size have in common; return [size, vocab] logits."""
        rows, starts, _, *_ = self._input[: _COLUMNS * size].view(_COLUMNS, size)
        inputs.write_cells(self._rows.tables, self._input[3 * size : 6 * size].view(size, 3))
        batch = Batch(
            input_ids=self._token_columns[0, :size],
            positions=self._token_columns[1, :size],
            slot_mapping=self._slot_mapping[:size],
            block_tables=self._tables[:size],
            query_start=self._query_start[: size + 1],
            seq_lens=self._seq_lens[:size],
            logits_index=None,
            num_decodes=size,
            max_query_len=0,
        )
        prepare(self._rows, rows, starts, batch, self._limits.block_size)
        return self._model.forward(batch, self._caches)

    def _draw(self, size: int, logits: Tensor) -> Tensor:
        rows, _, places, *_ = self._input[: _COLUMNS * size].view(_COLUMNS, size)
        return self._rows.draw(self._ops, logits[:, : self._valid_vocab], rows, places)

    def _keep(self, size: int, logits: Tensor) -> None:
        if self._logits is None:
            raise RuntimeError("there is no room for logits")
        self._logits[:size].copy_(logits)


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture what happens on the current stream; torch.cuda.graph would collect garbage each time."""
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield
    finally:
        graph.capture_end()
