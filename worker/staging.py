"""Weights on their way from mapped files to a device: through pinned buffers, so that reading and copying overlap."""

from typing import Protocol

import torch
from torch import Tensor

STAGING_BYTES = 64 * 2**20
"""Of each buffer: large enough that a copy over PCIe is long beside its launch, small beside the weights."""
_NUM_BUFFERS = 2


class _Copied(Protocol):
    def synchronize(self) -> None: ...


class Staging:
    """Copies tensors of the CPU to one device, piece by piece, each buffer filled while another one is copied.

    On the CPU itself there is nothing to stage: tensors are copied at once.
    """

    def __init__(self, device: torch.device, num_bytes: int = STAGING_BYTES) -> None:
        """Prepare for tensors of a device; the buffers, `num_bytes` each, are made when the first one comes."""
        self._device = device
        self._num_bytes = num_bytes
        self._buffers: list[Tensor] = []
        self._copied: list[_Copied | None] = [None] * _NUM_BUFFERS  # the end of the last copy out of each buffer
        self._next = 0

    @property
    def is_direct(self) -> bool:
        """Whether there is nothing to stage: the targets are the processor's own memory."""
        return self._device.type == "cpu"

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy `source` to `target`, of the same shape and any dtype; `finish` waits until it has arrived.

        The source may be dropped at once; the target must be contiguous.
        """
        if self.is_direct:
            target.copy_(source)
            return
        # Flat, so that a piece is a run of numbers, whatever the shape. Converted on the way into the buffer: what
        # crosses the bus is in the target's dtype.
        flat_target, flat_source = target.view(-1), source.reshape(-1)
        piece = self._num_bytes // target.dtype.itemsize
        for start in range(0, flat_target.numel(), piece):
            part = flat_source[start : start + piece]
            buffer = self._free_buffer().view(target.dtype)[: part.numel()]
            buffer.copy_(part)
            flat_target[start : start + piece].copy_(buffer, non_blocking=True)
            self._copied[self._next] = _end_of_copies(self._device)
            self._next = (self._next + 1) % _NUM_BUFFERS

    def finish(self) -> None:
        """Wait until everything has arrived, and free the buffers."""
        for copied in self._copied:
            if copied is not None:
                copied.synchronize()
        self._buffers, self._copied = [], [None] * _NUM_BUFFERS

    def _free_buffer(self) -> Tensor:
        """Return the buffer whose turn it is, once the last copy out of it is done."""
        if not self._buffers:
            self._buffers = [_pinned(self._num_bytes) for _ in range(_NUM_BUFFERS)]
        copied = self._copied[self._next]
        if copied is not None:
            copied.synchronize()
        return self._buffers[self._next]


def _pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _end_of_copies(device: torch.device) -> _Copied:
    copied: _Copied = torch.cuda.current_stream(device).record_event()
    return copied
