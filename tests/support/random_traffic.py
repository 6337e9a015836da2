"""Endless random traffic for one runner: sampling of every kind, chunks, hits, forks, ends, preemptions."""

from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random

from octavo.wire.columns import pack_floats, pack_ints
from octavo.wire.plan import RowSampling, StepPlan, StepResult
from octavo.worker.interface import Runner
from octavo.worker.mirror import RowLimits
from tests.support.plan_driver import GREEDY, PlanDriver, faults_of, tokens_of

SAMPLINGS = (
    GREEDY,
    RowSampling(seed=9, temperature=0.8),
    RowSampling(seed=11, temperature=0.9, top_k=20, top_p=0.9, min_p=0.01),
    RowSampling(seed=2**63 + 1, temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, logprobs=3),
    RowSampling(
        seed=4,
        min_tokens=3,
        stop_token_ids=pack_ints([5, 6]),
        allowed_token_ids=pack_ints(range(40)),
        logit_bias_ids=pack_ints([9, 60]),
        logit_bias_values=pack_floats([2.0, 100.0]),
    ),
)
LONGEST_PROMPT, LONGEST_OUTPUT = 40, 40


@dataclass
class _Sequence:
    prompt: list[int]
    sampling: RowSampling
    choice: int
    num_wanted: int
    num_drawn: int = 0  # in plans
    output: list[int] = field(default_factory=list)  # that has arrived


class RandomTraffic:
    """Writes plans for a runner without rows; it must be told every result, in order.

    Attributes:
        driver: what the rows hold after the last plan.
        seen: how often each kind of thing happened.
    """

    def __init__(self, limits: RowLimits, seed: int) -> None:
        self.driver = PlanDriver(limits.block_size, limits.num_blocks, seed=seed)
        self.seen: Counter[str] = Counter()
        self._limits = limits
        self._random = Random(seed)
        self._live: dict[int, _Sequence] = {}
        self._preempted: list[_Sequence] = []
        self._planned: deque[dict[int, _Sequence]] = deque()  # who owns the rows of plans without a result

    def next_plan(self) -> StepPlan:
        """Write a plan."""
        for row, sequence in list(self._live.items()):
            if sequence.num_drawn >= sequence.num_wanted or self._random.random() < 0.01:
                self._end(row, "ends")
        counts = self._go_on()
        self._begin(counts)
        self._fork(counts)
        plan = self.driver.plan(counts)
        self._planned.append(dict(self._live))
        return plan

    def note(self, result: StepResult) -> None:
        """Take the ids of the next result."""
        assert faults_of(result) == {}
        owners = self._planned.popleft()
        for row, token in tokens_of(result).items():
            owners[row].output.append(token)

    def _end(self, row: int, why: str) -> _Sequence:
        self.seen[why] += 1
        self.driver.end(row)
        return self._live.pop(row)

    def _go_on(self) -> dict[int, int]:
        """Give live rows tokens, and preempt some for which there are no blocks."""
        counts: dict[int, int] = {}
        room, budget = self.driver.num_free_blocks, self._limits.max_num_batched_tokens
        for row in list(self._live):
            state = self.driver.rows[row]
            left = min(state.num_known - state.num_computed, budget)
            if left == 0 or self._random.random() < 0.1:
                continue
            count = self._random.randint(1, left)
            needed = self.driver.num_blocks_for(row, count)
            if needed > room:
                if self._random.random() < 0.5:
                    self._preempted.append(self._end(row, "preemptions"))
                continue
            counts[row] = count
            room, budget = room - needed, budget - count
            self._draw_if_last(row, count)
        return counts

    def _begin(self, counts: dict[int, int]) -> None:
        """Let rows begin: those that were preempted, once all their ids are here, and new ones."""
        for row in range(self._limits.max_num_seqs):
            if row in self.driver.rows or self._random.random() < 0.5:
                continue
            room = self.driver.num_free_blocks - sum(self.driver.num_blocks_for(r, n) for r, n in counts.items())
            budget = self._limits.max_num_batched_tokens - sum(counts.values())
            back = next((s for s in self._preempted if len(s.output) == s.num_drawn), None)
            sequence, source, num_cached = (back, None, 0) if back is not None else self._new_sequence()
            ids = sequence.prompt + sequence.output
            count = min(len(ids) - num_cached, budget)
            if count < 1 or -(-(num_cached + count) // self._limits.block_size) > room:
                continue
            if back is not None:
                self._preempted.remove(back)
            self.seen["hits" if num_cached else "begins"] += 1
            self.driver.begin(
                row,
                ids,
                sequence.sampling,
                num_prompt=len(sequence.prompt),
                choice=sequence.choice,
                num_cached=num_cached,
                cached_from=None if source is None else self.driver.rows[source],
            )
            self._live[row] = sequence
            counts[row] = count
            self._draw_if_last(row, count)

    def _new_sequence(self) -> tuple[_Sequence, int | None, int]:
        """Return a sequence, the row whose blocks it begins with, and how many tokens these hold."""
        random, size = self._random, self._limits.block_size
        prompt = [random.randrange(self._limits.vocab_size) for _ in range(random.randint(1, LONGEST_PROMPT))]
        sequence = _Sequence(
            prompt, random.choice(SAMPLINGS), random.randrange(3), num_wanted=random.randint(1, LONGEST_OUTPUT)
        )
        for row in self._live if random.random() < 0.4 else ():
            known = self._live[row].prompt
            # What was computed before this plan; the row may have begun in it.
            num_cached = min(len(known), self.driver.rows[row].num_computed) // size * size
            if num_cached:
                sequence.prompt = known[:num_cached] + prompt[:5]
                return sequence, row, num_cached
        return sequence, None, 0

    def _draw_if_last(self, row: int, count: int) -> None:
        state = self.driver.rows[row]
        self._live[row].num_drawn += state.num_computed + count == state.num_known

    def _fork(self, counts: dict[int, int]) -> None:
        free = [row for row in range(self._limits.max_num_seqs) if row not in self.driver.rows]
        for row in counts:
            source, state = self._live[row], self.driver.rows[row]
            draws = state.num_computed + counts[row] == state.num_known
            if draws and source.num_drawn == 1 and free and self._random.random() < 0.3:
                self.seen["forks"] += 1
                self.driver.fork(row, target := free.pop(), source.choice + 1)
                self._live[target] = _Sequence(
                    source.prompt, source.sampling, source.choice + 1, source.num_wanted, num_drawn=1
                )


def run_traffic(runner: Runner, traffic: RandomTraffic, num_steps: int, depth: int = 2) -> None:
    """Run so many plans with `depth` of them under way, until the last result is there."""
    launched = done = 0
    while done < num_steps:
        while launched < num_steps and runner.num_in_flight < depth:
            runner.launch(traffic.next_plan())
            launched += 1
        for result in runner.take_results():
            traffic.note(result)
            done += 1
