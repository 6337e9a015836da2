"""The scheduling policies: who is next, who gives way, and how far anybody can be overtaken."""

from collections.abc import Callable

import pytest

from octavo.scheduler.config import ConfigConflict
from octavo.scheduler.policy import POLICIES, Policy
from octavo.scheduler.policy.fair import OUTPUT_COST, Fair
from octavo.scheduler.policy.priority import OVERTAKES_PER_LEVEL
from octavo.scheduler.simulate.model import make_facts
from octavo.wire.requests import FailureCode, RequestFailed
from tests.support.core_driver import Client, CoreDriver, entries_of, make_config

PRIORITY = "octavo.scheduler.policy.priority.OVERTAKES_PER_LEVEL"


def scheduled(
    policy: str,
    max_num_seqs: int = 1,
    num_blocks: int = 65,
    budget: int = 256,
    max_preemptions: int = 3,
    chunk: int = 0,
    caching: bool = False,
    depth: int = 2,
) -> CoreDriver:
    """Return a driver with blocks of 4 tokens under a policy, its worker ready."""
    facts = make_facts(
        num_blocks=num_blocks, block_size=4, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=128
    )
    config = make_config(
        scheduling_policy=policy,
        max_preemptions=max_preemptions,
        enable_prefix_caching=caching,
        long_prefill_token_threshold=chunk,
        pipeline_depth=depth,
    )
    driver = CoreDriver(facts, config)
    driver.worker_ready()
    return driver


def order(driver: CoreDriver, clients: list[Client]) -> list[int]:
    """Return the indices of requests in the order in which they first took rows."""
    names = [client.name for client in clients]
    entered = [new.request for plan in driver.plans for new in plan.new_rows if new.request in names]
    return [names.index(name) for name in dict.fromkeys(entered)]


def overtakers(driver: CoreDriver, waiting: Client, refill: Callable[[], Client], keep: int) -> int:
    """Keep `keep` later requests waiting until one starts; return how many of them started before it did."""
    later: list[Client] = []
    while not entries_of(driver, waiting):
        while sum(client.is_live and not entries_of(driver, client) for client in later) < keep:
            later.append(refill())
            assert len(later) < 500, "it starves"
        driver.step()
    entry = entries_of(driver, waiting)[0].step
    return sum(bool(found := entries_of(driver, client)) and found[0].step <= entry for client in later)


def policy_of(driver: CoreDriver) -> Policy:
    return driver.core._policy


def test_a_policy_that_does_not_exist_is_a_conflict_that_names_those_that_do() -> None:
    with pytest.raises(ConfigConflict, match="scheduling_policy is 'lifo': there are fcfs, priority, fair"):
        make_config(scheduling_policy="lifo")


# Priorities


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
@pytest.mark.parametrize("priority", [3, -1])
def test_a_priority_is_refused_where_it_does_nothing(policy: str, priority: int) -> None:
    driver = scheduled(policy)
    refused = driver.submit([1], 1, priority=priority)
    assert driver.failure(refused) == RequestFailed(
        refused.handle,
        FailureCode.INVALID,
        f"priority {priority}: only 0 is possible, the scheduling policy {policy} takes no priorities",
    )
    assert driver.submit([1], 1, priority=0).is_live
    driver.drain()


def test_lower_values_run_first_and_equals_as_they_came() -> None:
    driver = scheduled("priority")
    driver.submit([9], 3)
    clients = [driver.submit([n], 2, priority=p) for n, p in enumerate([1, 0, -1, 0, 1, -1])]
    driver.drain()
    assert order(driver, clients) == [2, 5, 1, 3, 0, 4]


def test_a_priority_evicts_for_blocks() -> None:
    driver = scheduled("priority", max_num_seqs=4, num_blocks=9)
    low = [driver.submit([n] * 13, 4, seed=n, priority=1) for n in range(2)]  # 8 blocks, all there are
    driver.step()
    urgent = driver.submit([9] * 13, 2)
    driver.step()
    assert entries_of(driver, urgent), "it runs with the next plan"
    assert [len(entries_of(driver, client)) for client in low] == [1, 1]
    assert driver.core.figures.num_preemptions == 1
    assert driver.core.figures.num_waiting == 1
    driver.drain()
    assert [len(entries_of(driver, client)) for client in low] == [1, 2], "of equals, the latest gave way"
    assert [driver.tokens(client) for client in low] == [client.expected[0] for client in low]


