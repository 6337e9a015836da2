"""Counters of arrivals, by which the last of several programs knows that it is the last."""

import torch
from torch import Tensor

_MIN_COUNTERS = 1 << 17
"""Counters made for a device at first: enough for 1024 rows of 128 KV heads."""

_made: dict[tuple[torch.device, int], Tensor] = {}


def counters(device: torch.device, count: int) -> Tensor:
    """Return at least ``count`` int32 zeros that kernels count arrivals in and leave at zero.

    They are kept for good: captured graphs hold their address. Kernels of one stream share them.
    """
    size = max(_MIN_COUNTERS, 1 << (count - 1).bit_length())
    found = _made.get((device, size))
    if found is None:
        with torch.inference_mode(False):
            found = _made[device, size] = torch.zeros(size, dtype=torch.int32, device=device)
    return found
