"""What a step drew, as the message that tells it."""

from octavo.wire.columns import pack_floats, pack_ints
from octavo.wire.plan import (
    FAULT_GRAMMAR,
    FAULT_NO_CANDIDATE,
    FAULT_NONFINITE_LOGITS,
    RowLogprobs,
    StepPlan,
    StepResult,
)
from octavo.worker.sampler import Sampled


def step_result(plan: StepPlan, rows: list[int], sampled: list[Sampled], compute_us: int) -> StepResult:
    """Build the result of a plan.

    Args:
        plan: the plan.
        rows: that sampled.
        sampled: what became of each.
        compute_us: time that the step took.
    """
    drawn = [(row, s) for row, s in zip(rows, sampled, strict=True) if s.token is not None]
    faults = [(row, _fault(s)) for row, s in zip(rows, sampled, strict=True) if s.token is None]
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


def _fault(sampled: Sampled) -> int:
    if sampled.nonfinite:
        return FAULT_NONFINITE_LOGITS
    return FAULT_GRAMMAR if sampled.dead_end else FAULT_NO_CANDIDATE
