"""The worker's GPU path: rows as tensors, steps that are launched ahead, decode steps as captured graphs."""
