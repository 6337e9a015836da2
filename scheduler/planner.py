"""The next plan: which sequences compute how many tokens, in which blocks, within one step's budget.

Running sequences come first, then waiting ones in the order of the policy. Nothing here asks whether tokens are a
prompt's, a decode's or recomputed: each sequence is given min(tokens not planned, chunk cap, budget left).
"""

from typing import NamedTuple

from octavo.scheduler.batch import Batch
from octavo.scheduler.blocks import BlockPool
from octavo.scheduler.config import Limits
from octavo.scheduler.errors import InvariantViolation
from octavo.scheduler.pipeline import PlannedRow, PlanRecord
from octavo.scheduler.policy import Policy
from octavo.scheduler.queues import WaitingQueue
from octavo.scheduler.sequence import Sequence, Status
from octavo.scheduler.tables import BlockTables
from octavo.wire.codec import MAX_MESSAGE_BYTES
from octavo.wire.columns import column_length, pack_ints
from octavo.wire.ids import BlockId, Row, SessionId
from octavo.wire.plan import FLAG_SAMPLE, NewRow, StepPlan

MAX_NEW_IDS = MAX_MESSAGE_BYTES // 8
"""Most column elements (4 bytes each) that the new rows of one plan bring, unless one row has more: half a message."""


class BuiltPlan(NamedTuple):
    """A plan to send, the record to match its result with, and the sequences that it names for the first time."""

    plan: StepPlan
    record: PlanRecord
    entered: list[Sequence]


class StepBudget:
    """Tokens that the plan in the making may still give."""

    def __init__(self, limits: Limits) -> None:
        self.num_left = limits.max_num_batched_tokens
        self._cap = limits.max_chunk_tokens

    def offer(self, wanted: int) -> int:
        """Return how many of `wanted` tokens one sequence can have."""
        return min(wanted, self._cap, self.num_left)

    def give(self, num_tokens: int) -> None:
        """Take tokens from what is left."""
        self.num_left -= num_tokens

    def refund(self, num_tokens: int) -> None:
        """Put tokens back."""
        self.num_left += num_tokens


