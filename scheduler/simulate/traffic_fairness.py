"""How evenly callers are served while they have work that waits."""

import numpy as np

from octavo.scheduler.simulate.arrivals import Floats, Integers

MAX_COMPARED = 128
"""Callers that are compared in pairs: the first ones to come."""

WINDOW_S = 5.0
"""Over which Jain's index is taken."""

SAMPLE_S = 0.1
"""Between two comparisons of all pairs."""


class Fairness:
    """Service of callers while they are backlogged: while a request of theirs has not started.

    Jain's index of x_1 .. x_n is (sum x)^2 / (n * sum x^2): 1 if all are equal, 1/n if one has everything. It is taken
    over windows of virtual time, for the callers that are backlogged from a window's begin to its end.

    The gap of two callers is the most by which their services differ over any interval in which both are backlogged.
    """

    def __init__(self) -> None:
        self.indices: list[float] = []
        """Jain's index of each window that had two callers to compare."""
        self.largest_gap = 0
        self._numbers: dict[str, int] = {}
        self._waiting = np.zeros(8, np.int64)
        self._service = np.zeros(8, np.int64)
        self._at_begin = np.zeros(8, np.int64)  # service at the begin of the window
        self._since_begin = np.zeros(8, np.bool_)  # backlogged since then
        self._window_end = WINDOW_S
        self._next_sample = 0.0
        self._since_sample = np.zeros(8, np.bool_)
        self._lowest: Integers | None = None  # [n, n] of the difference, since both are backlogged
        self._highest: Integers | None = None

    @property
    def num_callers(self) -> int:
        """Callers seen."""
        return len(self._numbers)

    @property
    def names(self) -> list[str]:
        """Of the callers, by number."""
        return list(self._numbers)

    @property
    def service(self) -> Integers:
        """What each caller has got."""
        return self._service[: self.num_callers]

    def number_of(self, caller: str) -> int:
        """Return a caller's number; new ones get the next."""
        number = self._numbers.setdefault(caller, len(self._numbers))
        if number == len(self._waiting):
            for name in ("_waiting", "_service", "_at_begin", "_since_begin", "_since_sample"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        return number

    def change_waiting(self, caller: int, amount: int) -> None:
        """Take note that requests of a caller wait, or wait no longer."""
        self._waiting[caller] += amount

    def serve(self, now: float, service: Integers) -> None:
        """Take note of the service of one step.

        Args:
            now: virtual time.
            service: by number of the caller.
        """
        self._service[: len(service)] += service
        if len(self._numbers) < 2:
            return
        is_backlogged = self._waiting > 0
        self._since_begin &= is_backlogged
        self._since_sample &= is_backlogged
        if now >= self._window_end:
            self._close_window(now, is_backlogged)
        if now >= self._next_sample:
            self._compare(is_backlogged)
            self._next_sample = now + SAMPLE_S

    def _close_window(self, now: float, is_backlogged: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> None:
        # A window that nothing ended in time has no clear end, and is left out.
        if self._since_begin.sum() >= 2 and now < self._window_end + WINDOW_S:
            self.indices.append(jain((self._service - self._at_begin)[self._since_begin]))
        self._window_end = now + WINDOW_S
        self._at_begin = self._service.copy()
        self._since_begin = is_backlogged.copy()

    def _compare(self, is_backlogged: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> None:
        size = min(MAX_COMPARED, len(self._waiting))
        service = self._service[:size]
        difference = service[:, None] - service[None, :]
        if self._lowest is None or self._highest is None or len(self._lowest) != size:
            self._lowest, self._highest = difference.copy(), difference.copy()
        else:
            both = self._since_sample[:size, None] & self._since_sample[None, :size]
            np.copyto(self._lowest, np.where(both, np.minimum(self._lowest, difference), difference))
            np.copyto(self._highest, np.where(both, np.maximum(self._highest, difference), difference))
            self.largest_gap = max(self.largest_gap, int((self._highest - self._lowest).max()))
        self._since_sample = is_backlogged.copy()


def jain(shares: Integers | Floats) -> float:
    """Return Jain's index of some shares; 1 if all are 0."""
    values = shares.astype(np.float64)
    squares = float((values**2).sum())
    return float(values.sum()) ** 2 / (len(values) * squares) if squares else 1.0
