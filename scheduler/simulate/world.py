"""The simulated world's clock: what will happen, in order of time; and the record of what has happened."""

import heapq
import math
import zlib
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

BEGIN_S = 1000.0
"""Virtual time at which a world begins; nothing may depend on it."""

REACTION_S = 0.0002
"""Between what wakes a process and its turn: what comes meanwhile is handled in the same turn."""


class Violation(AssertionError):
    """The simulated service broke a promise."""


class World:
    """A clock that jumps from one happening to the next, and one source of randomness.

    The same seed makes the same world: happenings at the same time keep the order in which they were arranged.

    Args:
        seed: of everything.

    Attributes:
        digest: over everything noted so far; equal for equal runs, in whatever process.
        stats: how often what has happened, so that a test can tell that it did.
        num_steps: plans that workers have executed.
    """

    def __init__(self, seed: str) -> None:
        self.random = Random(seed)  # noqa: S311  reproducible, not secret
        self.now = BEGIN_S
        self.digest = 0
        self.stats: Counter[str] = Counter()
        self.num_steps = 0
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._num_arranged = 0

    def clock(self) -> float:
        """Return the monotonic time of every process."""
        return self.now

    def at(self, when: float, act: Callable[..., object], *args: Any) -> None:
        """Arrange a happening; never before now."""
        self._num_arranged += 1
        heapq.heappush(self._heap, (max(when, self.now), self._num_arranged, act, args))

    def after(self, delay: float, act: Callable[..., object], *args: Any) -> None:
        """Arrange a happening."""
        self.at(self.now + delay, act, *args)

    def advance(self) -> None:
        """Let the next thing happen."""
        self.now, _, act, args = heapq.heappop(self._heap)
        act(*args)

    def note(self, what: bytes) -> None:
        """Take something into the digest."""
        self.digest = zlib.crc32(what, self.digest)

    def chance(self, probability: float) -> bool:
        """Draw whether something happens."""
        return self.random.random() < probability


class Process:
    """A single-threaded process: it sleeps until something wakes it, takes a turn, and may be paused or killed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_alive = True
        self._wake_at = math.inf
        self._paused_until = 0.0
        self._alarms: list[float] = []  # arranged happenings that look whether it is time, the soonest last

    def turn(self) -> None:
        """Do what is to be done now."""
        raise NotImplementedError

    def wake(self) -> None:
        """Let it take a turn soon."""
        self.wake_at(self.world.now + REACTION_S)

    def wake_at(self, when: float) -> None:
        """Let it take a turn at a time, or when its pause is over."""
        when = max(when, self._paused_until, self.world.now)
        if when < self._wake_at and self.is_alive:
            self._wake_at = when
            self._set_alarm(when)

    def pause(self, until: float) -> None:
        """Give it no processor until a time; the present in order to let it go on."""
        self._paused_until = until
        self._wake_at = math.inf
        self.wake_at(until)

    def vanish(self) -> None:
        """End without a word (SIGKILL)."""
        self.is_alive = False

    def _set_alarm(self, when: float) -> None:
        if not self._alarms or when < self._alarms[-1]:
            self._alarms.append(when)
            self.world.at(when, self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarms.pop()
        if not self.is_alive or self._wake_at == math.inf:
            return
        if self.world.now < self._wake_at:
            self._set_alarm(self._wake_at)
            return
        self._wake_at = math.inf
        self.turn()
