"""Tensors of safetensors files, mapped: what is held in memory of a checkpoint is what the system keeps of its files."""

import logging
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from octavo.worker.checkpoint import CheckpointTensor
from octavo.worker.errors import WeightsError
from octavo.worker.models.targets import Target
from octavo.worker.read_ahead import Extent
from octavo.worker.safetensors_file import INDEX_FILE, TensorPlace, checkpoint_files, read_file_header, some
from octavo.worker.staging import Staging

logger = logging.getLogger(__name__)

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class SafetensorsCheckpoint:
    """The files of a model folder.

    Args:
        folder: of the model.

    Raises:
        WeightsError: a file is missing or damaged; the message names it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        files, extra = checkpoint_files(folder)
        if extra:
            logger.warning(
                "%s does not name %d files beside it, which are not read: %s",
                folder / INDEX_FILE,
                len(extra),
                some(extra),
            )
        self._mapped: tuple[Path, mmap.mmap] | None = None  # the file that was read last
        self.tensors: list[CheckpointTensor] = []
        self.num_bytes = 0
        for path, expected in files.items():
            file = read_file_header(path, expected)
            self.num_bytes += file.num_bytes
            self.tensors += [SafetensorsTensor(self, path, name, place) for name, place in file.tensors.items()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._mapped = None

    def mapped(self, path: Path) -> mmap.mmap:
        """Return a file's bytes.

        Raises:
            WeightsError: it cannot be read.
        """
        if self._mapped is None or self._mapped[0] != path:
            try:
                with path.open("rb") as file:
                    # A private mapping: torch wants memory that it may write to, the file stays as it is.
                    self._mapped = path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                raise WeightsError(f"{path} cannot be read: {error}") from error
        return self._mapped[1]


class SafetensorsTensor:
    """One tensor of such a file."""

    def __init__(self, checkpoint: SafetensorsCheckpoint, path: Path, name: str, place: TensorPlace) -> None:
        self._checkpoint = checkpoint
        self.name = name
        self.shape = place.shape
        self.dtype = place.dtype
        self.torch_dtype = _DTYPES.get(place.dtype)
        self.extent = Extent(path, place.start, place.end)
        self._num_elements = place.num_elements

    def fill(self, target: Target, staging: Staging) -> Iterator[int]:
        """Read what the target takes, in one go."""
        staging.copy(target.view, target.take(self._tensor()))
        yield target.view.numel()

    def _tensor(self) -> Tensor:
        assert self.torch_dtype is not None  # noqa: S101 - for the type checker
        if not self._num_elements:
            return torch.empty(self.shape, dtype=self.torch_dtype)
        mapped = self._checkpoint.mapped(self.extent.path)
        flat = torch.frombuffer(mapped, dtype=self.torch_dtype, count=self._num_elements, offset=self.extent.start)
        return flat.view(self.shape)
