"""The worker: one process a device, which owns weights, KV cache and rows, and executes the scheduler's plans."""

import os

# Threads of torch's OpenMP that spin while they wait starve each other as soon as another process runs on the same cores:
# beside two busy processes on 2 cores, a decode step of the demo model took 1.8 s instead of 0.06 s. libgomp reads this
# once, when torch is imported: nothing of this package can be imported before this line.
if "GOMP_SPINCOUNT" not in os.environ:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
