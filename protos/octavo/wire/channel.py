"""The sockets: a ROUTER at the scheduler, a DEALER at each frontend and worker.

Both are non-blocking and owned by one thread. A send that cannot be queued at once ends the session (SessionLost): the
queues are bounded by SEND_QUEUE_MESSAGES, and nothing is dropped silently. Liveness is `Heartbeat` messages of our own;
a closed connection shows at once, at the ROUTER as an unroutable peer, at the DEALER through the socket's monitor.
Over tcp both ends hold CURVE keys (`octavo.wire.curve`); ipc sockets are guarded by their folder.
"""

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from octavo.wire.codec import (
    MAX_MESSAGE_BYTES,
    Envelope,
    FromPeer,
    FromScheduler,
    decode_from_peer,
    decode_from_scheduler,
    encode,
)
from octavo.wire.curve import HANDSHAKE_FAILED, LOG_INTERVAL_S, Gate, PeerKeys, SchedulerKeys, guard, present
from octavo.wire.errors import AddressInUse, KeyRefused, MalformedMessage, ProtocolMismatch, SessionLost, WireError
from octavo.wire.handshake import Refuse
from octavo.wire.ids import BootId
from octavo.wire.socket_lock import lock, unlock

HEARTBEAT_INTERVAL_S = 1.0
"""How often the scheduler sends a Heartbeat to each peer, and a peer without a session its Hello."""

HEARTBEAT_TIMEOUT_S = 10.0
"""Silence after which the other side counts as lost (a worker that computes is given its step timeout instead)."""

SEND_QUEUE_MESSAGES = 1000
"""High-water mark of every socket and direction."""

MAX_IPC_PATH_BYTES = 107
"""Of a Unix socket's path (sun_path of Linux, less its final zero)."""

HANDSHAKE_TIMEOUT_MS = 10_000
"""How long a new connection may take to show its key."""

MANY_FAILED_HANDSHAKES = 3
"""In a row: keys do not fit."""

_IDENTITY_BYTES = 64

_log = logging.getLogger(__name__)


