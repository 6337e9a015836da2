"""How a benchmark ends early: Ctrl-C and SIGTERM end its processes, remove its folders, and leave one line."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_SIGNALS = frozenset(_WORDS)


class Ended(BaseException):
    """A signal asks for the end; no Exception, so that nothing on the way takes it for a failure.

    Args:
        number: of the signal.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Leave the context at the first signal; later ones, of an impatient user or of `timeout`, cut no clean-up short.

    What was ignored when the program started stays ignored.

    Raises:
        SystemExit: a signal came; the code is 128 and its number.
    """
    has_ended = False

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal has_ended
        if not has_ended:
            has_ended = True
            raise Ended(signal.Signals(number))

    before = {number: handler for number in _SIGNALS if (handler := signal.getsignal(number)) != signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, end)
        yield
    except Ended as ended:
        sys.stderr.write(f"{_WORDS[ended.number]}\n")
        sys.exit(128 + ended.number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def held() -> Iterator[None]:
    """Let signals wait until the context is left: around what must not be done by half."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
