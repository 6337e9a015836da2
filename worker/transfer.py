"""Small columns from host to device and back, without waiting for the device.

On a GPU both directions go through pinned memory of torch's caching allocator, which does not give the memory to anybody
else before the copy is done.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [n] values on a device; the copy is enqueued on the current stream."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """Return a copy in host memory, which is valid once the current stream has come so far; on the CPU the tensor itself."""
    if not values.is_cuda:
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def upload(values: NDArray[np.int32], device: torch.device) -> Tensor:
    """Return [n] int32 on a device; the copy is enqueued on the current stream, and `values` may change at once."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.clone()
