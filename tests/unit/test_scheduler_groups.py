"""Beam groups in the core: beams share blocks, copy before they write, and find what the search finds alone."""

import re
from collections.abc import Callable

import pytest

from octavo.scheduler.simulate.model import make_facts
from octavo.wire.ids import SessionId
from octavo.wire.plan import FLAG_SAMPLE
from octavo.wire.requests import BeamParams, FailureCode, FinishReason
from tests.support.core_driver import (
    FRONTEND,
    CoreDriver,
    beams_of,
    copies_of,
    entries_of,
    make_config,
    rows_of,
)

DRAW = (1, FLAG_SAMPLE)
PROMPT = range(100, 106)  # a full block of four, and a half


def searching(
    *,
    num_blocks: int = 129,
    max_num_seqs: int = 8,
    budget: int = 256,
    policy: str = "fcfs",
    depth: int = 2,
    max_preemptions: int = 3,
    fault_rule: Callable[..., bool] | None = None,
    vocab_size: int = 1000,
) -> CoreDriver:
    """Return a driver with blocks of 4 tokens, its worker ready."""
    facts = make_facts(
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=64,
        vocab_size=vocab_size,
    )
    config = make_config(scheduling_policy=policy, pipeline_depth=depth, max_preemptions=max_preemptions)
    driver = CoreDriver(facts, config, fault_rule=fault_rule)
    driver.worker_ready()
    return driver


# The plans


def test_a_group_is_planned_when_its_results_are_back_and_its_beams_copy_what_they_share() -> None:
    driver = searching()
    driver.submit(PROMPT, 4, num_choices=2, beams=BeamParams(3))
    (first,) = driver.plans
    assert rows_of(first) == [(0, 6, FLAG_SAMPLE)]
    driver.execute()
    assert len(driver.plans) == 1, "what follows is not known yet"
    driver.deliver()
    second = driver.plans[1]
    assert sorted(row for row, *_ in rows_of(second)) == [0, 1, 2]
    assert [(row, source) for row, source, _ in beams_of(second)] == [(0, 0), (1, 0), (2, 0)]
    shared = 2
    assert [(row, source) for row, source, _ in copies_of(second)] == [(0, shared), (1, shared)]
    driver.drain()


def test_others_run_ahead_meanwhile() -> None:
    driver = searching()
    other, group = driver.prepare(range(3), 30), driver.prepare(PROMPT, 4, beams=BeamParams(2))
    driver.submit_all(other, group)
    assert [len(rows_of(plan)) for plan in driver.plans] == [2, 1], "the second goes without the group"
    driver.step()
    assert len(rows_of(driver.plans[2])) == 3
    driver.step()
    assert rows_of(driver.plans[3]) == [(0, *DRAW)]
    driver.drain()


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("stop_ids", [(), tuple(range(0, 1000, 7))])
@pytest.mark.parametrize("num_prompt", [1, 4, 5, 8])
def test_a_search_finds_what_it_finds_alone(width: int, stop_ids: tuple[int, ...], num_prompt: int) -> None:
    driver = searching(budget=8)
    beams = BeamParams(width, length_penalty=0.5, early_stopping=width % 2 == 0)
    client = driver.submit(range(num_prompt), 12, num_choices=width, stop_ids=stop_ids, min_tokens=2, beams=beams)
    other = driver.submit(range(3), 20)
    driver.drain()
    assert [driver.tokens(client, choice) for choice in range(width)] == client.expected
    assert len(driver.tokens(other)) == 20


def test_beams_are_told_whole_at_the_end_with_their_log_probabilities() -> None:
    driver = searching()
    client = driver.submit(PROMPT, 5, num_choices=2, beams=BeamParams(4))
    while not driver.tokens(client):
        assert driver.step()
    finished = driver.received[FRONTEND].finished
    logprobs = [finished[client.handle, choice].cumulative_logprob for choice in range(2)]
    assert all(value is not None for value in logprobs)
    assert sorted(logprobs, key=lambda value: value or 0.0, reverse=True) == logprobs
    assert [driver.reason(client, choice) for choice in range(2)] == [FinishReason.LENGTH] * 2


# Room


def test_a_group_enters_when_there_are_rows_for_all_of_its_beams() -> None:
    driver = searching(max_num_seqs=4)
    driver.submit(range(3), 3)
    group = driver.submit(PROMPT, 6, beams=BeamParams(4))
    driver.step()
    assert driver.core.figures.waiting_reason == "4 of 4 rows (max_num_seqs)"
    late = driver.submit(range(4), 3)
    while not entries_of(driver, group):
        assert driver.step()
    assert not entries_of(driver, late), "nobody takes the rows of beams to come"
    driver.drain()


