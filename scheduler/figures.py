"""What the core holds at one moment, for reports."""

from dataclasses import dataclass


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
    waiting_reason: str
    """What the next waiting sequence waits for; '' if none waits."""
