"""A scheduler in miniature for one worker's tests: keeps tables, counts and free blocks, and writes plans.

It shares blocks when told to, and copies a block before a row writes where others read.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import msgspec

from octavo.wire.columns import pack_ints, unpack_ints
from octavo.wire.held_rows import HeldRow
from octavo.wire.plan import FLAG_SAMPLE, NewRow, RowSampling, StepPlan, StepResult
from octavo.worker.interface import Runner

GREEDY = RowSampling(seed=0, temperature=0.0)


@dataclass
class DrivenRow:
    """What the driver knows of a row; `num_known` counts ids that may not have arrived yet."""

    num_known: int
    num_computed: int
    table: list[int] = field(default_factory=list)


@dataclass
class _Columns:
    """Columns of the plan that is being written."""

    append: list[tuple[int, int]] = field(default_factory=list)  # row, block
    copy: list[tuple[int, int, int]] = field(default_factory=list)  # row, source, target


class PlanDriver:
    """Writes valid plans; blocks are dealt in a shuffled order, so that tables matter."""

    def __init__(self, block_size: int, num_blocks: int, *, epoch: int = 1, seed: int = 0) -> None:
        self.rows: dict[int, DrivenRow] = {}
        self._block_size = block_size
        self._free = list(range(1, num_blocks))
        Random(seed).shuffle(self._free)
        self._num_holders: Counter[int] = Counter()
        self._epoch = epoch
        self._step = 0
        self._new: list[NewRow] = []
        self._freed: list[int] = []
        self._cached_from: dict[int, DrivenRow] = {}
        self._forks: list[tuple[int, int, int]] = []
        self._beams: list[tuple[int, int, int]] = []

    @classmethod
    def of(cls, runner: Runner, seed: int = 0) -> "PlanDriver":
        """Return a driver for a runner without rows."""
        limits = runner.rows.limits
        return cls(limits.block_size, limits.num_blocks, seed=seed)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that the next plan can give out."""
        return len(self._free)

    def num_blocks_for(self, row: int, count: int) -> int:
        """Return how many blocks the next plan takes to compute so many tokens of a live row, at most."""
        state = self.rows[row]
        copies = state.num_computed % self._block_size > 0 and self._num_holders[state.table[-1]] > 1
        return -(-(state.num_computed + count) // self._block_size) - len(state.table) + copies

    def begin(
        self,
        row: int,
        ids: Sequence[int],
        sampling: RowSampling = GREEDY,
        *,
        num_prompt: int = 0,
        choice: int = 0,
        num_cached: int = 0,
        cached_from: DrivenRow | None = None,
    ) -> None:
        """Give a row to a sequence in the next plan; `num_prompt` 0: all ids are the prompt.

        The first `num_cached` tokens, whole blocks, are those of another row: a live one that comes earlier in that
        plan, or one whose blocks nobody has taken since. What a session before has left is for `adopt`.
        """
        num_prompt = num_prompt or len(ids)
        self._new.append(NewRow(row, f"row {row}", choice, num_prompt, num_cached, pack_ints(ids), sampling))
        self.rows[row] = DrivenRow(len(ids), num_cached)
        if cached_from is not None:
            self._cached_from[row] = cached_from

    def adopt(self, row: int, held: HeldRow, ids: Sequence[int], sampling: RowSampling, *, num_cached: int = 0) -> None:
        """Give a row to a sequence that goes on, with all its ids, from what another session has left in the cache.

        `num_cached` 0: from all that is computed. Blocks that are not its own, the next plans take after all others.
        """
        num_cached = num_cached or held.num_computed_tokens
        table = list(unpack_ints(held.block_table))
        self._free = [*table, *(block for block in self._free if block not in table)]
        left = DrivenRow(len(ids), held.num_computed_tokens, table)
        num_prompt = held.num_prompt_tokens
        self.begin(
            row, ids, sampling, num_prompt=num_prompt, choice=held.choice, num_cached=num_cached, cached_from=left
        )

    def end(self, row: int) -> None:
        """Free a row in the next plan; blocks that nobody else names can be taken by that plan."""
        for block in self.rows.pop(row).table:
            self._drop(block)
        self._freed.append(row)

    def fork(self, source: int, target: int, choice: int) -> None:
        """Start a row from one that samples in the next plan."""
        self._forks.append((source, target, choice))

    def go_on(self, row: int, source: int, token: int) -> None:
        """Let a row go on with an id in the next plan, itself or, if it is free, from another one that has drawn."""
        self._beams.append((row, source, token))
        if row != source:
            state = self.rows[source]
            self.rows[row] = DrivenRow(state.num_known, state.num_computed, list(state.table))
            self._num_holders.update(state.table)

    def plan(self, counts: dict[int, int]) -> StepPlan:
        """Write the plan that computes so many tokens of each row; a row that reaches its end samples."""
        columns = _Columns()
        flags: list[int] = []
        for row, count in counts.items():
            state = self.rows[row]
            self._extend(row, count, columns)
            samples = state.num_computed == state.num_known
            state.num_known += samples
            flags.append(FLAG_SAMPLE if samples else 0)
        for source, target, _ in self._forks:
            state = self.rows[source]
            self.rows[target] = DrivenRow(state.num_known, state.num_computed, list(state.table))
            self._num_holders.update(state.table)
        self._step += 1
        plan = StepPlan(
            epoch=self._epoch,
            step=self._step,
            row=pack_ints(counts.keys()),
            num_tokens=pack_ints(counts.values()),
            flags=pack_ints(flags),
            new_rows=tuple(self._new),
            copy_row=pack_ints(row for row, _, _ in columns.copy),
            copy_src=pack_ints(source for _, source, _ in columns.copy),
            copy_dst=pack_ints(target for _, _, target in columns.copy),
            append_row=pack_ints(row for row, _ in columns.append),
            append_block=pack_ints(block for _, block in columns.append),
            fork_src=pack_ints(source for source, _, _ in self._forks),
            fork_dst=pack_ints(target for _, target, _ in self._forks),
            fork_choice=pack_ints(choice for _, _, choice in self._forks),
            freed_rows=pack_ints(self._freed),
            beam_row=pack_ints(row for row, _, _ in self._beams),
            beam_src=pack_ints(source for _, source, _ in self._beams),
            beam_token=pack_ints(token for _, _, token in self._beams),
        )
        self._new, self._freed, self._forks, self._beams = [], [], [], []
        return plan

    def _extend(self, row: int, count: int, columns: _Columns) -> None:
        state = self.rows[row]
        if row in self._cached_from:
            cached = self._cached_from.pop(row).table[: -(-state.num_computed // self._block_size)]
            for block in cached:
                if not self._num_holders[block]:
                    self._free.remove(block)
                self._hold(row, block, columns)
        if state.num_computed % self._block_size and self._num_holders[state.table[-1]] > 1:
            source, target = state.table[-1], self._free.pop()
            columns.copy.append((row, source, target))
            self._num_holders[target] = 1
            state.table[-1] = target
            self._drop(source)
        state.num_computed += count
        while len(state.table) * self._block_size < state.num_computed:
            self._hold(row, self._free.pop(), columns)

    def _hold(self, row: int, block: int, columns: _Columns) -> None:
        self._num_holders[block] += 1
        self.rows[row].table.append(block)
        columns.append.append((row, block))

    def _drop(self, block: int) -> None:
        self._num_holders[block] -= 1
        if not self._num_holders[block]:
            self._free.append(block)

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
    runner.clear()
    return ids, bits


def logprob_bits(result: StepResult) -> dict[int, bytes]:
    """Return, for each row that asked for log-probabilities, their exact bits."""
    return {
        entry.row: msgspec.msgpack.encode((entry.logprob, entry.rank, entry.top_ids, entry.top_logprobs))
        for entry in result.logprobs
    }
