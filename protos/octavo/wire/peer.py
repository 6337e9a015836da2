"""A frontend's or worker's side of the handshake, as one object over a DealerChannel.

The owner calls `step` whenever the sockets are readable and at least every HEARTBEAT_INTERVAL_S, and acts on what comes
out: `SessionBegan`, messages of the session, `SessionEnded`. Hello, Heartbeat and numbering are handled here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from octavo.wire.channel import HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S, DealerChannel
from octavo.wire.codec import Envelope, FromPeer, FromScheduler
from octavo.wire.errors import KeyRefused, ProtocolMismatch, SessionLost, WireError
from octavo.wire.handshake import (
    FrontendHello,
    FrontendWelcome,
    Goodbye,
    Heartbeat,
    Refuse,
    UnknownSession,
    Wait,
    WorkerHello,
    WorkerWelcome,
)
from octavo.wire.ids import SessionId
from octavo.wire.session import Session

RECEIVE_LIMIT = 256
"""Messages taken from the socket in one step, so that a flood cannot starve the owner."""

GOODBYE_LINGER_MS = 100
"""How long a leaving peer waits at most for its Goodbye to be written."""

_LEFT = "the scheduler left: "


@dataclass(frozen=True)
class SessionBegan:
    """The scheduler has welcomed this peer."""

    session: SessionId
    welcome: FrontendWelcome | WorkerWelcome


@dataclass(frozen=True)
class SessionEnded:
    """The session is over (there was one); a new Hello goes out by itself."""

    reason: str

    @property
    def is_orderly(self) -> bool:
        """Whether the scheduler said Goodbye."""
        return self.reason.startswith(_LEFT)


@dataclass(frozen=True)
class Waiting:
    """The scheduler is there but cannot welcome this peer yet."""

    reason: str


class PeerRefused(WireError):
    """The scheduler will never take this peer: stop and say why."""


PeerEvent = SessionBegan | SessionEnded | Waiting


class Peer:
    """One peer's sessions with the scheduler; at most one at a time.

    Args:
        channel: the connection; owned by this object from now on.
        make_hello: builds the Hello, called each time one is sent (its facts may change).
        clock: monotonic seconds.
    """

    def __init__(
        self, channel: DealerChannel, make_hello: Callable[[], FrontendHello | WorkerHello], clock: Callable[[], float]
    ) -> None:
        self.channel = channel
        self.num_dropped = 0  # messages of other sessions
        self._make_hello = make_hello
        self._clock = clock
        self._session: Session | None = None
        self._pending_end: str | None = None  # a send failed; told by the next step
        self._last_heard = clock()
        self._next_hello = self._last_heard

    @property
    def session_id(self) -> SessionId | None:
        """The session, None while there is none."""
        return self._session.id if self._session else None

    def send(self, message: FromPeer) -> bool:
        """Send a message of the session; False if there is none, or it ended by this (the next `step` tells)."""
        if self._session is None:
            return False
        try:
            self.channel.send(message, self._session.id, self._session.next_number())
        except SessionLost as error:
            self._pending_end = str(error)
            return False
        return True

    def step(self) -> Iterator[PeerEvent | FromScheduler]:
        """Handle what has come and what is due; yield events and messages of the session in order.

        Raises:
            PeerRefused: the scheduler refused this peer or its key, or speaks another protocol version.
        """
        try:
            if self._pending_end is not None:
                raise SessionLost(self._pending_end)
            for envelope, message in self.channel.receive(RECEIVE_LIMIT):
                yield from self._on_message(envelope.session, envelope.number, message)
            if self._session is not None and self._clock() - self._last_heard > HEARTBEAT_TIMEOUT_S:
                raise SessionLost(f"nothing heard from the scheduler for {HEARTBEAT_TIMEOUT_S:g} s")
        except SessionLost as error:
            yield from self._end(str(error))
        except (ProtocolMismatch, KeyRefused) as error:
            raise PeerRefused(str(error)) from error
        self._say_hello()

    def leave(self, reason: str) -> None:
        """Say Goodbye, so that the scheduler need not find out by silence, and close."""
        self.send(Goodbye(reason))
        self._session = None
        self.channel.close(linger_ms=GOODBYE_LINGER_MS)

    def reset(self, reason: str) -> PeerEvent | None:
        """End the session from this side (the owner saw something impossible); a new Hello follows."""
        events = list(self._end(reason))
        return events[0] if events else None

    def _on_message(self, session: int, number: int, message: FromScheduler) -> Iterator[PeerEvent | FromScheduler]:
        if session == 0:
            yield from self._on_unsessioned(message)
            return
        if isinstance(message, FrontendWelcome | WorkerWelcome):
            if self._session is not None:
                raise SessionLost("welcomed twice")
            self._session = Session(SessionId(session))
            self._last_heard = self._clock()
            yield SessionBegan(self._session.id, message)
            return
        if self._session is None or session != self._session.id:
            self.num_dropped += 1
            return
        self._session.accept(Envelope(SessionId(session), number))
        self._last_heard = self._clock()
        if isinstance(message, Heartbeat):
            self.send(Heartbeat())
        elif isinstance(message, Goodbye):
            raise SessionLost(f"{_LEFT}{message.reason}")
        else:
            yield message

    def _on_unsessioned(self, message: FromScheduler) -> Iterator[PeerEvent]:
        if isinstance(message, Refuse):
            raise PeerRefused(message.reason)
        if isinstance(message, UnknownSession) and self._session is not None:
            raise SessionLost("the scheduler does not know this session")
        if isinstance(message, Wait) and self._session is None:
            yield Waiting(message.reason)

    def _end(self, reason: str) -> Iterator[SessionEnded]:
        had_session = self._session is not None
        self._session = None
        self._pending_end = None
        self._next_hello = self._clock()
        self.channel.reopen()
        if had_session:
            yield SessionEnded(reason)

    def _say_hello(self) -> None:
        if self._session is not None or self._clock() < self._next_hello:
            return
        self._next_hello = self._clock() + HEARTBEAT_INTERVAL_S
        try:
            self.channel.send(self._make_hello())
        except SessionLost:
            # Not connected yet: the scheduler is not there. The next Hello is due in a moment.
            self._next_hello = self._clock() + HEARTBEAT_INTERVAL_S / 10
