"""A checkpoint and its tensors, whatever kind of files they lie in."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from octavo.worker.models.targets import Target
from octavo.worker.read_ahead import Extent
from octavo.worker.staging import Staging

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""What is read into each other, whatever dtype the model runs in; other numbers are taken as they are."""


class CheckpointTensor(Protocol):
    """One tensor of a checkpoint."""

    @property
    def name(self) -> str:
        """In transformers' checkpoints."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """As transformers' checkpoints have it."""
        ...

    @property
    def dtype(self) -> str:
        """How the file calls the numbers: F32, Q4_K."""
        ...

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """What it is read as; None: it cannot be read."""
        ...

    @property
    def extent(self) -> Extent:
        """Where it lies."""
        ...

    def fill(self, target: Target, staging: Staging) -> Iterator[int]:
        """Read what the target takes; yield how many numbers of it are read, now and then.

        Raises:
            WeightsError: the file cannot be read.
        """
        ...


class Checkpoint(Protocol):
    """The files of a checkpoint; a context manager around their reading."""

    @property
    def path(self) -> Path:
        """Folder, or the one file."""
        ...

    @property
    def tensors(self) -> Sequence[CheckpointTensor]:
        """In the order in which they lie."""
        ...

    @property
    def num_bytes(self) -> int:
        """Of all files that are read."""
        ...

    def __enter__(self) -> "Checkpoint":
        """Begin to read."""
        ...

    def __exit__(self, *exception: object) -> None:
        """Let go of files and threads."""
        ...
