"""What is wrong with a message whose positions do not follow the ones before."""

from octavo.wire.errors import WireError


class PositionGap(WireError):
    """Something came for a place that is not the next one: something was lost, the session cannot go on."""
