"""What both doors' clients have in common: how a call fails, and how a connection is made."""

import asyncio
import ssl
from collections.abc import Callable
from typing import TypeVar

OnMessage = Callable[[bytes], None]
"""Takes one whole message of an answer, while it comes."""

CONNECT_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 1.0
"""How long the server may take to say in TLS that it has heard of the end."""

P = TypeVar("P", bound=asyncio.Protocol)


class CallFailed(Exception):
    """A call brought no whole answer.

    Args:
        kind: what errors are counted under: a status's name or number, or what happened to the connection.
        message: what the server says, or what is wrong.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class ConnectionLost(CallFailed):
    """The connection cannot be made, has ended, or speaks another protocol."""

    def __init__(self, message: str) -> None:
        super().__init__("connection", message)


async def connect(make: Callable[[], P], host: str, port: int, tls: ssl.SSLContext | None) -> P:
    """Open a connection.

    Raises:
        ConnectionLost: nobody answers within CONNECT_TIMEOUT_S, or TLS fails.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            end_s = None if tls is None else CLOSE_TIMEOUT_S
            _, protocol = await loop.create_connection(make, host, port, ssl=tls, ssl_shutdown_timeout=end_s)
    except TimeoutError as error:
        raise ConnectionLost(f"{host}:{port} did not answer within {CONNECT_TIMEOUT_S:g} s") from error
    except OSError as error:  # of TLS as well
        raise ConnectionLost(f"{host}:{port}: {error}") from error
    return protocol
