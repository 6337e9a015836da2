"""When streams with new tokens are woken."""

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from octavo.frontend.pacing import MAX_HOLD_S, MIN_HELD, Pacer

COST_S = 50e-6


class Clock:
    """A loop's clock and timers, moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (when, len(self._timers), callback))

    def advance(self, to: float) -> None:
        while self._timers and self._timers[0][0] <= to:
            when, _, callback = heapq.heappop(self._timers)
            self.now = max(self.now, when)
            callback()
        self.now = to


@dataclass
class FakeStream:
    handle: int
    clock: Clock
    may_wait: bool = True
    message_cost_s: float = COST_S
    waiting: list[float] = field(default_factory=list)  # when tokens came that were not sent
    messages: list[list[float]] = field(default_factory=list)  # the ages of the tokens of each
    sent_at: list[float] = field(default_factory=list)

    def wake(self) -> None:
        if self.waiting:
            self.messages.append([self.clock.now - came for came in self.waiting])
            self.sent_at.append(round(self.clock.now, 6))
            self.waiting = []


def run(num_streams: int, interval_s: float, steps: int = 200, **fields: Any) -> list[FakeStream]:
    """Give every stream a token each step; return the streams."""
    clock = Clock()
    pacer = Pacer(clock)  # type: ignore[arg-type]
    streams = [FakeStream(handle, clock, **fields) for handle in range(num_streams)]
    for step in range(steps):
        clock.advance(step * interval_s)
        for stream in streams:
            stream.waiting.append(clock.now)
        pacer.wake(streams)
    clock.advance(steps * interval_s + 1.0)
    return streams


def tokens_per_message(streams: list[FakeStream]) -> float:
    """Return the mean of the second half."""
    sizes = [len(message) for s in streams for message in s.messages[len(s.messages) // 2 :]]
    return sum(sizes) / len(sizes)


def test_a_few_streams_are_woken_with_every_token() -> None:
    for num_streams in (1, MIN_HELD - 1, 64):
        assert all(len(m) == 1 for s in run(num_streams, 0.02) for m in s.messages)


def test_many_streams_take_turns() -> None:
    streams = run(256, 0.02)
    assert 1.3 < tokens_per_message(streams) < 2.0
    busiest = run(256, 0.012)
    assert tokens_per_message(busiest) > 1.95  # all but the last one of each
    # The messages of a step are spread: about half of the streams send in each.
    moments = Counter(moment for s in busiest for moment in s.sent_at)
    assert all(100 < moments[round(step * 0.012, 6)] < 156 for step in range(150, 190))


def test_slower_messages_make_more_streams_wait() -> None:
    assert tokens_per_message(run(256, 0.02, message_cost_s=25e-6)) < tokens_per_message(run(256, 0.02))


def test_first_tokens_and_streams_that_end_never_wait() -> None:
    assert all(len(m) == 1 for s in run(256, 0.012, may_wait=False) for m in s.messages)


def test_who_has_waited_is_woken_first() -> None:
    clock = Clock()
    pacer = Pacer(clock)  # type: ignore[arg-type]
    order: list[int] = []

    @dataclass
    class Ordered(FakeStream):
        def wake(self) -> None:
            if self.waiting:
                order.append(len(self.waiting))
            super().wake()

    streams = [Ordered(handle, clock) for handle in range(256)]
    for step in range(100):
        clock.advance(step * 0.02)
        order.clear()
        for stream in streams:
            stream.waiting.append(clock.now)
        pacer.wake(streams)
    assert 2 in order
    assert order == sorted(order, reverse=True)


def test_when_tokens_become_few_nobody_is_forgotten() -> None:
    clock = Clock()
    pacer = Pacer(clock)  # type: ignore[arg-type]
    streams = [FakeStream(handle, clock) for handle in range(256)]
    for step in range(51):
        clock.advance(step * 0.012)
        for stream in streams:
            stream.waiting.append(clock.now)
        pacer.wake(streams)
    assert any(stream.waiting for stream in streams)
    clock.advance(clock.now + 1e-6)
    streams[0].waiting.append(clock.now)
    pacer.wake(streams[:1])
    assert not any(stream.waiting for stream in streams)


@given(
    st.lists(st.tuples(st.floats(0.0001, 0.1), st.sets(st.integers(0, 299), min_size=1)), max_size=60),
    st.floats(1e-6, 1e-3),
)
def test_no_token_waits_longer_than_the_bound(outputs: list[tuple[float, set[int]]], cost_s: float) -> None:
    clock = Clock()
    pacer = Pacer(clock)  # type: ignore[arg-type]
    streams = {handle: FakeStream(handle, clock, message_cost_s=cost_s) for handle in range(300)}
    sent = 0
    for passed, handles in outputs:
        clock.advance(clock.now + passed)
        for handle in handles:
            streams[handle].waiting.append(clock.now)
            sent += 1
        pacer.wake([streams[handle] for handle in sorted(handles)])
    clock.advance(clock.now + 1.0)
    ages = [age for s in streams.values() for message in s.messages for age in message]
    assert len(ages) == sent
    assert max(ages, default=0.0) <= MAX_HOLD_S + 1e-9
