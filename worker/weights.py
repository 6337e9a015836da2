"""Weights from a checkpoint to the parameters they belong to; every tensor is accounted for before the first is read.

What the headers of all files say is compared with what the model needs: names, shapes and dtypes. Then the files are gone
through once, in the order in which they lie on the disk, with a few threads reading ahead.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from octavo.worker.checkpoint import FLOATS, Checkpoint, CheckpointTensor
from octavo.worker.errors import WeightsError
from octavo.worker.models.targets import Target
from octavo.worker.read_ahead import ReadAhead
from octavo.worker.safetensors_file import some
from octavo.worker.safetensors_reader import SafetensorsCheckpoint
from octavo.worker.staging import Staging

_EXACT = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}
_FLOATS = "F32, F16, BF16"
_TABLE_SIZE = 16
_TABLE_DEVIATION = 0.02
_SMALL_FLOAT8 = 0b10011111
"""Bits of 8-bit floating point that make numbers below an eighth."""

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in total."""


def open_checkpoint(folder: Path, gguf: Path | None = None) -> Checkpoint:
    """Open a model's checkpoint: read the headers of its files.

    Args:
        folder: the model.
        gguf: the file that the weights are in, if it is such a file.

    Raises:
        WeightsError: a file is missing or damaged, or of a kind that is not read; the message names it.
        ModelConfigError: a GGUF file's architecture is not supported.
    """
    if gguf is None:
        return SafetensorsCheckpoint(folder)
    from octavo.worker.gguf.header import read_header  # the library takes a fifth of a second
    from octavo.worker.gguf.reader import GgufCheckpoint

    return GgufCheckpoint(read_header(gguf))


def load_weights(
    checkpoint: Checkpoint,
    targets: dict[str, Target],
    is_ignored: Callable[[str], bool],
    progress: Progress,
    name_of: Callable[[str], str] = str,
) -> None:
    """Fill every target from a checkpoint, which is closed then.

    Args:
        checkpoint: of the model.
        targets: by name.
        is_ignored: whether a tensor without a target may be there.
        progress: told now and then.
        name_of: what `targets` calls a tensor of the checkpoint.

    Raises:
        WeightsError: a tensor is missing, unexpected, or of another shape or dtype, or cannot be read.
    """
    with checkpoint:
        _read(checkpoint, match(checkpoint, targets, is_ignored, name_of), progress)


def match(
    checkpoint: Checkpoint,
    targets: dict[str, Target],
    is_ignored: Callable[[str], bool],
    name_of: Callable[[str], str],
) -> list[tuple[CheckpointTensor, Target]]:
    """Return the tensors that are read, each with its target.

    Raises:
        WeightsError: a tensor is missing, unexpected, there twice, or of another shape or dtype.
    """
    found: dict[str, CheckpointTensor] = {}
    unexpected: list[str] = []
    for tensor in checkpoint.tensors:
        name = name_of(tensor.name)
        if name in found:
            raise WeightsError(f"tensor {name} comes twice; the second time in {tensor.extent.path}")
        if name in targets:
            _check(tensor, targets[name])
            found[name] = tensor
        elif not is_ignored(name):
            unexpected.append(name)
    if missing := sorted(targets.keys() - found):
        raise WeightsError(f"{checkpoint.path} lacks {len(missing)} tensors that the model needs: {some(missing)}")
    if unexpected:
        unexpected.sort()
        raise WeightsError(
            f"{checkpoint.path} holds {len(unexpected)} tensors that the model does not know: {some(unexpected)}"
        )
    return [(tensor, targets[name]) for name, tensor in found.items()]


def _check(tensor: CheckpointTensor, target: Target) -> None:
    name, path = tensor.name, tensor.extent.path
    if tensor.shape != target.full_shape:
        raise WeightsError(
            f"tensor {name} in {path} has shape {list(tensor.shape)}, expected {list(target.full_shape)}"
        )
    wanted = target.view.dtype
    if not (tensor.torch_dtype in FLOATS if wanted in FLOATS else tensor.torch_dtype == wanted):
        raise WeightsError(f"tensor {name} in {path} has dtype {tensor.dtype}, expected {_EXACT.get(wanted, _FLOATS)}")


def _read(checkpoint: Checkpoint, matched: list[tuple[CheckpointTensor, Target]], progress: Progress) -> None:
    staging = Staging(next((target.view.device for _, target in matched), torch.device("cpu")))
    total, done = checkpoint.num_bytes, 0
    with ReadAhead([tensor.extent for tensor, _ in matched]) as ahead:
        for tensor, target in matched:
            num_bytes = tensor.extent.end - tensor.extent.start
            for filled in tensor.fill(target, staging):
                progress(done + num_bytes * filled // max(1, target.view.numel()), total)
            done += num_bytes
            ahead.advance(num_bytes)
    staging.finish()
    progress(total, total)  # with the headers, and what was ignored


def fill_dummy(targets: dict[str, Target], seed: int, progress: Progress) -> None:
    """Fill every target with small random numbers: for speed measurements without a checkpoint.

    They are drawn on the device, in place and in the dtype of the weights.
    """
    total = sum(target.view.nbytes for target in targets.values())
    done = 0
    for number, target in enumerate(targets.values()):
        generator = torch.Generator(target.view.device).manual_seed(seed + number)
        _draw(target.view, generator)
        done += target.view.nbytes
        progress(done, total)


def _draw(view: torch.Tensor, generator: torch.Generator) -> None:
    """Fill one tensor; integers of one dimension say how others are laid out, and hold that already."""
    if view.dtype.is_floating_point and view.dtype.itemsize > 1:
        if view.dim() > 1:
            # Up to sixteen are the table of an output that may have thousands of inputs, not its inputs.
            deviation = _TABLE_DEVIATION if view.shape[-1] <= _TABLE_SIZE else view.shape[-1] ** -0.5
            view.normal_(0.0, deviation, generator=generator)
        else:
            view.fill_(1.0)
    elif view.dim() > 1:
        codes = view.view(torch.uint8)
        codes.random_(0, 256, generator=generator)
        if view.dtype.is_floating_point:
            codes.bitwise_and_(_SMALL_FLOAT8)
