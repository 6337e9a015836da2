"""The worker's GPU path: rows as tensors, steps that are launched ahead, small steps as captured graphs."""
