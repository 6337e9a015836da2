"""The channels over real sockets: sessions begin, number their messages and end by name; nothing is lost silently."""

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import zmq

from octavo.wire import codec
from octavo.wire.channel import DealerChannel, RouterChannel, check_address
from octavo.wire.errors import AddressInUse, SessionLost, WireError
from octavo.wire.handshake import FrontendHello, FrontendWelcome, Goodbye, Heartbeat, Refuse, ServiceFacts, WorkerState
from octavo.wire.ids import BootId
from octavo.wire.peer import Peer, PeerRefused, SessionBegan, SessionEnded
from octavo.wire.requests import CancelRequest

WAIT_MS = 10_000
FACTS = ServiceFacts(vocab_size=10, max_model_len=10, block_size=1, max_num_seqs=1)
T = TypeVar("T")


class Clock:
    """Seconds that pass only when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


class Pair:
    """A router and a peer that talk to each other, stepped by hand."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self.clock = Clock()
        self.router = RouterChannel(context, address)
        channel = DealerChannel(context, address, BootId("b"))
        self.peer = Peer(channel, lambda: FrontendHello(1, "digest", "b", 1), self.clock)
        self.identity = b""

    def peer_until(self, wanted: Callable[[object], T | None]) -> T:
        for _ in range(100):
            for event in self.peer.step():
                if (found := wanted(event)) is not None:
                    return found
            self.clock.now += 0.2
            poller = zmq.Poller()
            poller.register(self.peer.channel.socket, zmq.POLLIN)
            poller.register(self.peer.channel.monitor, zmq.POLLIN)
            poller.poll(100)
        raise AssertionError("the peer never saw it")

    def router_next(self) -> tuple[bytes, codec.Envelope, codec.FromPeer]:
        for _ in range(100):
            for received in self.router.receive(1):
                return received
            list(self.peer.step())
            self.clock.now += 0.2
            self.router.socket.poll(100)
        raise AssertionError("the router never received it")

    def router_next_without_peer(self) -> codec.FromPeer:
        assert self.router.socket.poll(WAIT_MS)
        (received,) = self.router.receive(1)
        return received[2]

    def begin(self, session: int = 77) -> None:
        self.identity, _, hello = self.router_next()
        assert hello == FrontendHello(1, "digest", "b", 1)
        self.router.send(self.identity, FrontendWelcome("sched", FACTS), session)
        began = self.peer_until(lambda e: e if isinstance(e, SessionBegan) else None)
        assert began.session == session

    def close(self) -> None:
        if not self.peer.channel.socket.closed:
            self.peer.channel.close()
        self.router.close()


