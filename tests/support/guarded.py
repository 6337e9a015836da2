"""Memory between guards: what an operation writes beside its outputs, or leaves unwritten in them, is found."""

from typing import Any

import pytest
import torch
from torch import Tensor

GUARD_BYTES = 4096
"""On either side: more than a line of a tile is long."""
_GUARD, _POISON = 0xA5, 0xFF  # the poison makes NaN of every floating dtype, and -1 of integers

_empty = torch.empty


class Guards:
    """Gives out memory between guards, full of poison; in place of torch.empty too, once it was asked to."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []  # [guard + memory + guard] uint8

    def replace_empty(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let torch.empty and torch.empty_like give such memory; pinned memory stays as it is."""
        monkeypatch.setattr(torch, "empty", self.empty)
        monkeypatch.setattr(torch, "empty_like", self.empty_like)

    def empty(self, *size: Any, dtype: torch.dtype | None = None, device: Any = None, **more: Any) -> Tensor:
        """Return memory of a shape, contiguous."""
        if more.get("pin_memory"):
            return _empty(*size, dtype=dtype, device=device, **more)
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        num_bytes = shape.numel() * dtype.itemsize
        end = (
            GUARD_BYTES + -(-num_bytes // 16) * 16
        )  # what lies behind the last element to the next 16 is guarded as well
        buffer = torch.full((end + GUARD_BYTES,), _GUARD, dtype=torch.uint8, device=device)
        buffer[GUARD_BYTES : GUARD_BYTES + num_bytes] = _POISON
        self._buffers.append(buffer[: GUARD_BYTES + num_bytes + GUARD_BYTES])
        return buffer[GUARD_BYTES : GUARD_BYTES + num_bytes].view(dtype).view(shape)

    def empty_like(self, x: Tensor, **more: Any) -> Tensor:
        """Return memory of another tensor's shape, contiguous."""
        return self.empty(x.shape, dtype=more.get("dtype", x.dtype), device=x.device)

    def copy(self, x: Tensor) -> Tensor:
        """Return a copy, contiguous."""
        return self.empty_like(x).copy_(x)

    def check(self) -> int:
        """See that no guard was written to; return how many pieces of memory were given out."""
        for place, buffer in enumerate(self._buffers):
            for side, guard in (("before", buffer[:GUARD_BYTES]), ("behind", buffer[-GUARD_BYTES:])):
                hurt = (guard != _GUARD).nonzero()
                size = buffer.numel() - 2 * GUARD_BYTES
                assert hurt.numel() == 0, f"{len(hurt)} bytes were written {side} piece {place} of {size} bytes"
        return len(self._buffers)
