"""Tensors of a GGUF file as those of a transformers checkpoint: other names, quantised blocks made floats.

Blocks become numbers piece by piece, by a few threads (numpy lets go of the interpreter), so that a tensor is never held
twice. What comes out is bit for bit what `gguf.quants.dequantize` makes of the whole tensor.
"""

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from octavo.worker.checkpoint import CheckpointTensor
from octavo.worker.gguf.config import architecture_of, model_config_values
from octavo.worker.gguf.header import GgufError, GgufFile, TensorInfo
from octavo.worker.gguf.kinds import require_readable
from octavo.worker.gguf.names import checkpoint_name, has_unit_offset, is_ignored, rotated_heads
from octavo.worker.models.targets import Target
from octavo.worker.read_ahead import Extent
from octavo.worker.staging import Staging

PIECE_ELEMENTS = 2**20
"""Of a tensor, that are made floats at a time by one thread: 4 MiB."""
_BLOCK_ELEMENTS = 2**15
"""Of them, that are in work at once: the intermediate arrays stay in the processor's caches, and torch, which copies them
to where they belong, calls no threads of its own."""
MAX_THREADS = 8
_AHEAD = 2
"""Pieces a thread that are finished or in work before they are asked for."""
_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}

Bytes = npt.NDArray[np.uint8]