@pytest.fixture
def pair(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> Iterator[Pair]:
    pair = Pair(context, address)
    yield pair
    pair.close()


def ended(event: object) -> str | None:
    return event.reason if isinstance(event, SessionEnded) else None


def test_messages_are_numbered_from_one(pair: Pair) -> None:
    pair.begin()
    assert pair.peer.send(CancelRequest(1))
    assert pair.peer.send(CancelRequest(2))
    assert pair.router_next() == (pair.identity, (77, 1), CancelRequest(1))
    assert pair.router_next() == (pair.identity, (77, 2), CancelRequest(2))


def test_a_heartbeat_is_answered(pair: Pair) -> None:
    pair.begin()
    pair.router.send(pair.identity, Heartbeat(), 77, 1)
    assert pair.router_next() == (pair.identity, (77, 1), Heartbeat())


def test_a_gap_ends_the_session_and_a_new_hello_comes_from_a_fresh_identity(pair: Pair) -> None:
    pair.begin()
    pair.router.send(pair.identity, WorkerState(True), 77, 2)
    assert pair.peer_until(ended) == "message 2 came after message 0"
    assert not pair.peer.send(CancelRequest(1))
    identity, envelope, message = pair.router_next()
    assert identity != pair.identity
    assert envelope.session == 0
    assert isinstance(message, FrontendHello)


def test_a_repeated_message_ends_the_session(pair: Pair) -> None:
    pair.begin()
    pair.router.send(pair.identity, WorkerState(True), 77, 1)
    pair.router.send(pair.identity, WorkerState(True), 77, 1)
    assert pair.peer_until(ended) == "message 1 came after message 1"


def test_messages_of_another_session_are_dropped_and_counted(pair: Pair) -> None:
    pair.begin()
    pair.router.send(pair.identity, WorkerState(False, "old"), 76, 1)
    pair.router.send(pair.identity, WorkerState(True, "new"), 77, 1)
    assert pair.peer_until(lambda e: e if isinstance(e, WorkerState) else None).reason == "new"
    assert pair.peer.num_dropped == 1


def test_silence_ends_the_session(pair: Pair) -> None:
    pair.begin()
    pair.clock.now += 11
    assert pair.peer_until(ended) == "nothing heard from the scheduler for 10 s"


def test_goodbye_ends_the_session(pair: Pair) -> None:
    pair.begin()
    pair.router.send(pair.identity, Goodbye("upgrade"), 77, 1)
    assert pair.peer_until(ended) == "the scheduler left: upgrade"


def test_a_refusal_is_final(pair: Pair) -> None:
    identity, _, _ = pair.router_next()
    pair.router.send(identity, Refuse("other model"))
    with pytest.raises(PeerRefused, match="other model"):
        pair.peer_until(lambda e: None)


def test_a_closed_scheduler_is_noticed_without_a_timer(pair: Pair) -> None:
    pair.begin()
    pair.router.close()
    now = pair.clock.now
    while not (reasons := [r for e in pair.peer.step() if (r := ended(e))]):
        assert pair.peer.channel.monitor.poll(WAIT_MS)
    assert reasons == ["the scheduler closed the connection"]
    assert pair.clock.now == now


def test_a_gone_peer_is_noticed_at_the_next_send(pair: Pair) -> None:
    pair.begin()
    with pair.router.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        pair.peer.leave("done")
        assert pair.router_next_without_peer() == Goodbye("done")
        assert monitor.poll(WAIT_MS)
        pair.router.socket.disable_monitor()
    # Sends within the millisecond until the socket looks at its connections again may fill the queue first.
    with pytest.raises(SessionLost, match=r"gone|does not keep up"):
        for number in range(1, 2001):
            pair.router.send(pair.identity, Heartbeat(), 77, number)


def test_a_peer_that_does_not_read_ends_its_session_instead_of_losing_messages(pair: Pair) -> None:
    pair.begin()
    big = WorkerState(True, "x" * 2**20)
    with pytest.raises(SessionLost, match="does not keep up"):
        for number in range(1, 10_000):
            pair.router.send(pair.identity, big, 77, number)


def test_garbage_is_dropped_and_counted(pair: Pair, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
    pair.begin()
    with context.socket(zmq.DEALER) as stranger:
        stranger.connect(address)
        for frames in ([b""], [b"\x00" * 100], [b"x"] * 20, [os.urandom(500)], [codec.encode(Heartbeat())[:-1]]):
            stranger.send_multipart(frames)
        old = bytearray(codec.encode(Heartbeat()))
        old[2] = 99
        stranger.send(bytes(old))
        assert not list(pair.router.receive(0))
        while pair.router.num_malformed < 6:
            assert pair.router.socket.poll(WAIT_MS)
            assert not list(pair.router.receive(10))
        assert stranger.poll(WAIT_MS)
        _, answer = codec.decode_from_scheduler(stranger.recv())
        assert isinstance(answer, Refuse)
        assert "version 99" in answer.reason
        stranger.setsockopt(zmq.LINGER, 0)
    pair.peer.send(CancelRequest(3))
    assert pair.router_next()[2] == CancelRequest(3)


def test_a_second_scheduler_on_one_path_is_refused(
    pair: Pair, context: "zmq.Context[zmq.Socket[bytes]]", address: str
) -> None:
    with pytest.raises(AddressInUse, match="another process listens"):
        RouterChannel(context, address)
    pair.begin()


def test_the_socket_that_a_crash_left_is_replaced(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(address.removeprefix("ipc://"))
    pair = Pair(context, address)
    pair.begin()
    pair.close()


def test_who_leaves_leaves_no_file(context: "zmq.Context[zmq.Socket[bytes]]", address: str, tmp_path: Path) -> None:
    RouterChannel(context, address).close()
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_one_that_has_just_left_is_worth_nothing(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock file that was opened is removed by its holder before it could be locked; a third one would make a new one."""
    lock_path, flock, opened = tmp_path / "s.lock", fcntl.flock, []

    def late_flock(descriptor: int, operation: int) -> None:
        opened.append(os.fstat(descriptor).st_ino)
        if len(opened) == 1:
            lock_path.rename(tmp_path / "removed")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late_flock)
    first = RouterChannel(context, address)
    assert len(opened) == 2
    assert lock_path.stat().st_ino == opened[1]
    with pytest.raises(AddressInUse, match="another process listens"):
        RouterChannel(context, address)
    first.close()
    assert not lock_path.exists()


def test_a_file_in_the_way_is_not_removed(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, tmp_path: Path
) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(AddressInUse, match="is no socket"):
        RouterChannel(context, address)
    assert (tmp_path / "s").read_text() == "precious"


def test_the_socket_is_for_its_owner_alone(pair: Pair, tmp_path: Path) -> None:
    assert (tmp_path / "s").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "address", ["ipc://relative", "ipc:///" + "x" * 120, "tcp://0.0.0.0:1", "tcp://10.0.0.1:5", "udp://x", ""]
)
def test_addresses_beyond_this_machine_or_malformed_are_refused(address: str) -> None:
    with pytest.raises(WireError):
        check_address(address)
