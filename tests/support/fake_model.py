"""A worker's mirror without tensors: it applies plans, and *reads its tokens through the block tables*.

Each slot of a block stores the id that was written there, so a wrong table, a block given to two rows, or a slot read
before it was written yields another token or a PlanError at once. It is as strict as a worker may be: whatever a plan
must not do raises PlanError.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.wire.columns import pack_floats, pack_ints, unpack_ints
from octavo.wire.handshake import WorkerFacts
from octavo.wire.ids import NULL_BLOCK
from octavo.wire.plan import FAULT_NONFINITE_LOGITS, FLAG_SAMPLE, NewRow, RowLogprobs, StepPlan, StepResult

POISON = -1

Rule = Callable[[Sequence[int], int, int], int]
"""(token ids from position 0 on, seed, choice) -> next id."""

FaultRule = Callable[[Sequence[int], int, int], bool]
"""(token ids from position 0 on, seed, choice) -> whether the row's logits are broken."""


class PlanError(AssertionError):
    """A plan breaks the contract between scheduler and worker."""


def make_facts(
    *,
    num_blocks: int = 65,
    block_size: int = 16,
    vocab_size: int = 1000,
    max_model_len: int = 512,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 256,
) -> WorkerFacts:
    """Return facts of a small worker."""
    return WorkerFacts(
        num_blocks=num_blocks,
        block_size=block_size,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        backend="fake",
        device="none",
        dtype="int32",
    )


def hash_rule(vocab_size: int) -> Rule:
    """Return the rule next = H(all tokens so far, seed, choice), which depends on every token and its place."""

    def rule(ids: Sequence[int], seed: int, choice: int) -> int:
        return zlib.crc32(pack_ints(ids), zlib.crc32(f"{seed}/{choice}".encode())) % vocab_size

    return rule


def solo_run(
    rule: Rule,
    prompt: Sequence[int],
    *,
    seed: int,
    choice: int,
    max_output: int,
    stop_ids: Sequence[int] = (),
    min_tokens: int = 0,
    vocab_size: int,
) -> list[int]:
    """Return what a request gets when it is alone in the world: the reference for every schedule."""
    output: list[int] = []
    while len(output) < max_output:
        masked = stop_ids if len(output) < min_tokens else ()
        output.append(_draw(rule([*prompt, *output], seed, choice), masked, vocab_size))
        if output[-1] in stop_ids and len(output) > min_tokens:
            break
    return output


@dataclass
class MirrorRow:
    """What the worker holds of one row."""

    new_row: NewRow
    ids: list[int]
    num_computed: int
    table: list[int] = field(default_factory=list)
    stop_ids: Sequence[int] = ()


