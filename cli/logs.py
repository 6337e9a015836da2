"""Logging of every process: one line an event, on standard error, as text or as JSON; of bounded length and number."""

import json
import logging
import os
import sys
from datetime import UTC, datetime

from octavo.cli.log_handler import BoundedHandler

ACCESS_LOGGER = "octavo.frontend.access_log"

MAX_MESSAGE_CHARS = 4096
"""What is beyond it is cut off: of a message, and of a traceback."""

_QUIET = {"httpx": "warning", "asyncio": "info", "urllib3": "warning"}
"""Loggers of others that say more at `debug` than anybody wants, and perhaps what they carry."""

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127) if code not in (9, 10)} | {10: "\\n"}


def configure(role: str, level: str, log_format: str = "text", access_log: bool = False) -> None:
    """Set the log of this process.

    Args:
        role: what the process is.
        level: least level of a line: a name of the module logging, in lower case.
        log_format: text, or json: an object a line.
        access_log: whether a frontend tells of each call.
    """
    handler = BoundedHandler(sys.stderr, unbounded=frozenset({ACCESS_LOGGER}))
    handler.setFormatter(JsonFormatter(role) if log_format == "json" else TextFormatter(role))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name, least in _QUIET.items():
        logging.getLogger(name).setLevel(max(logging.getLevelName(level.upper()), logging.getLevelName(least.upper())))
    logging.getLogger(ACCESS_LOGGER).setLevel(logging.INFO if access_log else logging.WARNING)


class TextFormatter(logging.Formatter):
    """Time, role, level, message; a message stays on its line."""

    def __init__(self, role: str) -> None:
        super().__init__(f"%(asctime)s {role:<10}%(levelname)s %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the base class names it so)
        """Return the line."""
        record.message = _bounded(record.message.translate(_CONTROL))
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802
        """Return the traceback."""
        return _bounded(super().formatException(ei))  # type: ignore[arg-type]


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ts, level, process, pid, logger, message, and what `extra={"fields": ...}` names."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._role,
            "pid": os.getpid(),
            "logger": record.name,
            "message": _bounded(record.getMessage()),
        }
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            line |= {name: value for name, value in fields.items() if value is not None and name not in line}
        if record.exc_info:
            line["exception"] = _bounded(self.formatException(record.exc_info))
        return json.dumps(line, default=str)


def _bounded(text: str) -> str:
    cut = len(text) - MAX_MESSAGE_CHARS
    return text if cut <= 0 else f"{text[:MAX_MESSAGE_CHARS]}... ({cut} characters more)"
