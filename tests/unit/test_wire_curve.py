"""CURVE over real tcp sockets: known keys come in, nothing else does, and who is let in does not notice the others."""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
from zmq.auth import create_certificates

from octavo.wire.channel import DealerChannel, RouterChannel
from octavo.wire.curve import PeerKeys, SchedulerKeys, load_peer_keys, load_scheduler_keys
from octavo.wire.errors import AddressInUse, CurveKeysError, KeyRefused, WireError
from octavo.wire.handshake import FrontendHello
from octavo.wire.ids import BootId
from octavo.wire.peer import Peer, PeerRefused
from octavo.wire.requests import CancelRequest
from tests.support.service import free_port

WAIT_MS = 10_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("keys"))


def make_folder(folder: Path, *names: str) -> Path:
    mask = os.umask(0o077)
    for name in names or ("scheduler", "frontend", "worker"):
        create_certificates(folder, name)
    os.umask(mask)
    return folder


class Router:
    """A scheduler's end that listens on tcp, and peers of it."""

    def __init__(self, folder: Path) -> None:
        keys = load_scheduler_keys(folder)
        assert keys is not None
        self.keys: SchedulerKeys = keys
        self.folder = folder
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.channel = RouterChannel(self._context, self.address, keys)
        self._peers: list[DealerChannel] = []

    def peer_keys(self, name: str = "frontend") -> PeerKeys:
        keys = load_peer_keys(self.folder, name)
        assert keys is not None
        return keys

    def peer(self, keys: PeerKeys) -> DealerChannel:
        self._peers.append(DealerChannel(self._peers_context, self.address, BootId("b"), keys))
        return self._peers[-1]

    def stranger(self, kind: int = zmq.DEALER) -> "zmq.Socket[bytes]":
        """Return a socket of plain ZeroMQ without any key."""
        found = self._peers_context.socket(kind)
        found.connect(self.address)
        return found

    def hear_from(self, peer: DealerChannel) -> None:
        """See that a message of this peer comes in, whatever else happens."""
        assert peer.socket.poll(WAIT_MS, zmq.POLLOUT)
        peer.send(CancelRequest(7))
        assert self.channel.socket.poll(WAIT_MS)
        assert [message for _, _, message in self.channel.receive(10)] == [CancelRequest(7)]

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self.channel.close()
        self._peers_context.destroy(linger=0)
        self._context.destroy(linger=0)


@pytest.fixture
def router(folder: Path) -> Iterator[Router]:
    router = Router(folder)
    yield router
    router.close()


def failed_handshake(peer: DealerChannel) -> int:
    """Wait until the peer has noticed that it is not let in."""
    while not peer.num_failed_handshakes:
        assert peer.monitor.poll(WAIT_MS)
        assert not list(peer.receive(10))
    return peer.num_failed_handshakes


def until_refused(router: Router, count: int) -> None:
    """Wait until the router has counted so many."""
    while router.channel.num_refused < count:
        # What comes in would wake this poll, and nothing may.
        assert not router.channel.socket.poll(5)


@pytest.mark.parametrize("name", ["frontend", "worker"])
def test_known_peers_come_in(router: Router, name: str) -> None:
    router.hear_from(router.peer(router.peer_keys(name)))
    assert router.channel.num_refused == 0


