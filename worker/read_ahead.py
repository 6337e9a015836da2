"""Bring what will be read soon from the disk into the page cache, by a few threads, a bounded distance ahead.

Whoever reads mapped files waits for the disk at each page that is not in memory, one request at a time. Here several
threads read the same bytes a little earlier, so that several requests are under way and the disk works while weights are
converted. What is in memory already is not read again.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

NUM_THREADS = 4
PIECE_BYTES = 8 * 2**20
WINDOW_BYTES = 256 * 2**20
"""How far ahead of the reader: what at most is brought into memory before it is needed."""


@dataclass(frozen=True)
class Extent:
    """A run of bytes of a file."""

    path: Path
    start: int
    end: int


class ReadAhead:
    """Reads extents in their order, until the reader's place and a window beyond it; a context manager.

    It only warms memory: an error is left to the reader, who meets it too.
    """

    def __init__(self, extents: Sequence[Extent], num_threads: int | None = None, window: int = WINDOW_BYTES) -> None:
        """Begin.

        Args:
            extents: in the order in which they will be read.
            num_threads: None: NUM_THREADS, and at most half the cores, since whoever reads has work to do too.
            window: bytes.
        """
        self._pieces = _pieces(extents)
        self._window = window
        self._turn = threading.Condition()
        self._begun = 0  # bytes handed to a thread
        self._done = 0  # bytes that the reader has behind it
        self._stopped = False
        count = max(1, min(NUM_THREADS, (os.cpu_count() or 1) // 2)) if num_threads is None else num_threads
        self._threads = [threading.Thread(target=self._work, name=f"read-ahead-{i}", daemon=True) for i in range(count)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._turn:
            self._stopped = True
            self._turn.notify_all()
        for thread in self._threads:
            thread.join()

    def advance(self, num_bytes: int) -> None:
        """Say that the reader has read so many bytes more of the extents."""
        with self._turn:
            self._done += num_bytes
            self._turn.notify_all()

    def _work(self) -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        path: Path | None = None
        descriptor = -1
        try:
            while (piece := self._next()) is not None:
                if piece.path != path:
                    if descriptor >= 0:
                        os.close(descriptor)
                    descriptor, path = os.open(piece.path, os.O_RDONLY | os.O_CLOEXEC), piece.path
                if not _in_memory(descriptor, piece.end - 1):
                    os.preadv(descriptor, [buffer[: piece.end - piece.start]], piece.start)
        except OSError:
            return  # the reader meets it too, and names it
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _next(self) -> Extent | None:
        with self._turn:
            piece = None if self._stopped else next(self._pieces, None)
            if piece is None:
                return None
            place = self._begun
            self._begun += piece.end - piece.start
            self._turn.wait_for(lambda: self._stopped or place - self._done < self._window)
            return None if self._stopped else piece


def _pieces(extents: Sequence[Extent]) -> Iterator[Extent]:
    for extent in extents:
        for start in range(extent.start, extent.end, PIECE_BYTES):
            yield Extent(extent.path, start, min(start + PIECE_BYTES, extent.end))


def _in_memory(descriptor: int, offset: int) -> bool:
    """Say whether a byte of a file can be had without waiting for the disk."""
    try:
        return bool(os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT))
    except OSError:
        return False  # it cannot, or the file system does not say
