"""Priorities: lower runs earlier."""

from octavo.scheduler.policy.interface import Place, Policy
from octavo.scheduler.sequence import Sequence

OVERTAKES_PER_LEVEL = 1024
"""Later requests of the next better priority that may overtake one."""


class ByPriority(Policy):
    """Requests of lower priority value run first; of equals, in the order in which they came.

    Bound: a request is overtaken by at most OVERTAKES_PER_LEVEL later ones for each level of difference, so that a
    stream of urgent requests delays the others, and starves none. A waiting sequence whose row is free, but not its
    blocks, takes them from running sequences of a higher value, as long as these are not protected.
    """

    uses_priorities = True

    def place(self, sequence: Sequence) -> Place:
        """Return the arrival as if it were OVERTAKES_PER_LEVEL requests later for each level."""
        request = sequence.request
        return (request.arrival + OVERTAKES_PER_LEVEL * request.priority, request.arrival, sequence.choice)

    def yields_first(self, sequence: Sequence) -> Place:
        """Return the highest value first, then as for first come, first served."""
        return (-sequence.request.priority, *super().yields_first(sequence))

    def may_evict(self, waiting: Sequence, running: Sequence) -> bool:
        """Return whether the running one has a higher value."""
        return running.request.priority > waiting.request.priority
