"""What happens after a supervised process has ended: when it starts again, or why it does not."""

import signal
from dataclasses import dataclass

from octavo.wire.live import EXIT_STALLED

EXIT_CONFIGURATION = 2
EXIT_GAVE_UP = 1
FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 30.0
STABLE_AFTER_S = 60.0
WELL_FOR_S = 3.0
"""A process that has answered that it is well for so long works: what killed it then says nothing about its start."""
FAILED_START_S = 5.0
ORDERLY_LIFE_S = 1.0
"""A process that leaves in good order after so long was asked to; one that does it sooner might do it for ever."""
MAX_FAILED_STARTS = 6
"""A process that was killed does not count: that says nothing about its next start."""


@dataclass(frozen=True)
class GiveUp:
    """It does not start again, and the service ends."""

    reason: str
    exit_code: int


class Restarts:
    """The lives of one process.

    After a life that ended badly it starts again: first at once, then with a delay that doubles up to MAX_BACKOFF_S, and
    starts over once a life has lasted STABLE_AFTER_S, or the process was well for WELL_FOR_S. So a process that dies at its
    start costs two starts a minute, and one that is killed at its work starts again at once, however often.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._backoff_s = 0.0
        self._num_failed_starts = 0

    def after(self, code: int, lasted_s: float, was_asked: bool = False, well_s: float = 0.0) -> float | GiveUp:
        """Return in how many seconds the next life begins.

        Args:
            code: exit code, negative for a signal.
            lasted_s: how long the life was.
            was_asked: it was told to end, so that the next one takes its place.
            well_s: how long before its end it first answered that it was well; 0 if it never did, or cannot be asked.
        """
        if code == EXIT_CONFIGURATION:
            return GiveUp(f"the {self._name} cannot start as configured; the service ends", EXIT_CONFIGURATION)
        if was_asked or (code == 0 and lasted_s >= ORDERLY_LIFE_S):
            return 0.0
        self._num_failed_starts = self._num_failed_starts + 1 if code >= 0 and lasted_s < FAILED_START_S else 0
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            reason = f"the {self._name} failed {self._num_failed_starts} times in a row at its start; the service ends"
            return GiveUp(reason, EXIT_GAVE_UP)
        if lasted_s > STABLE_AFTER_S or well_s >= WELL_FOR_S:
            self._backoff_s = 0.0
        return self._next_delay()

    def after_no_start(self) -> float:
        """Return in how many seconds to try again to start it, after the system could not."""
        return self._next_delay()

    def _next_delay(self) -> float:
        delay_s = self._backoff_s
        self._backoff_s = min(max(2 * self._backoff_s, FIRST_BACKOFF_S), MAX_BACKOFF_S)
        return delay_s


def how_it_ended(code: int, lasted_s: float) -> str:
    """Say how a life ended, and how long it was."""
    if code < 0:
        how = f"was killed by {_signal_name(-code)}"
    elif code == 0:
        how = "left in good order"
    elif code == EXIT_STALLED:
        how = f"ended itself because it hung (exit code {code})"
    else:
        how = f"failed (exit code {code})"
    return f"{how} after {lasted_s:.1f} s"


def when(delay_s: float) -> str:
    """Say when it starts again."""
    return f"in {delay_s:g} s" if delay_s else "at once"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
