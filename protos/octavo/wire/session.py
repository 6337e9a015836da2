"""Numbering of a session, without sockets: what makes a loss, a repetition or an old life visible."""

from octavo.wire.codec import Envelope
from octavo.wire.errors import SessionLost
from octavo.wire.ids import SessionId


class Session:
    """One session between the scheduler and a peer.

    The law: messages of each direction are numbered 1, 2, 3, ...; a gap or repetition ends the session. A message of
    another session is not this session's business: `is_current` says so, and the receiver drops and counts it.
    """

    def __init__(self, session_id: SessionId) -> None:
        self.id = session_id
        self._sent = 0
        self._received = 0

    def next_number(self) -> int:
        """Return the number of the next message to send."""
        self._sent += 1
        return self._sent

    def is_current(self, envelope: Envelope) -> bool:
        """Say whether a message belongs to this session."""
        return envelope.session == self.id

    def accept(self, envelope: Envelope) -> None:
        """Take note of a received message.

        Raises:
            SessionLost: messages were lost, repeated or reordered on the way.
        """
        if envelope.number != self._received + 1:
            raise SessionLost(f"message {envelope.number} came after message {self._received}")
        self._received = envelope.number
