"""Checkpoints of safetensors files: which files there are, and where in them each tensor lies.

Nothing here imports torch, and no tensor is read. Headers are checked as the format demands: the tensors fill the file
without gaps or overlaps, each as long as its shape says.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.wire.model_files import open_model_file, read_model_text
from octavo.worker.errors import WeightsError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 * 2**20
MAX_HEADER_BYTES = 100_000_000
"""The limit of the format itself."""
_NAMES_SHOWN = 5
_LENGTH = struct.Struct("<Q")
_BITS = {
    "BOOL": 8,
    **{f"{kind}{bits}": bits for kind in "UI" for bits in (8, 16, 32, 64)},
    **{f"F{bits}": bits for bits in (16, 32, 64)},
    "BF16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
}
"""Of the dtypes whose size is known; of others the size is not checked."""


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies: bytes `start` to `end` of the file."""

    dtype: str  # as safetensors calls it: F32, BF16, ...
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_elements(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class SafetensorsFile:
    """The header of one file; the tensors in the order of their places."""

    path: Path
    num_bytes: int
    tensors: Mapping[str, TensorPlace]


def checkpoint_files(folder: Path) -> tuple[dict[Path, frozenset[str] | None], list[str]]:
    """Return the files of a checkpoint with the tensors that the index puts there (None without an index).

    Returns:
        The files, and the names of safetensors files beside them that the index does not name.

    Raises:
        WeightsError: there is no checkpoint, the index is malformed, or it names a file that is not there.
    """
    index_path = folder / INDEX_FILE
    if not index_path.exists():
        single = folder / SINGLE_FILE
        if not single.exists():
            raise WeightsError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors are read")
        return {single: None}, []
    try:
        if index_path.stat().st_size > MAX_INDEX_BYTES:
            raise WeightsError(f"{index_path} has {index_path.stat().st_size} bytes, limit {MAX_INDEX_BYTES}")
        weight_map = json.loads(read_model_text(index_path))["weight_map"]
        by_file: dict[Any, set[str]] = {}  # checked below
        for name, file in weight_map.items():
            by_file.setdefault(file, set()).add(name)
    except OSError as error:
        raise WeightsError(f"{index_path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{index_path} is no index: {type(error).__name__}: {error}") from error
    if not by_file:
        raise WeightsError(f"{index_path} names no tensor")
    files: dict[Path, frozenset[str] | None] = {}
    for file, names in by_file.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise WeightsError(f"{index_path} names {file!r}: expected the name of a .safetensors file in the folder")
        if not os.path.isfile(folder / file):  # says no, where Path raises, if the name is too long
            raise WeightsError(f"{index_path} names {file}, which is not in {folder}")
        files[folder / file] = frozenset(names)
    return files, sorted(path.name for path in folder.glob("*.safetensors") if path not in files)


def read_file_header(path: Path, expected: frozenset[str] | None = None) -> SafetensorsFile:
    """Read one file's header.

    Args:
        path: of the file.
        expected: names of the tensors that the index puts there; None: any.

    Raises:
        WeightsError: the file is damaged, or holds other tensors than expected; the message names it.
    """
    try:
        with open_model_file(path) as file:
            num_bytes = file.seek(0, 2)
            file.seek(0)
            tensors = _read_tensors(file.read(_LENGTH.size), num_bytes, file.read)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from error
    except _Damaged as damage:
        raise WeightsError(f"{path} ({num_bytes} bytes) is damaged: {damage}") from damage
    if expected is not None and tensors.keys() != expected:
        differing = sorted(tensors.keys() ^ expected)
        raise WeightsError(f"{path} and the index differ about {len(differing)} tensors: {some(differing)}")
    return SafetensorsFile(path, num_bytes, tensors)


def some(names: list[str]) -> str:
    """Return the first few of many names as text."""
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown}, ..."


class _Damaged(Exception):
    pass


def _read_tensors(start: bytes, num_bytes: int, read: Callable[[int], bytes]) -> dict[str, TensorPlace]:
    if len(start) < _LENGTH.size:
        raise _Damaged("it is too short for a header")
    (header_bytes,) = _LENGTH.unpack(start)
    data_start = _LENGTH.size + header_bytes
    if header_bytes > MAX_HEADER_BYTES or data_start > num_bytes:
        raise _Damaged(f"it names a header of {header_bytes} bytes")
    try:
        header = json.loads(read(header_bytes), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise _Damaged(f"its header cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise _Damaged("its header is no JSON object")
    header.pop("__metadata__", None)
    tensors = [(name, _stored(name, entry, data_start)) for name, entry in header.items()]
    tensors.sort(key=lambda named: (named[1].start, named[1].end))
    end = data_start
    for name, tensor in tensors:
        if tensor.start != end:
            what = "overlaps the one before it" if tensor.start < end else "leaves a gap before it"
            raise _Damaged(f"tensor {name!r} {what}: it begins at byte {tensor.start}, expected {end}")
        end = tensor.end
    if end != num_bytes:
        raise _Damaged(f"its header describes {end} bytes")
    return dict(tensors)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _stored(name: str, entry: Any, data_start: int) -> TensorPlace:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]} if (
            all(isinstance(size, int) and size >= 0 for size in shape) and 0 <= start <= end
        ):
            bits = _BITS.get(dtype)
            if bits is not None and math.prod(shape) * bits != (end - start) * 8:
                raise _Damaged(f"tensor {name!r} of {dtype} and shape {shape} cannot have {end - start} bytes")
            return TensorPlace(dtype, tuple(shape), data_start + start, data_start + end)
        case _:
            raise _Damaged(f"it describes tensor {name!r} in no way that safetensors knows")
