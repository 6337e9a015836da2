"""One plan to one result: delta, block copies, forward pass, forks, sampling."""

import time

import torch

from octavo.kernels.ops import Ops
from octavo.wire.columns import pack_floats, pack_ints
from octavo.wire.plan import (
    FAULT_NO_CANDIDATE,
    FAULT_NONFINITE_LOGITS,
    RowLogprobs,
    StepPlan,
    StepResult,
)
from octavo.worker.models.decoder import Decoder, KVCache
from octavo.worker.rows import RowLimits, Rows
from octavo.worker.sampler import Sampled, SamplingRow, sample

_PLACEHOLDER_TOKEN = 0


class Runner:
    """Executes plans in order on one device. Owns the rows; weights and caches outlive its sessions."""

    def __init__(
        self, model: Decoder, ops: Ops, caches: list[KVCache], limits: RowLimits, device: torch.device, valid_vocab: int
    ) -> None:
        self.rows = Rows(limits, device)
        self._model = model
        self._ops = ops
        self._caches = caches
        self._valid_vocab = valid_vocab

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
            logits = self._model.forward(planned.batch, self._caches)
            if planned.logits_of is not None:
                logits = logits[planned.logits_of]
            states = [self.rows.state(row) for row in planned.sampling_rows]
            sampled = sample(
                self._ops,
                logits,
                [
                    SamplingRow(state.sampler, self.rows.known_ids(row), state.num_prompt)
                    for row, state in zip(planned.sampling_rows, states, strict=True)
                ],
                self._valid_vocab,
            )
        for row, outcome in zip(planned.sampling_rows, sampled, strict=True):
            # A faulted row gets a placeholder, so that plans already on their way still find the counts they expect.
            self.rows.store(row, _PLACEHOLDER_TOKEN if outcome.token is None else outcome.token)
        return _result(plan, planned.sampling_rows, sampled, (time.monotonic_ns() - started) // 1000)

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        source, target = torch.tensor(copies, dtype=torch.int64, device=self._caches[0].keys.device).unbind(1)
        for cache in self._caches:
            self._ops.copy_blocks(cache.keys, cache.values, source, target)


def _result(plan: StepPlan, rows: list[int], sampled: list[Sampled], compute_us: int) -> StepResult:
    drawn = [(row, s) for row, s in zip(rows, sampled, strict=True) if s.token is not None]
    faults = [
        (row, FAULT_NONFINITE_LOGITS if s.nonfinite else FAULT_NO_CANDIDATE)
        for row, s in zip(rows, sampled, strict=True)
        if s.token is None
    ]
    return StepResult(
        epoch=plan.epoch,
        step=plan.step,
        row=pack_ints(row for row, _ in drawn),
        token=pack_ints(s.token for _, s in drawn if s.token is not None),
        fault_row=pack_ints(row for row, _ in faults),
        fault=pack_ints(fault for _, fault in faults),
        logprobs=tuple(
            RowLogprobs(
                row,
                s.logprobs.logprob,
                s.logprobs.rank,
                pack_ints(s.logprobs.top_ids),
                pack_floats(s.logprobs.top_logprobs),
            )
            for row, s in drawn
            if s.logprobs is not None
        ),
        compute_us=compute_us,
    )
