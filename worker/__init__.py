"""The worker: one process a device, which owns weights, KV cache and rows, and executes the scheduler's plans."""
