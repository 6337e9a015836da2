"""What needs a GPU says so before it does anything."""

import sys

import torch


def require_cuda(name: str) -> None:
    """End the program with exit code 2 and one line where torch finds no CUDA device.

    Args:
        name: of the program.
    """
    if not torch.cuda.is_available():
        sys.stderr.write(f"{name}: torch {torch.__version__} finds no CUDA device\n")
        sys.exit(2)
