"""Memory of a device: what is free, and what this process takes of it by its own measure."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

from octavo.worker.errors import MemoryShortage

CONTEXT_BYTES = 2**30
"""Allowance for what a process takes on a CUDA device beside its tensors: the context, loaded kernels, libraries.

The driver tells only what all processes took together, so it is not measured: two engines may start on one device at the
same time.
"""
GRAPH_BYTES = 2**30
"""Reserve for the CUDA graphs that are captured after the KV cache was allocated, with the memory they compute in."""

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


@dataclass(frozen=True)
class DeviceMemory:
    """A CUDA device after the largest step was tried, in bytes.

    `weights`, `peak` and `held` are this process's own allocations; what others have on the device shows in `free` alone.
    """

    total: int
    free: int  # not taken by any process
    weights: int
    peak: int  # most that was held during the largest step, the weights included
    held: int  # now
    graphs: int  # reserve for graphs that are captured later
    context: int = CONTEXT_BYTES

    @property
    def activations(self) -> int:
        """What the largest step takes beside the weights."""
        return self.peak - self.weights

    @property
    def owed(self) -> int:
        """What this process will still take of `free`, the KV cache not counted."""
        return self.peak - self.held + self.graphs


def measure(device: torch.device, largest_step: Callable[[], object], graphs: int) -> DeviceMemory:
    """Run the largest step and return what was held meanwhile; what it leaves behind is freed."""
    gc.collect()
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    largest_step()
    torch.cuda.synchronize(device)
    # Reserved, not allocated: what the allocator loses between its blocks is lost to the KV cache too.
    peak = torch.cuda.max_memory_reserved(device)
    gc.collect()
    torch.cuda.empty_cache()
    free, total = free_and_total(device)
    return DeviceMemory(total, free, weights, peak, torch.cuda.memory_reserved(device), graphs)


def free_and_total(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a device that no process uses, and all that it has."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    memory = psutil.virtual_memory()
    return int(memory.available), int(memory.total)


@contextmanager
def named_shortage(device: torch.device, what: str, remedy: str) -> Iterator[None]:
    """Turn the allocator's failure into one that says what did not fit and what helps.

    Raises:
        MemoryShortage: the device ran out of memory within.
    """
    try:
        yield
    except RuntimeError as error:
        # The driver's own shortages (of a graph, of a module) come as plain errors of CUDA.
        if "out of memory" not in str(error):
            raise
        free, total = free_and_total(device)
        raise MemoryShortage(
            f"{what} ran out of memory: {in_words(free)} of {in_words(total)} are free on {device}, "
            f"this process holds {in_words(torch.cuda.memory_reserved(device))}; {remedy}"
        ) from error


def in_words(num_bytes: int) -> str:
    """Write a size as people read it: 15.0 GiB."""
    for unit, size in _UNITS:
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
