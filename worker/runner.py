"""One plan to one result: delta, block copies, forward pass, forks, sampling."""

import time

import torch
from torch import Tensor

from octavo.kernels.ops import Ops
from octavo.wire.columns import unpack_ints
from octavo.wire.held_rows import HeldRow
from octavo.wire.plan import StepPlan, StepResult
from octavo.worker.grammar import Grammars, settle
from octavo.worker.mirror import RowLimits
from octavo.worker.models.interface import Batch, KVCache, Model
from octavo.worker.prompt_logprobs import Told, tell, try_telling
from octavo.worker.rehearsal import MANY_LOGPROBS, draw_everything
from octavo.worker.results import step_result
from octavo.worker.rows import Rows
from octavo.worker.sampler import Sampled, draw

PLACEHOLDER_TOKEN = 0
"""What a faulted row gets, so that plans already on their way still find the counts they expect."""


def profile_batch(limits: RowLimits, device: torch.device) -> Batch:
    """Return the largest step: one prompt as long as it may be, and logits for as many rows as there can be.

    It writes nothing (all slots are -1) and reads block 1 in place of every other, whatever that holds.
    """
    num_tokens = limits.max_num_batched_tokens
    length = min(num_tokens, limits.max_model_len)

    def column(value: int, size: int, dtype: torch.dtype) -> Tensor:
        return torch.full((size,), value, dtype=dtype, device=device)

    return Batch(
        input_ids=column(0, num_tokens, torch.int32),
        positions=column(0, num_tokens, torch.int32),
        slot_mapping=column(-1, num_tokens, torch.int64),
        block_tables=torch.ones(1, -(-length // limits.block_size), dtype=torch.int32, device=device),
        query_start=torch.tensor([0, length], dtype=torch.int32, device=device),
        seq_lens=column(length, 1, torch.int32),
        logits_index=column(0, min(limits.max_num_seqs, num_tokens), torch.int32),
    )


class EagerRunner:
    """Executes each plan at once: `launch` returns when its result is there."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        caches: list[KVCache],
        limits: RowLimits,
        device: torch.device,
        valid_vocab: int,
        grammars: Grammars | None = None,
    ) -> None:
        self.rows = Rows(limits, device)
        self._model = model
        self._ops = ops
        self._caches = caches
        self._device = device
        self._valid_vocab = valid_vocab
        self._results: list[StepResult] = []
        self._grammars = grammars or Grammars(None)

    @property
    def num_in_flight(self) -> int:
        """Plans whose results were not taken."""
        return len(self._results)

    @torch.inference_mode()
    def profile(self) -> None:
        """Run the largest step once, without touching any row or block."""
        batch = profile_batch(self.rows.limits, self._device)
        hidden = self._model.hidden(batch, self._caches)
        try_telling(self._model, self._ops, hidden, self.rows.ids, self._valid_vocab)
        self._model.logits(hidden, batch.logits_index).float()

    @torch.inference_mode()
    def profile_sampling(self) -> None:
        """Draw an id for as many rows as there can be, each of which wants everything."""
        limits = self.rows.limits
        logits = self._model.empty_logits(limits.max_num_seqs).zero_().float()
        ids = torch.zeros_like(self.rows.ids[:1])
        draw_everything(self._ops, logits, ids, self._valid_vocab, MANY_LOGPROBS)

    def rehearse(self, *, prompts: bool) -> None:
        """Do nothing: steps run as they are."""

    def capture(self) -> None:
        """Do nothing: there is nothing to capture."""

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

    def hold(self) -> list[HeldRow]:
        """Forget rows and results: the session is over. Return the rows that the next one may go on from."""
        held = self.rows.hold()
        self._grammars.clear()
        self._results = []
        return held

    def clear(self) -> None:
        """Forget rows and results, and what the cache holds of any."""
        self.rows.clear()
        self._grammars.clear()
        self._results = []

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Execute a plan.

        Raises:
            PlanError: it contradicts the rows; they must not be used any more.
        """
        started = time.monotonic_ns()
        copies = self.rows.apply(plan)
        self._grammars.apply(plan)
        planned = self.rows.batch(plan)
        if copies:
            self._copy_blocks(copies)
        sampled: list[Sampled] = []
        told: Told | None = None
        if planned.batch.input_ids.numel():
            if planned.prompt_parts:
                hidden = self._model.hidden(planned.batch, self._caches)
                parts, first_tokens = planned.prompt_parts, planned.first_tokens
                told = tell(self._model, self._ops, hidden, self.rows.ids, parts, first_tokens, self._valid_vocab)
                logits = self._model.logits(hidden, planned.batch.logits_index).float()
            else:
                logits = self._model.forward(planned.batch, self._caches).float()
            if planned.logits_of is not None:
                logits = logits[planned.logits_of]
            rows = [self.rows.sampling_row(row) for row in planned.sampling_rows]
            if rows:
                followers = self._grammars.of_step(plan, planned.sampling_rows)
                masks = self._grammars.masks(followers)
                drawn = draw(self._ops, logits, self.rows.ids, rows, self._valid_vocab, masks.mask if masks else None)
                self._synchronize()
                sampled = settle(followers, masks, drawn.collect())
        for row, outcome in zip(planned.sampling_rows, sampled, strict=True):
            self.rows.store(row, PLACEHOLDER_TOKEN if outcome.token is None else outcome.token)
        self._synchronize()
        parts_told = told.collect() if told is not None else []
        compute_us = (time.monotonic_ns() - started) // 1000
        result = step_result(plan, planned.sampling_rows, sampled, parts_told, compute_us)
        for row in unpack_ints(result.fault_row):
            self.rows.lose(row)
        return result

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        source, target = torch.tensor(copies, dtype=torch.int64, device=self._caches[0].keys.device).unbind(1)
        for cache in self._caches:
            self._ops.copy_blocks(cache.keys, cache.values, source, target)
