"""SIGTERM and SIGINT as something that a poller can wait for."""

import os
import signal
import socket
from types import FrameType
from typing import Self

_IMMEDIATE_EXIT_CODE = 1


class StopSignal:
    """While entered, the first SIGTERM or SIGINT makes `fileno()` readable; a second one ends the process at once."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self._requested = False

    def __enter__(self) -> Self:
        """Take over the signals; only the main thread may."""
        self._previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._receiver.close()
        self._sender.close()

    def requested(self) -> bool:
        """Say whether the process should stop."""
        return self._requested

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable, and stays so, when the process should stop."""
        return self._receiver.fileno()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._requested:
            os._exit(_IMMEDIATE_EXIT_CODE)
        self._requested = True
        self._sender.send(b"\0")
