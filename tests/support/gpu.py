"""Where the tests of tests/gpu run: on a CUDA device, else nowhere; or, when asked, through Triton's interpreter."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.worker.gpu.runner import GpuRunner
from tests.support.tiny_models import TINY_LLAMA, load_worker, write_model

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")

needs_cuda = pytest.mark.skipif(not CUDA, reason="no CUDA device")
ON_GPU = [pytest.mark.gpu, needs_cuda]
"""Marks of what only a CUDA device can show."""

# Whoever writes a test of the GPU path where there is no GPU can try it: slowly, on the CPU.
ON_GPU_OR_INTERPRETED = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA and "OCTAVO_TEST_INTERPRETED" not in os.environ, reason="no CUDA device"),
    # The interpreter computes with numpy, which warns where floating point overflows or meets NaN.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
"""Marks of what the interpreter can run as well, when OCTAVO_TEST_INTERPRETED is set."""

SHAPE: dict[str, Any] = TINY_LLAMA | {"tie_word_embeddings": False, "head_dim": 64 if CUDA else 8}
"""A tiny model with a head size that the kernels are made for; the interpreter takes any."""


def settle() -> None:
    """Wait for what a test has enqueued itself: a runner has a stream of its own, which waits for no other."""
    if CUDA:
        torch.cuda.synchronize()


def write_tiny(folder: Path) -> Path:
    """Write the tiny model; return its folder."""
    return write_model(folder, SHAPE)


def load_gpu(folder: Path, **settings: Any) -> GpuRunner:
    """Load a small worker of the GPU backend; return its runner, with graphs captured unless told otherwise."""
    runner = load_worker(folder, backend="triton", device=DEVICE.type, **settings).runner
    assert isinstance(runner, GpuRunner)
    return runner
