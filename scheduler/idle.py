"""When an idle service proves its own state."""

from collections.abc import Callable

from octavo.scheduler.errors import InvariantViolation

IDLE_BEFORE_CHECK_S = 1.0
"""How long nothing must have happened before the state is proven: a service between two requests has better to do."""

CHECK_INTERVAL_S = 10.0
"""Least time between two proofs."""


class IdleCheck:
    """Proves the state once in each idle period.

    The law: a proof is due exactly when something has happened since the last one and nothing is under way; so an idle
    service sleeps, and a busy one is never kept waiting.

    Args:
        check: proves the state, raises InvariantViolation.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self.num_failed = 0
        self._check = check
        self._idle_since: float | None = None
        self._has_news = False
        self._not_before = 0.0

    @property
    def due(self) -> float | None:
        """When `turn` has something to do; None while it has not."""
        if self._idle_since is None or not self._has_news:
            return None
        return max(self._idle_since + IDLE_BEFORE_CHECK_S, self._not_before)

    def turn(self, now: float, *, happened: bool, idle: bool) -> InvariantViolation | None:
        """Take note of a turn of the service; return what a proof, if one was due, has found wrong.

        Args:
            now: monotonic seconds.
            happened: whether the state may have changed in this turn.
            idle: whether nothing is under way after it.
        """
        if happened:
            self._has_news = True
            self._idle_since = None
        if not idle:
            self._idle_since = None
            return None
        if self._idle_since is None:
            self._idle_since = now
        if self.due is None or now < self.due:
            return None
        self._has_news = False
        self._not_before = now + CHECK_INTERVAL_S
        try:
            self._check()
        except InvariantViolation as violation:
            self.num_failed += 1
            return violation
        return None
