"""First come, first served."""

from octavo.scheduler.policy.interface import Policy


class FirstComeFirstServed(Policy):
    """Requests run in the order in which they came, and none overtakes another.

    A preempted sequence keeps its place, which is before all that came later. The one with the least computed work
    gives way; of equals, the latest. Bound: a request starts when those before it have started.
    """
