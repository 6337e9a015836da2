"""When streams that have new tokens are woken: at once while there are few, by turns while there are many.

A message costs a frontend about as much whatever it carries (50 to 80 us over gRPC, 25 over HTTP), so one with hundreds
of streams spends a core on messages of one token. Under load some streams therefore wait for their next token and send
two or more at once; no token waits longer than MAX_HOLD_S for that. Which streams wait follows from their handles, in
turns, so that the messages of a step are spread over several steps; whoever has waited is woken first.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Protocol

MAX_HOLD_S = 0.022
"""How long a token may wait for the next one of its stream."""

FREE_SHARE, FULL_SHARE = 0.3, 0.8
"""Share of a core that messages of one token each may cost before streams begin to wait; share at which all do."""

MIN_HELD = 16
"""Fewer new tokens at a time never wait."""

LOAD_WINDOW_S = 0.5
"""Over how long the load is measured."""

_SMOOTHING = 0.1


class Paced(Protocol):
    """A stream as its pacer sees it."""

    @property
    def handle(self) -> int:
        """Its number."""
        ...

    @property
    def message_cost_s(self) -> float:
        """CPU time of a message to its client, about."""
        ...

    @property
    def may_wait(self) -> bool:
        """Whether its new tokens may wait: its first one, and its end, never do."""
        ...

    def wake(self) -> None:
        """Let its task take what is new."""
        ...


class Pacer:
    """Wakes the streams of one frontend.

    The law: a stream given to `wake` is woken before MAX_HOLD_S have passed, or at its end by itself.

    Args:
        loop: whose clock and timers are used.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._time: Callable[[], float] = loop.time
        self._call_at = loop.call_at
        self._turn = 0
        self._interval_s = 1.0  # between two outputs, smoothed
        self._load = 0.0  # share of a core that messages of one token each would cost
        self._last = loop.time()
        self._held: dict[int, tuple[float, Paced]] = {}  # by handle, the longest waiting first; since when
        self._timer: asyncio.TimerHandle | None = None

    @property
    def share(self) -> float:
        """Share of the streams that wait for their next token, 0 to 1."""
        return min(1.0, max(0.0, (self._load - FREE_SHARE) / (FULL_SHARE - FREE_SHARE)))

    def wake(self, streams: Sequence[Paced]) -> None:
        """Take the streams that one output gave new tokens: wake each now, or within MAX_HOLD_S."""
        now = self._time()
        self._observe(sum(stream.message_cost_s for stream in streams), now)
        share = self.share if len(streams) >= MIN_HELD else 0.0
        num_turns = 1 + int(MAX_HOLD_S / self._interval_s)
        if not share or num_turns == 1:
            self._wake_now([*(stream for _, stream in self._held.values()), *streams])
            return
        self._turn += 1
        due, others = [], []
        for stream in streams:
            number = _scatter(stream.handle)
            if number >= share or not stream.may_wait:
                others.append(stream)
            elif (stream.handle + self._turn) % num_turns == 0:
                due.append(stream)
            else:
                self._held.setdefault(stream.handle, (now, stream))
        self._wake_now(due + others)
        self._set_timer()

    def _wake_now(self, streams: Sequence[Paced]) -> None:
        """Wake streams in this order; to be woken twice is as good as once."""
        for stream in streams:
            self._held.pop(stream.handle, None)
            stream.wake()

    def _observe(self, cost_s: float, now: float) -> None:
        passed = max(now - self._last, 0.0)
        self._last = now
        self._interval_s += _SMOOTHING * (min(passed, 1.0) - self._interval_s)
        self._load = self._load * math.exp(-passed / LOAD_WINDOW_S) + cost_s / LOAD_WINDOW_S

    def _set_timer(self) -> None:
        if self._held and self._timer is None:
            since, _ = next(iter(self._held.values()))
            self._timer = self._call_at(since + MAX_HOLD_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        oldest = self._time() - MAX_HOLD_S
        self._wake_now([stream for since, stream in self._held.values() if since <= oldest])
        self._set_timer()


def _scatter(handle: int) -> float:
    """Return a number in [0, 1) that says nothing of a handle's neighbours."""
    return (handle * 2654435761 % 2**32) / 2**32
