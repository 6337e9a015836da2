"""The report of a worker that comes into session with rows of an earlier one: collected until it is whole."""

import logging
from dataclasses import dataclass, field

from octavo.scheduler.peers import PeerRecord
from octavo.wire.handshake import ServiceFacts, WorkerFacts
from octavo.wire.held_rows import HeldRow, HeldRows

REPORT_TIMEOUT_S = 2.0
"""A worker whose report is not whole by then begins without it."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Report:
    """What has come of a report.

    Attributes:
        peer: the worker, which is in session and gets no plans before its report is whole.
        worker_facts: its own.
        facts: what frontends are told.
        num_expected: rows that its Hello named.
        due: when it begins without the report.
        rows: those that have come.
    """

    peer: PeerRecord
    worker_facts: WorkerFacts
    facts: ServiceFacts
    num_expected: int
    due: float
    rows: list[HeldRow] = field(default_factory=list)

    def take(self, part: HeldRows) -> bool:
        """Take in a part; say whether it was the last, or one too many."""
        self.rows += part.rows
        return part.is_last or len(self.rows) > self.num_expected

    def whole(self) -> tuple[HeldRow, ...]:
        """Return the rows, none if these are not as many as they should be."""
        if len(self.rows) == self.num_expected:
            return tuple(self.rows)
        _log.warning(
            "%s reported %d rows of %d: they are discarded", self.peer.label, len(self.rows), self.num_expected
        )
        return ()