class FakeModel:
    """One epoch of a worker; plans come in order through `execute`.

    Args:
        facts: bounds that plans must respect.
        rule: the model.
        fault_rule: which rows fault instead of drawing a token.
    """

    def __init__(self, facts: WorkerFacts, rule: Rule, fault_rule: FaultRule | None = None) -> None:
        self.facts = facts
        self.rows: dict[int, MirrorRow] = {}
        self.num_steps = 0
        self.computed_tokens = 0  # of all plans, run-ahead and recomputed ones included
        self._rule = rule
        self._fault_rule = fault_rule
        self._slots = [POISON] * (facts.num_blocks * facts.block_size)
        self._owner: dict[int, int] = {}  # block -> row

    def execute(self, plan: StepPlan) -> StepResult:
        """Apply a plan and compute its result.

        Raises:
            PlanError: the plan breaks the contract.
        """
        if plan.step != self.num_steps + 1:
            raise PlanError(f"plan {plan.step} came after plan {self.num_steps}")
        self.num_steps = plan.step
        self._apply_rows(plan)
        self._apply_blocks(plan)
        return self._compute(plan)

    def _apply_rows(self, plan: StepPlan) -> None:
        for row in unpack_ints(plan.freed_rows):
            if row not in self.rows:
                raise PlanError(f"plan {plan.step} frees row {row}, which is not in use")
            for block in self.rows.pop(row).table:
                del self._owner[block]
        for new in plan.new_rows:
            if new.row in self.rows:
                raise PlanError(f"plan {plan.step} gives row {new.row} to {new.request}, but it is in use")
            if not 0 <= new.row < self.facts.max_num_seqs:
                raise PlanError(f"row {new.row} of {self.facts.max_num_seqs}")
            ids = list(unpack_ints(new.token_ids))
            if not 0 < new.num_prompt_tokens <= len(ids) or new.num_computed_tokens != 0:
                raise PlanError(f"odd counts in {new}")
            self.rows[new.row] = MirrorRow(new, ids, 0, [], unpack_ints(new.sampling.stop_token_ids))

    def _apply_blocks(self, plan: StepPlan) -> None:
        if plan.fork_src or plan.fork_dst or plan.copy_src or plan.copy_dst:
            raise PlanError("forks and copies are not in use")
        size = self.facts.block_size
        for row, block in zip(unpack_ints(plan.append_row), unpack_ints(plan.append_block), strict=True):
            if row not in self.rows:
                raise PlanError(f"plan {plan.step} appends block {block} to row {row}, which is not in use")
            if not NULL_BLOCK < block < self.facts.num_blocks:
                raise PlanError(f"block {block} of {self.facts.num_blocks}")
            if block in self._owner:
                raise PlanError(f"block {block} given to row {row} belongs to row {self._owner[block]}")
            self._owner[block] = row
            self.rows[row].table.append(block)
            self._slots[block * size : (block + 1) * size] = [POISON] * size

    def _compute(self, plan: StepPlan) -> StepResult:
        rows, counts, flags = unpack_ints(plan.row), unpack_ints(plan.num_tokens), unpack_ints(plan.flags)
        if not rows or sum(counts) > self.facts.max_num_batched_tokens:
            raise PlanError(f"plan {plan.step} computes {sum(counts)} of {self.facts.max_num_batched_tokens} tokens")
        self.computed_tokens += sum(counts)
        drawn: list[tuple[int, int]] = []
        faults: list[int] = []
        logprobs: list[RowLogprobs] = []
        for row, count, row_flags in zip(rows, counts, flags, strict=True):
            state = self._write(plan, row, count, row_flags)
            seen = self._read(row, state)
            if not row_flags & FLAG_SAMPLE:
                continue
            new = state.new_row
            if self._fault_rule is not None and self._fault_rule(seen, new.sampling.seed, new.choice):
                faults.append(row)
                state.ids.append(0)
                continue
            num_output = len(state.ids) - new.num_prompt_tokens
            masked = state.stop_ids if num_output < new.sampling.min_tokens else ()
            token = _draw(self._rule(seen, new.sampling.seed, new.choice), masked, self.facts.vocab_size)
            state.ids.append(token)
            drawn.append((row, token))
            if new.sampling.logprobs >= 0:
                logprobs.append(self._logprobs(row, token, new.sampling.logprobs))
        return StepResult(
            epoch=plan.epoch,
            step=plan.step,
            row=pack_ints([row for row, _ in drawn]),
            token=pack_ints([token for _, token in drawn]),
            fault_row=pack_ints(faults),
            fault=pack_ints([FAULT_NONFINITE_LOGITS] * len(faults)),
            logprobs=tuple(logprobs),
            compute_us=1,
        )

    def _write(self, plan: StepPlan, row: int, count: int, flags: int) -> MirrorRow:
        if row not in self.rows:
            raise PlanError(f"plan {plan.step} computes row {row}, which is not in use")
        state = self.rows[row]
        end = state.num_computed + count
        if end > len(state.ids):
            raise PlanError(f"plan {plan.step} computes {end} tokens of row {row}, which has {len(state.ids)}")
        if bool(flags & FLAG_SAMPLE) != (end == len(state.ids)):
            raise PlanError(f"plan {plan.step}, row {row}: flags {flags} at token {end} of {len(state.ids)}")
        size = self.facts.block_size
        if len(state.table) != -(-end // size):
            raise PlanError(f"row {row} has {len(state.table)} blocks of {size} for {end} tokens")
        for position in range(state.num_computed, end):
            self._slots[state.table[position // size] * size + position % size] = state.ids[position]
        state.num_computed = end
        return state

    def _read(self, row: int, state: MirrorRow) -> list[int]:
        size = self.facts.block_size
        seen: list[int] = []
        for block in state.table:
            seen += self._slots[block * size : (block + 1) * size]
        del seen[state.num_computed :]
        if POISON in seen:
            raise PlanError(f"row {row} reads position {seen.index(POISON)} before it was written")
        return seen

    def _logprobs(self, row: int, token: int, count: int) -> RowLogprobs:
        top = [(token + i) % self.facts.vocab_size for i in range(count)]
        return RowLogprobs(row, -0.5, 1, pack_ints(top), pack_floats([-0.5 - i for i in range(count)]))


def _draw(token: int, masked: Sequence[int], vocab_size: int) -> int:
    while token in masked:
        token = (token + 1) % vocab_size
    return token
