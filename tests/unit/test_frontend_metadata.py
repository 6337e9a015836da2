"""Whom a call counts against: the client's address, without what differs from one connection to the next."""

import pytest

from octavo.frontend.metadata import MAX_CALLER_BYTES, read_caller


@pytest.mark.parametrize(
    ("peer", "caller"),
    [
        ("ipv4:127.0.0.1:50051", "ipv4:127.0.0.1"),
        ("ipv6:%5B::1%5D:50051", "ipv6:[::1]"),
        ("ipv6:[2001:db8::7]:50051", "ipv6:[2001:db8::7]"),
        ("ipv6:%5Bfe80::1%25eth0%5D:1", "ipv6:[fe80::1%eth0]"),
        ("unix:", "unix"),
        ("unix:/run/octavo/grpc", "unix"),
        ("unix-abstract:name", "unix"),
        ("", ""),
        ("unknown", "unknown"),
    ],
)
def test_callers_are_addresses_without_ports(peer: str, caller: str) -> None:
    assert read_caller(peer) == caller


def test_callers_are_bounded() -> None:
    for peer in ("x" * 1000, "é" * 1000, f"ipv6:[{'f' * 1000}]:1", "\ud800" * 1000):
        assert 0 < len(read_caller(peer).encode()) <= MAX_CALLER_BYTES
