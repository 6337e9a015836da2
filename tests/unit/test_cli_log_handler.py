"""The log of a process: its volume is bounded, and a log that cannot be written stops nobody (F57)."""

import asyncio
import errno
import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli.log_handler import BURST_LINES, LINES_PER_S, TRACEBACK_LINES, BoundedHandler
from octavo.cli.logs import JsonFormatter, TextFormatter


class Clock:
    """Seconds that pass only when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Log:
    """A logger of its own before a handler that writes to memory."""

    def __init__(self, formatter: logging.Formatter | None = None) -> None:
        self.clock = Clock()
        self.stream = io.StringIO()
        self.handler = BoundedHandler(self.stream, frozenset({"access"}), self.clock)
        self.handler.setFormatter(formatter or logging.Formatter("%(message)s"))
        self.logger = self.named("octavo.x")

    def named(self, name: str) -> logging.Logger:
        logger = logging.Logger(name, logging.DEBUG)
        logger.addHandler(self.handler)
        return logger

    def take(self) -> list[str]:
        lines = self.stream.getvalue().splitlines()
        self.stream.seek(0)
        self.stream.truncate()
        return lines


def test_a_place_that_says_too_much_is_cut_short_and_tells_so_later() -> None:
    log = Log()

    def complain(number: int) -> None:
        log.logger.warning("peer %d is wrong", number)

    for number in range(1000):
        complain(number)
    assert log.take() == [f"peer {number} is wrong" for number in range(BURST_LINES)]
    assert log.handler.num_left_out == 1000 - BURST_LINES
    log.logger.warning("another place")
    assert log.take() == ["another place"]
    log.clock.now += 1 / LINES_PER_S
    complain(1000)
    complain(1001)
    assert log.take() == ["peer 1000 is wrong (lines like this that were left out: 950)"]
    log.clock.now += 3600
    for number in range(1000):
        complain(number)
    assert len(log.take()) == BURST_LINES


def test_debug_and_the_access_log_are_for_who_wants_each_line() -> None:
    log = Log()
    access = log.named("access")
    for _ in range(2 * BURST_LINES):
        log.logger.debug("d")
        access.info("a")
    assert len(log.take()) == 4 * BURST_LINES


def test_tracebacks_count_for_more_and_their_kinds_are_told_apart() -> None:
    log = Log()
    for number in range(2 * BURST_LINES):
        try:
            raise OSError(errno.EMFILE, "Too many open files") if number % 2 else ValueError("x")
        except (OSError, ValueError):
            log.logger.exception("failed")
    lines = log.take()
    assert lines.count("failed") == 2 * BURST_LINES // TRACEBACK_LINES
    assert any("OSError" in line for line in lines)
    assert any("ValueError" in line for line in lines)


async def test_what_asyncio_says_without_files_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """F59: it tells of each of a hundred failures to accept in a turn, with a traceback."""
    log = Log()
    monkeypatch.setattr(logging.getLogger("asyncio"), "handlers", [log.handler])
    monkeypatch.setattr(logging.getLogger("asyncio"), "propagate", False)
    loop = asyncio.get_running_loop()
    for _ in range(1000):
        error = OSError(errno.EMFILE, "Too many open files")
        loop.call_exception_handler({"message": "socket.accept() out of system resource", "exception": error})
    assert len(log.take()) <= 4 * BURST_LINES


def test_notes_are_part_of_the_message_in_json() -> None:
    log = Log(JsonFormatter("worker"))

    def complain() -> None:
        log.logger.warning("%s", "wrong", extra={"fields": {"request": "f-1"}})

    for _ in range(BURST_LINES + 3):
        complain()
    log.take()
    log.clock.now += 1 / LINES_PER_S
    complain()
    (line,) = [json.loads(line) for line in log.take()]
    assert (line["message"], line["request"]) == ("wrong (lines like this that were left out: 3)", "f-1")


@pytest.mark.parametrize("formatter", [JsonFormatter("serve"), TextFormatter("serve")])
def test_a_line_that_cannot_be_made_says_where_it_is(formatter: logging.Formatter) -> None:
    log = Log(formatter)
    log.logger.warning("%d", "no number")
    (line,) = log.take()
    assert "a line of the log cannot be made" in line
    assert f"{Path(__file__).name}:" in line
    assert "no number" not in line


def test_what_cannot_be_written_is_counted_and_told_once_it_can_be() -> None:
    log = Log()
    with Path("/dev/full").open("w") as full:
        log.handler._stream = full
        log.logger.warning("lost")
        log.logger.warning("lost, too")
    log.logger.warning("the stream is closed")
    assert log.handler.num_lost == 3
    log.handler._stream = log.stream
    log.logger.warning("there is room again")
    log.logger.warning("and still")
    assert log.take() == ["there is room again (lines before this that could not be written: 3)", "and still"]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_process_whose_log_cannot_be_written_ends_as_it_would(log_format: str) -> None:
    """Nothing is left in a buffer that Python fails to write at the end (exit code 120)."""
    code = f"""
import logging
from octavo.cli import logs
logs.configure("worker", "info", {log_format!r})
for _ in range(100):
    logging.warning("lost")
try:
    raise ValueError
except ValueError:
    logging.exception("lost")
print(logging.getLogger().handlers[0].num_lost)
"""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, text=True, check=True)
    assert done.stdout == f"{BURST_LINES + 1}\n"
