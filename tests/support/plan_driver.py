"""A scheduler in miniature for one worker's tests: keeps tables, counts and free blocks, and writes plans."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import msgspec

from octavo.wire.columns import pack_ints, unpack_ints
from octavo.wire.plan import FLAG_SAMPLE, NewRow, RowSampling, StepPlan, StepResult
from octavo.worker.runner import Runner

GREEDY = RowSampling(seed=0, temperature=0.0)


@dataclass
class DrivenRow:
    """What the driver knows of a row; `num_known` counts ids that may not have arrived yet."""

    num_known: int
    num_computed: int
    table: list[int] = field(default_factory=list)


class PlanDriver:
    """Writes valid plans; blocks are dealt in a shuffled order, so that tables matter."""

    def __init__(self, block_size: int, num_blocks: int, *, epoch: int = 1, seed: int = 0) -> None:
        self.rows: dict[int, DrivenRow] = {}
        self._block_size = block_size
        self._free = list(range(1, num_blocks))
        Random(seed).shuffle(self._free)
        self._epoch = epoch
        self._step = 0
        self._new: list[NewRow] = []
        self._freed: list[int] = []

    @classmethod
    def of(cls, runner: Runner, seed: int = 0) -> "PlanDriver":
        """Return a driver for a runner without rows."""
        limits = runner.rows.limits
        return cls(limits.block_size, limits.num_blocks, seed=seed)

    def begin(
        self, row: int, ids: Sequence[int], sampling: RowSampling = GREEDY, *, num_prompt: int = 0, choice: int = 0
    ) -> None:
        """Give a row to a sequence in the next plan; `num_prompt` 0: all ids are the prompt."""
        self._new.append(NewRow(row, f"row {row}", choice, num_prompt or len(ids), 0, pack_ints(ids), sampling))
        self.rows[row] = DrivenRow(len(ids), 0)

    def end(self, row: int) -> None:
        """Free a row in the next plan; its blocks can be taken by that plan."""
        self._free += self.rows.pop(row).table
        self._freed.append(row)

    def plan(self, counts: dict[int, int]) -> StepPlan:
        """Write the plan that computes so many tokens of each row; a row that reaches its end samples."""
        append_row: list[int] = []
        append_block: list[int] = []
        flags: list[int] = []
        for row, count in counts.items():
            state = self.rows[row]
            state.num_computed += count
            while len(state.table) * self._block_size < state.num_computed:
                state.table.append(self._free.pop())
                append_row.append(row)
                append_block.append(state.table[-1])
            samples = state.num_computed == state.num_known
            state.num_known += samples
            flags.append(FLAG_SAMPLE if samples else 0)
        self._step += 1
        plan = StepPlan(
            epoch=self._epoch,
            step=self._step,
            row=pack_ints(counts.keys()),
            num_tokens=pack_ints(counts.values()),
            flags=pack_ints(flags),
            new_rows=tuple(self._new),
            append_row=pack_ints(append_row),
            append_block=pack_ints(append_block),
            freed_rows=pack_ints(self._freed),
        )
        self._new, self._freed = [], []
        return plan

    def chunks(self, row: int, size: int) -> list[dict[int, int]]:
        """Return the counts of the plans that prefill a row in chunks of a size."""
        left = self.rows[row].num_known - self.rows[row].num_computed
        return [{row: min(size, left - done)} for done in range(0, left, size)]


def tokens_of(result: StepResult) -> dict[int, int]:
    """Return the token of each row that drew one."""
    return dict(zip(unpack_ints(result.row), unpack_ints(result.token), strict=True))


def faults_of(result: StepResult) -> dict[int, int]:
    """Return the fault of each row that has one."""
    return dict(zip(unpack_ints(result.fault_row), unpack_ints(result.fault), strict=True))


def generate(
    runner: Runner,
    prompt: Sequence[int],
    num_tokens: int,
    sampling: RowSampling = GREEDY,
    *,
    chunk: int = 32,
    choice: int = 0,
    seed: int = 0,
) -> tuple[list[int], list[bytes]]:
    """Run one sequence alone on a runner without rows, and forget it.

    Returns:
        Its output ids, and the bits of the log-probabilities that came with each.
    """
    driver = PlanDriver.of(runner, seed)
    driver.begin(0, prompt, sampling, choice=choice)
    ids: list[int] = []
    bits: list[bytes] = []
    plans = driver.chunks(0, chunk)
    while len(ids) < num_tokens:
        result = runner.execute(driver.plan(plans.pop(0) if plans else {0: 1}))
        ids += tokens_of(result).values()
        bits += logprob_bits(result).values()
    runner.rows.clear()
    return ids, bits


def logprob_bits(result: StepResult) -> dict[int, bytes]:
    """Return, for each row that asked for log-probabilities, their exact bits."""
    return {
        entry.row: msgspec.msgpack.encode((entry.logprob, entry.rank, entry.top_ids, entry.top_logprobs))
        for entry in result.logprobs
    }
