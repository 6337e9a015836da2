"""What one round of a simulation runs with: drawn at random, small on purpose, so that every limit is met often."""

from dataclasses import dataclass
from random import Random

from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.simulate.links import Weather
from octavo.scheduler.simulate.model import make_facts
from octavo.wire.handshake import WorkerFacts
from octavo.wire.step_timeout import step_timeout_s

DIGEST = "simulated model"
VOCAB_SIZE = 50
LONGEST = 96
"""Most tokens of prompt and output together, whatever the pool holds."""


@dataclass
class Troubles:
    """Mean virtual seconds between faults of each kind; 0: never.

    Attributes:
        worker_dies, scheduler_dies, frontend_dies: a process is killed, or leaves, and comes back.
        worker_hangs: for longer than the step timeout.
        pause: of any process, up to 20 s.
        clog: a connection brings nothing for seconds.
        cut: a connection breaks.
        garbage: comes from strangers.
    """

    worker_dies: float = 0.0
    worker_hangs: float = 0.0
    scheduler_dies: float = 0.0
    frontend_dies: float = 0.0
    pause: float = 0.0
    clog: float = 0.0
    cut: float = 0.0
    garbage: float = 0.0

    @property
    def are_deadly(self) -> bool:
        """Whether workers are lost of something else than a request, and do not come back or have hung."""
        return any((self.worker_dies, self.worker_hangs, self.pause, self.clog))


@dataclass
class Traffic:
    """What is asked for.

    Attributes:
        num_live: requests that each frontend tries to have at once.
        mean_gap_s: between two requests of a frontend.
        cancels, stops, deadlines, sick, deadly, wrong, choices, beams, logprobs, prompt_logprobs, unshared: shares of
            requests that end early, have a stop string, a deadline, broken values, kill their worker, have a mistake,
            n > 1, a search, log-probabilities of output or prompt, no part in the prefix cache.
        max_prompt, max_output: tokens.
        resets: of the prefix cache, mean seconds between two; 0: none.
    """

    num_live: int
    mean_gap_s: float
    cancels: float
    stops: float
    deadlines: float
    sick: float
    deadly: float
    wrong: float
    choices: float
    beams: float
    logprobs: float
    prompt_logprobs: float
    unshared: float
    max_prompt: int
    max_output: int
    resets: float


@dataclass
class Scenario:
    """One round's configuration."""

    config: SchedulerConfig
    facts: WorkerFacts
    small_facts: WorkerFacts
    """Of a worker with less; the same as `facts` in most rounds."""
    num_frontends: int
    queue_limit: int
    compute_s: float
    """Most time that a step takes."""
    weather: Weather
    troubles: Troubles
    traffic: Traffic

    @property
    def step_timeout_s(self) -> float:
        """After which a worker that hangs is lost."""
        return step_timeout_s(self.config.step_timeout_s, self.facts.device)


def draw_scenario(random: Random) -> Scenario:
    """Draw one."""
    block_size = random.choice([1, 2, 4, 4, 16])
    facts = _draw_facts(random, block_size)
    small_facts = _draw_facts(random, random.choice([1, 2, 4, 16])) if random.random() < 0.1 else facts
    num_frontends = random.randint(1, 3)
    calm = random.random() < 0.25
    compute_s = random.choice([0.005, 0.05, 0.1])
    return Scenario(
        config=_draw_config(random, num_frontends),
        facts=facts,
        small_facts=small_facts,
        num_frontends=num_frontends,
        queue_limit=random.choice([16, 24, 100, 1000]),
        compute_s=compute_s,
        weather=Weather() if calm else _draw_weather(random),
        troubles=Troubles() if calm else _draw_troubles(random),
        traffic=_draw_traffic(random, facts, compute_s),
    )


def _draw_facts(random: Random, block_size: int) -> WorkerFacts:
    num_usable = random.randint(4, 40) if block_size < 16 else random.randint(2, 12)
    pool = num_usable * block_size
    return make_facts(
        num_blocks=num_usable + 1,
        block_size=block_size,
        vocab_size=VOCAB_SIZE,
        max_model_len=max(2, min(pool - random.randint(0, 2), LONGEST)) if random.random() < 0.8 else LONGEST,
        max_num_seqs=random.choice([1, 2, 3, 4, 6, 8, 8]),
        max_num_batched_tokens=random.choice([1, 2, 4, 8, 16, 64, 64, 64]),
    )


def _draw_config(random: Random, num_frontends: int) -> SchedulerConfig:
    return SchedulerConfig(
        address="ipc:///simulated",
        config_digest=DIGEST,
        long_prefill_token_threshold=random.choice([0, 0, 1, 3, 8]),
        pipeline_depth=random.randint(1, 3),
        max_preemptions=random.randint(0, 3),
        enable_prefix_caching=random.random() < 0.8,
        scheduling_policy=random.choice(["fcfs", "fcfs", "priority", "fair"]),
        max_requests_per_caller=random.choice([0, 0, 0, 0, 2, 4]),
        max_waiting_tokens_per_caller=random.choice([0, 0, 0, 60]),
        max_waiting_requests=random.choice([1, 4, 1024, 1024, 1024, 1024]),
        max_waiting_tokens=random.choice([60, 2**20, 2**20, 2**20]),
        max_frontends=random.choice([num_frontends, 64]),
        step_timeout_s=random.choice([2.0, 5.0, 20.0]),
        recovery_timeout_s=random.choice([2.0, 20.0, 120.0]),
    )


def _draw_weather(random: Random) -> Weather:
    weather = Weather(max_latency_s=random.choice([0.0005, 0.002, 0.02]))
    for kind in ("lose", "duplicate", "reorder", "corrupt", "delay"):
        if random.random() < 0.3:
            setattr(weather, kind, random.choice([1e-4, 1e-3, 5e-3]))
    return weather


def _draw_troubles(random: Random) -> Troubles:
    troubles = Troubles()
    for kind in vars(troubles):
        if random.random() < 0.5:
            setattr(troubles, kind, random.choice([5.0, 25.0, 100.0]))
    return troubles


def _draw_traffic(random: Random, facts: WorkerFacts, compute_s: float) -> Traffic:
    def share(*shares: float) -> float:
        return random.choice(shares)

    longest = min(facts.max_model_len, (facts.num_blocks - 1) * facts.block_size)
    return Traffic(
        num_live=random.choice([2, 4, 8, 12]),
        mean_gap_s=compute_s * random.choice([0.3, 1.0, 4.0]),
        cancels=share(0.0, 0.15, 0.4),
        stops=share(0.0, 0.2),
        deadlines=share(0.0, 0.0, 0.2),
        sick=share(0.0, 0.0, 0.05, 0.3),
        deadly=share(0.0, 0.0, 0.01, 0.05),
        wrong=share(0.0, 0.02),
        choices=share(0.0, 0.3, 0.6),
        beams=share(0.0, 0.2, 0.4),
        logprobs=share(0.0, 0.2),
        prompt_logprobs=share(0.0, 0.2),
        unshared=share(0.0, 0.2),
        max_prompt=max(1, min(longest - 1, random.choice([8, 24, 64, 96]))),
        max_output=random.choice([6, 20, 60]),
        resets=random.choice([0.0, 0.0, 3.0, 20.0]),
    )
