"""One plan to one result: delta, block copies, forward pass, forks, sampling."""

import time
from typing import Protocol

import torch

from octavo.kernels.ops import Ops
from octavo.wire.plan import StepPlan, StepResult
from octavo.worker.mirror import RowLimits
from octavo.worker.models.decoder import Decoder, KVCache
from octavo.worker.results import step_result
from octavo.worker.rows import Rows
from octavo.worker.sampler import Sampled, draw

PLACEHOLDER_TOKEN = 0
"""What a faulted row gets, so that plans already on their way still find the counts they expect."""


class RowsView(Protocol):
    """What others may know and ask of a runner's rows."""

    @property
    def limits(self) -> RowLimits:
        """What they can hold."""
        ...

    def clear(self) -> None:
        """Forget every row: the session is over."""
        ...

    def __len__(self) -> int: ...


class Runner(Protocol):
    """Executes plans in order on one device. Owns the rows; weights and caches outlive its sessions."""

    @property
    def rows(self) -> RowsView:
        """The persistent batch."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Plans that were launched and whose results were not taken."""
        ...

    def launch(self, plan: StepPlan) -> None:
        """Apply a plan and start what it asks for; does not wait for the device.

        Raises:
            PlanError: it contradicts the rows; they must not be used any more.
        """
        ...

    def take_results(self) -> list[StepResult]:
        """Return the results that are there, in the order of the plans; does not wait for the device."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Launch a plan while none is in flight, and wait for its result.

        Raises:
            PlanError: see `launch`.
        """
        ...

    def clear(self) -> None:
        """Forget rows and plans in flight: the session is over; returns when the device is done with them."""
        ...


class EagerRunner:
    """Executes each plan at once: `launch` returns when its result is there."""

    def __init__(
        self, model: Decoder, ops: Ops, caches: list[KVCache], limits: RowLimits, device: torch.device, valid_vocab: int
    ) -> None:
        self.rows = Rows(limits, device)
        self._model = model
        self._ops = ops
        self._caches = caches
        self._valid_vocab = valid_vocab
        self._results: list[StepResult] = []

    @property
    def num_in_flight(self) -> int:
        """Plans whose results were not taken."""
        return len(self._results)

    def launch(self, plan: StepPlan) -> None:
        """Execute a plan.

        Raises:
            PlanError: it contradicts the rows; they must not be used any more.
        """
        self._results.append(self.execute(plan))

    def take_results(self) -> list[StepResult]:
        """Return the results of all plans that were launched."""
        results, self._results = self._results, []
        return results

    def clear(self) -> None:
        """Forget rows and results: the session is over."""
        self.rows.clear()
        self._results = []

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Execute a plan.

        Raises:
            PlanError: it contradicts the rows; they must not be used any more.
        """
        started = time.monotonic_ns()
        copies = self.rows.apply(plan)
        planned = self.rows.batch(plan)
        if copies:
            self._copy_blocks(copies)
        sampled: list[Sampled] = []
        if planned.batch.input_ids.numel():
            logits = self._model.forward(planned.batch, self._caches).float()
            if planned.logits_of is not None:
                logits = logits[planned.logits_of]
            rows = [self.rows.sampling_row(row) for row in planned.sampling_rows]
            if rows:
                sampled = draw(self._ops, logits, self.rows.ids, rows, self._valid_vocab).collect()
        for row, outcome in zip(planned.sampling_rows, sampled, strict=True):
            self.rows.store(row, PLACEHOLDER_TOKEN if outcome.token is None else outcome.token)
        return step_result(plan, planned.sampling_rows, sampled, (time.monotonic_ns() - started) // 1000)

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        source, target = torch.tensor(copies, dtype=torch.int64, device=self._caches[0].keys.device).unbind(1)
        for cache in self._caches:
            self._ops.copy_blocks(cache.keys, cache.values, source, target)
