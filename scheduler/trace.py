"""The record of plans and results that `--trace-plans` asks for: one JSON line each."""

import json
import logging
from pathlib import Path
from typing import Any, TextIO

from octavo.scheduler.figures import Figures
from octavo.wire.columns import column_length, unpack_ints
from octavo.wire.plan import StepPlan, StepResult

_log = logging.getLogger(__name__)


class PlanTrace:
    """Writes lines until the file cannot be written any more; serving goes on without it.

    Raises (on construction):
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: dict[int, str] = {}  # row -> "request/choice"
        self._file: TextIO | None = path.open("a", encoding="utf-8")

    def plan(self, plan: StepPlan, figures: Figures, now: float) -> None:
        """Write a plan that is being sent; `figures` are the core's when all plans of this turn had been built."""
        if self._file is None:
            return
        names = self._names
        names |= {new.row: f"{new.request}/{new.choice}" for new in plan.new_rows}
        rows, counts = unpack_ints(plan.row), unpack_ints(plan.num_tokens)
        forks = zip(*map(unpack_ints, (plan.fork_src, plan.fork_dst, plan.fork_choice)), strict=True)
        names |= {target: f"{names.get(source, '').partition('/')[0]}/{choice}" for source, target, choice in forks}
        self._write(
            {
                "plan": plan.step,
                "epoch": f"{plan.epoch:x}",
                "time_s": round(now, 6),
                "rows": [
                    {"row": row, "sequence": self._names.get(row), "num_tokens": count}
                    for row, count in zip(rows, counts, strict=True)
                ],
                "num_new": len(plan.new_rows),
                "cached_tokens": sum(new.num_computed_tokens for new in plan.new_rows),
                "forked_rows": list(unpack_ints(plan.fork_dst)),
                "freed_rows": list(unpack_ints(plan.freed_rows)),
                "appended_blocks": column_length(plan.append_block),
                "copied_blocks": column_length(plan.copy_dst),
                "free_blocks": figures.num_free_blocks,
                "running": figures.num_running,
                "waiting": figures.num_waiting,
            }
        )

    def result(self, result: StepResult, now: float) -> None:
        """Write a result that has come."""
        self._write(
            {
                "result": result.step,
                "epoch": f"{result.epoch:x}",
                "time_s": round(now, 6),
                "tokens": column_length(result.token),
                "faults": column_length(result.fault_row),
                "compute_us": result.compute_us,
            }
        )

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError as error:
                self._warn(error)

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            self._warn(error)
            file, self._file = self._file, None
            try:
                file.close()
            except OSError:
                _log.debug("closing %s failed as well", self._path)

    def _warn(self, error: OSError) -> None:
        _log.warning("plans are traced no longer: cannot write %s: %s", self._path, error.strerror or error)