class Planner:
    """Blocks, tables and rows of one worker, and the plans over them. It dies with the worker's epoch."""

    def __init__(
        self, epoch: SessionId, limits: Limits, waiting: WaitingQueue, policy: Policy, max_preemptions: int
    ) -> None:
        self.limits = limits
        self.num_preemptions = 0
        self.pool = BlockPool(limits.num_blocks)
        self.batch = Batch(limits.max_num_seqs)
        self._epoch = epoch
        self._tables = BlockTables(self.pool, limits.block_size)
        self._waiting = waiting
        self._policy = policy
        self._max_preemptions = max_preemptions

    def remove(self, sequence: Sequence, status: Status) -> None:
        """Take a running sequence's row and blocks; no later plan names it."""
        self.batch.leave(sequence, status)
        self._tables.release(sequence.number)

    def build(self, step: int, num_completed: int) -> BuiltPlan | None:
        """Build plan number `step`; None if nothing can be computed now.

        Args:
            step: its number.
            num_completed: newest plan whose result is back.
        """
        budget = StepBudget(self.limits)
        chosen: dict[Sequence, int] = {}
        self._choose_running(budget, chosen)
        entered = self._choose_waiting(budget, chosen, num_completed)
        if not chosen:
            return None
        return self._commit(step, chosen, entered)

    def check(self) -> None:
        """Prove blocks, tables and rows against each other.

        Raises:
            InvariantViolation: they contradict.
        """
        self.batch.check()
        self._tables.check({s.number: s.num_planned for s in self.batch})
        for s in self.batch:
            if not 0 <= s.num_confirmed <= s.num_planned <= s.num_known + s.num_sampling:
                raise InvariantViolation(
                    f"{s.request.name}/{s.choice}: {s.num_confirmed} confirmed, {s.num_planned} planned, "
                    f"{s.num_known} known, {s.num_sampling} being drawn"
                )
            if s.num_blocks_sent != len(self._tables.table(s.number)):
                raise InvariantViolation(f"{s.request.name}/{s.choice}: the worker does not know all of its blocks")
            if self._tables.is_protected(s.number) != self._needs_protection(s):
                raise InvariantViolation(f"{s.request.name}/{s.choice}: preempted {s.num_preemptions} times")

    def _choose_running(self, budget: StepBudget, chosen: dict[Sequence, int]) -> None:
        for sequence in list(self.batch):
            if budget.num_left == 0:
                return
            if sequence.row is None:  # preempted for one before it
                continue
            num_tokens = budget.offer(sequence.num_plannable)
            if num_tokens <= 0:
                continue
            end = sequence.num_planned + num_tokens
            if end > sequence.num_blocks_sent * self.limits.block_size:
                if not self._secure(sequence, end, budget, chosen):
                    continue
                self._tables.grow(sequence.number, end)
            budget.give(num_tokens)
            chosen[sequence] = num_tokens

    def _secure(self, sequence: Sequence, end: int, budget: StepBudget, chosen: dict[Sequence, int]) -> bool:
        """Preempt until a running sequence can grow to `end` tokens; False if it had to give way itself."""
        while not self._tables.can_grow(sequence.number, end):
            # A sequence that cannot grow is unprotected itself, so there is always a victim.
            victim = min(
                (s for s in self.batch if not self._tables.is_protected(s.number)), key=self._policy.yields_first
            )
            budget.refund(chosen.pop(victim, 0))
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.remove(sequence, Status.WAITING)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.add(sequence)

    def _choose_waiting(self, budget: StepBudget, chosen: dict[Sequence, int], num_completed: int) -> list[Sequence]:
        entered: list[Sequence] = []
        num_new_ids = 0
        num_owed: int | None = None
        while budget.num_left > 0 and self.batch.has_free_row and (head := self._waiting.head) is not None:
            if head.newest_step > num_completed:  # preempted, and ids of it are still under way
                break
            new_ids = _num_new_ids(head)
            if entered and num_new_ids + new_ids > MAX_NEW_IDS:
                break
            if num_owed is None:
                num_owed = self._num_owed_blocks(chosen)
            if not self._can_admit(head, num_owed):
                break
            num_tokens = budget.offer(head.num_known)
            self._waiting.remove(head)
            self.batch.enter(head)
            if self._needs_protection(head):
                self._tables.reserve(head.number, self._tables.blocks_for(head.max_stored_tokens))
            else:
                num_owed += self._tables.blocks_for(head.num_known) - self._tables.blocks_for(num_tokens)
            self._tables.grow(head.number, num_tokens)
            budget.give(num_tokens)
            chosen[head] = num_tokens
            entered.append(head)
            num_new_ids += new_ids
        return entered

    def _can_admit(self, sequence: Sequence, num_owed: int) -> bool:
        wanted = sequence.max_stored_tokens if self._needs_protection(sequence) else sequence.num_known
        return self._tables.blocks_for(wanted) + num_owed <= self._tables.num_available

    def _needs_protection(self, sequence: Sequence) -> bool:
        return sequence.num_preemptions >= self._max_preemptions

    def _num_owed_blocks(self, chosen: dict[Sequence, int]) -> int:
        """Return the blocks that running sequences need for tokens they know: admitted prompts are not squeezed out."""
        owed = 0
        for s in self.batch:
            if s.num_planned + chosen.get(s, 0) < s.num_known and not self._tables.is_protected(s.number):
                owed += self._tables.blocks_for(s.num_known) - len(self._tables.table(s.number))
        return owed

    def _commit(self, step: int, chosen: dict[Sequence, int], entered: list[Sequence]) -> BuiltPlan:
        rows: list[PlannedRow] = []
        append_row: list[Row] = []
        append_block: list[BlockId] = []
        sampled: list[Row] = []
        block_size = self.limits.block_size
        for sequence, num_tokens in chosen.items():
            if (row := sequence.row) is None:
                raise InvariantViolation(f"{sequence.request.name}/{sequence.choice} is planned, but has no row")
            sequence.num_planned += num_tokens
            if sequence.num_planned > sequence.num_blocks_sent * block_size:
                table = self._tables.table(sequence.number)
                new_blocks = table[sequence.num_blocks_sent :]
                append_row += [row] * len(new_blocks)
                append_block += new_blocks
                sequence.num_blocks_sent = len(table)
            sequence.newest_step = step
            samples = sequence.num_planned == sequence.num_known + sequence.num_sampling
            if samples:
                sequence.num_sampling += 1
                sampled.append(row)
            rows.append(PlannedRow(sequence, row, num_tokens, samples, sequence.residency))
        plan = StepPlan(
            epoch=self._epoch,
            step=step,
            row=pack_ints(r.row for r in rows),
            num_tokens=pack_ints(chosen.values()),
            flags=pack_ints(FLAG_SAMPLE if r.samples else 0 for r in rows),
            new_rows=tuple(_new_row(sequence) for sequence in entered),
            append_row=pack_ints(append_row),
            append_block=pack_ints(append_block),
            freed_rows=pack_ints(self.batch.take_freed_rows()),
        )
        return BuiltPlan(plan, PlanRecord(step, rows, pack_ints(sampled)), entered)


def _num_new_ids(sequence: Sequence) -> int:
    """Return the column elements (4 bytes each) that a sequence's new row brings: its ids and its sampling lists."""
    sampling = sequence.request.sampling
    columns = (
        sampling.allowed_token_ids,
        sampling.stop_token_ids,
        sampling.logit_bias_ids,
        sampling.logit_bias_values,
    )
    return sequence.num_known + sum(map(column_length, columns))


def _new_row(sequence: Sequence) -> NewRow:
    request = sequence.request
    if sequence.row is None:
        raise InvariantViolation(f"{request.name}/{sequence.choice} enters, but has no row")
    return NewRow(
        row=sequence.row,
        request=request.name,
        choice=sequence.choice,
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=0,
        token_ids=sequence.token_ids(),
        sampling=request.sampling,
    )
