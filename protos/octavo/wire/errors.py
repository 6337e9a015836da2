"""What can go wrong between two processes, named by what the receiver can do about it."""


class WireError(Exception):
    """Base of everything that the wire raises."""


class MalformedMessage(WireError):
    """The bytes are no message of this contract: drop and count them; the peer's session is over."""


class ProtocolMismatch(WireError):
    """The peer speaks another version or serves another model: refuse it by name."""


class SessionLost(WireError):
    """The session with the peer is over (gap, full queue, peer gone, timeout): begin a new one and replay."""


class AddressInUse(WireError):
    """Another live process holds the address."""


class CurveKeysError(WireError):
    """The folder of CURVE keys cannot be used as it is. The message never holds a key."""


class KeyRefused(WireError):
    """The scheduler does not let this process's CURVE key in: it must be told of it first."""
