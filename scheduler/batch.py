"""The running batch: which sequence has which row of the worker."""

from collections.abc import Iterator

from octavo.scheduler.errors import InvariantViolation
from octavo.scheduler.sequence import Sequence, Status
from octavo.wire.ids import Row


class Batch:
    """Running sequences in the order in which they entered, and the worker's rows.

    The law: a row belongs to at most one running sequence. A row that was given back may be given out at once: the
    next plan frees it before it is taken again.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._running: dict[int, Sequence] = {}  # by sequence number, in order of entry
        self._free = [Row(row) for row in reversed(range(num_rows))]
        self._to_free: list[Row] = []
        self._num_entered = 0
        self.num_held = 0
        """Rows that are kept for beams to come."""
        self.version = 0
        """Changes whenever a sequence enters or leaves."""

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._running.values())

    @property
    def num_free_rows(self) -> int:
        """Rows that sequences can enter."""
        return len(self._free) - self.num_held

    @property
    def has_free_row(self) -> bool:
        """Whether a sequence can enter."""
        return len(self._free) > self.num_held

    def enter(self, sequence: Sequence) -> None:
        """Give a sequence a row; `has_free_row` said that there is one."""
        self.version += 1
        self._num_entered += 1
        sequence.take_row(self._free.pop(), self._num_entered)
        self._running[sequence.number] = sequence

    def leave(self, sequence: Sequence, status: Status, newest_step: int) -> None:
        """Take a sequence's row; no plan after `newest_step` names it."""
        if (row := sequence.row) is None:
            raise InvariantViolation(f"{sequence.request.name}/{sequence.choice} leaves the batch, but has no row")
        self.version += 1
        del self._running[sequence.number]
        self._free.append(row)
        self._to_free.append(row)
        sequence.leave_row(status, newest_step)

    def take_freed_rows(self) -> list[Row]:
        """Take the rows that the next plan must free at the worker."""
        rows, self._to_free = self._to_free, []
        return rows

    def check(self) -> None:
        """Prove rows and sequences against each other.

        Raises:
            InvariantViolation: they contradict.
        """
        rows = [sequence.row for sequence in self]
        if len(set(rows)) != len(rows) or set(rows) & set(self._free) or len(rows) + len(self._free) != self.num_rows:
            raise InvariantViolation(f"rows in use {rows}, free {self._free}, of {self.num_rows}")
        if not 0 <= self.num_held <= len(self._free):
            raise InvariantViolation(f"{self.num_held} rows held of {len(self._free)} free ones")
        if len(set(self._to_free)) != len(self._to_free):
            raise InvariantViolation(f"a row is freed twice: {self._to_free}")
        if any(sequence.status is not Status.RUNNING for sequence in self):
            raise InvariantViolation("a sequence with a row does not run")
