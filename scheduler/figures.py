"""What the core holds at one moment, for reports."""

from dataclasses import dataclass

from octavo.scheduler.config import Limits
from octavo.scheduler.pipeline import Pipeline
from octavo.scheduler.planner import Planner
from octavo.scheduler.queues import WaitingQueue
from octavo.scheduler.state import RequestTable


@dataclass(frozen=True, slots=True)
class Figures:
    """What the core holds at one moment, for reports."""

    num_requests: int
    num_running: int
    """Sequences with a row."""
    num_waiting: int
    """Sequences without one."""
    num_blocks: int
    """That can be used; 0 without a worker."""
    num_free_blocks: int
    block_size: int
    num_steps: int
    """Finished in all epochs."""
    num_preemptions: int
    num_old_results: int
    """Results of earlier epochs, ignored."""
    num_cached_blocks: int
    """That can be found in the prefix cache, in use or free."""
    num_prompt_tokens: int
    """Of all requests that have started."""
    num_cached_prompt_tokens: int
    """Of these, found in the prefix cache."""
    num_recomputed_tokens: int
    """Computed again after preemptions, faults and losses of a worker."""
    num_adopted_rows: int
    """Rows of an earlier session that sequences went on from."""
    num_adopted_tokens: int
    """Of these rows, tokens that were not computed again."""
    waiting_reason: str
    """What the next waiting sequence waits for; '' if none waits."""
    num_waiting_tokens: int
    """Prompt tokens, times choices, of requests that wait for their first step."""


@dataclass(slots=True)
class Totals:
    """What the core counts itself; steps, preemptions and recomputed tokens are those of ended epochs."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_old_results: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_adopted_rows: int = 0
    num_adopted_tokens: int = 0

    def add(self, planner: Planner, pipeline: Pipeline) -> None:
        """Keep what was counted in an epoch that ends."""
        self.num_steps += pipeline.num_completed
        self.num_preemptions += planner.num_preemptions
        self.num_recomputed_tokens += planner.num_recomputed_tokens
        self.num_adopted_rows += planner.adoption.num_rows
        self.num_adopted_tokens += planner.adoption.num_tokens


def figures_of(
    totals: Totals,
    requests: RequestTable,
    waiting: WaitingQueue,
    worker: tuple[Planner, Pipeline] | None,
    limits: Limits | None,
) -> Figures:
    """Return what the core holds now; `worker` is the one that is ready."""
    planner, pipeline = worker or (None, None)
    return Figures(
        num_requests=len(requests),
        num_running=len(planner.batch) if planner else 0,
        num_waiting=len(waiting),
        num_blocks=planner.pool.num_blocks - 1 if planner else 0,
        num_free_blocks=planner.pool.num_free if planner else 0,
        block_size=limits.block_size if limits else 0,
        num_steps=totals.num_steps + (pipeline.num_completed if pipeline is not None else 0),
        num_preemptions=totals.num_preemptions + (planner.num_preemptions if planner else 0),
        num_old_results=totals.num_old_results,
        num_cached_blocks=len(planner.cache) if planner else 0,
        num_prompt_tokens=totals.num_prompt_tokens,
        num_cached_prompt_tokens=totals.num_cached_prompt_tokens,
        num_recomputed_tokens=totals.num_recomputed_tokens + (planner.num_recomputed_tokens if planner else 0),
        num_adopted_rows=totals.num_adopted_rows + (planner.adoption.num_rows if planner else 0),
        num_adopted_tokens=totals.num_adopted_tokens + (planner.adoption.num_tokens if planner else 0),
        waiting_reason=_waiting_reason(waiting, planner),
        num_waiting_tokens=requests.num_unstarted_tokens,
    )


def _waiting_reason(waiting: WaitingQueue, planner: Planner | None) -> str:
    if len(waiting) == 0:
        return ""
    return planner.waiting_reason if planner else "a worker"
