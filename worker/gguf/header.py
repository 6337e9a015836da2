"""The header of a GGUF file: its metadata, and where each tensor lies. No tensor is read, nothing here imports torch.

A header is read from front to back. Every length in it is checked against a limit and against the bytes that are left
before anything is allocated by it, so that a damaged or malicious file costs a bounded time and is named with a reason.
"""

import hashlib
import itertools
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from octavo.wire.model_files import open_model_file
from octavo.worker.errors import WeightsError

SUFFIX = ".gguf"
MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
MAX_HEADER_BYTES = 64 * 2**20
"""Vocabularies of 260,000 tokens with their merges take about 10 MB."""
MAX_ENTRIES = 2**16
"""Of metadata, and of tensors."""
MAX_ARRAY = 2**22
MAX_NAME_BYTES = 1024
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**20

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Number of each type of metadata -> how struct calls it."""
_STRING, _ARRAY = 8, 9
_PIECE_BYTES = 4 * 2**20
"""How much of the file is read at a time."""
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

Scalar = bool | int | float | str
Value = Scalar | list[bool] | list[int] | list[float] | list[str]


class GgufError(WeightsError):
    """The file is no GGUF file, is damaged, or is of a kind that is not read; the message names it."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor.

    Attributes:
        name: in the file.
        shape: outermost dimension first, as torch has it.
        type: how its numbers are stored.
        start: of its bytes in the file.
        num_bytes: of them.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class GgufFile:
    """A file's header.

    Attributes:
        path: of the file.
        num_bytes: of the file.
        metadata: key -> value.
        tensors: by name, in the order of the file.
        digest: SHA-256 (hex) of the header, which tells files of different models apart.
    """

    path: Path
    num_bytes: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    digest: str


def read_header(path: Path) -> GgufFile:
    """Read a file's header.

    Raises:
        GgufError: it cannot be read, is damaged, or is of a kind that is not supported.
    """
    try:
        with open_model_file(path) as file:
            return _Reader(path, file).read()
    except OSError as error:
        raise GgufError(f"{path} cannot be read: {error.strerror}") from error