def test_a_priority_evicts_those_whose_prompts_would_take_the_blocks_first() -> None:
    driver = scheduled("priority", max_num_seqs=4, num_blocks=21, chunk=4)  # 20 blocks to use
    low = driver.submit([1] * 64, 4, priority=1)  # 16 blocks, of which it has 2
    urgent = driver.submit([9] * 32, 4)
    driver.step()
    assert entries_of(driver, urgent), "8 blocks are enough once the other one's 16 are not owed"
    driver.drain()
    assert driver.tokens(low) == low.expected[0]


def test_a_priority_never_evicts_for_a_row() -> None:
    driver = scheduled("priority")
    low = driver.submit([1] * 4, 20, priority=5)
    urgent = driver.submit([9] * 4, 2, priority=-5)
    while low.is_live:
        assert not entries_of(driver, urgent)
        driver.step()
    driver.drain()
    assert driver.core.figures.num_preemptions == 0


@pytest.mark.parametrize(
    ("priorities", "max_preemptions", "num_urgent"),
    [((0, 0), 3, 14), ((1, 1), 0, 14), ((0, 1), 3, 30)],
    ids=["equal", "protected", "not enough"],
)
def test_nobody_is_evicted_in_vain(priorities: tuple[int, int], max_preemptions: int, num_urgent: int) -> None:
    driver = scheduled("priority", max_num_seqs=4, num_blocks=9, max_preemptions=max_preemptions)
    running = [driver.submit([n] * 14, 2, seed=n, priority=p) for n, p in enumerate(priorities)]
    driver.submit([9] * num_urgent, 2)
    while any(client.is_live for client in running):
        assert driver.core.figures.num_preemptions == 0
        driver.step()
    driver.drain()


def test_nobody_is_evicted_for_blocks_that_are_found_in_use_anyway() -> None:
    driver = scheduled("priority", max_num_seqs=4, num_blocks=10, caching=True, depth=1)  # 9 blocks to use
    blocker = driver.submit([8] * 18, 3)  # 5 of them
    low = driver.submit(range(12), 4, priority=1)  # 3
    driver.step()
    urgent = driver.submit(range(18), 2)  # 5, of which 3 are those of the one before
    driver.step_until(lambda: not blocker.is_live)
    assert driver.core.figures.num_preemptions == 0, "with its blocks back there would still be one too few"
    driver.drain()
    assert driver.num_cached(urgent) == 12
    assert len(entries_of(driver, low)) == 1


def test_the_dry_pool_takes_from_the_highest_value_first() -> None:
    driver = scheduled("priority", max_num_seqs=4, num_blocks=8)
    low = driver.submit([1] * 12, 12, priority=1)  # the most computed work
    urgent = driver.submit([2] * 4, 20)
    driver.step_until(lambda: driver.core.figures.num_preemptions)
    assert [s.request.handle for s in driver.core._waiting] == [low.handle]
    driver.drain()
    assert len(entries_of(driver, urgent)) == 1


@pytest.mark.parametrize(("levels", "bound"), [(0, 0), (1, 3), (2, 6)])
def test_overtaking_is_bounded_for_each_level(monkeypatch: pytest.MonkeyPatch, levels: int, bound: int) -> None:
    monkeypatch.setattr(PRIORITY, 3)
    driver = scheduled("priority")
    driver.submit([1], 2)
    waiting = driver.submit([2], 2, priority=levels)
    count = overtakers(driver, waiting, lambda: driver.submit([3], 1), keep=3)
    assert count == max(0, bound - 1), "those that are more than so many later come after it"
    driver.drain()


def test_the_bound_is_what_is_documented() -> None:
    assert OVERTAKES_PER_LEVEL == 1024


# Fairness


def flood(policy: str) -> int:
    """Return how many of a caller's 200 requests start between the arrival and the start of another caller's one."""
    driver = scheduled(policy, max_num_seqs=4)
    many = [driver.submit([n % 50], 4, seed=n, caller="many") for n in range(200)]
    driver.step()
    assert driver.core.figures.num_running == 4
    one = driver.submit([99], 4, caller="one")
    driver.drain()
    return order(driver, [*many, one]).index(200) - 4


def test_one_request_of_a_caller_does_not_wait_for_two_hundred_of_another() -> None:
    assert (flood("fair"), flood("fcfs")) == (0, 196)


def test_a_newly_active_caller_starts_where_the_others_are() -> None:
    driver = scheduled("fair")
    long = driver.submit([1], 60, caller="a")
    driver.step_until(lambda: len(driver.tokens(long)) == 56)
    clients = [driver.submit([2] * 4, 4, caller=caller) for caller in "aaaaaabbbbbb"]
    driver.drain()
    callers = [clients[index].message.caller for index in order(driver, clients)]
    for end in range(len(callers)):
        served = callers[:end]
        assert abs(served.count("a") - served.count("b")) <= 2, "neither its past nor that of the other one counts"


