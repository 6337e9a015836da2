"""What must hold of each running sequence."""

from octavo.scheduler.errors import InvariantViolation
from octavo.scheduler.sequence import Sequence
from octavo.scheduler.tables import BlockTables


def check_running(s: Sequence, tables: BlockTables) -> None:
    """Prove a running sequence's counts against each other and against its table.

    Raises:
        InvariantViolation: they contradict.
    """
    name = f"{s.request.name}/{s.choice}"
    if not 0 <= s.num_confirmed <= s.num_planned <= s.num_expected or s.num_known > s.num_expected:
        raise InvariantViolation(
            f"{name}: {s.num_confirmed} confirmed, {s.num_planned} planned, "
            f"{s.num_known} known, {s.num_sampling} being drawn"
        )
    if s.num_blocks_sent != len(tables.table(s.number)):
        raise InvariantViolation(f"{name}: the worker does not know all of its blocks")
    writes = s.num_planned < s.num_fast
    if writes and (s.request.held or tables.must_copy(s.number, s.num_planned)):
        raise InvariantViolation(f"{name} would write a block that is shared or can be found")
