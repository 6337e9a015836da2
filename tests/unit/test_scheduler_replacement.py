"""A scheduler that is to make room leaves once who asked has read that it does (F40)."""

import pytest

from octavo.scheduler.peers import PeerRecord, Peers
from octavo.scheduler.replacement import ANSWER_TIMEOUT_S, Replacement
from octavo.wire.handshake import PROTOCOL_VERSION, FrontendHello
from octavo.wire.ids import SessionId
from octavo.wire.session import Session

NOW = 50.0


@pytest.fixture
def peers() -> Peers:
    peers = Peers()
    for number, name in enumerate("ab", start=1):
        hello = FrontendHello(PROTOCOL_VERSION, "digest", name, 1)
        peers.add(PeerRecord(name.encode(), Session(SessionId(number)), hello, NOW))
    return peers


def test_nobody_asked(peers: Peers) -> None:
    replacement = Replacement()
    assert replacement.due is None
    assert not replacement.is_settled(peers, NOW)


def test_all_who_asked_must_have_answered_all_heartbeats(peers: Peers) -> None:
    replacement = Replacement()
    first, second = peers
    first.num_unread, second.num_unread = 2, 1
    replacement.asked(first, NOW)
    replacement.asked(second, NOW + 0.1)
    second.num_unread = 0
    first.num_unread = 1  # that was an earlier one
    assert not replacement.is_settled(peers, NOW + 0.2)
    first.num_unread = 0
    assert replacement.is_settled(peers, NOW + 0.2)


def test_who_is_gone_is_not_waited_for(peers: Peers) -> None:
    replacement = Replacement()
    (first, _) = peers
    first.num_unread = 1
    replacement.asked(first, NOW)
    peers.remove(first)
    assert replacement.is_settled(peers, NOW)


def test_the_wait_is_bounded_whoever_asks_again(peers: Peers) -> None:
    replacement = Replacement()
    (first, _) = peers
    first.num_unread = 1
    replacement.asked(first, NOW)
    replacement.asked(first, NOW + ANSWER_TIMEOUT_S / 2)
    assert replacement.due == NOW + ANSWER_TIMEOUT_S
    assert not replacement.is_settled(peers, NOW + 0.99 * ANSWER_TIMEOUT_S)
    assert replacement.is_settled(peers, NOW + ANSWER_TIMEOUT_S)
