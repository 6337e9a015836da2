"""The worker: one process a device, which owns weights, KV cache and rows, and executes the scheduler's plans."""

import os

_SPIN_COUNT = "1000"
"""How often a thread of torch's OpenMP (libgomp) looks for its fellows before it sleeps.

By default it looks for milliseconds: with as many threads as cores, and another process on one of them, each of the
hundreds of barriers of a step then waits for a time slice. Measured on 2 cores beside one busy process, a decode step of
the demo model took 1500 ms by default and 60 ms so; on quiet cores it took 42 ms instead of 37. Not to spin at all
(OMP_WAIT_POLICY=PASSIVE) took 44 ms there.
"""

_HUGE_PAGES = "1"
"""That torch asks for huge pages where it allocates 2 MB or more, so that weights are read with fewer misses of the TLB.

Measured on 2 cores, medians of six runs in turns: all products of a step with 400 MB of float32 weights took 15.7 ms instead
of 17.5 with 8 rows, 15.9 instead of 16.2 with one, and the same with 128.
"""

# Both are read once, when torch is imported: nothing of this package can be imported before these lines.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", _HUGE_PAGES)
