"""The service that traffic is simulated on: its limits, its policy, what a step of its worker costs."""

import importlib
from dataclasses import dataclass, field

from octavo.scheduler.config import ConfigConflict, SchedulerConfig
from octavo.scheduler.policy import POLICIES, Policy
from octavo.scheduler.simulate.cost import StepCost
from octavo.wire.handshake import WorkerFacts


class BadPolicy(ValueError):
    """A policy's name means nothing, or what it names is no policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The service that is simulated. The worker's defaults are an H200's with an 8B model in bfloat16.

    Raises:
        ConfigConflict: a limit of the worker is out of its range.
    """

    policy: str = "fcfs"
    """A name among `octavo.scheduler.policy.POLICIES`, or module:Class."""
    cost: StepCost = field(default_factory=StepCost)
    num_blocks: int = 50_001
    """The null block included: 50,000 blocks of 16 tokens of 128 KiB are 98 GiB."""
    block_size: int = 16
    vocab_size: int = 32_000
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 8192
    long_prefill_token_threshold: int = 0
    pipeline_depth: int = 2
    max_preemptions: int = 3
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 4 * 2**20
    max_requests_per_caller: int = 0
    max_waiting_tokens_per_caller: int = 0
    enable_prefix_caching: bool = True
    check: bool = False
    """Make real ids, read them through the block tables, and prove the core's invariants after each event: slow."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ConfigConflict(
                    f"{name} is {getattr(self, name)}: it must be at least {least}{_WHY.get(name, '')}"
                )
        if (self.num_blocks - 1) * self.block_size < 2:
            raise ConfigConflict(
                f"num_blocks is {self.num_blocks} and block_size {self.block_size}: without the null block the pool "
                "holds 1 token, and must hold 2"
            )

    @property
    def facts(self) -> WorkerFacts:
        """What the worker would say of itself."""
        return WorkerFacts(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            backend="simulated",
            device="none",
            dtype="none",
        )

    def config(self, policy: Policy) -> SchedulerConfig:
        """Return the scheduler's settings.

        Raises:
            ConfigConflict: one is out of range.
        """
        # A policy of one's own runs under a name that tells admission whether requests may have priorities.
        own = "priority" if policy.uses_priorities else "fcfs"
        return SchedulerConfig(
            address="ipc:///unused",
            config_digest="simulated",
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            pipeline_depth=self.pipeline_depth,
            max_preemptions=self.max_preemptions,
            max_waiting_requests=self.max_waiting_requests,
            max_waiting_tokens=self.max_waiting_tokens,
            max_requests_per_caller=self.max_requests_per_caller,
            max_waiting_tokens_per_caller=self.max_waiting_tokens_per_caller,
            enable_prefix_caching=self.enable_prefix_caching,
            scheduling_policy=self.policy if self.policy in POLICIES else own,
        )


_LEAST = {
    "num_blocks": 2,
    "block_size": 1,
    "vocab_size": 2,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_model_len": 2,
}
_WHY = {"num_blocks": ", since one is the null block, which holds no tokens"}


def load_policy(name: str) -> Policy:
    """Return a new policy.

    Raises:
        BadPolicy: there is none of that name, or module:Class cannot be imported or is no policy.
    """
    if name in POLICIES:
        return POLICIES[name]()
    module, colon, attribute = name.partition(":")
    if not colon:
        raise BadPolicy(f"policy {name!r}: there are {', '.join(POLICIES)}, and module:Class")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BadPolicy(f"policy {name!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise BadPolicy(f"policy {name!r}: it is no subclass of octavo.scheduler.policy.Policy")
    try:
        return found()
    except TypeError as error:
        raise BadPolicy(f"policy {name!r}: it must be made without arguments: {error}") from error
