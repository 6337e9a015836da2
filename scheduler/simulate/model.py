"""A fake worker without tensors: it applies plans, and *reads its tokens through the block tables*.

Each slot of a block stores the id that was written there, so a wrong table, a block given to two rows, or a slot read
before it was written yields another token or a PlanError at once. It is as strict as a worker may be: whatever a plan
must not do raises PlanError, a write to a block that two tables name among it.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.wire.columns import pack_floats, pack_ints, unpack_ints
from octavo.wire.handshake import WorkerFacts
from octavo.wire.held_rows import HeldRow, prompt_digest
from octavo.wire.ids import NULL_BLOCK
from octavo.wire.plan import FAULT_NONFINITE_LOGITS, FLAG_SAMPLE, RowLogprobs, RowSampling, StepPlan, StepResult
from octavo.wire.prompt_logprobs import PromptLogprobs

POISON = -1
"""In a slot that was not written since its block was given out."""

GARBAGE = -2
"""In a slot that a sick row wrote."""

Rule = Callable[[Sequence[int], int, int], int]
"""(token ids from position 0 on, seed, choice) -> next id."""

FaultRule = Callable[[Sequence[int], int, int], bool]
"""(token ids from position 0 on, seed, choice) -> whether what the row writes is broken."""


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


@dataclass
class MirrorRow:
    """What the worker holds of one row."""

    request: str
    choice: int
    num_prompt: int
    sampling: RowSampling
    ids: list[int]
    num_computed: int
    table: list[int] = field(default_factory=list)
    stop_ids: Sequence[int] = ()
    first_told: int = 0
    is_lost: bool = False
    """It faulted, or is a beam: nobody goes on from it in another session."""


class FakeModel:
    """A worker's cache and, until `forget`, its rows of one session; plans come in order through `execute`.

    A row whose fault rule holds is sick: what it writes is GARBAGE, as if it were NaN, and so is every row that reads
    it. Such rows fault when they sample.

    Args:
        facts: bounds that plans must respect.
        rule: the model.
        fault_rule: which rows are sick.
    """

    def __init__(self, facts: WorkerFacts, rule: Rule, fault_rule: FaultRule | None = None) -> None:
        self.facts = facts
        self.rows: dict[int, MirrorRow] = {}
        self.num_steps = 0
        self.computed_tokens = 0  # of all plans, run-ahead and recomputed ones included
        self._rule = rule
        self._fault_rule = fault_rule
        self._blocks = [[POISON] * facts.block_size for _ in range(facts.num_blocks)]  # ids that were written there
        self._holders = [0] * facts.num_blocks  # tables that name each block
        self._joined: Counter[int] = Counter()  # of these, those that found it in this very plan

    def execute(self, plan: StepPlan) -> StepResult:
        """Apply a plan and compute its result.

        Raises:
            PlanError: the plan breaks the contract.
        """
        if plan.step != self.num_steps + 1:
            raise PlanError(f"plan {plan.step} came after plan {self.num_steps}")
        self.num_steps = plan.step
        self._joined.clear()
        self._apply_rows(plan)
        self._apply_copies(plan)
        self._apply_appends(plan)
        return self._compute(plan)

    def report(self) -> list[HeldRow]:
        """Return what can be gone on from in another session."""
        return [
            HeldRow(
                state.request,
                state.choice,
                state.num_prompt,
                prompt_digest(pack_ints(state.ids[: state.num_prompt])),
                pack_ints(state.ids[state.num_prompt :]),
                state.num_computed,
                pack_ints(state.table),
            )
            for state in self.rows.values()
            if state.num_computed and not state.is_lost and not self._has_to_tell(state)
        ]

    def forget(self, kept: Sequence[HeldRow]) -> None:
        """Forget every row: the session is over. Of the cache only the blocks of some rows stay as they are."""
        blocks = {block for row in kept for block in unpack_ints(row.block_table)}
        for block in range(self.facts.num_blocks):
            if block not in blocks:
                self._blocks[block] = [POISON] * self.facts.block_size
        self.rows.clear()
        self._holders = [0] * self.facts.num_blocks
        self.num_steps = 0

    def _has_to_tell(self, state: MirrorRow) -> bool:
        first = max(state.num_computed + 1, state.first_told)
        return state.sampling.prompt_logprobs >= 0 and first < state.num_prompt

    def _apply_rows(self, plan: StepPlan) -> None:
        for row in unpack_ints(plan.freed_rows):
            if row not in self.rows:
                raise PlanError(f"plan {plan.step} frees row {row}, which is not in use")
            for block in self.rows.pop(row).table:
                self._holders[block] -= 1
        if plan.beam_row:
            self._apply_beams(plan)
        for new in plan.new_rows:
            self._check_free_row(plan, new.row, new.request)
            ids = list(unpack_ints(new.token_ids))
            if not 0 < new.num_prompt_tokens <= len(ids) or not 0 <= new.num_computed_tokens < len(ids):
                raise PlanError(f"odd counts in {new}")
            stop_ids = unpack_ints(new.sampling.stop_token_ids)
            self.rows[new.row] = MirrorRow(
                new.request,
                new.choice,
                new.num_prompt_tokens,
                new.sampling,
                ids,
                new.num_computed_tokens,
                stop_ids=stop_ids,
                first_told=max(1, new.first_prompt_logprob),
            )
            tells = new.sampling.prompt_logprobs >= 0 and new.first_prompt_logprob < new.num_prompt_tokens
            if tells and new.num_computed_tokens >= self.rows[new.row].first_told:
                raise PlanError(f"row {new.row} is to tell what was computed before it")

    def _apply_beams(self, plan: StepPlan) -> None:
        columns = map(unpack_ints, (plan.beam_row, plan.beam_src, plan.beam_token))
        beams = [(row, self._live(plan, source), token) for row, source, token in zip(*columns, strict=True)]
        for row, state, token in beams:
            if not 0 <= token < self.facts.vocab_size:
                raise PlanError(f"plan {plan.step} lets row {row} go on with id {token}")
            if len(state.ids) != state.num_computed + 1 or len(state.ids) <= state.num_prompt:
                raise PlanError(f"plan {plan.step} lets row {row} go on from {state}, which has not drawn")
            if row not in self.rows:
                self._check_free_row(plan, row, state.request)
                self._copy_row(state, row, state.choice)
            elif self.rows[row] is not state:
                raise PlanError(f"plan {plan.step} lets row {row} go on as another one, but it is in use")
        for row, _, token in beams:
            self.rows[row].ids[-1] = token
            self.rows[row].is_lost = True

    def _copy_row(self, state: MirrorRow, target: int, choice: int) -> None:
        self.rows[target] = MirrorRow(
            state.request,
            choice,
            state.num_prompt,
            state.sampling,
            list(state.ids),
            state.num_computed,
            list(state.table),
            state.stop_ids,
            is_lost=state.is_lost,
        )
        for block in state.table:
            self._holders[block] += 1

    def _check_free_row(self, plan: StepPlan, row: int, request: str) -> None:
        if row in self.rows:
            raise PlanError(f"plan {plan.step} gives row {row} to {request}, but it is in use")
        if not 0 <= row < self.facts.max_num_seqs:
            raise PlanError(f"row {row} of {self.facts.max_num_seqs}")

    def _apply_copies(self, plan: StepPlan) -> None:
        contents: list[tuple[int, list[int]]] = []
        columns = (plan.copy_row, plan.copy_src, plan.copy_dst)
        for row, source, target in zip(*map(unpack_ints, columns), strict=True):
            state = self._live(plan, row)
            if not state.table or state.table[-1] != source:
                raise PlanError(f"plan {plan.step} copies block {source} of row {row}, whose table is {state.table}")
            self._check_fresh(plan, row, target)
            contents.append((target, list(self._blocks[source])))
            self._holders[source] -= 1
            self._holders[target] += 1
            state.table[-1] = target
        for target, content in contents:
            self._blocks[target] = content

    def _apply_appends(self, plan: StepPlan) -> None:
        size = self.facts.block_size
        for row, block in zip(unpack_ints(plan.append_row), unpack_ints(plan.append_block), strict=True):
            state = self._live(plan, row)
            if block in state.table:
                raise PlanError(f"block {block} is in the table of row {row} already")
            if len(state.table) * size >= state.num_computed:
                self._check_fresh(plan, row, block)
                self._blocks[block] = [POISON] * size
            elif (len(state.table) + 1) * size > state.num_computed:
                self._check_fresh(plan, row, block)  # adopted: it goes on to write there
            elif not NULL_BLOCK < block < self.facts.num_blocks:
                raise PlanError(f"block {block} of {self.facts.num_blocks}")
            else:
                self._joined[block] += 1
            self._holders[block] += 1
            state.table.append(block)

    def _check_fresh(self, plan: StepPlan, row: int, block: int) -> None:
        if not NULL_BLOCK < block < self.facts.num_blocks:
            raise PlanError(f"block {block} of {self.facts.num_blocks}")
        if self._holders[block]:
            raise PlanError(f"plan {plan.step} gives block {block} to row {row}, but it is in use")

    def _live(self, plan: StepPlan, row: int) -> MirrorRow:
        if row not in self.rows:
            raise PlanError(f"plan {plan.step} names row {row}, which is not in use")
        return self.rows[row]

    def _compute(self, plan: StepPlan) -> StepResult:
        rows, counts, flags = unpack_ints(plan.row), unpack_ints(plan.num_tokens), unpack_ints(plan.flags)
        if not rows or sum(counts) > self.facts.max_num_batched_tokens:
            raise PlanError(f"plan {plan.step} computes {sum(counts)} of {self.facts.max_num_batched_tokens} tokens")
        self.computed_tokens += sum(counts)
        begins = {row: self._live(plan, row).num_computed for row in rows}
        for row, count, row_flags in zip(rows, counts, flags, strict=True):
            self._write(plan, row, count, row_flags)
        seen = {row: self._read(row) for row in rows}  # after all were written: a layer attends last
        told = {row: self._tell(row, begins[row], seen[row]) for row in rows if self._tells(row, begins[row])}
        sampling = [row for row, row_flags in zip(rows, flags, strict=True) if row_flags & FLAG_SAMPLE]
        for source, target, choice in zip(
            *map(unpack_ints, (plan.fork_src, plan.fork_dst, plan.fork_choice)), strict=True
        ):
            if source not in sampling:
                raise PlanError(f"plan {plan.step} forks row {source}, which does not sample")
            self._fork(plan, source, target, choice)
            seen[target] = seen[source]
            sampling.append(target)
        return self._sample(plan, sampling, seen, told)

    def _write(self, plan: StepPlan, row: int, count: int, flags: int) -> None:
        state = self._live(plan, row)
        begin, end = state.num_computed, state.num_computed + count
        if end > len(state.ids):
            raise PlanError(f"plan {plan.step} computes {end} tokens of row {row}, which has {len(state.ids)}")
        if bool(flags & FLAG_SAMPLE) != (end == len(state.ids)):
            raise PlanError(f"plan {plan.step}, row {row}: flags {flags} at token {end} of {len(state.ids)}")
        size = self.facts.block_size
        if len(state.table) != -(-end // size):
            raise PlanError(f"row {row} has {len(state.table)} blocks of {size} for {end} tokens")
        sick = self._fault_rule is not None and self._fault_rule(state.ids[:end], state.sampling.seed, state.choice)
        for position in range(begin, end):
            block = state.table[position // size]
            if self._holders[block] - self._joined[block] != 1:
                raise PlanError(f"row {row} writes position {position} to block {block}, which others share")
            self._blocks[block][position % size] = GARBAGE if sick else state.ids[position]
        state.num_computed = end

    def _read(self, row: int) -> list[int]:
        state = self.rows[row]
        seen: list[int] = []
        for block in state.table:
            seen += self._blocks[block]
        del seen[state.num_computed :]
        if seen != state.ids[: state.num_computed]:
            for position, (found, expected) in enumerate(zip(seen, state.ids, strict=False)):
                if found == POISON:
                    raise PlanError(f"row {row} reads position {position} before it was written")
                if found not in (expected, GARBAGE):
                    raise PlanError(f"row {row} reads {found} at position {position}, its own id is {expected}")
        return seen

    def _fork(self, plan: StepPlan, source: int, target: int, choice: int) -> None:
        state = self.rows[source]
        self._check_free_row(plan, target, state.request)
        self._copy_row(state, target, choice)

    def _tells(self, row: int, begin: int) -> bool:
        state = self.rows[row]
        first, end = max(begin + 1, state.first_told), min(state.num_computed + 1, state.num_prompt)
        return state.sampling.prompt_logprobs >= 0 and first < end

    def _tell(self, row: int, begin: int, seen: list[int]) -> PromptLogprobs | None:
        """Return what a row tells of its prompt after it computed from `begin` on; None if its values are broken."""
        state = self.rows[row]
        first, end = max(begin + 1, state.first_told), min(state.num_computed + 1, state.num_prompt)
        if GARBAGE in seen:
            return None
        return told_of_prompt(row, state.ids, first, end, state.sampling.prompt_logprobs, self.facts.vocab_size)

    def _sample(
        self,
        plan: StepPlan,
        rows: list[int],
        seen: dict[int, list[int]],
        told: dict[int, PromptLogprobs | None],
    ) -> StepResult:
        drawn: list[tuple[int, int]] = []
        faults: list[int] = [row for row, part in told.items() if part is None and row not in rows]
        logprobs: list[RowLogprobs] = []
        for row in rows:
            state = self.rows[row]
            sampling = state.sampling
            if GARBAGE in seen[row]:
                state.is_lost = True
                faults.append(row)
                state.ids.append(0)
                continue
            num_output = len(state.ids) - state.num_prompt
            masked = state.stop_ids if num_output < sampling.min_tokens else ()
            token = draw(self._rule(seen[row], sampling.seed, state.choice), masked, self.facts.vocab_size)
            state.ids.append(token)
            drawn.append((row, token))
            if sampling.logprobs >= 0:
                top = candidates(token, seen[row], sampling.logprobs, self.facts.vocab_size)
                ids, values = pack_ints([id_ for id_, _ in top]), pack_floats([value for _, value in top])
                logprobs.append(RowLogprobs(row, -0.5, 1, ids, values))
        return StepResult(
            epoch=plan.epoch,
            step=plan.step,
            row=pack_ints([row for row, _ in drawn]),
            token=pack_ints([token for _, token in drawn]),
            fault_row=pack_ints(faults),
            fault=pack_ints([FAULT_NONFINITE_LOGITS] * len(faults)),
            logprobs=tuple(logprobs),
            compute_us=1,
            prompt_logprobs=tuple(part for part in told.values() if part is not None),
        )


def candidates(token: int, ids: Sequence[int], count: int, vocab_size: int) -> list[tuple[int, float]]:
    """Return the likeliest ids and their log-probabilities, the drawn one first, which depend on every id and its place."""
    crc = zlib.crc32(pack_ints(ids))
    return [((token + i) % vocab_size, -0.5 - i / 16 - (crc >> i % 16 & 0xFF) / 512) for i in range(count)]


def told_of_prompt(of: int, ids: Sequence[int], first: int, end: int, num_top: int, vocab_size: int) -> PromptLogprobs:
    """Return what is told of the positions from `first` to before `end`, which depends on every token up to each."""
    marks: list[int] = []
    mark = zlib.crc32(pack_ints(ids[:first]))
    for position in range(first, end):
        mark = zlib.crc32(pack_ints([ids[position]]), mark)
        marks.append(mark)
    return PromptLogprobs(
        of,
        first,
        pack_floats([-(mark % 4096) / 16 for mark in marks]),
        pack_ints([1 + mark % vocab_size for mark in marks]),
        pack_ints([(mark + i) % vocab_size for mark in marks for i in range(num_top)]),
        pack_floats([-(mark % 256 + i) / 8 for mark in marks for i in range(num_top)]),
    )


def draw(token: int, masked: Sequence[int], vocab_size: int) -> int:
    """Return the token, or the next one that is not masked."""
    while token in masked:
        token = (token + 1) % vocab_size
    return token
