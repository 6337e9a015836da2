"""Headers of GGUF files: whatever is wrong with one is named with the file, in bounded time and memory."""

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from octavo.worker.errors import StartError
from octavo.worker.gguf.header import MAX_HEADER_BYTES, GgufError, read_header
from octavo.worker.gguf.reader import GgufCheckpoint
from tests.support.gguf_files import TINY, write_gguf
from tests.support.tiny_models import random_tensors

U32, U64, TEXT, ARRAY = 4, 10, 8, 9


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: bytes, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf(entries: list[bytes], tensors: list[bytes], data: int = 0, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries + tensors)
    return head + bytes(-len(head) % 32 + data)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "m.gguf", TINY, random_tensors(TINY), Kind.Q8_0)


def test_a_header_tells_all(whole: Path) -> None:
    file = read_header(whole)
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.context_length"] == 256
    embedding = file.tensors["token_embd.weight"]
    assert (embedding.shape, embedding.type, embedding.num_bytes) == ((97, 64), Kind.Q8_0, 97 * 2 * 34)
    assert len(file.digest) == 64


def test_values_of_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(
        gguf(
            [
                entry(b"i8", 1, struct.pack("<b", -3)),
                entry(b"true", 7, b"\1"),
                entry(b"f64", 12, struct.pack("<d", 0.5)),
                entry(b"text", TEXT, text("ü".encode())),
                entry(b"texts", ARRAY, struct.pack("<IQ", TEXT, 2) + text(b"a") + text(b"")),
                entry(b"numbers", ARRAY, struct.pack("<IQ3h", 3, 3, 1, -1, 2)),
            ],
            [],
        )
    )
    values = {"i8": -3, "true": True, "f64": 0.5, "text": "ü", "texts": ["a", ""], "numbers": [1, -1, 2]}
    assert read_header(path).metadata == values


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "begins with only 0 bytes"),
        (b"GGU", "begins with only 3 bytes"),
        (b"PK\3\4" + bytes(60), r"begins with b'PK\\x03\\x04', expected b'GGUF'"),
        (b"GGUF", "ends after 4 bytes"),
        (gguf([], [], version=1), "is GGUF version 1; supported are"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), f"number of tensors is {2**60}, limit 65536"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), f"number of metadata entries is {2**63}"),
        (b"GGUF" + struct.pack("<IQQ", 3, 5, 0), "ends after 24 bytes, within tensor 0"),
        (gguf([struct.pack("<Q", 2**60)], []), rf"length of a text in metadata entry 0 is {2**60}"),
        (gguf([entry(b"k", TEXT, struct.pack("<Q", 2**40))], []), f"length of a text in metadata 'k' is {2**40}"),
        (gguf([entry(b"k", TEXT, struct.pack("<Q", 2**20))], []), "within metadata 'k'"),
        (gguf([entry(b"k", ARRAY, struct.pack("<IQ", 0, 2**62))], []), f"length of metadata 'k' is {2**62}"),
        (gguf([entry(b"k", ARRAY, struct.pack("<IQ", 12, 2**22))], []), "within metadata 'k'"),
        (gguf([entry(b"k", ARRAY, struct.pack("<IQ", ARRAY, 1))], []), "as an array of type 9"),
        (gguf([entry(b"k", 99, b"")], []), "metadata 'k' of type 99"),
        (gguf([entry(b"k", 7, b"\1")] * 2, []), "has metadata 'k' twice"),
        (gguf([entry(b"general.alignment", U32, struct.pack("<I", 24))], []), "general.alignment = 24"),
        (gguf([entry(b"general.alignment", U32, bytes(4))], []), "general.alignment = 0"),
        (gguf([], [tensor(b"t", [1] * 5)]), "tensor 't' with 5 dimensions"),
        (gguf([], [tensor(b"t", [2**62, 2**62])], 64), "tensor 't' ends at"),
        (gguf([], [tensor(b"t", [0, 4])], 64), r"tensor 't' with shape \[4, 0\]"),
        (gguf([], [tensor(b"t", [33], kind=2)], 64), r"expected rows of whole blocks of 32 \(Q4_0\)"),
        (gguf([], [tensor(b"t", [4], kind=77)], 64), "tensor 't' in type 77"),
        (gguf([], [tensor(b"t", [4], offset=2**63)], 64), "tensor 't' ends at"),
        (gguf([], [tensor(b"t", [4], offset=4)], 64), "expected a multiple of 32"),
        (gguf([], [tensor(b"t", [4])] * 2, 64), "describes tensor 't' twice"),
        (gguf([], [tensor(b"t", [16]), tensor(b"u", [4], offset=32)], 64), "'t' and 'u' at overlapping places"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(GgufError, match=reason) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_a_file_that_ends_early_is_named(whole: Path) -> None:
    content = whole.read_bytes()
    whole.write_bytes(content[:-1])
    with pytest.raises(GgufError, match=rf"has {len(content) - 1} bytes, but tensor .* ends at {len(content)}"):
        read_header(whole)


def test_headers_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(b"k") + struct.pack("<IQ", TEXT, MAX_HEADER_BYTES))
        file.truncate(2 * MAX_HEADER_BYTES)
    with pytest.raises(GgufError, match="header of more than"):
        read_header(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=r"absent\.gguf cannot be read: No such file"):
        read_header(tmp_path / "absent.gguf")


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(GgufError, match=r"pipe\.gguf cannot be read: it is no regular file"):
        read_header(tmp_path / "pipe.gguf")


def flip(content: bytearray, draw: random.Random) -> None:
    for _ in range(draw.randint(1, 8)):
        content[draw.randrange(len(content) // 4)] = draw.randrange(256)


def cut(content: bytearray, draw: random.Random) -> None:
    del content[draw.randrange(len(content)) :]


def swell(content: bytearray, draw: random.Random) -> None:
    place = draw.randrange(0, 2000)
    content[place : place + 8] = struct.pack("<Q", draw.choice([2**64 - 1, 2**63, 2**40, 2**32, 2**16]))


@pytest.mark.parametrize("damage", [flip, cut, swell])
def test_damaged_files_are_refused_or_read(whole: Path, damage: Callable[[bytearray, random.Random], None]) -> None:
    """No crash, no hang, no other error, whatever the bytes are."""
    content = whole.read_bytes()
    for seed in range(150):
        damaged = bytearray(content)
        damage(damaged, random.Random(seed))
        whole.write_bytes(damaged)
        assert str(whole) in (problem_of(whole) or str(whole))


def problem_of(path: Path) -> str | None:
    """Open a file as the worker does; return why it is refused."""
    try:
        with GgufCheckpoint(read_header(path)):
            return None
    except StartError as error:
        return str(error)
