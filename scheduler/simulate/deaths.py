"""Who may be given up because workers died: an account of its own beside the core's."""

from collections import Counter
from collections.abc import Collection

from octavo.scheduler.simulate.world import Violation
from octavo.scheduler.suspects import MAX_DEATHS
from octavo.wire.columns import unpack_ints
from octavo.wire.ids import SessionId
from octavo.wire.requests import StepOutput

RequestName = tuple[SessionId, int]
"""Session of the frontend, handle."""


class Deaths:
    """Deaths of workers, which live requests were being computed at each, and how far these were.

    Args:
        pipeline_depth: plans that may be outstanding.
    """

    def __init__(self, pipeline_depth: int) -> None:
        self._depth = pipeline_depth
        self._lost: tuple[str, set[RequestName]] | None = None  # worker, '' if it hung; not settled yet
        self._last: set[RequestName] = set()
        self._num_tokens: Counter[RequestName] = Counter()
        self._at_deaths: dict[RequestName, list[int]] = {}  # tokens that frontends had been told at each

    @property
    def num_suspects(self) -> int:
        """Requests that were being computed at two deaths or more."""
        return sum(len(tokens) > 1 for tokens in self._at_deaths.values())

    def note_loss(self, boot_id: str, under_way: set[RequestName]) -> None:
        """Take note of the loss of a worker, which may not have died; '' if it counts as dead."""
        self._lost = boot_id, under_way

    def settle(self, boot_id: str, live: Collection[RequestName]) -> None:
        """Take note of the next worker, which may be the same."""
        self._at_deaths = {name: tokens for name, tokens in self._at_deaths.items() if name in live}
        self._num_tokens = Counter({name: n for name, n in self._num_tokens.items() if name in live})
        lost, self._lost = self._lost, None
        if lost is None or lost[0] == boot_id:
            return
        self._last = lost[1]
        for name in self._last:
            if name in live:
                self._at_deaths.setdefault(name, []).append(self._num_tokens[name])

    def count_tokens(self, frontend: SessionId, output: StepOutput) -> None:
        """Take note of what a frontend is told."""
        for handle in unpack_ints(output.handle):
            self._num_tokens[frontend, handle] += 1

    def check_blame(self, name: RequestName, num_choices: int, others: Collection[RequestName]) -> None:
        """Check who is given up: it was under way at three deaths, at the last alone, and has not got on in between.

        Raises:
            Violation: that is not so.
        """
        tokens = self._at_deaths.get(name, [])[-MAX_DEATHS:]
        if len(tokens) < MAX_DEATHS or any(other != name and other in others for other in self._last):
            raise Violation(f"{name} is given up after {len(tokens)} deaths, the last with {self._last}")
        if self._num_tokens[name] - tokens[0] > self._depth * max(1, num_choices):
            raise Violation(f"{name} is given up, but got on in between: it had {tokens} tokens at the deaths")
