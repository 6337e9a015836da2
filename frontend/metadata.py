"""What a call says besides its message: request id, where it comes from. A call never fails because of it."""

import re
import secrets
from collections.abc import Iterable
from urllib.parse import unquote

MAX_REQUEST_ID_CHARS = 128
MAX_CALLER_BYTES = 128

_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID_CHARS}}}")


def read_request_id(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the caller's x-request-id if it is printable ASCII of bounded length, else a made one."""
    return _read(metadata, "x-request-id", _REQUEST_ID) or secrets.token_hex(16)


def read_authorization(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """Return the call's authorization, None if it has none; several, joined as HTTP would, are no key."""
    values = [value for name, value in metadata or () if name == "authorization" and isinstance(value, str)]
    return ", ".join(values) if values else None


def read_caller(peer: str) -> str:
    """Return whom a call without a key counts against in limits and fairness, from gRPC's name of the client.

    It is the client's address without its port, as `ipv4:127.0.0.1` or `ipv6:[::1]`: the clients of one machine, or
    behind one proxy, count as one caller. Clients of Unix sockets are `unix`. It is no identity: what a client may find
    in the prefix cache never depends on it.
    """
    kind, _, address = peer.partition(":")
    if kind.startswith("unix"):
        return "unix"
    if kind in ("ipv4", "ipv6"):
        # gRPC escapes the brackets: ipv6:%5B::1%5D:50051.
        peer = f"{kind}:{unquote(address.rpartition(':')[0])}"
    return peer.encode("utf-8", "replace")[:MAX_CALLER_BYTES].decode("utf-8", "ignore")


def _read(metadata: Iterable[tuple[str, str | bytes]] | None, key: str, pattern: re.Pattern[str]) -> str:
    for name, value in metadata or ():
        if name == key and isinstance(value, str) and pattern.fullmatch(value):
            return value
    return ""