def test_a_group_gives_way_whole_and_begins_anew() -> None:
    driver = searching(num_blocks=15, max_num_seqs=6)
    old = driver.submit(range(3), 40)
    driver.step_until(lambda: len(driver.tokens(old)) >= 12)
    group = driver.submit(PROMPT, 12, num_choices=3, beams=BeamParams(3))
    driver.drain()
    assert driver.core.figures.num_preemptions > 0
    assert len(entries_of(driver, group)) > 1
    assert len(entries_of(driver, group)) <= 4, "three preemptions, then it is protected"


@pytest.mark.parametrize("max_preemptions", [0, 1])
@pytest.mark.parametrize("width", [2, 4])
def test_a_protected_group_always_has_the_blocks_that_it_needs(max_preemptions: int, width: int) -> None:
    # 1 full block of the prompt, then (6 + 15) / 4 more of each beam.
    driver = searching(num_blocks=1 + 1 + 5 * width, max_num_seqs=6, max_preemptions=max_preemptions)
    groups = [driver.submit([*PROMPT, i], 15, num_choices=width, beams=BeamParams(width)) for i in range(3)]
    other = driver.submit(range(3), 9)
    driver.drain()
    assert all(len(entries_of(driver, group)) <= 1 + max_preemptions for group in groups)
    assert len(driver.tokens(other)) == 9


@pytest.mark.parametrize(
    ("beams", "num_prompt", "max_tokens", "message"),
    [
        (BeamParams(9), 6, 4, r"9 beams run at once, the limit is 8 sequences \(max_num_seqs\)"),
        (
            BeamParams(8),
            6,
            30,
            "8 beams of a prompt of 6 tokens and max_tokens 30 can take 65 blocks of 4 tokens: there are 64",
        ),
    ],
)
def test_a_group_that_can_never_run_is_refused(
    beams: BeamParams, num_prompt: int, max_tokens: int, message: str
) -> None:
    driver = searching(num_blocks=65)
    client = driver.submit(range(num_prompt), max_tokens, beams=beams)
    failure = driver.failure(client)
    assert failure.code is FailureCode.INVALID
    assert re.fullmatch(message, failure.message)


def test_more_beams_and_ends_than_ids_are_refused() -> None:
    driver = searching(vocab_size=9)
    client = driver.submit(range(3), 4, stop_ids=range(6), beams=BeamParams(4))
    assert driver.failure(client).message == "4 beams and 6 ids that end them need 10 ids, there are 9"


# What goes wrong


def test_a_group_is_cancelled_at_any_time() -> None:
    for num_results in range(6):
        driver = searching()
        group = driver.submit(PROMPT, 6, num_choices=2, beams=BeamParams(3))
        other = driver.submit(range(5), 12)
        for _ in range(num_results):
            driver.step()
        driver.cancel(group)
        driver.drain()
        assert driver.tokens(group) == []
        assert len(driver.tokens(other)) == 12


@pytest.mark.parametrize("num_steps", range(5))
def test_a_group_outlives_its_worker(num_steps: int) -> None:
    driver = searching()
    group = driver.submit(PROMPT, 8, num_choices=3, beams=BeamParams(3))
    for _ in range(num_steps):
        driver.step()
    driver.lose_worker()
    driver.worker_ready()
    driver.drain()
    assert [driver.tokens(group, choice) for choice in range(3)] == group.expected


def test_a_group_outlives_its_scheduler_and_its_frontends_session() -> None:
    driver = searching()
    driver.submit(PROMPT, 8, num_choices=3, beams=BeamParams(3))
    driver.step()
    driver.step()
    driver.replay(FRONTEND, SessionId(8))
    driver.drain()


def test_a_beam_whose_values_break_fails_the_request() -> None:
    driver = searching(fault_rule=lambda ids, seed, choice: seed == 1 and len(ids) >= 9)
    group = driver.submit(PROMPT, 8, num_choices=3, seed=1, beams=BeamParams(3), is_faulty=True)
    other = driver.submit(range(3), 20)
    driver.drain()
    assert driver.failure(group).code is FailureCode.INTERNAL
    assert len(driver.tokens(other)) == 20


def test_a_deadline_ends_a_group() -> None:
    driver = searching()
    group = driver.submit(PROMPT, 8, beams=BeamParams(3), deadline_s=5.0)
    driver.step()
    driver.now += 6.0
    driver.tell()
    assert driver.failure(group).code is FailureCode.DEADLINE
    driver.drain()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_groups_under_every_policy(policy: str) -> None:
    driver = searching(num_blocks=33, policy=policy, max_preemptions=2)
    for i in range(6):
        width = 1 + i % 4
        driver.submit(
            range(i, 7 + i),
            10,
            num_choices=width,
            beams=BeamParams(width) if i % 3 else None,
            caller="ab"[i % 2],
            priority=i % 3 if policy == "priority" else 0,
        )
    driver.drain()
