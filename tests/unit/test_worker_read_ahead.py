"""Reading ahead: everything once, in order, no further than the window, and never in the way."""

import os
import threading
from pathlib import Path

import pytest

from octavo.worker.read_ahead import PIECE_BYTES, Extent, ReadAhead


class Disk:
    """Notes what is read, in the place of the system's call; pages are never in memory before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[tuple[int, int]] = []
        self.changed = threading.Condition()
        monkeypatch.setattr(os, "preadv", self.preadv)

    def preadv(self, descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            raise BlockingIOError
        with self.changed:
            self.read.append((offset, len(buffers[0])))
            self.changed.notify_all()
        return len(buffers[0])

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.read) >= count, timeout=30)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    return tmp_path / "file"


def test_extents_are_read_once_in_pieces(disk: Disk, file: Path) -> None:
    extents = [Extent(file, 10, 20), Extent(file, 100, 100 + PIECE_BYTES + 1)]
    with ReadAhead(extents, num_threads=1):
        disk.wait_for(3)
    assert disk.read == [(10, 10), (100, PIECE_BYTES), (100 + PIECE_BYTES, 1)]


def test_the_window_bounds_how_far(disk: Disk, file: Path) -> None:
    extents = [Extent(file, start, start + 10) for start in range(0, 100, 10)]
    with ReadAhead(extents, num_threads=3, window=30) as ahead:
        disk.wait_for(3)
        assert sorted(start for start, _ in disk.read) == [0, 10, 20]
        ahead.advance(20)
        disk.wait_for(5)
        assert sorted(start for start, _ in disk.read) == [0, 10, 20, 30, 40]
    assert len(disk.read) == 5  # the rest is nobody's any more


def test_what_is_in_memory_is_not_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def preadv(descriptor: int, buffers: list[bytearray], offset: int, flags: int = 0) -> int:
        assert flags & os.RWF_NOWAIT
        asked.set()
        return 1

    monkeypatch.setattr(os, "preadv", preadv)
    with ReadAhead([Extent(file, 0, 10)], num_threads=1):
        assert asked.wait(30)


def test_errors_are_left_to_the_reader(tmp_path: Path) -> None:
    with ReadAhead([Extent(tmp_path / "absent", 0, 10)], num_threads=2):
        pass
