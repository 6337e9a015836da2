"""What the safetensors files of a model folder hold, from their headers alone: no tensor is read."""

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.cli.errors import CommandError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format itself."""
MAX_INDEX_BYTES = 64 * 2**20

_LENGTH = struct.Struct("<Q")


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
    return [_read_file(folder / name) for name in _file_names(folder)]


def _file_names(folder: Path) -> list[str]:
    index = folder / INDEX_FILE
    if not index.is_file():
        if not (folder / SINGLE_FILE).is_file():
            raise CommandError(
                f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE} (--load-format dummy runs it with random weights)"
            )
        return [SINGLE_FILE]
    if (size := index.stat().st_size) > MAX_INDEX_BYTES:
        raise CommandError(f"{index} has {size} bytes, limit {MAX_INDEX_BYTES}")
    weight_map = _parse_object(index, index.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CommandError(f"{index} has no weight_map")
    names = set()
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise CommandError(f"{index} names {name!r}, which is no file of {folder}")
        names.add(name)
    return sorted(names)


def _read_file(path: Path) -> CheckpointFile:
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH.size)
        if len(start) < _LENGTH.size:
            raise CommandError(f"{path} is no safetensors file: it has {num_bytes} bytes")
        (header_bytes,) = _LENGTH.unpack(start)
        data_start = _LENGTH.size + header_bytes
        if header_bytes > MAX_HEADER_BYTES or data_start > num_bytes:
            raise CommandError(f"{path} has {num_bytes} bytes and names a header of {header_bytes}")
        header = _parse_object(path, file.read(header_bytes))
    num_tensors, num_parameters, end = 0, 0, 0
    dtypes = set()
    for dtype, shape, stop in _tensors(path, header):
        num_tensors += 1
        num_parameters += math.prod(shape)
        dtypes.add(dtype)
        end = max(end, stop)
    if data_start + end != num_bytes:
        raise CommandError(f"{path} has {num_bytes} bytes, but its header describes {data_start + end}: it is damaged")
    return CheckpointFile(path, num_bytes, num_tensors, num_parameters, frozenset(dtypes))


def _tensors(path: Path, header: dict[str, Any]) -> Iterator[tuple[str, list[int], int]]:
    """Yield dtype, shape and end offset of each tensor."""
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]} if (
                all(isinstance(size, int) and size >= 0 for size in shape) and 0 <= start <= stop
            ):
                yield dtype, shape, stop
            case _:
                raise CommandError(f"{path} describes tensor {name!r} in no way that safetensors knows")


def _parse_object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CommandError(f"{path} holds no JSON object")
    return value
