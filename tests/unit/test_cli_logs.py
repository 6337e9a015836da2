"""Lines of logs: text and JSON, one an event, of bounded length."""

import json
import logging
import sys
from datetime import UTC, datetime

import pytest

from octavo.cli.logs import ACCESS_LOGGER, MAX_MESSAGE_CHARS, JsonFormatter, TextFormatter
from octavo.frontend import access_log


def record(message: str, *arguments: object, fields: object = None) -> logging.LogRecord:
    made = logging.LogRecord("octavo.x", logging.INFO, "x.py", 1, message, arguments, None)
    if fields is not None:
        made.fields = fields
    return made


def test_a_json_line_says_when_where_and_what() -> None:
    line = json.loads(JsonFormatter("worker").format(record("row %d", 3, fields={"request": "f-1", "ttft_s": None})))
    assert line.pop("pid") > 0
    assert datetime.fromisoformat(line.pop("ts")).tzinfo == UTC
    assert line == {"level": "info", "process": "worker", "logger": "octavo.x", "message": "row 3", "request": "f-1"}


def test_fields_do_not_replace_what_every_line_has() -> None:
    line = json.loads(JsonFormatter("worker").format(record("x", fields={"level": "forged", "process": "forged"})))
    assert (line["level"], line["process"]) == ("info", "worker")


@pytest.mark.parametrize("formatter", [JsonFormatter("serve"), TextFormatter("serve")])
def test_a_message_stays_on_its_line_and_is_bounded(formatter: logging.Formatter) -> None:
    line = formatter.format(record("a\nINFO forged\x1b[31m %s", "x" * 10**6))
    assert "\n" not in line
    assert "\x1b" not in line
    assert MAX_MESSAGE_CHARS < len(line) < MAX_MESSAGE_CHARS + 400
    assert "characters more" in line


@pytest.mark.parametrize("formatter", [JsonFormatter("serve"), TextFormatter("serve")])
def test_a_traceback_is_bounded(formatter: logging.Formatter) -> None:
    try:
        raise ValueError("y" * 10**6)
    except ValueError:
        made = record("failed")
        made.exc_info = sys.exc_info()
    line = formatter.format(made)
    assert "ValueError" in line
    assert len(line) < 2 * MAX_MESSAGE_CHARS + 400


def test_the_access_log_is_a_logger_of_its_own() -> None:
    assert access_log.__name__ == ACCESS_LOGGER
