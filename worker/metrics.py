"""Counts what a worker does: additions only, in the loop's thread; what costs more is looked at once a second."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from octavo.wire.columns import unpack_ints
from octavo.wire.metrics_catalogue import FAULTS, WORKER
from octavo.wire.plan import FAULT_GRAMMAR, FAULT_NO_CANDIDATE, FAULT_NONFINITE_LOGITS, StepResult
from octavo.wire.process_stats import sample
from octavo.wire.requests import MetricsRow, WorkerFigures

TELL_INTERVAL_S = 1.0
"""How often the scheduler is told."""

_FAULT_CODES = dict(zip((FAULT_NONFINITE_LOGITS, FAULT_NO_CANDIDATE, FAULT_GRAMMAR), FAULTS, strict=True))
_FAULT_CELLS = {code: WORKER.faults.cell(kind) for code, kind in _FAULT_CODES.items()}
_SAMPLED, _REFUSED, _SESSIONS = WORKER.sampled.first, WORKER.refused.first, WORKER.sessions.first


@dataclass(frozen=True)
class Sizes:
    """What does not change once the model is loaded."""

    weights_bytes: int = 0
    kv_cache_bytes: int = 0
    device_bytes: int = 0
    load_s: float = 0.0


@dataclass(frozen=True)
class Held:
    """What the worker holds at one moment."""

    rows: int = 0
    grammar_rows: int = 0
    in_flight: int = 0
    allocated_bytes: int = 0  # of the device's memory
    reserved_bytes: int = 0


class WorkerMetrics:
    """The row of one life of a worker.

    Args:
        sizes: of what is loaded.
        held: says what it holds now.
        dropped: says how many stray messages and malformed frames there were.
    """

    def __init__(
        self,
        sizes: Sizes = Sizes(),
        held: Callable[[], Held] = Held,
        dropped: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self.cells = array("d", bytes(WORKER.num_bytes))
        self._held = held
        self._dropped = dropped
        for metric, value in (
            (WORKER.load_seconds, sizes.load_s),
            (WORKER.weights_bytes, sizes.weights_bytes),
            (WORKER.kv_bytes, sizes.kv_cache_bytes),
            (WORKER.device_total, sizes.device_bytes),
        ):
            self.cells[metric.first] = float(value)

    def step_done(self, result: StepResult) -> None:
        """Count a step."""
        cells = self.cells
        WORKER.compute_seconds.observe(cells, result.compute_us * 1e-6)
        cells[_SAMPLED] += len(result.row) // 4
        if result.fault:
            for fault in unpack_ints(result.fault):
                cells[_FAULT_CELLS[fault]] += 1.0

    def plan_refused(self) -> None:
        """Count a plan that contradicts the rows."""
        self.cells[_REFUSED] += 1.0

    def session_began(self) -> None:
        """Count a session."""
        self.cells[_SESSIONS] += 1.0

    def figures(self) -> WorkerFigures:
        """Return the row as it is now, and what the process takes; takes some 100 us."""
        cells, held = self.cells, self._held()
        num_strays, num_malformed = self._dropped()
        for metric, value in (
            (WORKER.rows, held.rows),
            (WORKER.grammar_rows, held.grammar_rows),
            (WORKER.in_flight, held.in_flight),
            (WORKER.device_allocated, held.allocated_bytes),
            (WORKER.device_reserved, held.reserved_bytes),
            (WORKER.dropped, num_strays),
            (WORKER.malformed, num_malformed),
        ):
            cells[metric.first] = float(value)
        return WorkerFigures(MetricsRow(WORKER.digest, cells.tobytes()), sample())
