"""Who runs first and who gives way: one interface, one module for each policy."""

from octavo.scheduler.policy.fair import Fair
from octavo.scheduler.policy.fcfs import FirstComeFirstServed
from octavo.scheduler.policy.interface import Place, Policy
from octavo.scheduler.policy.priority import ByPriority

POLICIES: dict[str, type[Policy]] = {"fcfs": FirstComeFirstServed, "priority": ByPriority, "fair": Fair}
"""By the name that --scheduling-policy takes."""

__all__ = ["POLICIES", "Place", "Policy"]
