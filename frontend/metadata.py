"""What a call's metadata says: request id and trace. Whatever is in it, a call never fails because of it."""

import re
import secrets
from collections.abc import Iterable

MAX_REQUEST_ID_CHARS = 128

_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID_CHARS}}}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def read_request_id(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the caller's x-request-id if it is printable ASCII of bounded length, else a made one."""
    return _read(metadata, "x-request-id", _REQUEST_ID) or secrets.token_hex(16)


def read_trace(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the caller's traceparent (W3C Trace Context) if it is one, else ''."""
    return _read(metadata, "traceparent", _TRACEPARENT)


def _read(metadata: Iterable[tuple[str, str | bytes]] | None, key: str, pattern: re.Pattern[str]) -> str:
    for name, value in metadata or ():
        if name == key and isinstance(value, str) and pattern.fullmatch(value):
            return value
    return ""
