"""When a scheduler that was asked to make room leaves: once who asked knows of it.

A connection's end lets ZeroMQ drop what the peer has not read yet, so the answer alone, right before it, can be lost.
"""

from octavo.scheduler.peers import PeerRecord, Peers

ANSWER_TIMEOUT_S = 1.0
"""How long to wait for that. It takes a turn of the asker's loop."""


class Replacement:
    """Who asked for the next scheduler and may not have read the answer; until they have, the turns go on.

    Attributes:
        due: when to leave at the latest; None while nobody asks.
    """

    def __init__(self) -> None:
        self.due: float | None = None
        self._askers: list[PeerRecord] = []

    def asked(self, peer: PeerRecord, now: float) -> None:
        """Note that a peer was answered, and was sent a Heartbeat after that, which it answers in its turn."""
        self._askers.append(peer)
        if self.due is None:
            self.due = now + ANSWER_TIMEOUT_S

    def is_settled(self, peers: Peers, now: float) -> bool:
        """Whether somebody asked, and it is time to leave."""
        if self.due is None:
            return False
        self._askers = [one for one in self._askers if one.num_unread and peers.by_session(one.session.id) is one]
        return not self._askers or now >= self.due
