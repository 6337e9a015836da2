"""The core against random schedules: whatever happens, every token is the one of the solo run."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.scheduler.policy import POLICIES
from octavo.scheduler.simulate.model import make_facts
from octavo.wire.ids import SessionId
from octavo.wire.requests import BeamParams, FailureCode
from tests.support.core_driver import Client, CoreDriver, make_config
from tests.support.fake_tracing import TracedDriver

VOCAB = 50
SICK_LATER, SICK_EARLY = 99, 98
SICK_SEEDS = (SICK_LATER, SICK_EARLY)
SEEDS = (0, 1, 2, *SICK_SEEDS)
CALLERS = ("", "a", "b")
TENANTS = ("", "", "other", None)


def faults(ids: Sequence[int], seed: int, choice: int) -> bool:
    """Break choice 1 from its twelfth token on, or every choice somewhere at the beginning."""
    return (seed == SICK_LATER and choice == 1 and len(ids) >= 12) or (seed == SICK_EARLY and 3 <= len(ids) <= 9)


def make_prompt(stem: int, length: int, tail: int) -> list[int]:
    """Return a prompt whose tokens are those of one of a few stems, but for the last `tail` ones."""
    random = Random(stem)
    ids = [random.randrange(VOCAB) for _ in range(length)]
    for index in range(max(0, length - tail), length):
        ids[index] = (ids[index] + tail) % VOCAB
    return ids


def prompt_length(driver: CoreDriver, num_blocks: int, extra: int) -> int:
    """Return a length at the end of a block, or next to it, that leaves room for output."""
    limits = driver.core.limits
    assert limits is not None
    return max(1, min(num_blocks * limits.block_size + extra, limits.max_model_len - 1))


def drawn_from(clients: Sequence[Client]) -> list[Client]:
    """Return the clients whose tokens are drawn one by one, so that a frontend may end their choices."""
    return [client for client in clients if client.message.beams is None]


class CoreMachine(RuleBasedStateMachine):
    """Everything that can happen to the core, in any order."""

    driver: CoreDriver
    frontends: int

    @initialize(
        num_blocks=st.integers(4, 14),
        block_size=st.sampled_from([1, 2, 4, 16]),
        num_rows=st.integers(1, 5),
        budget=st.integers(1, 24),
        chunk=st.sampled_from([0, 1, 3, 8]),
        depth=st.integers(1, 3),
        max_preemptions=st.integers(0, 3),
        policy=st.sampled_from(sorted(POLICIES)),
        caching=st.sampled_from([True, True, False]),
        max_requests_per_caller=st.sampled_from([0, 0, 2]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        num_rows: int,
        budget: int,
        chunk: int,
        depth: int,
        max_preemptions: int,
        policy: str,
        caching: bool,
        max_requests_per_caller: int,
    ) -> None:
        facts = make_facts(
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=VOCAB,
            max_model_len=64,
            max_num_seqs=num_rows,
            max_num_batched_tokens=budget,
        )
        config = make_config(
            long_prefill_token_threshold=chunk,
            pipeline_depth=depth,
            max_preemptions=max_preemptions,
            scheduling_policy=policy,
            enable_prefix_caching=caching,
            max_requests_per_caller=max_requests_per_caller,
        )
        self.driver = CoreDriver(facts, config, fault_rule=faults)
        self.frontends = 1
        self.driver.worker_ready()

    def live(self) -> list[Client]:
        return [client for client in self.driver.clients.values() if client.is_live]

    @rule(
        stem=st.integers(0, 2),
        num_blocks=st.integers(0, 10),
        extra=st.sampled_from([-1, 0, 1, 1, 5]),
        tail=st.sampled_from([0, 0, 0, 1, 4, 40]),
        max_tokens=st.sampled_from([0, *range(1, 40)]),
        prompt_logprobs=st.sampled_from([-1, -1, 0, 2]),
        num_choices=st.sampled_from([1, 1, 1, 2, 3, 4]),
        seed=st.sampled_from(SEEDS),
        stops=st.lists(st.integers(0, VOCAB - 1), max_size=4),
        min_tokens=st.integers(0, 10),
        deadline_s=st.sampled_from([None, None, 5.0, 50.0]),
        caller=st.sampled_from(CALLERS),
        tenant=st.sampled_from(TENANTS),
        priority=st.integers(-1, 1),
        beams=st.sampled_from([None, None, (1, 1.0, False), (2, 0.0, True), (3, 1.0, False), (4, 2.0, True)]),
    )
    def submit(
        self,
        stem: int,
        num_blocks: int,
        extra: int,
        tail: int,
        max_tokens: int,
        prompt_logprobs: int,
        num_choices: int,
        seed: int,
        stops: list[int],
        min_tokens: int,
        deadline_s: float | None,
        caller: str,
        tenant: str | None,
        priority: int,
        beams: tuple[int, float, bool] | None,
    ) -> None:
        num_prompt = prompt_length(self.driver, num_blocks, extra)
        limits = self.driver.core.limits
        assert limits is not None
        max_tokens = min(max_tokens, limits.max_model_len - num_prompt)
        beams = beams if max_tokens else None  # a search finds at least one token
        self.driver.submit(
            make_prompt(stem, num_prompt, tail),
            max_tokens,
            frontend=SessionId(self.frontends),
            num_choices=num_choices if beams is None else min(num_choices, beams[0]),
            stop_ids=stops,
            min_tokens=min(min_tokens, max_tokens),
            seed=seed,
            deadline_s=deadline_s,
            is_faulty=seed in SICK_SEEDS,
            caller=caller,
            tenant=tenant,
            priority=priority if limits.scheduling_policy == "priority" else 0,
            prompt_logprobs=prompt_logprobs if beams is None else -1,
            beams=None if beams is None else BeamParams(*beams),
        )

    @rule()
    def execute(self) -> None:
        self.driver.execute()

    @rule()
    def deliver(self) -> None:
        self.driver.deliver()

    @rule(count=st.integers(1, 20))
    def several_steps(self, count: int) -> None:
        for _ in range(count):
            self.driver.execute()
            self.driver.deliver()

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.driver.cancel(data.draw(st.sampled_from(self.live())))

    @precondition(lambda self: len(drawn_from(self.live())) > 0)
    @rule(data=st.data())
    def stop_choice(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(drawn_from(self.live())))
        self.driver.stop_choice(client, data.draw(st.sampled_from(sorted(client.choices_left))))

    @rule(seconds=st.sampled_from([0.1, 6.0]))
    def wait(self, seconds: float) -> None:
        self.driver.now += seconds
        self.driver.tell()

    @precondition(lambda self: self.driver.model is not None)
    @rule()
    def lose_worker(self) -> None:
        self.driver.lose_worker()

    @precondition(lambda self: self.driver.model is None)
    @rule(is_same=st.booleans())
    def worker_back(self, is_same: bool) -> None:
        self.driver.worker_ready(is_same=is_same)

    @rule()
    def replay(self) -> None:
        self.frontends += 1
        self.driver.replay(SessionId(self.frontends - 1), SessionId(self.frontends))

    @rule()
    def reset_cache(self) -> None:
        self.driver.reset_cache()

    @invariant()
    def nobody_is_sent_away(self) -> None:
        assert not self.driver.ended_sessions

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain()
            failures = [f for received in self.driver.received.values() for f in received.failed.values()]
            codes = {f.code for f in failures if f.code is not FailureCode.INVALID}
            assert all("beams" in f.message for f in failures if f.code is FailureCode.INVALID)
            expected = {FailureCode.DEADLINE, FailureCode.INTERNAL, FailureCode.UNAVAILABLE}
            if self.driver.config.max_requests_per_caller:
                expected.add(FailureCode.CALLER_LIMIT)
            assert codes <= expected


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


ACTIONS = {
    "submit": 12,
    "execute": 30,
    "deliver": 30,
    "step": 60,
    "cancel": 2,
    "stop": 2,
    "wait": 0.5,
    "lose": 0.5,
    "replay": 0.5,
    "reset": 0.3,
}


@pytest.mark.parametrize("seed", range(60))
def test_long_random_runs_end_with_solo_outputs_and_everything_free(seed: int) -> None:
    """Deeper than the machine above goes: pools so small that most sequences are preempted."""
    run_long(Random(seed), sorted(POLICIES)[seed % 3], caching=seed % 4 > 0)


@pytest.mark.parametrize("seed", range(100, 112))
def test_in_long_random_runs_exactly_live_requests_are_traced(seed: int) -> None:
    driver = run_long(Random(seed), sorted(POLICIES)[seed % 3], caching=seed % 4 > 0, make=TracedDriver)
    assert isinstance(driver, TracedDriver)
    assert len({span.trace for span in driver.tracing.spans}) > 10


def run_long(random: Random, policy: str, caching: bool, make: type[CoreDriver] = CoreDriver) -> CoreDriver:
    """Run 400 random actions and drain."""
    block_size = random.choice([1, 2, 4, 16])
    num_tokens = random.randint(24, 64)
    facts = make_facts(
        num_blocks=1 + -(-num_tokens // block_size),
        block_size=block_size,
        vocab_size=VOCAB,
        max_model_len=num_tokens - random.randint(0, 8),
        max_num_seqs=random.randint(2, 6),
        max_num_batched_tokens=random.choice([1, 5, 16, 64, 64]),
    )
    config = make_config(
        long_prefill_token_threshold=random.choice([0, 3]),
        pipeline_depth=random.randint(1, 3),
        max_preemptions=random.randint(0, 3),
        scheduling_policy=policy,
        enable_prefix_caching=caching,
        max_requests_per_caller=random.choice([0, 4]),
        max_waiting_tokens_per_caller=random.choice([0, 100]),
    )
    driver = make(facts, config, fault_rule=faults)
    driver.worker_ready()
    frontends = 1
    for _ in range(400):
        driver.now += 0.05
        live = [client for client in driver.clients.values() if client.is_live]
        match random.choices(list(ACTIONS), list(ACTIONS.values()))[0]:
            case "submit" if len(live) < 12:
                submit_random(driver, random, SessionId(frontends))
            case "execute":
                driver.execute()
            case "deliver":
                driver.deliver()
            case "step":
                driver.step()
            case "cancel" if live:
                driver.cancel(random.choice(live))
            case "stop" if drawn_from(live):
                client = random.choice(drawn_from(live))
                driver.stop_choice(client, random.choice(sorted(client.choices_left)))
            case "wait":
                driver.now += 3.0
                driver.tell()
            case "lose":
                driver.lose_worker()
                driver.worker_ready()
            case "replay":
                frontends += 1
                driver.replay(SessionId(frontends - 1), SessionId(frontends))
            case "reset":
                driver.reset_cache()
    driver.drain()
    assert not driver.ended_sessions
    return driver


def submit_random(driver: CoreDriver, random: Random, frontend: SessionId) -> None:
    limits = driver.core.limits
    assert limits is not None
    most = limits.max_model_len // limits.block_size
    num_prompt = prompt_length(driver, random.randint(0, most), random.choice([-1, 0, 1, 5]))
    max_tokens = random.randint(random.choice([0, 1, 1, 1]), limits.max_model_len - num_prompt)
    seed = random.choice(SEEDS)
    num_choices = random.choice([1, 1, 1, 2, 3, 4])
    beams = BeamParams(num_choices, random.choice([0.0, 1.0])) if max_tokens and random.random() < 0.25 else None
    driver.submit(
        make_prompt(random.randrange(3), num_prompt, random.choice([0, 0, 1, 5, 40])),
        max_tokens,
        frontend=frontend,
        num_choices=num_choices,
        stop_ids=random.sample(range(VOCAB), random.randint(0, 2)),
        min_tokens=random.randint(0, max_tokens),
        seed=seed,
        deadline_s=random.choice([None, None, None, 2.0]),
        is_faulty=seed in SICK_SEEDS,
        caller=random.choice(CALLERS),
        tenant=random.choice(TENANTS),
        priority=random.randint(-2, 2) if limits.scheduling_policy == "priority" else 0,
        prompt_logprobs=random.choice([-1, -1, -1, 0, 2]) if beams is None else -1,
        beams=beams,
    )
