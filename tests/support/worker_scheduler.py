"""The scheduler's end of a worker's socket, told by a test what to say."""

import time
from contextlib import suppress
from typing import TypeVar

import zmq

from octavo.wire.channel import RouterChannel
from octavo.wire.codec import FromPeer, FromScheduler
from octavo.wire.errors import SessionLost
from octavo.wire.handshake import Heartbeat, Wait, WorkerHello, WorkerWelcome
from octavo.wire.held_rows import HeldRows
from octavo.wire.ids import SessionId
from octavo.wire.requests import WorkerFigures
from octavo.wire.session import Session

WAIT_S = 60.0
"""Bound of every wait in here: longer means that the test has failed."""

T = TypeVar("T", bound=FromPeer)


class ScriptedScheduler:
    """Listens on an address for one worker."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self.router = RouterChannel(context, address)
        self.identity = b""  # of the peer that was heard last
        self.session = Session(SessionId(0))
        self._inbox: list[tuple[bytes, int, FromPeer]] = []

    def hear(self, kind: type[T]) -> T:
        """Return the next message of a kind; heartbeats, Hellos and reports of rows are skipped, all else is an error."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if not self._inbox:
                self.router.socket.poll(100)
                self._inbox += [(who, envelope.session, message) for who, envelope, message in self.router.receive(64)]
                continue
            self.identity, _, message = self._inbox.pop(0)
            if isinstance(message, kind):
                return message
            if not isinstance(message, Heartbeat | WorkerHello | WorkerFigures | HeldRows):
                raise AssertionError(f"expected {kind.__name__}, heard {message}")
        raise AssertionError(f"no {kind.__name__} came in {WAIT_S} s")

    def hear_ready(self) -> WorkerHello:
        """Return the next Hello with facts; tell the worker to wait until then."""
        while (hello := self.hear(WorkerHello)).facts is None:
            with suppress(SessionLost):  # it may have connected anew since: another Hello follows
                self.router.send(self.identity, Wait("loading"))
        return hello

    def welcome(self, session: int) -> None:
        """Begin a session with the peer that was heard last."""
        self.session = Session(SessionId(session))
        self.router.send(self.identity, WorkerWelcome("scheduler"), session, 0)

    def send(self, message: FromScheduler) -> None:
        """Send a message of the session."""
        self.router.send(self.identity, message, self.session.id, self.session.next_number())

    def close(self) -> None:
        """Close the socket."""
        self.router.close()
