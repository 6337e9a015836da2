"""What stands between peers and their scheduler and is no good link: messages get lost, doubled, late, cut and mangled.

Each peer that connects in front gets a connection of its own, under the same identity, to the scheduler behind; so the
scheduler sees peers that come back under an identity which it still holds (F46). Whatever is let through comes as it was:
a transport that silently changed single bits of ids would be no fault of ours to find.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from types import TracebackType
from typing import Self

import zmq

FAULTS = ("drop", "duplicate", "late", "truncate", "garble", "extra frame", "no frame", "reconnect", "clog")
"""late: others overtake it. garble: bytes that are no message. reconnect: the connection behind is closed and made anew,
with what was in it. clog: the whole link stands still for a while."""

MAX_LATE_S = 0.1
MAX_CLOG_S = 0.3
MAX_IDLE_S = 5.0
"""A connection of a peer that has gone, or begun anew under another identity, is closed after so long."""

POLL_MS = 5


@dataclass(order=True)
class _Late:
    due: float
    number: int
    to_scheduler: bool = field(compare=False)
    identity: bytes = field(compare=False)
    frames: list[bytes] = field(compare=False)


@dataclass
class _Link:
    """A peer's connection to the scheduler."""

    socket: "zmq.Socket[bytes]"
    used_at: float


class LossyProxy:
    """Forwards between `front`, where peers connect, and `back`, where the scheduler listens.

    Args:
        front: address to bind.
        back: the scheduler's address.
        seed: of the faults.
        rate: share of messages that meet a fault, while there are faults.

    Attributes:
        is_faulty: whether there are faults at the moment.
        faults: how often each kind has happened.
    """

    def __init__(self, front: str, back: str, seed: int, rate: float) -> None:
        self.is_faulty = False
        self.faults: Counter[str] = Counter()
        self.num_messages = 0
        self._addresses = front, back
        self._draw = random.Random(seed)
        self._rate = rate
        self._stopping = threading.Event()
        self._links: dict[bytes, _Link] = {}
        self._late: list[_Late] = []
        self._clogged_until = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._front = self._socket(zmq.ROUTER)
        self._front.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._front.bind(front)
        self._poller = zmq.Poller()
        self._poller.register(self._front, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, daemon=True, name="lossy-proxy")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 1000)
        socket.setsockopt(zmq.RCVHWM, 1000)
        return socket

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                ready = dict(self._poller.poll(POLL_MS))
                now = time.monotonic()
                while self._late and self._late[0].due <= now:
                    late = heappop(self._late)
                    self._pass_on(late.to_scheduler, late.identity, late.frames)
                if now < self._clogged_until:
                    time.sleep(POLL_MS / 1000)
                    continue
                if self._front in ready:
                    identity, *frames = self._front.recv_multipart()
                    self._link(identity)
                    self._meet(True, identity, frames, now)
                for identity, link in list(self._links.items()):
                    if link.socket in ready and not link.socket.closed:
                        self._meet(False, identity, link.socket.recv_multipart(), now)
                    elif now - link.used_at > MAX_IDLE_S:
                        self._unlink(identity)
        finally:
            for identity in list(self._links):
                self._unlink(identity)
            self._front.close()
            self._context.term()

    def _link(self, identity: bytes) -> None:
        if identity not in self._links:
            socket = self._socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, identity)
            socket.setsockopt(zmq.RECONNECT_IVL, 20)
            socket.connect(self._addresses[1])
            self._poller.register(socket, zmq.POLLIN)
            self._links[identity] = _Link(socket, time.monotonic())

    def _unlink(self, identity: bytes) -> None:
        socket = self._links.pop(identity).socket
        self._poller.unregister(socket)
        socket.close()

    def _meet(self, to_scheduler: bool, identity: bytes, frames: list[bytes], now: float) -> None:
        """Let a message through, or what a fault leaves of it."""
        self.num_messages += 1
        if to_scheduler:
            self._links[identity].used_at = now
        if not self.is_faulty or self._draw.random() >= self._rate:
            self._pass_on(to_scheduler, identity, frames)
            return
        fault = self._draw.choice(FAULTS)
        self.faults[fault] += 1
        match fault:
            case "late":
                due = now + self._draw.uniform(0, MAX_LATE_S)
                heappush(self._late, _Late(due, self.num_messages, to_scheduler, identity, frames))
            case "reconnect":
                self._unlink(identity)
                self._link(identity)
            case "clog":
                self._clogged_until = now + self._draw.uniform(0, MAX_CLOG_S)
                self._pass_on(to_scheduler, identity, frames)
            case _:
                for found in self._mangled(fault, frames):
                    self._pass_on(to_scheduler, identity, found)

    def _mangled(self, fault: str, frames: list[bytes]) -> Sequence[list[bytes]]:
        last = frames[-1]
        match fault:
            case "duplicate":
                return (frames, frames)
            case "truncate":
                return ([last[: self._draw.randrange(len(last))]] if last else [b""],)
            case "garble":
                return ([b"\0" + self._draw.randbytes(max(1, len(last) - 1))],)
            case "extra frame":
                return ([*frames, self._draw.randbytes(8)],)
            case "no frame":
                return ([b""],)
        return ()

    def _pass_on(self, to_scheduler: bool, identity: bytes, frames: list[bytes]) -> None:
        try:
            if not to_scheduler:
                self._front.send_multipart([identity, *frames], zmq.NOBLOCK)
            elif identity in self._links:
                self._links[identity].socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self.faults["full"] += 1