def test_within_a_caller_requests_run_as_they_came() -> None:
    driver = scheduled("fair")
    clients = [driver.submit([n], 2, caller=caller) for n, caller in enumerate("aababba")]
    driver.drain()
    for caller in "ab":
        mine = [index for index in order(driver, clients) if clients[index].message.caller == caller]
        assert mine == sorted(mine)


def test_a_caller_that_leaves_and_returns_keeps_its_counter() -> None:
    driver = scheduled("fair")
    driver.submit([1] * 100, 20, caller="a")
    other = [driver.submit([n], 4, caller="b") for n in range(4)]
    driver.step_until(lambda: entries_of(driver, other[0]))
    back = [driver.submit([7], 4, caller="a")]
    driver.drain()
    assert order(driver, [*other, *back])[-1] == 4, "it has had its share"


def test_who_was_served_in_idle_times_does_not_pay_for_it() -> None:
    """Nobody waited while it was served: a caller that is new then must not have all of that in advance."""
    driver = scheduled("fair")
    driver.submit([1] * 100, 28, caller="a")
    driver.drain()
    new = [driver.submit([2] * 4, 4, caller="b") for _ in range(12)]
    back = driver.submit([3] * 4, 4, caller="a")
    driver.drain()
    assert order(driver, [*new, back]).index(12) <= 2


def test_counters_are_prompts_and_outputs_and_nothing_twice() -> None:
    driver = scheduled("fair", max_num_seqs=4, num_blocks=11)
    clients = [driver.prepare([n] * 8, 20, seed=n, caller=str(n)) for n in range(3)]
    driver.submit_all(*clients)
    driver.drain()
    assert driver.core.figures.num_preemptions > 0
    policy = policy_of(driver)
    assert isinstance(policy, Fair)
    for client in clients:
        # The prompt draws the first token, and the last one is not computed.
        assert policy._idle[client.message.caller] == 8 + 19 * OUTPUT_COST


def test_tokens_that_were_found_cost_nothing() -> None:
    driver = scheduled("fair", max_num_seqs=4, caching=True)
    clients = [driver.submit(range(17), 1, caller=caller) for caller in "ab"]
    driver.drain()
    policy = policy_of(driver)
    assert isinstance(policy, Fair)
    assert driver.num_cached(clients[1]) == 16
    assert policy._idle["b"] - policy._idle["a"] <= OUTPUT_COST


def test_idle_callers_are_remembered_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.scheduler.policy.fair.MAX_IDLE_CALLERS", 3)
    driver = scheduled("fair")
    for n in range(10):
        driver.submit([1], 1, caller=str(n))
        driver.drain()
    policy = policy_of(driver)
    assert isinstance(policy, Fair)
    assert list(policy._idle) == ["7", "8", "9"]
    assert not policy._counters
    assert not policy._num_requests


# A long request among short ones


@pytest.mark.parametrize(
    ("policy", "callers", "bound"),
    [
        ("fcfs", ("a", "a"), 0),
        ("priority", ("a", "a"), 0),
        ("fair", ("a", "a"), 0),
        ("fair", ("long", "short"), 0),
    ],
)
def test_a_long_request_among_short_ones_starts_within_a_bound(
    policy: str, callers: tuple[str, str], bound: int
) -> None:
    driver = scheduled(policy, max_num_seqs=4, num_blocks=31, budget=32)
    for _ in range(8):
        driver.submit([1] * 8, 8, caller=callers[1])
    long = driver.submit([2] * 100, 8, caller=callers[0])
    assert overtakers(driver, long, lambda: driver.submit([3] * 8, 8, caller=callers[1]), keep=4) <= bound
    driver.drain()
    assert driver.tokens(long) == long.expected[0]


def test_a_long_request_of_little_priority_starts_within_the_bound_of_its_level(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PRIORITY, 8)
    driver = scheduled("priority", max_num_seqs=4, num_blocks=31, budget=32, max_preemptions=1)
    for _ in range(8):
        driver.submit([1] * 8, 8)
    long = driver.submit([2] * 100, 8, priority=1)
    assert overtakers(driver, long, lambda: driver.submit([3] * 8, 8), keep=4) <= 8
    driver.drain()
    assert driver.tokens(long) == long.expected[0]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_steady_stream_is_served_to_its_end_under_each_policy(policy: str) -> None:
    driver = scheduled(policy, max_num_seqs=3, num_blocks=13, budget=9)
    clients = [driver.submit([n] * (1 + n % 9), 1 + n % 7, seed=n, caller=str(n % 3)) for n in range(60)]
    driver.drain()
    assert [driver.tokens(client) for client in clients] == [client.expected[0] for client in clients]