class GgufCheckpoint:
    """A file, as a checkpoint.

    Args:
        file: its header.

    Raises:
        GgufError: a tensor's type cannot be read, or the file is gone.
        ModelConfigError: the architecture is not supported.
    """

    def __init__(self, file: GgufFile) -> None:
        self.path = file.path
        self.num_bytes = file.num_bytes
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "dequantise")
        try:
            with file.path.open("rb") as opened:
                # A private mapping: torch wants memory that it may write to, the file stays as it is.
                self._mapped = mmap.mmap(opened.fileno(), file.num_bytes, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise GgufError(f"{file.path} cannot be read: {error}") from error
        architecture, config = architecture_of(file), model_config_values(file)
        heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.tensors: list[CheckpointTensor] = []
        for tensor in file.tensors.values():
            if is_ignored(tensor.name):
                continue
            require_readable(file.path, tensor)
            num_heads = rotated_heads(architecture, tensor.name, *heads)
            if num_heads is not None and tensor.shape[0] % (2 * num_heads):
                raise GgufError(
                    f"{file.path}: tensor {tensor.name} has {tensor.shape[0]} rows, expected a multiple of {2 * num_heads}: "
                    f"pairs in {num_heads} heads"
                )
            self.tensors.append(
                GgufTensor(
                    self,
                    tensor,
                    checkpoint_name(architecture, tensor.name) or tensor.name,
                    num_heads,
                    has_unit_offset(architecture, tensor.name),
                )
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        del self._mapped

    def lines(self, tensor: TensorInfo) -> Bytes:
        """Return a tensor's bytes: [rows, bytes of a row]."""
        data = np.frombuffer(self._mapped, np.uint8, tensor.num_bytes, tensor.start)
        return data.reshape(-1, tensor.num_bytes // (tensor.num_elements // tensor.shape[-1]))

    def plain(self, tensor: TensorInfo, dtype: torch.dtype) -> Tensor:
        """Return a tensor whose numbers torch knows."""
        flat = torch.frombuffer(self._mapped, dtype=dtype, count=tensor.num_elements, offset=tensor.start)
        return flat.view(tensor.shape)

    def submit(self, work: Callable[..., Tensor], *arguments: Any) -> "Future[Tensor]":
        """Have a thread do something."""
        return self._threads.submit(work, *arguments)

    @property
    def ahead(self) -> int:
        """How many pieces are in work or finished before they are asked for."""
        return min(MAX_THREADS, os.cpu_count() or 1) * _AHEAD


class GgufTensor:
    """One tensor of such a file.

    Args:
        checkpoint: that it belongs to.
        info: where it lies.
        name: in transformers' checkpoints.
        heads: whose rows are in the order of interleaved rotary pairs; None: the rows are in order.
        unit_offset: whether 1 was added to the numbers.
    """

    def __init__(
        self, checkpoint: GgufCheckpoint, info: TensorInfo, name: str, heads: int | None, unit_offset: bool
    ) -> None:
        self._checkpoint, self._info = checkpoint, info
        self._order = None if heads is None else _halves(info.shape[0], heads)
        self._unit_offset = unit_offset
        self.name = name
        self.shape = info.shape
        self.dtype = info.type.name
        self.torch_dtype = _PLAIN.get(info.type, torch.float32)
        self.extent = Extent(checkpoint.path, info.start, info.start + info.num_bytes)

    def fill(self, target: Target, staging: Staging) -> Iterator[int]:
        """Read what the target takes, piece by piece."""
        if target.transposed or target.order is not None or self._info.type in _PLAIN:
            staging.copy(target.view, target.take(self._whole()))
            yield target.view.numel()
            return
        lines, columns = target.part[0], target.part[1]
        view = target.view if staging.is_direct else None
        filled = 0
        for piece, numbers in self._read(lines, columns, view):
            part = target.view[piece.start - lines.start : piece.stop - lines.start]
            if view is None:
                staging.copy(part, numbers)
            filled += part.numel()
            yield filled

    def _whole(self) -> Tensor:
        dtype = _PLAIN.get(self._info.type)
        if dtype is None:
            view = torch.empty(self.shape, dtype=torch.float32)
            for _ in self._read(slice(0, self.shape[0]), slice(None), view):
                pass
            return view
        plain = self._checkpoint.plain(self._info, dtype)
        if self._order is not None:
            plain = plain[torch.from_numpy(self._order)]
        return plain - 1 if self._unit_offset else plain

    def _read(self, taken: slice, columns: slice, view: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
        """Yield the taken lines a few at a time; in the view, where one is given that has them all, else in new memory."""
        lines = self._checkpoint.lines(self._info)
        step = max(1, PIECE_ELEMENTS // self.shape[-1])
        waiting: deque[tuple[slice, Future[Tensor]]] = deque()
        for start in range(taken.start, taken.stop, step):
            if len(waiting) >= self._checkpoint.ahead:
                piece, work = waiting.popleft()
                yield piece, work.result()
            piece = slice(start, min(start + step, taken.stop))
            out = None if view is None else view[piece.start - taken.start : piece.stop - taken.start]
            waiting.append((piece, self._checkpoint.submit(self._numbers, lines, piece, columns, out)))
        for piece, work in waiting:
            yield piece, work.result()

    def _numbers(self, lines: Bytes, piece: slice, columns: slice, out: Tensor | None) -> Tensor:
        """Return the numbers of some lines, in `out` or in new memory: [n, columns]."""
        chosen = lines[piece] if self._order is None else lines[self._order[piece]]
        step = max(1, _BLOCK_ELEMENTS // self.shape[-1])
        if out is None:
            width = len(range(*columns.indices(self.shape[-1])))
            out = torch.empty(len(chosen), width, dtype=torch.float32)
        for start in range(0, len(chosen), step):
            block = chosen[start : start + step]
            # As one long row: the library goes through an array sixteen rows at a time, which are too short.
            numbers = dequantize(block.reshape(1, -1), self._info.type).reshape(len(block), -1)[:, columns]
            numbers = numbers - np.float32(1) if self._unit_offset else numbers
            out[start : start + step] = torch.from_numpy(numbers)
        return out


def _halves(num_rows: int, heads: int) -> npt.NDArray[np.int64]:
    """Return which rows of interleaved pairs make heads whose first half is rotated with the second one.

    Row 2 i + half of a head of the file is row i + half * size / 2 of the model's.
    """
    order: npt.NDArray[np.int64] = np.arange(num_rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    return order
