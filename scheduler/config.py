"""Settings of the scheduler process, read once by the command line, and the limits that follow from a worker's facts."""

from dataclasses import dataclass
from pathlib import Path

from octavo.scheduler.policy import POLICIES
from octavo.wire.handshake import ServiceFacts, WorkerFacts
from octavo.wire.step_timeout import step_timeout_s


class ConfigConflict(ValueError):
    """A setting is out of range, or asks for more than the worker has: change one of the two."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Settings. A limit that is None is the worker's; an explicit one above the worker's is an error, never cut.

    Raises:
        ConfigConflict: a setting is out of its range.
    """

    address: str
    """Where frontends and workers connect: ipc:///folder/name or tcp://host:port."""
    config_digest: str
    """model_digest() of the model folder; peers of another model are refused."""
    max_num_seqs: int | None = None
    """Sequences that run at once."""
    max_num_batched_tokens: int | None = None
    """Tokens of one step."""
    max_model_len: int | None = None
    """Tokens of prompt and output together."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one sequence in one step; 0: only the step's budget bounds them."""
    pipeline_depth: int = 2
    """Plans that may be outstanding at the worker."""
    max_waiting_requests: int = 1024
    """Requests that may wait for their first step; with max_num_seqs, also the most that are held at all."""
    max_waiting_tokens: int = 4 * 2**20
    """Prompt tokens, times choices, of the requests that wait; a single request may exceed it when none waits."""
    max_preemptions: int = 3
    """After so many, a sequence comes back only with all blocks it can ever need, and is not preempted again; 0: always."""
    enable_prefix_caching: bool = True
    """Whether blocks with equal tokens are shared and found again."""
    scheduling_policy: str = "fcfs"
    """Who runs first: one of `octavo.scheduler.policy.POLICIES`."""
    max_requests_per_caller: int = 0
    """Requests that one caller may have at once, running or waiting; 0: no limit."""
    max_waiting_tokens_per_caller: int = 0
    """Prompt tokens, times choices, of one caller's requests that wait; a single request may exceed it when none of the
    caller's waits. 0: no limit but the queue's."""
    max_frontends: int = 64
    step_timeout_s: float | None = None
    """Without a finished step for so long while plans are outstanding, the worker counts as lost; None: 60 s on a GPU, 300 s
    on a CPU."""
    recovery_timeout_s: float = 120.0
    """Without a worker for so long, requests fail with UNAVAILABLE."""
    curve_keys: Path | None = None
    """Folder of the CURVE keys that tcp needs."""
    trace_plans: Path | None = None
    """File that gets one JSON line for each plan and result."""
    otlp_traces_endpoint: str | None = None
    """Collector that is told of requests in spans; None: nobody is."""
    model_name: str = ""
    """What the label model_name of metrics says."""
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    """Where this process alone answers GET /metrics; None: nowhere."""

    def __post_init__(self) -> None:
        for name, lowest in _LOWEST.items():
            value = getattr(self, name)
            if value is not None and not value >= lowest:
                raise ConfigConflict(f"{name} is {value}: it must be at least {lowest}")
        if self.scheduling_policy not in POLICIES:
            raise ConfigConflict(f"scheduling_policy is {self.scheduling_policy!r}: there are {', '.join(POLICIES)}")


_LOWEST: dict[str, float] = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_model_len": 2,
    "long_prefill_token_threshold": 0,
    "pipeline_depth": 1,
    "max_waiting_requests": 1,
    "max_waiting_tokens": 1,
    "max_preemptions": 0,
    "max_requests_per_caller": 0,
    "max_waiting_tokens_per_caller": 0,
    "max_frontends": 1,
    "step_timeout_s": 0.001,
    "recovery_timeout_s": 0.0,
}


@dataclass(frozen=True)
class Limits:
    """What plans and requests must respect while one worker serves."""

    num_blocks: int
    """Of the pool, the null block included."""
    block_size: int
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_chunk_tokens: int
    """Most tokens of one sequence in one step."""
    scheduling_policy: str
    prefix_caching: bool
    step_timeout_s: float

    @property
    def num_pool_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return (self.num_blocks - 1) * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that `num_tokens` stored tokens of one sequence take."""
        return -(-num_tokens // self.block_size)

    @property
    def service_facts(self) -> ServiceFacts:
        """What frontends are told."""
        return ServiceFacts(
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            scheduling_policy=self.scheduling_policy,
            prefix_caching=self.prefix_caching,
            takes_priorities=POLICIES[self.scheduling_policy].uses_priorities,
        )


def resolve_limits(config: SchedulerConfig, facts: WorkerFacts) -> Limits:
    """Return what holds for this configuration on this worker.

    Raises:
        ConfigConflict: an explicit setting exceeds what the worker has.
    """
    num_pool_tokens = (facts.num_blocks - 1) * facts.block_size
    max_model_len = config.max_model_len
    if max_model_len is not None and max_model_len > facts.max_model_len:
        raise ConfigConflict(f"max_model_len {max_model_len} exceeds the worker's {facts.max_model_len}")
    if max_model_len is not None and max_model_len > num_pool_tokens:
        raise ConfigConflict(
            f"max_model_len {max_model_len} needs {-(-max_model_len // facts.block_size)} blocks of "
            f"{facts.block_size} tokens, the pool has {facts.num_blocks - 1}: it holds {num_pool_tokens} tokens; "
            "lower --max-model-len or raise --kv-cache-memory-bytes"
        )
    if min(facts.max_model_len, num_pool_tokens) < 2:
        raise ConfigConflict(f"the pool holds {num_pool_tokens} tokens: too few for a prompt and an answer")
    max_num_batched_tokens = _at_most(
        "max_num_batched_tokens", config.max_num_batched_tokens, facts.max_num_batched_tokens
    )
    max_num_seqs = _at_most("max_num_seqs", config.max_num_seqs, facts.max_num_seqs)
    return Limits(
        num_blocks=facts.num_blocks,
        block_size=facts.block_size,
        vocab_size=facts.vocab_size,
        max_model_len=max_model_len or min(facts.max_model_len, num_pool_tokens),
        # More running sequences than a step has tokens for would leave the last of them without any.
        max_num_seqs=min(max_num_seqs, max_num_batched_tokens),
        max_num_batched_tokens=max_num_batched_tokens,
        max_chunk_tokens=config.long_prefill_token_threshold or max_num_batched_tokens,
        scheduling_policy=config.scheduling_policy,
        prefix_caching=config.enable_prefix_caching,
        step_timeout_s=step_timeout_s(config.step_timeout_s, facts.device),
    )


def _at_most(name: str, wanted: int | None, available: int) -> int:
    if wanted is not None and wanted > available:
        raise ConfigConflict(f"{name} {wanted} exceeds the worker's {available}")
    return wanted if wanted is not None else available
