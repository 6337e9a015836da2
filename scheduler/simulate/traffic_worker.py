"""A worker that answers plans without reading tokens: a few array operations a step, whatever its size."""

from dataclasses import dataclass, field

import numpy as np

from octavo.scheduler.policy.fair import OUTPUT_COST
from octavo.scheduler.simulate.arrivals import Arrival, Integers
from octavo.scheduler.simulate.cost import StepLoad
from octavo.scheduler.simulate.traffic_prompts import STOP_ID
from octavo.wire.columns import pack_ints, unpack_ints
from octavo.wire.handshake import WorkerFacts
from octavo.wire.plan import StepPlan, StepResult


@dataclass(slots=True)
class Live:
    """A request that has not ended."""

    arrival: Arrival
    caller: int
    """Number of its caller."""
    num_left: int
    """Choices that have not ended."""
    queue_s: float = 0.0
    num_cached: int = 0
    furthest: dict[int, int] = field(default_factory=dict)
    """By choice: tokens computed before a row was taken away."""


class FastWorker:
    """Lengths and owners of rows, kept as arrays; the law: `lengths` is 0 exactly where a row is free.

    Args:
        facts: bounds of the worker; its vocabulary has at least 2 ids.
        live: requests by handle, as plans name them; the owner adds and removes.
    """

    def __init__(self, facts: WorkerFacts, live: dict[int, Live]) -> None:
        self.facts = facts
        rows = facts.max_num_seqs
        self.lengths = np.zeros(rows, np.int64)
        """Tokens with a place in a block."""
        self.callers = np.zeros(rows, np.int64)
        self.greatest = np.zeros(rows, np.int64)
        """Tokens that the request may come to need places for: prompt and max_tokens."""
        self._live = live
        self._prompts = np.zeros(rows, np.int64)
        self._ends = np.zeros(rows, np.int64)  # the length at which a row draws its last token, a stop id
        self._furthest = np.zeros(rows, np.int64)
        self._shares_last = np.zeros(rows, np.bool_)  # forked, and has written nothing since
        self._owners: dict[int, tuple[int, int]] = {}  # row -> handle, choice
        self._flags = pack_ints([1]) * rows
        self._tokens = np.ones(rows, "<i4")  # what a row draws: choices of one request draw different ids

    @property
    def num_empty_slots(self) -> int:
        """Slots of blocks in tables that hold no token; a block that several tables name counts once."""
        empty = -self.lengths % self.facts.block_size
        return int(empty.sum() - empty[self._shares_last].sum())

    def execute(self, plan: StepPlan, num_callers: int) -> tuple[StepResult, StepLoad, Integers]:
        """Apply a plan.

        Returns:
            Its result, what it makes the worker do, and the service that each caller gets.
        """
        self._apply_rows(plan)
        rows, counts = np.frombuffer(plan.row, "<i4"), np.frombuffer(plan.num_tokens, "<i4")
        self._shares_last[rows] = False
        before = self.lengths[rows]
        after = before + counts
        self.lengths[rows] = after
        only_decodes = plan.flags == self._flags[: len(plan.flags)] and plan.num_tokens == plan.flags
        draws = rows if only_decodes else rows[np.frombuffer(plan.flags, "<i4") > 0]
        service = OUTPUT_COST * np.bincount(self.callers[draws], minlength=num_callers)
        if only_decodes:
            load = StepLoad(0, len(rows), int(after.sum()), len(rows))
        else:
            begin = np.maximum(before, self._furthest[rows])
            computed = np.maximum(np.minimum(after, self._prompts[rows]) - begin, 0)
            service = service + np.bincount(self.callers[rows], computed, num_callers).astype(np.int64)
            is_decode = counts == 1
            load = StepLoad(int(counts[~is_decode].sum()), int(is_decode.sum()), int(after.sum()), len(rows))
        if plan.fork_dst:
            draws = np.concatenate([draws, self._fork(plan)])
        return self._result(plan, draws), load, service

    def _result(self, plan: StepPlan, draws: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> StepResult:
        tokens = self._tokens[draws]
        tokens[self.lengths[draws] == self._ends[draws]] = STOP_ID
        return StepResult(epoch=plan.epoch, step=plan.step, row=draws.tobytes(), token=tokens.tobytes())

    def _apply_rows(self, plan: StepPlan) -> None:
        for row in unpack_ints(plan.freed_rows):
            handle, choice = self._owners.pop(row)
            if (live := self._live.get(handle)) is not None:
                live.furthest[choice] = max(live.furthest.get(choice, 0), int(self.lengths[row]))
            self.lengths[row] = self.greatest[row] = 0
            self._shares_last[row] = False
        for new in plan.new_rows:
            handle = int(new.request.rpartition("-")[2])
            self.lengths[new.row] = new.num_computed_tokens
            self._own(new.row, handle, new.choice)

    def _own(self, row: int, handle: int, choice: int) -> None:
        live = self._live[handle]
        arrival = live.arrival
        self._owners[row] = (handle, choice)
        self.callers[row] = live.caller
        self._prompts[row] = arrival.num_prompt_tokens
        self.greatest[row] = arrival.num_prompt_tokens + arrival.max_tokens
        self._ends[row] = arrival.num_prompt_tokens + arrival.num_output_tokens - 1
        self._furthest[row] = live.furthest.get(choice, 0)
        self._tokens[row] = 1 + choice % (self.facts.vocab_size - 1)

    def _fork(self, plan: StepPlan) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
        sources, targets = unpack_ints(plan.fork_src), unpack_ints(plan.fork_dst)
        for source, target, choice in zip(sources, targets, unpack_ints(plan.fork_choice), strict=True):
            self.lengths[target] = self.lengths[source]
            self._own(target, self._owners[source][0], choice)
            self._shares_last[target] = self.lengths[target] % self.facts.block_size > 0
        return np.frombuffer(plan.fork_dst, "<i4")