class _Reader:
    """Reads one header; `_place` is what is being read, for messages."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._num_bytes = os.fstat(file.fileno()).st_size
        self._data = bytearray()  # what was read of it
        self._position = 0
        self._place = "its beginning"

    def read(self) -> GgufFile:
        if self._num_bytes < len(MAGIC) or (magic := self._take(len(MAGIC))) != MAGIC:
            found = f"only {self._num_bytes} bytes" if self._num_bytes < len(MAGIC) else repr(bytes(magic))
            raise self._error(f"is no GGUF file: it begins with {found}, expected {MAGIC!r}")
        version = self._u32()
        if version not in SUPPORTED_VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = "big-endian" if swapped in SUPPORTED_VERSIONS else f"GGUF version {version}"
            raise self._error(f"is {kind}; supported are little-endian files of versions 2 and 3")
        num_tensors = self._count("number of tensors", MAX_ENTRIES)
        num_values = self._count("number of metadata entries", MAX_ENTRIES)
        metadata: dict[str, Value] = {}
        for index in range(num_values):
            self._place = f"metadata entry {index}"
            key = self._string(MAX_NAME_BYTES)
            self._place = f"metadata {key!r}"
            if key in metadata:
                raise self._error(f"has {self._place} twice")
            metadata[key] = self._value(self._u32())
        described = [self._tensor(index) for index in range(num_tensors)]
        tensors = self._placed(described, self._alignment(metadata))
        digest = hashlib.sha256(memoryview(self._data)[: self._position]).hexdigest()
        return GgufFile(self._path, self._num_bytes, metadata, tensors, digest)

    def _tensor(self, index: int) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        """Return name, shape, type and offset of the next tensor."""
        self._place = f"tensor {index}"
        name = self._string(MAX_NAME_BYTES)
        self._place = f"tensor {name!r}"
        num_dimensions = self._u32()
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._error(
                f"describes {self._place} with {num_dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}"
            )
        shape = tuple(reversed([self._u64() for _ in range(num_dimensions)]))
        number = self._u32()
        try:
            kind = GGMLQuantizationType(number)
            block, _ = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise self._error(f"stores {self._place} in type {number}, which is not known") from error
        if not all(shape) or shape[-1] % block:
            raise self._error(
                f"describes {self._place} with shape {list(shape)}, expected rows of whole blocks of {block} ({kind.name})"
            )
        return name, shape, kind, self._u64()

    def _placed(
        self, described: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]], alignment: int
    ) -> dict[str, TensorInfo]:
        """Return the tensors with their places in the file, which must lie within it, apart from each other."""
        start_of_data = self._position + -self._position % alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in described:
            block, size = GGML_QUANT_SIZES[kind]
            num_bytes = math.prod(shape) // block * size
            start = start_of_data + offset
            if name in tensors:
                raise self._error(f"describes tensor {name!r} twice")
            if offset % alignment:
                raise self._error(f"places tensor {name!r} at {offset}, expected a multiple of {alignment}")
            if start + num_bytes > self._num_bytes:
                raise self._error(
                    f"has {self._num_bytes} bytes, but tensor {name!r} ends at {start + num_bytes}: it is damaged"
                )
            tensors[name] = TensorInfo(name, shape, kind, start, num_bytes)
        ordered = sorted(tensors.values(), key=lambda tensor: tensor.start)
        for before, after in itertools.pairwise(ordered):
            if before.start + before.num_bytes > after.start:
                raise self._error(f"has tensors {before.name!r} and {after.name!r} at overlapping places")
        return {tensor.name: tensor for tensor in ordered}

    def _alignment(self, metadata: Mapping[str, Value]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or not 1 <= value <= MAX_ALIGNMENT
            or value & value - 1
        ):
            raise self._error(f"has general.alignment = {value!r}, expected a power of two up to {MAX_ALIGNMENT}")
        return value

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string(MAX_HEADER_BYTES)
        if kind in _SCALARS:
            return self._scalars(kind, 1)[0]
        if kind != _ARRAY:
            raise self._error(f"has {self._place} of type {kind}, which is not known")
        item = self._u32()
        length = self._count(f"length of {self._place}", MAX_ARRAY)
        if item == _STRING:
            return [self._string(MAX_HEADER_BYTES) for _ in range(length)]
        if item in _SCALARS:
            return self._scalars(item, length)
        raise self._error(f"has {self._place} as an array of type {item}; arrays of numbers and of texts are read")

    def _scalars(self, kind: int, length: int) -> list[bool] | list[int] | list[float]:
        code = _SCALARS[kind]
        return list(struct.unpack(f"<{length}{code}", self._take(length * struct.calcsize(f"<{code}"))))

    def _string(self, limit: int) -> str:
        length = self._count(f"length of a text in {self._place}", limit)
        # Vocabularies may hold bytes that are no characters; nothing that must be exact is among them.
        return self._take(length).decode("utf-8", "replace")

    def _count(self, what: str, limit: int) -> int:
        value = self._u64()
        if value > limit:
            raise self._error(f"is damaged: {what} is {value}, limit {limit}")
        return value

    def _u32(self) -> int:
        found: int = _U32.unpack(self._take(4))[0]
        return found

    def _u64(self) -> int:
        found: int = _U64.unpack(self._take(8))[0]
        return found

    def _take(self, num_bytes: int) -> bytearray:
        """Return the next bytes."""
        end = self._position + num_bytes
        if end > self._num_bytes:
            raise self._error(f"is damaged: it ends after {self._num_bytes} bytes, within {self._place}")
        if end > MAX_HEADER_BYTES:
            raise self._error(f"has a header of more than {MAX_HEADER_BYTES} bytes")
        while len(self._data) < end:
            piece = self._file.read(_PIECE_BYTES)
            if not piece:  # it became shorter meanwhile
                raise self._error(f"is damaged: it ends within {self._place}")
            self._data += piece
        data = self._data[self._position : end]
        self._position = end
        return data

    def _error(self, words: str) -> GgufError:
        return GgufError(f"{self._path} {words}")
