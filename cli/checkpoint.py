"""What the safetensors files of a model folder hold, from their headers alone: no tensor is read."""

from dataclasses import dataclass
from pathlib import Path

from octavo.cli.errors import CommandError
from octavo.worker.errors import WeightsError
from octavo.worker.safetensors_file import checkpoint_files, read_file_header


@dataclass(frozen=True)
class CheckpointFile:
    """One safetensors file."""

    path: Path
    num_bytes: int
    num_tensors: int
    num_parameters: int
    dtypes: frozenset[str]


def read_checkpoint(folder: Path) -> list[CheckpointFile]:
    """Read the headers of a folder's safetensors files.

    Raises:
        CommandError: there is no checkpoint, or a file of it is missing or damaged; the message names the file.
    """
    try:
        files, _ = checkpoint_files(folder)
        return [_summary(path, expected) for path, expected in sorted(files.items())]
    except WeightsError as error:
        raise CommandError(str(error)) from error


def _summary(path: Path, expected: frozenset[str] | None) -> CheckpointFile:
    file = read_file_header(path, expected)
    tensors = file.tensors.values()
    return CheckpointFile(
        path=path,
        num_bytes=file.num_bytes,
        num_tensors=len(tensors),
        num_parameters=sum(tensor.num_elements for tensor in tensors),
        dtypes=frozenset(tensor.dtype for tensor in tensors),
    )
