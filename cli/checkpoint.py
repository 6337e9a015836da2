"""What the files with a model's weights hold, from their headers alone: no tensor is read."""

from dataclasses import dataclass
from pathlib import Path

from octavo.cli.errors import CommandError
from octavo.worker.errors import WeightsError
from octavo.worker.safetensors_file import checkpoint_files, read_file_header


@dataclass(frozen=True)
class CheckpointFile:
    """One safetensors or GGUF file."""

    path: Path
    num_bytes: int
    num_tensors: int
    num_parameters: int
    dtypes: frozenset[str]


def read_checkpoint(folder: Path, gguf: Path | None = None) -> list[CheckpointFile]:
    """Read the headers of a model's safetensors files, or of its GGUF file.

    Args:
        folder: the model.
        gguf: the file that the weights are in, if it is such a file.

    Raises:
        CommandError: there is no checkpoint, or a file of it is missing or damaged; the message names the file.
    """
    try:
        if gguf is not None:
            return [_summary_of_gguf(gguf)]
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


def _summary_of_gguf(path: Path) -> CheckpointFile:
    from octavo.worker.gguf.header import read_header  # the library takes a fifth of a second
    from octavo.worker.gguf.kinds import require_readable

    file = read_header(path)
    tensors = file.tensors.values()
    for tensor in tensors:
        require_readable(path, tensor)
    return CheckpointFile(
        path=path,
        num_bytes=file.num_bytes,
        num_tensors=len(tensors),
        num_parameters=sum(tensor.num_elements for tensor in tensors),
        dtypes=frozenset(tensor.type.name for tensor in tensors),
    )
