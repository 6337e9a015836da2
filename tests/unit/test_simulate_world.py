"""The simulated clock, processes and links behave as what they stand for."""

import time
from typing import Any

import pytest

from octavo.scheduler.simulate.clocks import forbidden_clocks
from octavo.scheduler.simulate.links import STRANGER, DealerLink, Network, RouterLink
from octavo.scheduler.simulate.world import Process, Violation, World
from octavo.wire.codec import FromPeer, FromScheduler, encode
from octavo.wire.errors import ProtocolMismatch, SessionLost
from octavo.wire.handshake import Goodbye, Heartbeat, Refuse, Wait
from octavo.wire.ids import BootId
from octavo.wire.requests import CancelRequest


class Sleeper(Process):
    """Notes its turns."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.turns: list[float] = []

    def turn(self) -> None:
        self.turns.append(self.world.now)


def run_until(world: World, when: float) -> None:
    """Let happen what happens until a time."""
    done = False

    def end() -> None:
        nonlocal done
        done = True

    world.at(when, end)
    while not done:
        world.advance()


def test_things_happen_in_order_of_time_and_then_of_arrangement() -> None:
    world = World("test")
    seen: list[str] = []
    for delay, name in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b"), (-5.0, "now")):
        world.after(delay, seen.append, name)
    run_until(world, world.now + 3.0)
    assert seen == ["now", "a", "b", "c", "d"]


def test_a_process_takes_one_turn_for_all_that_wakes_it_before() -> None:
    world = World("test")
    process = Sleeper(world)
    process.wake_at(world.now + 5.0)
    process.wake_at(world.now + 1.0)
    process.wake_at(world.now + 1.0)
    run_until(world, world.now + 10.0)
    assert process.turns == [1001.0]


def test_a_paused_process_takes_its_turn_after_the_pause_and_a_dead_one_never() -> None:
    world = World("test")
    paused, dead = Sleeper(world), Sleeper(world)
    for process in (paused, dead):
        process.wake_at(world.now + 1.0)
    paused.pause(world.now + 7.0)
    paused.wake()
    dead.vanish()
    dead.wake()
    run_until(world, world.now + 20.0)
    assert (paused.turns, dead.turns) == ([1007.0], [])


def test_looking_at_a_real_clock_is_forbidden_and_allowed_again() -> None:
    with forbidden_clocks():
        for name in ("time", "time_ns", "monotonic", "perf_counter"):
            with pytest.raises(Violation):
                getattr(time, name)()
        with pytest.raises(Violation):
            time.sleep(0.0)
    assert time.time() > 0


class Ends:
    """A router, a dealer, and what came over."""

    def __init__(self, seed: str = "test", queue_limit: int = 5) -> None:
        self.world = World(seed)
        self.network = Network(self.world, queue_limit)
        self.num_woken = 0
        self.router = RouterLink(self.network, self._wake)
        self.dealer = DealerLink(self.network, BootId("f"), self._wake)
        self.wait()

    def _wake(self) -> None:
        self.num_woken += 1

    def wait(self, seconds: float = 1.0) -> None:
        run_until(self.world, self.world.now + seconds)

    def up(self) -> list[tuple[bytes, int, FromPeer]]:
        return [(identity, envelope.number, message) for identity, envelope, message in self.router.receive(100)]

    def down(self) -> list[tuple[int, FromScheduler]]:
        return [(envelope.number, message) for envelope, message in self.dealer.receive(100)]


def test_good_weather_keeps_the_order_and_loses_nothing() -> None:
    ends = Ends(queue_limit=1000)
    for number in range(200):
        ends.dealer.send(CancelRequest(number), 7, number)
        ends.router.send(b"f.1", Goodbye(str(number)), 7, number)
    ends.wait()
    assert ends.up() + ends.up() == [(b"f.1", number, CancelRequest(number)) for number in range(200)]
    assert ends.down() + ends.down() == [(number, Goodbye(str(number))) for number in range(200)]
    assert ends.num_woken == 400


def test_a_full_queue_ends_the_session_at_the_sender_until_somebody_reads() -> None:
    ends = Ends(queue_limit=5)
    for number in range(5):
        assert ends.dealer.has_room
        ends.dealer.send(Heartbeat(), 7, number)
        ends.router.send(b"f.1", Heartbeat(), 7, number)
    assert not ends.dealer.has_room
    with pytest.raises(SessionLost, match="full"):
        ends.dealer.send(Heartbeat(), 7, 6)
    with pytest.raises(SessionLost, match="full"):
        ends.router.send(b"f.1", Heartbeat(), 7, 6)
    ends.wait()
    with pytest.raises(SessionLost):
        ends.dealer.send(Heartbeat(), 7, 6)
    ends.up()
    ends.dealer.send(Heartbeat(), 7, 6)


def test_a_cut_loses_what_is_under_way_and_both_ends_find_out() -> None:
    ends = Ends()
    ends.router.send(b"f.1", Goodbye("arrived"), 7, 1)
    ends.wait()
    ends.dealer.send(Heartbeat(), 7, 1)
    ends.router.send(b"f.1", Goodbye("lost"), 7, 2)
    (connection,) = ends.network.connections
    ends.network.disconnect(connection)
    with pytest.raises(SessionLost, match="gone"):
        ends.router.send(b"f.1", Heartbeat(), 7, 3)
    with pytest.raises(SessionLost):
        ends.dealer.send(Heartbeat(), 7, 2)
    ends.wait()
    assert ends.up() == []
    received = ends.dealer.receive(100)
    assert next(received)[1] == Goodbye("arrived")
    with pytest.raises(SessionLost, match="closed the connection"):
        next(received)
    ends.dealer.reopen()
    ends.wait()
    ends.dealer.send(Heartbeat(), 8, 1)
    ends.wait()
    assert ends.up() == [(b"f.2", 1, Heartbeat())]


def test_a_new_router_finds_the_dealers_that_look_for_one_and_a_leaving_one_is_heard_out() -> None:
    ends = Ends()
    ends.router.send(b"f.1", Goodbye("last words"), 7, 1)
    ends.router.close(keeps_sent=True)
    ends.wait()
    received = ends.dealer.receive(100)
    assert next(received)[1] == Goodbye("last words")
    with pytest.raises(SessionLost):
        next(received)
    ends.dealer.reopen()
    ends.wait()
    with pytest.raises(SessionLost, match="cannot be reached"):
        ends.dealer.send(Heartbeat())
    ends.router = RouterLink(ends.network, ends._wake)
    ends.wait()
    ends.router.send(b"f.2", Wait("test"))
    ends.wait()
    assert ends.down() == [(0, Wait("test"))]


@pytest.mark.parametrize("kind", ["lose", "duplicate", "reorder", "corrupt", "delay"])
def test_bad_weather_does_what_it_says(kind: str) -> None:
    ends = Ends(queue_limit=1000)
    setattr(ends.network.weather, kind, 0.1)
    for number in range(500):
        ends.dealer.send(CancelRequest(number), 7, number)
    ends.network.weather.clear()
    ends.wait(0.05)
    early = [number for part in range(6) for _, number, _ in ends.up()]
    ends.wait(15.0)
    late = [number for part in range(6) for _, number, _ in ends.up()]
    numbers = early + late
    malformed = ends.router.num_malformed
    if kind == "lose":
        assert 20 < 500 - len(numbers) < 90
        assert numbers == sorted(numbers)
    elif kind == "duplicate":
        assert 20 < len(numbers) - 500 < 90
        assert set(numbers) == set(range(500))
    elif kind == "corrupt":
        assert 20 < malformed < 180  # a wrong version is counted again if its sender cannot be told
        assert 20 < 500 - len(numbers) < 90
    else:
        assert sorted(numbers) == list(range(500))
        assert numbers != sorted(numbers)
        assert 20 < len(late) < 90


def test_garbage_is_counted_and_another_version_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends()
    frame = encode(Heartbeat(), 1, 1)
    wrong: list[Any] = [b"", b"XX" + frame[2:], frame[:-1], frame[:2] + b"\xff\x00" + frame[4:]]
    for each in wrong:
        ends.router.take(STRANGER, each)
    assert ends.up() == []
    assert ends.router.num_malformed == len(wrong) + 1, "the stranger could not be told"
    ends.router.take(b"f.1", wrong[-1])
    assert ends.up() == []
    ends.wait()
    ((_, refused),) = ends.down()
    assert isinstance(refused, Refuse)
    monkeypatch.setattr("octavo.scheduler.simulate.links.encode", lambda *_: wrong[-1])
    ends.router.send(b"f.1", Heartbeat(), 1, 1)
    ends.wait()
    with pytest.raises(ProtocolMismatch):
        ends.down()
