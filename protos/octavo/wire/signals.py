"""The signals that end a process in order, as something that a poller can wait for."""

import os
import signal
import socket
from types import FrameType
from typing import Self

_IMMEDIATE_EXIT_CODE = 1


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end a process in order: SIGTERM, SIGINT, and SIGHUP, which a closed terminal sends.

    Where SIGHUP is ignored, as under nohup, it stays so. A second signal ends a process at once, but for SIGHUP: shell,
    make and kernel may each send one.
    """
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, signal.SIGINT, *hang_up)


class StopSignal:
    """While entered, the first signal makes `fileno()` readable; a second one ends the process at once."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self._requested = False

    def __enter__(self) -> Self:
        """Take over the signals; only the main thread may."""
        self._previous = {s: signal.signal(s, self._on_signal) for s in stop_signals()}
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

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._requested:
            if number == signal.SIGHUP:
                return
            os._exit(_IMMEDIATE_EXIT_CODE)
        self._requested = True
        self._sender.send(b"\0")
