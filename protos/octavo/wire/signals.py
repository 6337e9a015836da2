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


def has_controlling_terminal() -> bool:
    """Whether a terminal could send this process SIGHUP by being closed. To be asked before that happens."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def end_at_once_until_ready() -> None:
    """Have the stop signals end this process with exit code 0 at once, until somebody takes them over to end in order.

    For the time in which it imports and loads, and has nothing to tell anybody. Process 1 of a container would ignore
    them then, and any other process would look killed.
    """
    for number in stop_signals():
        signal.signal(number, _end_at_once)


def _end_at_once(_number: int, _frame: FrameType | None) -> None:
    os._exit(0)


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
