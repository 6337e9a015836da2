"""The steps that a worker makes before it is ready, so that the first request of any kind finds everything compiled."""

from octavo.wire.columns import pack_ints
from octavo.wire.plan import FLAG_SAMPLE, NewRow, RowSampling, StepPlan
from octavo.worker.interface import Runner
from octavo.worker.mirror import RowLimits
from octavo.worker.rehearsal import everything

_PLAIN = RowSampling(seed=0)


def warm_up(runner: Runner) -> None:
    """Run a prompt, decodes beside a prompt, and, where the limits allow it, a row that wants everything, forked and copied."""
    limits = runner.rows.limits
    prompt = max(1, min(4, limits.block_size - 1, limits.max_num_batched_tokens - 1, limits.max_model_len - 2))
    runner.execute(_plan(1, {0: prompt}, prompt, _PLAIN))
    has_room = prompt + 1 < min(limits.block_size + 1, limits.max_num_batched_tokens, limits.max_model_len)
    if has_room and _holds(limits, num_rows=2, num_blocks=2):
        runner.execute(_plan(2, {0: 1, 1: prompt}, prompt, _PLAIN))
        if _holds(limits, num_rows=4, num_blocks=4):
            rich = everything(limits.vocab_size)
            runner.execute(_plan(3, {2: prompt}, prompt, rich, fork=3))
            runner.execute(_after_fork(4, {2: 1, 3: 1}))
    runner.clear()


def _holds(limits: RowLimits, num_rows: int, num_blocks: int) -> bool:
    """Say whether there are so many rows, and so many blocks beside the null block."""
    return limits.max_num_seqs >= num_rows and limits.num_blocks > num_blocks


def _plan(step: int, counts: dict[int, int], prompt: int, sampling: RowSampling, fork: int | None = None) -> StepPlan:
    """Return a plan whose last row is new and takes the block behind the null block that has its number."""
    new = max(counts)
    return StepPlan(
        epoch=0,
        step=step,
        row=pack_ints(counts.keys()),
        num_tokens=pack_ints(counts.values()),
        flags=pack_ints([FLAG_SAMPLE] * len(counts)),
        new_rows=(NewRow(new, "warm-up", 0, prompt, 0, pack_ints([0] * prompt), sampling),),
        append_row=pack_ints([new]),
        append_block=pack_ints([new + 1]),
        fork_src=pack_ints([] if fork is None else [new]),
        fork_dst=pack_ints([] if fork is None else [fork]),
        fork_choice=pack_ints([] if fork is None else [1]),
    )


def _after_fork(step: int, counts: dict[int, int]) -> StepPlan:
    """Return a plan in which the row that was forked copies the block that it shares before both write."""
    source, target = counts
    return StepPlan(
        epoch=0,
        step=step,
        row=pack_ints(counts.keys()),
        num_tokens=pack_ints(counts.values()),
        flags=pack_ints([FLAG_SAMPLE] * len(counts)),
        copy_row=pack_ints([target]),
        copy_src=pack_ints([source + 1]),
        copy_dst=pack_ints([target + 1]),
    )
