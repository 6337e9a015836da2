"""Programmatic dependent launch: a kernel's programs start while the last ones of the kernel before still run.

Its rule: a kernel that is launched with ``launch_pdl`` waits (``wait_for_inputs``) in every program before it touches
anything that another kernel writes or reads, weights aside. Then its end means that every kernel before it has ended,
and its successors may be launched in the same way. Kernels that know nothing of it are ordered as always.

In a captured decode step this hides the start of a kernel (1 to 2 us each) behind the end of the one before.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor


@functools.cache
def _overlaps(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def overlaps(x: Tensor) -> bool:
    """Return whether kernels on x's device can be launched before the kernel before them has ended."""
    return x.is_cuda and _overlaps(x.device.index)


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Let the next kernel's programs in as soon as all of this one's have begun; wait until the kernel before ended."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(pointers):
    """Ask for the 128-byte line behind each pointer to be brought into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