class RouterChannel:
    """The scheduler's end. Peers are named by the identity that their socket announces.

    Args:
        context: of the socket.
        address: where to listen.
        keys: whom to let in over tcp; not used for ipc.

    Raises (on construction):
        AddressInUse: another live process holds the address, or its lock file belongs to another user.
        WireError: the address is malformed, or tcp without keys.
    """

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: SchedulerKeys | None = None
    ) -> None:
        check_address(address, has_keys=keys is not None)
        self.num_malformed = 0
        self._path = ipc_path(address)
        self._lock: int | None = None if self._path is None else lock(self._path)
        self._is_bound = False
        self._socket = context.socket(zmq.ROUTER)
        self._gate: Gate | None = None
        _set_common_options(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            if keys is not None and is_tcp(address):
                self._gate = guard(context, self._socket, keys)
            self._socket.bind(address)
        except AddressInUse:
            self.close()
            raise
        except zmq.ZMQError as error:
            self.close()
            raise AddressInUse(f"cannot listen on {address}: {error}") from error
        self._is_bound = True
        if self._path is not None:
            self._path.chmod(0o600)

    @property
    def socket(self) -> "zmq.Socket[bytes]":
        """The socket, for a poller; nobody else reads or writes it."""
        return self._socket

    @property
    def num_refused(self) -> int:
        """Connections over tcp that showed no key of a known peer."""
        return self._gate.num_refused if self._gate is not None else 0

    def receive(self, limit: int, max_bytes: int = MAX_MESSAGE_BYTES) -> Iterator[tuple[bytes, Envelope, FromPeer]]:
        """Yield up to `limit` waiting messages with the identity of their sender; drop and count malformed ones.

        It stops as soon as more than `max_bytes` have been taken. A peer of another protocol version yields nothing here,
        but gets a Refuse that names both versions.
        """
        num_bytes = 0
        for _ in range(limit):
            if num_bytes > max_bytes:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            num_bytes += sum(map(len, frames))
            if len(frames) != 2 or not 0 < len(frames[0]) <= _IDENTITY_BYTES:
                self.num_malformed += 1
                continue
            try:
                envelope, message = decode_from_peer(frames[1])
            except ProtocolMismatch as error:
                self.num_malformed += 1
                self._refuse(frames[0], str(error))
            except MalformedMessage:
                self.num_malformed += 1
            else:
                yield frames[0], envelope, message

    def send(self, peer: bytes, message: FromScheduler, session: int = 0, number: int = 0) -> int:
        """Queue a message for a peer; return its size in bytes.

        Raises:
            SessionLost: the peer is gone, its queue is full, or the message is larger than a frame may be.
        """
        frame = encode(message, session, number)
        if len(frame) > MAX_MESSAGE_BYTES:
            raise SessionLost(f"message of {len(frame)} bytes, limit {MAX_MESSAGE_BYTES}")
        try:
            self._socket.send_multipart((peer, frame), zmq.NOBLOCK, copy=True)
        except zmq.Again as error:
            raise SessionLost("the peer does not keep up: its queue is full") from error
        except zmq.ZMQError as error:
            raise SessionLost(f"the peer is gone: {error}") from error
        return len(frame)

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket, remove its file and the lock; wait in the background at most `linger_ms` for what is queued."""
        if self._gate is not None:
            self._gate.stop()
            self._gate = None
        self._socket.close(linger=linger_ms)
        if self._path is not None and self._lock is not None:
            unlock(self._path, self._lock, is_bound=self._is_bound)
            self._lock = None

    def _refuse(self, peer: bytes, reason: str) -> None:
        try:
            self.send(peer, Refuse(reason))
        except SessionLost:
            self.num_malformed += 1


class DealerChannel:
    """A peer's end. After SessionLost the owner calls `reopen` and says Hello again; what was queued is gone.

    Args:
        context: of the socket.
        address: where the scheduler listens.
        boot_id: of this process.
        keys: what to show there over tcp; not used for ipc.

    Raises (on construction):
        WireError: the address is malformed, or tcp without keys.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        boot_id: BootId,
        keys: PeerKeys | None = None,
    ) -> None:
        check_address(address, has_keys=keys is not None)
        self.num_malformed = 0
        self.num_failed_handshakes = 0
        self.num_failed_in_a_row = 0
        self._keys = keys if is_tcp(address) else None
        self._next_log = time.monotonic()
        self._context = context
        self._address = address
        self._boot_id = boot_id
        self._connections = 0
        self._open()

    @property
    def socket(self) -> "zmq.Socket[bytes]":
        """The socket, for a poller; a new one after `reopen`."""
        return self._socket

    @property
    def monitor(self) -> "zmq.Socket[bytes]":
        """The monitor socket, readable when the connection's state changes; a new one after `reopen`."""
        return self._monitor

    @property
    def is_shut_out(self) -> bool:
        """Whether somebody listens there, but handshakes fail again and again: not with this scheduler's key."""
        return self.num_failed_in_a_row >= MANY_FAILED_HANDSHAKES

    def receive(self, limit: int) -> Iterator[tuple[Envelope, FromScheduler]]:
        """Yield up to `limit` waiting messages.

        Raises:
            SessionLost: the connection was closed, or a message is malformed.
            KeyRefused: the scheduler does not know this process's key.
            ProtocolMismatch: the scheduler speaks another protocol version.
        """
        for _ in range(limit):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                if len(frames) != 1:
                    raise MalformedMessage(f"message of {len(frames)} frames, expected 1")
                yield decode_from_scheduler(frames[0])
            except MalformedMessage as error:
                self.num_malformed += 1
                raise SessionLost(f"malformed message: {error}") from error
        self._check_connection()

    def send(self, message: FromPeer, session: int = 0, number: int = 0) -> None:
        """Queue a message.

        Raises:
            SessionLost: not connected, the queue is full, or the message is larger than a frame may be.
        """
        frame = encode(message, session, number)
        if len(frame) > MAX_MESSAGE_BYTES:
            raise SessionLost(f"message of {len(frame)} bytes, limit {MAX_MESSAGE_BYTES}")
        try:
            self._socket.send(frame, zmq.NOBLOCK, copy=True)
        except zmq.Again as error:
            raise SessionLost("the scheduler cannot be reached or does not keep up") from error

    def reopen(self) -> None:
        """Drop the socket with all that it holds and connect anew, under a fresh identity."""
        self.close()
        self._open()

    def close(self, linger_ms: int = 0) -> None:
        """Close the sockets; wait in the background at most `linger_ms` for what is queued."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)

    def _open(self) -> None:
        self._connections += 1
        self._socket = self._context.socket(zmq.DEALER)
        _set_common_options(self._socket)
        # A fresh identity: a ROUTER that still holds the old connection would otherwise confuse the two.
        self._socket.setsockopt(zmq.IDENTITY, f"{self._boot_id}.{self._connections}".encode())
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 100)  # a scheduler that starts anew is there within a second
        if self._keys is not None:
            present(self._socket, self._keys)
        self._is_connected = False  # and each side has shown that it is who it should be
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(events)
        try:
            self._socket.connect(self._address)
        except zmq.ZMQError as error:
            self.close()
            raise WireError(f"cannot connect to {self._address}: {error}") from error

    def _check_connection(self) -> None:
        lost = False
        while self._monitor.poll(0):
            event: dict[str, Any] = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))  # type: ignore[assignment]
            kind = event["event"]
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_connected = True
                self.num_failed_in_a_row = 0
            elif kind == zmq.EVENT_DISCONNECTED:
                # Before a handshake there is nothing to lose, and the socket itself tries again, ever more slowly.
                lost = lost or self._is_connected
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # libzmq itself does not try again
                raise KeyRefused(f"{self._address} does not let this process in: its CURVE key is not known there")
            else:
                self._count_failed_handshake()
        if lost:
            raise SessionLost("the scheduler closed the connection")

    def _count_failed_handshake(self) -> None:
        self.num_failed_handshakes += 1
        self.num_failed_in_a_row += 1
        # One or two fail where a scheduler is about to stop: that says nothing of keys.
        if self.is_shut_out and (now := time.monotonic()) >= self._next_log:
            self._next_log = now + LOG_INTERVAL_S
            _log.warning(
                "connections to %s that failed so far: %d; is scheduler.key in --curve-keys that of the scheduler there?",
                self._address,
                self.num_failed_handshakes,
            )


def check_address(address: str, has_keys: bool = False) -> None:
    """Check an address that this process binds or connects to.

    Args:
        address: of the scheduler.
        has_keys: whether this process has CURVE keys.

    Raises:
        WireError: it is neither ipc:// with a short enough path nor tcp:// with a port, or it is tcp without keys.
    """
    if (path := ipc_path(address)) is not None:
        size = len(os.fsencode(path))
        if not path.is_absolute() or size > MAX_IPC_PATH_BYTES:
            raise WireError(
                f"ipc path {str(path)!r} has {size} bytes: it must be absolute and have at most {MAX_IPC_PATH_BYTES}"
            )
    elif is_tcp(address):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
            raise WireError(f"{address!r} is no address: expected tcp://host:port")
        if not has_keys:
            raise WireError(
                f"{address}: tcp needs CURVE keys; make them with 'octavo keys FOLDER' and give every process "
                "--curve-keys FOLDER, or use ipc"
            )
    else:
        raise WireError(f"{address!r} is no address: expected ipc:///folder/name or tcp://host:port")


def is_tcp(address: str) -> bool:
    """Whether an address can be reached from other machines, and CURVE guards it."""
    return address.startswith("tcp://")


def ipc_path(address: str) -> Path | None:
    """Return the path of an ipc address, None for any other."""
    return Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None


def _set_common_options(socket: "zmq.Socket[bytes]") -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, SEND_QUEUE_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
    socket.setsockopt(zmq.IPV6, 1)