def test_an_unknown_key_is_refused_and_counted_and_others_go_on(
    router: Router, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = router.peer(router.peer_keys())
    router.hear_from(known)
    other = load_peer_keys(make_folder(tmp_path), "frontend")
    assert other is not None
    with caplog.at_level(logging.WARNING, "octavo.wire"):
        strangers = [router.peer(replace(other, scheduler=router.keys.public)) for _ in range(5)]
        for stranger in strangers:
            assert stranger.monitor.poll(WAIT_MS)
            with pytest.raises(KeyRefused, match="CURVE key is not known there"):
                list(stranger.receive(10))
        until_refused(router, 5)
    router.hear_from(known)
    told = [record for record in caplog.records if record.name == "octavo.wire.curve"]
    assert len(told) == 1  # however many they are
    assert not any(key.decode() in caplog.text for key in (other.public, other.secret, router.keys.secret))
    assert not any(stranger.socket.poll(0, zmq.POLLOUT) for stranger in strangers)


def test_a_refused_key_is_final_for_a_peer(router: Router, tmp_path: Path) -> None:
    other = load_peer_keys(make_folder(tmp_path), "worker")
    assert other is not None
    channel = router.peer(replace(other, scheduler=router.keys.public))
    peer = Peer(channel, lambda: FrontendHello(1, "digest", "b", 1), time.monotonic)
    assert channel.monitor.poll(WAIT_MS)
    with pytest.raises(PeerRefused, match="CURVE key"):
        list(peer.step())


def test_no_key_is_refused(router: Router) -> None:
    known = router.peer(router.peer_keys())
    with router.stranger() as dealer, router.stranger(zmq.REQ) as req:
        dealer.setsockopt(zmq.LINGER, 0)
        req.setsockopt(zmq.LINGER, 0)
        dealer.send(b"hello")
        until_refused(router, 2)
        router.hear_from(known)


def test_a_peer_does_not_talk_to_another_scheduler(
    router: Router, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = router.peer_keys()
    other = load_scheduler_keys(make_folder(tmp_path))
    assert other is not None
    deceived = router.peer(replace(mine, scheduler=other.public))
    assert failed_handshake(deceived)
    router.hear_from(router.peer(mine))
    assert "curve-keys" not in caplog.text or deceived.is_shut_out, "one that fails may mean a scheduler that stops"
    while not deceived.is_shut_out:
        assert deceived.monitor.poll(WAIT_MS)
        assert not list(deceived.receive(10))
    assert caplog.text.count("; is scheduler.key in --curve-keys that of the scheduler there?") == 1


@pytest.mark.parametrize(
    "data",
    [
        os.urandom(4096),
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01NULL" + b"\0" * 48,  # a greeting of ZeroMQ without keys
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01CURVE" + b"\0" * 47 + b"\x06\xff" * 500,
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\xff" * 65536,
    ],
    ids=["random", "null", "curve", "http", "ones"],
)
def test_any_bytes_close_their_connection_alone(router: Router, data: bytes) -> None:
    known = router.peer(router.peer_keys())
    router.hear_from(known)
    port = int(router.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_MS / 1000) as one:
        try:
            one.sendall(data)
            with contextlib.suppress(OSError):  # it has closed already
                one.shutdown(socket.SHUT_WR)
            while one.recv(65536):
                pass
        except ConnectionError:
            pass  # it closed with something of ours unread
    router.hear_from(known)


def test_a_known_key_does_not_make_garbage_a_message(router: Router) -> None:
    known = router.peer(router.peer_keys())
    with router._peers_context.socket(zmq.DEALER) as one:
        keys = router.peer_keys("worker")
        one.curve_serverkey, one.curve_publickey, one.curve_secretkey = keys.scheduler, keys.public, keys.secret
        one.setsockopt(zmq.LINGER, 0)
        one.connect(router.address)
        for frames in ([b""], [b"x"] * 10_000, [os.urandom(500)]):
            one.send_multipart(frames)
        while router.channel.num_malformed < 3:
            assert router.channel.socket.poll(WAIT_MS)
            assert not list(router.channel.receive(10))
    router.hear_from(known)


def test_without_its_gate_a_scheduler_lets_nobody_in(router: Router) -> None:
    gate = router.channel._gate
    assert gate is not None
    gate.stop()
    router.channel._gate = None
    peer = router.peer(router.peer_keys())
    assert not peer.socket.poll(300, zmq.POLLOUT)


def test_tcp_needs_keys_and_ipc_does_not_use_them(folder: Path, tmp_path: Path) -> None:
    keys, peer_keys = load_scheduler_keys(folder), load_peer_keys(folder, "frontend")
    with zmq.Context() as context:
        for address in ("tcp://127.0.0.1:5555", "tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://[::1]:5555"):
            with pytest.raises(WireError, match=r"tcp needs CURVE keys.*octavo keys"):
                RouterChannel(context, address)
            with pytest.raises(WireError, match=r"tcp needs CURVE keys.*--curve-keys"):
                DealerChannel(context, address, BootId("b"))
        for address in ("tcp://127.0.0.1", "tcp://:5", "tcp://host:0", "tcp://host:65536", "tcp://host:x"):
            with pytest.raises(WireError, match="is no address"):
                RouterChannel(context, address, keys)
        with pytest.raises(WireError, match="cannot connect"):
            DealerChannel(context, "tcp://*:5555", BootId("b"), peer_keys)
        address = f"ipc://{tmp_path}/s"
        router, peer = RouterChannel(context, address, keys), DealerChannel(context, address, BootId("b"))
        assert peer.socket.poll(WAIT_MS, zmq.POLLOUT)
        peer.close()
        router.close()


def test_one_process_has_one_gate(router: Router) -> None:
    with pytest.raises(AddressInUse, match="lets peers in"):
        RouterChannel(router._context, f"tcp://127.0.0.1:{free_port()}", router.keys)
    router.hear_from(router.peer(router.peer_keys()))


def test_secrets_are_not_shown(folder: Path) -> None:
    for keys in (load_scheduler_keys(folder), load_peer_keys(folder, "worker")):
        assert keys is not None
        assert keys.secret.decode() not in repr(keys)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "scheduler.key_secret").unlink(), "scheduler.key_secret is missing"),
        (lambda folder: (folder / "scheduler.key_secret").chmod(0o604), "mode 0604"),
        (lambda folder: (folder / "scheduler.key_secret").write_bytes(b"x" * 5000), "5000 bytes, limit 4096"),
        (lambda folder: (folder / "scheduler.key_secret").write_text("curve"), "holds no public key"),
        (lambda folder: (folder / "frontend.key").write_text('public-key = "short"'), "not 40 characters"),
        (lambda folder: (folder / "frontend.key").write_bytes(b'public-key = "' + b"\xff" * 40), "not 40 characters"),
        (
            lambda folder: (folder / "scheduler.key_secret").write_bytes((folder / "worker.key").read_bytes()),
            "holds no secret key",
        ),
        (lambda folder: [path.unlink() for path in folder.glob("[fw]*.key")], "0 public keys of peers"),
        (
            lambda folder: (folder / "scheduler.key_secret").write_text(
                (folder / "scheduler.key_secret").read_text().split("secret-key")[0]
                + "secret-key"
                + (folder / "worker.key_secret").read_text().split("secret-key")[1]
            ),
            "no pair",
        ),
    ],
)
def test_keys_that_cannot_be_used_are_told(tmp_path: Path, spoil: object, words: str) -> None:
    make_folder(tmp_path)
    assert callable(spoil)
    spoil(tmp_path)
    with pytest.raises(CurveKeysError, match=words):
        load_scheduler_keys(tmp_path)


def test_a_peer_needs_the_schedulers_public_key(folder: Path, tmp_path: Path) -> None:
    make_folder(tmp_path, "frontend")
    with pytest.raises(CurveKeysError, match=r"scheduler\.key is missing"):
        load_peer_keys(tmp_path, "frontend")
    assert load_peer_keys(None, "frontend") is None
    assert load_scheduler_keys(None) is None


def test_a_peer_that_was_added_comes_in(tmp_path: Path) -> None:
    make_folder(tmp_path)
    make_folder(tmp_path, "worker-2")
    router = Router(tmp_path)
    router.hear_from(router.peer(router.peer_keys("worker-2")))
    router.close()
