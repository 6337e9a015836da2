"""The handler of every process's log: its volume is bounded, and a log that cannot be written stops nobody."""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import TextIO, TypeAlias

BURST_LINES = 50
"""Lines that one place in the code may write at once."""

LINES_PER_S = 1.0
"""That it may write from then on."""

TRACEBACK_LINES = 10
"""As many a line with a traceback counts."""

MAX_PLACES = 4096
"""Places that are told apart. More than the code has; beyond it all are forgotten."""


_Key: TypeAlias = tuple[str, int, type[BaseException] | None]


class BoundedHandler(logging.Handler):
    """Writes to a stream, past its buffer: what could not be written is counted, and not kept for the process's end.

    What one place says too often is left out, and its next line says how often. So a flood of what peers or clients do
    wrong, or of what the system has run out of, neither fills a disk nor takes the time of the loop that logs.

    Args:
        stream: where to write, standard error.
        unbounded: loggers whose lines are all written: who turned them on wants each.
        clock: monotonic seconds.

    Attributes:
        num_left_out: lines that were not written, because their place had said too much.
        num_lost: lines that could not be written.
    """

    def __init__(
        self, stream: TextIO, unbounded: frozenset[str] = frozenset(), clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self.num_left_out = self.num_lost = 0
        self._stream = stream
        self._unbounded = unbounded
        self._clock = clock
        self._places: dict[_Key, _Place] = {}
        self._num_lost_told = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or leave it out; the caller holds the lock."""
        place = None
        if record.levelno > logging.DEBUG and record.name not in self._unbounded:
            kind = record.exc_info[0] if record.exc_info else None
            place = self._place((record.pathname, record.lineno, kind))
            if not place.may_write(self._clock(), TRACEBACK_LINES if kind else 1):
                self.num_left_out += 1
                return
        notes = []
        if place is not None and place.num_left_out:
            notes.append(f"lines like this that were left out: {place.num_left_out}")
            place.num_left_out = 0
        if lost := self.num_lost - self._num_lost_told:
            notes.append(f"lines before this that could not be written: {lost}")
        try:
            text = self.format(_with_notes(record, notes))
        except Exception as error:  # noqa: BLE001  a message whose arguments do not fit must not end who says it
            text = self.format(_instead(record, error))
        try:
            write_all(self._stream, f"{text}\n")
        except (OSError, ValueError):  # the disk is full, the reader is gone, or the stream is closed
            self.num_lost += 1
        else:
            self._num_lost_told += lost

    def _place(self, key: _Key) -> "_Place":
        place = self._places.get(key)
        if place is None:
            if len(self._places) >= MAX_PLACES:
                self._places.clear()
            place = self._places[key] = _Place(self._clock())
        return place


class _Place:
    """A line of code that logs: a bucket of lines that fills again with time."""

    def __init__(self, now: float) -> None:
        self.num_left_out = 0
        self._lines = float(BURST_LINES)
        self._filled_at = now

    def may_write(self, now: float, num_lines: int) -> bool:
        self._lines = min(BURST_LINES, self._lines + (now - self._filled_at) * LINES_PER_S)
        self._filled_at = now
        if self._lines < num_lines:
            self.num_left_out += 1
            return False
        self._lines -= num_lines
        return True


def _with_notes(record: logging.LogRecord, notes: list[str]) -> logging.LogRecord:
    """Return the record with what the handler has to add, which is part of the message in every format."""
    if not notes:
        return record
    noted = logging.makeLogRecord(record.__dict__)
    noted.msg, noted.args = f"{record.getMessage()} ({'; '.join(notes)})", None
    return noted


def _instead(record: logging.LogRecord, error: Exception) -> logging.LogRecord:
    """Return what is said in place of a record that cannot be told: where it is from, and nothing that it holds."""
    message = f"a line of the log cannot be made: {record.pathname}:{record.lineno}: {type(error).__name__}"
    made = {"name": record.name, "levelno": record.levelno, "levelname": record.levelname, "msg": message}
    return logging.makeLogRecord(made | {"created": record.created})


def write_all(stream: TextIO, text: str) -> None:
    """Write text past a stream's buffer, so that what cannot be written is not tried again.

    Raises:
        OSError: it cannot be written.
        ValueError: the stream is closed.
    """
    descriptor = None
    with contextlib.suppress(OSError, AttributeError):  # a stream of a test may have no file
        descriptor = stream.fileno()
    if descriptor is None:
        stream.write(text)
        stream.flush()
        return
    data = text.encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(descriptor, data) :]
