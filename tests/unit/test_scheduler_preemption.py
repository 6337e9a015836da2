"""Preemption: who gives way, when it returns, and that nobody gives way for ever (F28, F30)."""

import pytest

from octavo.scheduler.policy import POLICIES
from octavo.scheduler.simulate.model import make_facts
from octavo.wire.columns import unpack_ints
from tests.support.core_driver import Client, CoreDriver, entries_of, make_config


def crowd(num_blocks: int, count: int, max_preemptions: int = 3) -> tuple[CoreDriver, list[Client]]:
    """Return requests of 8 + 16 tokens in a pool of blocks of 4 tokens: each comes to need 6 blocks."""
    facts = make_facts(num_blocks=num_blocks, block_size=4, max_model_len=24)
    driver = CoreDriver(facts, make_config(max_preemptions=max_preemptions))
    driver.worker_ready()
    return driver, [driver.submit(range(8), 16, seed=n) for n in range(count)]


@pytest.mark.parametrize("max_preemptions", [0, 1, 3])
@pytest.mark.parametrize("num_blocks", [7, 8, 9, 11, 13])
def test_a_dry_pool_preempts_and_every_output_is_the_solo_one(num_blocks: int, max_preemptions: int) -> None:
    driver, clients = crowd(num_blocks, 4, max_preemptions)
    driver.drain()
    assert [driver.tokens(client) for client in clients] == [client.expected[0] for client in clients]
    assert driver.core.figures.num_preemptions <= max_preemptions * len(clients)
    if num_blocks in (8, 9, 11) and max_preemptions:
        assert driver.core.figures.num_preemptions > 0


def test_the_victim_is_the_least_computed_and_of_equals_the_latest() -> None:
    driver, clients = crowd(7, 2)
    while driver.core.figures.num_preemptions == 0:
        driver.step()
    assert [s.request.handle for s in driver.core._waiting] == [clients[1].handle]
    driver.drain()


def test_a_preempted_sequence_returns_before_all_that_came_later() -> None:
    driver, clients = crowd(7, 2)
    while driver.core.figures.num_preemptions == 0:
        driver.step()
    later = driver.submit([1], 1)  # one block, which is free
    driver.drain()
    entered = [new.request for plan in driver.plans for new in plan.new_rows]
    assert entered.index(later.name) > max(n for n, name in enumerate(entered) if name == clients[1].name)


def test_a_preempted_sequence_returns_only_after_its_newest_plan_has_reported() -> None:
    driver, clients = crowd(7, 2)
    while driver.core.figures.num_preemptions == 0:
        driver.step()
    # The first is gone: there is room, but the ids of the second are still under way.
    driver.cancel(clients[0])
    assert len(driver.sent) > 0
    before = len(driver.plans)
    assert driver.core.figures.num_waiting == 1
    driver.step()
    (readmission,) = [plan for plan in driver.plans[before:] if plan.new_rows]
    (new,) = readmission.new_rows
    assert unpack_ints(new.token_ids)[8:].tolist() == driver.tokens(clients[1])  # type: ignore[attr-defined]
    driver.drain()


def test_a_protected_sequence_waits_for_all_its_blocks_and_keeps_them() -> None:
    driver, clients = crowd(9, 2, max_preemptions=1)
    while driver.core.figures.num_preemptions == 0:
        driver.step()
    while clients[0].is_live:
        assert driver.core.figures.num_running == 1, "8 blocks do not hold 6 and what the first one has"
        driver.step()
    late = driver.submit(range(8), 16, seed=9)
    while driver.core.figures.num_preemptions == 1:
        driver.step()
    assert [s.request.handle for s in driver.core._waiting] == [late.handle], "the reserved blocks were not its to take"
    driver.drain()
    assert driver.tokens(late) == late.expected[0]
    assert driver.core.figures.num_preemptions == 2


# Bounds


def assert_bounded(driver: CoreDriver, clients: list[Client], max_preemptions: int) -> None:
    """Each choice took a row once and once more for each preemption; everyone got its own output."""
    for client in clients:
        times = [entry.choice for entry in entries_of(driver, client)]
        for choice, expected in enumerate(client.expected):
            assert times.count(choice) <= max_preemptions + 1
            assert driver.tokens(client, choice) == expected


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("max_preemptions", [0, 1, 2, 3])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_many_long_requests_in_a_pool_for_one_and_a_half(policy: str, max_preemptions: int, caching: bool) -> None:
    facts = make_facts(num_blocks=16, block_size=4, max_model_len=40)
    config = make_config(
        max_preemptions=max_preemptions, scheduling_policy=policy, enable_prefix_caching=caching, max_num_seqs=8
    )
    driver = CoreDriver(facts, config)
    driver.worker_ready()
    clients = [driver.submit([n] * 10, 30, seed=n, caller=str(n % 3)) for n in range(12)]
    driver.drain()
    assert_bounded(driver, clients, max_preemptions)
    assert (driver.core.figures.num_preemptions > 0) == (max_preemptions > 0)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("max_preemptions", [1, 3])
def test_two_that_each_need_sixty_percent_both_end(policy: str, max_preemptions: int) -> None:
    facts = make_facts(num_blocks=11, block_size=4, max_model_len=40)
    driver = CoreDriver(facts, make_config(max_preemptions=max_preemptions, scheduling_policy=policy))
    driver.worker_ready()
    clients = [driver.submit([n] * 4, 21, seed=n, caller=str(n)) for n in range(2)]
    driver.drain()
    assert driver.core.figures.num_preemptions > 0
    assert_bounded(driver, clients, max_preemptions)


def test_a_steady_stream_does_not_preempt_one_more_often_than_allowed() -> None:
    """New work keeps coming, and is of the better priority: after its preemptions, the old one is left alone."""
    facts = make_facts(num_blocks=11, block_size=4, max_model_len=40, max_num_seqs=3)
    driver = CoreDriver(facts, make_config(max_preemptions=2, scheduling_policy="priority"))
    driver.worker_ready()
    old = driver.submit([1] * 8, 28, priority=1)
    urgent: list[Client] = []
    for step in range(400):
        if step % 8 == 0 and len(urgent) < 40:
            urgent.append(driver.submit([step % 50] * 16, 6, seed=step))
        driver.step()
    driver.drain()
    assert len(entries_of(driver, old)) == 3
    assert_bounded(driver, [old, *urgent], 2)


def test_recomputed_tokens_are_counted() -> None:
    driver, clients = crowd(7, 2)
    driver.drain()
    figures = driver.core.figures
    assert driver.model is not None
    useful = sum(len(client.prompt) + len(client.expected[0]) - 1 for client in clients)
    assert figures.num_recomputed_tokens > 0
    assert driver.model.computed_tokens == useful + figures.num_recomputed_tokens - figures.num_cached_prompt_tokens
