"""Weights from safetensors files to the parameters they belong to; every tensor is accounted for.

Only safetensors are read. With an index (model.safetensors.index.json) only the files it names are, and each tensor from
the file the index says. Files are mapped, not read: what is held in memory of a checkpoint is a tensor at a time.
"""

import json
import logging
import math
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from octavo.worker.errors import WeightsError
from octavo.worker.models.targets import Target
from octavo.worker.staging import Staging

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 * 2**20
_NAMES_SHOWN = 5
_FLOATS = ("F32", "F16", "BF16")
"""What is read where floating point is wanted, whatever dtype the model runs in; other numbers must be as they are."""
_EXACT = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}

_SMALL_FLOAT8 = 0b10011111
"""Bits of 8-bit floating point that make numbers below an eighth."""

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in total."""


def load_weights(
    folder: Path,
    targets: dict[str, Target],
    is_ignored: Callable[[str], bool],
    progress: Progress,
    name_of: Callable[[str], str] = str,
) -> None:
    """Fill every target from the folder's safetensors.

    Args:
        folder: the model.
        targets: by name.
        is_ignored: whether a tensor without a target may be there.
        progress: told now and then.
        name_of: what `targets` calls a tensor of the checkpoint.

    Raises:
        WeightsError: a file is missing or damaged, or a tensor is missing, unexpected, or of another shape or dtype.
    """
    files = checkpoint_files(folder)
    _warn_of_extra(folder, files)
    total = sum(path.stat().st_size for path in files)
    staging = Staging(next((target.view.device for target in targets.values()), torch.device("cpu")))
    done = 0
    filled: set[str] = set()
    unexpected: list[str] = []
    for path, expected_names in files.items():
        end = done + path.stat().st_size
        for stored_name, tensor_slice in _tensors(path, expected_names):
            name = name_of(stored_name)
            if name in filled:
                raise WeightsError(f"tensor {name} comes twice; the second time in {path}")
            if name in targets:
                target = targets[name]
                _fill(name, path, target, tensor_slice, staging)
                filled.add(name)
                read = math.prod(target.full_shape) * _ITEM_BYTES[tensor_slice.get_dtype()]
                done = min(done + read, end)
                progress(done, total)
            elif not is_ignored(name):
                unexpected.append(name)
        done = end  # the header and what was ignored
        progress(done, total)
    staging.finish()
    missing = sorted(targets.keys() - filled)
    if missing:
        raise WeightsError(f"{folder} lacks {len(missing)} tensors that the model needs: {_some(missing)}")
    if unexpected:
        raise WeightsError(
            f"{folder} holds {len(unexpected)} tensors that the model does not know: {_some(unexpected)}"
        )


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
            view.normal_(0.0, view.shape[-1] ** -0.5, generator=generator)
        else:
            view.fill_(1.0)
    elif view.dim() > 1:
        codes = view.view(torch.uint8)
        codes.random_(0, 256, generator=generator)
        if view.dtype.is_floating_point:
            codes.bitwise_and_(_SMALL_FLOAT8)


@dataclass(frozen=True)
class StoredTensor:
    """What a checkpoint says of a tensor."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors call it: F16


def stored_tensors(folder: Path, name_of: Callable[[str], str] = str) -> dict[str, StoredTensor]:
    """Return what the headers of a checkpoint say of its tensors, by the names that `name_of` gives them.

    Raises:
        WeightsError: a file is missing or damaged.
    """
    return {
        name_of(name): StoredTensor(tuple(tensor_slice.get_shape()), tensor_slice.get_dtype())
        for path, expected_names in checkpoint_files(folder).items()
        for name, tensor_slice in _tensors(path, expected_names)
    }


def checkpoint_files(folder: Path) -> dict[Path, frozenset[str] | None]:
    """Return the files of a checkpoint with the tensors that the index puts there (None without an index).

    Raises:
        WeightsError: there is no checkpoint, the index is malformed, or it names a file that is not there.
    """
    index_path = folder / INDEX_FILE
    if not index_path.exists():
        single = folder / SINGLE_FILE
        if not single.exists():
            raise WeightsError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors are read")
        return {single: None}
    if index_path.stat().st_size > MAX_INDEX_BYTES:
        raise WeightsError(f"{index_path} has {index_path.stat().st_size} bytes, limit {MAX_INDEX_BYTES}")
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        by_file: dict[Any, set[str]] = {}  # checked below
        for name, file in weight_map.items():
            by_file.setdefault(file, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{index_path} is no index: {type(error).__name__}: {error}") from error
    files: dict[Path, frozenset[str] | None] = {}
    for file, names in by_file.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise WeightsError(f"{index_path} names {file!r}: expected the name of a .safetensors file in the folder")
        if not (folder / file).exists():
            raise WeightsError(f"{index_path} names {file}, which is not in {folder}")
        files[folder / file] = frozenset(names)
    return files


def _warn_of_extra(folder: Path, files: Container[Path]) -> None:
    extra = sorted(path.name for path in folder.glob("*.safetensors") if path not in files)
    if extra and (folder / INDEX_FILE).exists():
        logger.warning(
            "%s does not name %d files beside it, which are not read: %s",
            folder / INDEX_FILE,
            len(extra),
            _some(extra),
        )


def _tensors(path: Path, expected: frozenset[str] | None) -> Iterator[tuple[str, Any]]:
    try:
        with safe_open(path, framework="pt") as handle:
            names = set(handle.keys())
            if expected is not None and names != expected:
                differing = sorted(names ^ expected)
                raise WeightsError(f"{path} and the index differ about {len(differing)} tensors: {_some(differing)}")
            for name in sorted(names):
                yield name, handle.get_slice(name)
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size if path.exists() else 0
        raise WeightsError(f"{path} ({size} bytes) is damaged: {error}") from error


def _fill(name: str, path: Path, target: Target, tensor_slice: Any, staging: Staging) -> None:
    shape = tuple(tensor_slice.get_shape())
    dtype = tensor_slice.get_dtype()
    if shape != target.full_shape:
        raise WeightsError(f"tensor {name} in {path} has shape {list(shape)}, expected {list(target.full_shape)}")
    expected = (_EXACT[target.view.dtype],) if target.view.dtype in _EXACT else _FLOATS
    if dtype not in expected:
        raise WeightsError(f"tensor {name} in {path} has dtype {dtype}, expected {', '.join(expected)}")
    staging.copy(target.view, target.take(tensor_slice))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown}, ..."
