"""What a door knows of a call besides its request."""

from dataclasses import dataclass

from octavo.frontend.tracing import CallTrace


@dataclass(frozen=True)
class CallContext:
    """What a door knows of a call besides its request.

    Attributes:
        request_id: the caller's, or a made one; for people, never a key.
        caller: whom the call counts against: its key's identity, without keys its address.
        identity: whose key it holds, '' without keys.
        trace: tells of the call in spans; None: nobody wants to know.
        deadline: when the caller's time is over, on the event loop's clock; None for never.
        arrived_at: when the call came, on that clock.
    """

    request_id: str
    caller: str
    arrived_at: float
    identity: str = ""
    trace: CallTrace | None = None
    deadline: float | None = None
