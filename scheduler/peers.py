"""The live sessions of the loop: one record for each peer, found by identity and by session."""

from collections.abc import Iterator
from dataclasses import dataclass

from octavo.wire.handshake import FrontendHello, WorkerHello
from octavo.wire.ids import SessionId
from octavo.wire.requests import WorkerFigures
from octavo.wire.session import Session


@dataclass(slots=True, eq=False)
class PeerRecord:
    """A frontend or worker with a session."""

    identity: bytes
    session: Session
    hello: FrontendHello | WorkerHello
    last_heard: float
    state: str = "ready"  # or draining, or drained
    figures: WorkerFigures | None = None  # the newest that it told
    num_unread: int = 0  # Heartbeats that it has not answered

    @property
    def is_worker(self) -> bool:
        """Whether it is a worker."""
        return isinstance(self.hello, WorkerHello)

    @property
    def role(self) -> str:
        """What it is."""
        return "worker" if self.is_worker else "frontend"

    @property
    def label(self) -> str:
        """Name for logs."""
        return f"{self.role} {self.hello.boot_id} (pid {self.hello.pid})"


class Peers:
    """Peers with a session; an identity has at most one, and there is at most one worker."""

    def __init__(self) -> None:
        self._by_identity: dict[bytes, PeerRecord] = {}
        self._by_session: dict[SessionId, PeerRecord] = {}
        self.worker: PeerRecord | None = None

    def __len__(self) -> int:
        return len(self._by_identity)

    def __iter__(self) -> Iterator[PeerRecord]:
        return iter(list(self._by_identity.values()))

    @property
    def frontends(self) -> list[PeerRecord]:
        """All frontends."""
        return [peer for peer in self if not peer.is_worker]

    def by_identity(self, identity: bytes) -> PeerRecord | None:
        """Find the peer behind a socket."""
        return self._by_identity.get(identity)

    def by_session(self, session: SessionId) -> PeerRecord | None:
        """Find the peer of a session."""
        return self._by_session.get(session)

    def by_boot_id(self, boot_id: str) -> PeerRecord | None:
        """Find the session of a process, which may have come back under another identity."""
        return next((peer for peer in self if peer.hello.boot_id == boot_id), None)

    def add(self, peer: PeerRecord) -> None:
        """Take in a welcomed peer."""
        self._by_identity[peer.identity] = peer
        self._by_session[peer.session.id] = peer
        if peer.is_worker:
            self.worker = peer

    def remove(self, peer: PeerRecord) -> None:
        """Forget a peer whose session is over."""
        del self._by_identity[peer.identity]
        del self._by_session[peer.session.id]
        if self.worker is peer:
            self.worker = None
