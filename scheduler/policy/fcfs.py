"""First come, first served."""

from octavo.scheduler.policy import Place
from octavo.scheduler.sequence import Sequence


class FirstComeFirstServed:
    """Requests run in the order in which they came, and none overtakes another.

    A preempted sequence keeps its place, which is before all that came later. The one with the least computed work
    gives way; of equals, the latest.
    """

    def place(self, sequence: Sequence) -> Place:
        """Return arrival, then choice."""
        return (sequence.request.arrival, sequence.choice)

    def yields_first(self, sequence: Sequence) -> Place:
        """Return computed tokens, then the latest arrival first."""
        return (sequence.num_planned, -sequence.request.arrival, -sequence.choice)
