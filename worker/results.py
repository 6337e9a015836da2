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
from octavo.worker.prompt_logprobs import ToldPart
from octavo.worker.sampler import Sampled


def step_result(
    plan: StepPlan, rows: list[int], sampled: list[Sampled], told: list[ToldPart], compute_us: int
) -> StepResult:
    """Build the result of a plan.

    Args:
        plan: the plan.
        rows: that sampled.
        sampled: what became of each.
        told: parts of prompts, of which each row has one at most.
        compute_us: time that the step took.
    """
    broken = {part.row: FAULT_NONFINITE_LOGITS for part in told if part.logprobs is None}
    drawn, faults = [], dict(broken)
    for row, s in zip(rows, sampled, strict=True):
        if s.token is None:
            faults[row] = _fault(s)
        elif row not in broken:
            drawn.append((row, s))
    return StepResult(
        epoch=plan.epoch,
        step=plan.step,
        row=pack_ints(row for row, _ in drawn),
        token=pack_ints(s.token for _, s in drawn if s.token is not None),
        fault_row=pack_ints(faults.keys()),
        fault=pack_ints(faults.values()),
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
        prompt_logprobs=tuple(part.logprobs for part in told if part.logprobs is not None and part.row not in faults),
    )


def _fault(sampled: Sampled) -> int:
    if sampled.nonfinite:
        return FAULT_NONFINITE_LOGITS
    return FAULT_GRAMMAR if sampled.dead_end else FAULT_NO_CANDIDATE
