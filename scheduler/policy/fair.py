"""Fairness among callers: virtual token counters (Sheng et al., Fairness in Serving Large Language Models, 2024)."""

from collections import Counter, OrderedDict
from collections.abc import Sequence as Several

from octavo.scheduler.policy.interface import Place, Policy
from octavo.scheduler.sequence import Request, Sequence

OUTPUT_COST = 2
"""What one token of output counts; a token of a prompt that is computed counts 1, one that was found 0."""

MAX_PASSED = 256
"""How many sequences of other callers may get a row while the first one of a caller waits; then it is next."""

MAX_IDLE_CALLERS = 4096
"""Callers without requests whose counters are remembered."""


class Fair(Policy):
    """The caller that has been served least is next; within a caller, requests run in the order in which they came.

    A caller that becomes active starts at the least counter of those that are: it neither saves up for idle times nor
    is punished for being new. Recomputed tokens count nothing. Bound: while a caller waits, each other one is served
    at most what the counters differed by, and what it has running, before the caller's turn. As others may come without
    end, each at the least counter, there is a second one: a caller's first sequence is passed by at most MAX_PASSED
    others, and by those of callers that have been passed as often and came earlier.
    """

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._num_requests: Counter[str] = Counter()
        self._idle: OrderedDict[str, int] = OrderedDict()
        self._num_entered = 0  # sequences that got a row, ever
        self._came_at: dict[int, int] = {}  # by arrival: _num_entered when a live request came
        self._served_at: dict[str, int] = {}  # _num_entered when an active caller last got a row
        self._level = 0  # where who comes to an idle service begins: the counter of the last one that left

    def lane(self, sequence: Sequence) -> str:
        """Return the caller."""
        return sequence.request.caller

    def rank(self, head: Sequence) -> Place:
        """Return what the caller has been served, or, if it was passed too often, a rank before all others."""
        request = head.request
        waits_since = max(self._came_at[request.arrival], self._served_at.get(request.caller, 0))
        if self._num_entered - waits_since >= MAX_PASSED:
            return (0, request.arrival)
        return (1, self._counters[request.caller])

    def on_admitted(self, request: Request) -> None:
        """Lift the counter of a caller that becomes active."""
        caller = request.caller
        self._num_requests[caller] += 1
        self._came_at[request.arrival] = self._num_entered
        if caller not in self._counters:
            least = min(self._counters.values(), default=self._level)
            self._counters[caller] = max(self._idle.pop(caller, 0), least)

    def on_entered(self, sequence: Sequence) -> None:
        """Count whom it passed."""
        self._num_entered += 1
        self._served_at[sequence.request.caller] = self._num_entered

    def on_planned(self, sequences: Several[Sequence], num_tokens: Several[int]) -> None:
        """Charge each caller."""
        counters = self._counters
        for sequence, num in zip(sequences, num_tokens):
            if (new := min(num, sequence.num_planned - sequence.num_furthest)) > 0:
                counters[sequence.request.caller] += new if new > 1 else OUTPUT_COST

    def on_ended(self, request: Request) -> None:
        """Remember the counter of a caller that becomes idle, for as long as it matters."""
        caller = request.caller
        self._num_requests[caller] -= 1
        del self._came_at[request.arrival]
        if self._num_requests[caller]:
            return
        del self._num_requests[caller]
        self._served_at.pop(caller, None)
        self._idle[caller] = self._level = self._counters.pop(caller)
        if len(self._idle) > MAX_IDLE_CALLERS:
            self._idle.popitem(last=False)
