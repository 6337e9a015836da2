"""Choices of one request: one computes the prompt, the others start from its blocks, and copy before they write."""

import pytest

from octavo.scheduler.events import RequestSubmitted, StepCompleted
from octavo.scheduler.instructions import EmitOutput, SendPlan
from octavo.scheduler.simulate.model import make_facts
from octavo.wire.columns import pack_ints
from octavo.wire.ids import SessionId
from octavo.wire.plan import FLAG_SAMPLE, NewRow, RowLogprobs, RowSampling, StepPlan, StepResult
from octavo.wire.requests import FinishReason, RequestStarted, StepOutput
from tests.support.core_by_hand import EPOCH, started
from tests.support.core_driver import (
    FRONTEND,
    Client,
    CoreDriver,
    appended_to,
    copies_of,
    entries_of,
    forks_of,
    make_config,
    rows_of,
)
from tests.support.fake_frontend import make_submit

DRAW = (1, FLAG_SAMPLE)


def forking(
    num_blocks: int = 65,
    max_num_seqs: int = 16,
    budget: int = 256,
    policy: str = "fcfs",
    depth: int = 2,
    max_preemptions: int = 3,
) -> CoreDriver:
    """Return a driver with blocks of 4 tokens, its worker ready."""
    facts = make_facts(
        num_blocks=num_blocks, block_size=4, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=64
    )
    config = make_config(scheduling_policy=policy, pipeline_depth=depth, max_preemptions=max_preemptions)
    driver = CoreDriver(facts, config)
    driver.worker_ready()
    return driver


def outputs(driver: CoreDriver, client: Client) -> list[list[int]]:
    return [driver.tokens(client, choice) for choice in range(len(client.expected))]


# The plans


def test_one_prompt_is_computed_and_forked_in_the_plan_that_draws_the_first_token() -> None:
    core = started(make_facts(block_size=4))
    instructions = core.on_event(RequestSubmitted(FRONTEND, make_submit(1, range(6), 5, num_choices=4)), 100.0)
    sampling = RowSampling(seed=0, min_tokens=0, logprobs=-1)
    assert instructions == [
        SendPlan(
            StepPlan(
                epoch=EPOCH,
                step=1,
                row=pack_ints([0]),
                num_tokens=pack_ints([6]),
                flags=pack_ints([FLAG_SAMPLE]),
                new_rows=(NewRow(0, f"{FRONTEND:x}-1", 0, 6, 0, pack_ints(range(6)), sampling),),
                append_row=pack_ints([0, 0]),
                append_block=pack_ints([1, 2]),
                fork_src=pack_ints([0, 0, 0]),
                fork_dst=pack_ints([1, 2, 3]),
                fork_choice=pack_ints([1, 2, 3]),
            )
        ),
        SendPlan(
            StepPlan(
                epoch=EPOCH,
                step=2,
                row=pack_ints([0, 1, 2, 3]),
                num_tokens=pack_ints([1] * 4),
                flags=pack_ints([FLAG_SAMPLE] * 4),
                copy_row=pack_ints([0, 1, 2]),
                copy_src=pack_ints([2, 2, 2]),
                copy_dst=pack_ints([3, 4, 5]),
            )
        ),
        EmitOutput(FRONTEND, StepOutput(started=(RequestStarted(1, 0, 0.0),))),
    ]


def test_the_result_of_a_fork_names_forked_rows_last() -> None:
    core = started(make_facts(block_size=4), pipeline_depth=1)
    core.on_event(RequestSubmitted(FRONTEND, make_submit(1, range(6), 5, num_choices=3, logprobs=0)), 100.0)
    entry = RowLogprobs(2, -0.5, 1)
    result = StepResult(EPOCH, 1, pack_ints([0, 1, 2]), pack_ints([70, 71, 72]), logprobs=(entry,))
    output = core.on_event(StepCompleted(result), 100.0)[-1]
    assert isinstance(output, EmitOutput)
    assert (output.output.choice, output.output.token) == (pack_ints([0, 1, 2]), pack_ints([70, 71, 72]))
    assert [logprobs.choice for logprobs in output.output.logprobs] == [2]


@pytest.mark.parametrize(
    ("length", "num_copies", "num_appended"), [(5, 3, 0), (6, 3, 0), (7, 3, 0), (8, 0, 4), (9, 3, 0), (3, 3, 0)]
)
def test_a_partial_block_is_copied_for_all_but_one_and_a_full_one_for_none(
    length: int, num_copies: int, num_appended: int
) -> None:
    driver = forking()
    client = driver.submit(range(length), 6, num_choices=4)
    driver.drain()
    first, second = driver.plans[:2]
    assert rows_of(first) == [(0, length, FLAG_SAMPLE)]
    assert forks_of(first) == [(0, 1, 1), (0, 2, 2), (0, 3, 3)]
    assert rows_of(second) == [(0, *DRAW), (1, *DRAW), (2, *DRAW), (3, *DRAW)]
    assert len(copies_of(second)) == num_copies
    assert sum(len(appended_to(second, row)) for row in range(4)) == num_appended
    assert all(not copies_of(plan) for plan in driver.plans[2:])
    assert outputs(driver, client) == client.expected
    assert driver.model is not None
    assert driver.model.computed_tokens == length + 4 * 5, "the prompt once"


def test_a_prompt_in_chunks_is_forked_with_its_last_one() -> None:
    driver = forking(budget=5, max_num_seqs=5, depth=1)
    client = driver.submit(range(12), 3, num_choices=3)
    driver.drain()
    assert [len(forks_of(plan)) for plan in driver.plans[:4]] == [0, 0, 2, 0]
    assert outputs(driver, client) == client.expected


def test_a_second_request_finds_the_prompt_and_forks_from_what_it_found() -> None:
    driver = forking()
    first = driver.submit(range(10), 4, num_choices=2)
    second = driver.submit(range(10), 4, num_choices=3, seed=1)
    driver.drain()
    assert driver.num_cached(second) == 8
    (entry,) = entries_of(driver, second)
    (plan,) = [plan for plan in driver.plans if plan.step == entry.step]
    assert len(forks_of(plan)) == 2
    assert [outputs(driver, client) for client in (first, second)] == [first.expected, second.expected]


def test_max_tokens_1_ends_all_choices_with_one_plan() -> None:
    driver = forking()
    client = driver.submit(range(6), 1, num_choices=4)
    driver.drain()
    assert len(driver.plans) == 1
    assert outputs(driver, client) == client.expected
    assert {driver.reason(client, n) for n in range(4)} == {FinishReason.LENGTH}


def test_a_replay_is_not_forked() -> None:
    driver = forking()
    driver.submit(range(6), 9, num_choices=3, frontend=SessionId(1))
    for _ in range(3):
        driver.step()
    driver.replay(SessionId(1), SessionId(2))
    (again,) = (client for client in driver.clients.values() if client.frontend == 2)
    driver.drain()
    assert [(entry.choice, entry.num_computed) for entry in entries_of(driver, again)] == [(0, 4), (1, 4), (2, 4)]
    assert outputs(driver, again) == again.expected


# When there is no room for all


def test_choices_without_a_row_wait_and_find_the_prompt() -> None:
    driver = forking(max_num_seqs=2)
    client = driver.submit(range(10), 4, num_choices=4)
    assert forks_of(driver.plans[0]) == [(0, 1, 1)]
    assert driver.core.figures.num_waiting == 2
    driver.drain()
    assert [(e.choice, e.num_computed) for e in entries_of(driver, client)] == [(0, 0), (2, 8), (3, 8)]
    assert outputs(driver, client) == client.expected


def test_choices_without_blocks_wait_and_find_the_prompt() -> None:
    driver = forking(num_blocks=6)  # 5 to use: 3 for the prompt, one more for each of two
    client = driver.submit(range(10), 4, num_choices=4)
    assert len(forks_of(driver.plans[0])) == 2
    driver.drain()
    later = [entry for entry in entries_of(driver, client) if entry.choice == 3]
    assert later[0].num_computed == 8
    assert outputs(driver, client) == client.expected


def test_choices_let_pass_whom_the_policy_prefers() -> None:
    driver = forking(policy="fair", max_num_seqs=3, budget=6, depth=1)
    many = driver.submit(range(20), 6, num_choices=3, caller="a")
    other = driver.submit([9] * 4, 6, caller="b")
    driver.drain()
    first = next(plan for plan in driver.plans if any(new.request == other.name for new in plan.new_rows))
    siblings = [e.step for e in entries_of(driver, many) if e.choice > 0]
    forked = [plan.step for plan in driver.plans if plan.fork_src]
    assert first.step <= min(siblings + forked)
    assert outputs(driver, many) == many.expected


@pytest.mark.parametrize("max_preemptions", [0, 1])
@pytest.mark.parametrize("num_blocks", [5, 6, 8, 11])
def test_a_dry_pool_preempts_choices_and_every_output_is_the_solo_one(num_blocks: int, max_preemptions: int) -> None:
    facts = make_facts(num_blocks=num_blocks, block_size=4, max_model_len=16)
    driver = CoreDriver(facts, make_config(max_preemptions=max_preemptions))
    driver.worker_ready()
    clients = [driver.submit(range(6), 10, num_choices=4, seed=n) for n in range(2)]
    driver.drain()
    assert [outputs(driver, client) for client in clients] == [client.expected for client in clients]
    assert driver.core.figures.num_preemptions <= max_preemptions * 8


def test_protected_choices_do_not_fork_but_find_the_prompt() -> None:
    driver = forking(max_preemptions=0)
    client = driver.submit(range(10), 4, num_choices=4)
    driver.drain()
    assert all(not plan.fork_src and not plan.copy_src for plan in driver.plans)
    assert [(e.step, e.num_computed) for e in entries_of(driver, client)] == [(1, 0), (1, 8), (1, 8), (1, 8)]
    assert outputs(driver, client) == client.expected


# When the first choice ends before it has drawn


def chunked(num_choices: int = 3) -> tuple[CoreDriver, Client]:
    """Return a request of whose 20 tokens 12 are planned."""
    driver = forking(budget=6, max_num_seqs=6)
    client = driver.submit(range(20), 5, num_choices=num_choices)
    assert driver.core.figures.num_waiting == 0, "the others are held"
    return driver, client


def test_the_next_choice_goes_on_where_a_stopped_one_was() -> None:
    driver, client = chunked()
    driver.stop_choice(client, 0)
    driver.drain()
    assert [(e.choice, e.num_computed) for e in entries_of(driver, client)] == [(0, 0), (1, 12)]
    assert sum(len(forks_of(plan)) for plan in driver.plans) == 1
    assert outputs(driver, client) == [[], *client.expected[1:]]


def test_choices_that_are_stopped_while_they_are_held_are_not_forked() -> None:
    driver, client = chunked()
    driver.stop_choice(client, 1)
    driver.drain()
    assert [choice for plan in driver.plans for _, _, choice in forks_of(plan)] == [2]
    assert outputs(driver, client) == [client.expected[0], [], client.expected[2]]


def test_the_last_choice_that_is_left_runs_alone() -> None:
    driver, client = chunked()
    driver.stop_choice(client, 0)
    driver.stop_choice(client, 1)
    driver.drain()
    assert all(not plan.fork_src for plan in driver.plans)
    assert driver.tokens(client, 2) == client.expected[2]


def test_cancel_and_loss_while_choices_are_held_leave_nothing() -> None:
    driver, client = chunked()
    driver.cancel(client)
    driver.drain()
    driver, client = chunked()
    driver.lose_worker()
    driver.worker_ready()
    driver.drain()
    assert outputs(driver, client) == client.expected


def test_choices_stay_held_when_the_first_one_is_preempted_before_it_has_drawn() -> None:
    driver = forking(num_blocks=9, budget=6, max_num_seqs=6, policy="priority")  # 8 blocks to use
    client = driver.submit(range(24), 4, num_choices=3, priority=1)
    urgent = driver.submit([9] * 20, 4)
    while driver.core.figures.num_preemptions == 0:
        driver.step()
    assert driver.core.figures.num_waiting == 1, "the first one alone waits, the others are held"
    driver.drain()
    entries = entries_of(driver, client)
    assert [entry.choice for entry in entries[:2]] == [0, 0]
    assert driver.tokens(urgent) == urgent.expected[0]
    assert outputs(driver, client) == client.expected


@pytest.mark.parametrize("index", range(20))
def test_stopped_choices_get_nothing_more_and_the_others_their_own(index: int) -> None:
    driver = forking(budget=7, num_blocks=14, max_num_seqs=7)
    client = driver.submit(range(10), 6, num_choices=4)
    for n in range(index):
        if n % 2:
            driver.deliver()
        else:
            driver.execute()
    driver.stop_choice(client, index % 4)
    driver.drain()
    for choice in set(range(4)) - {index % 4}:
        assert driver.tokens(client, choice) == client.expected[choice]


def test_a_first_choice_that_came_back_protected_does_not_fork() -> None:
    """What is reserved for it are blocks for its own tokens, not for copies."""
    driver = forking(num_blocks=9, budget=6, max_num_seqs=6, policy="priority", max_preemptions=1)
    client = driver.submit(range(22), 6, num_choices=3, priority=1)
    driver.submit([9] * 20, 4)
    driver.drain()
    assert [entry.choice for entry in entries_of(driver, client)[:2]] == [0, 0]
    assert all(not plan.fork_src for plan in driver.plans)
    assert outputs(driver, client) == client.expected


def test_a_choice_that_gives_way_in_the_plan_that_would_copy_its_block_is_not_copied() -> None:
    driver = forking(num_blocks=6)  # 5 to use
    choices, longer = driver.prepare(range(6), 4, num_choices=2), driver.prepare([9] * 8, 4)
    driver.submit_all(choices, longer)
    assert forks_of(driver.plans[0]) == [(0, 1, 1)]
    second = driver.plans[1]
    assert driver.core.figures.num_preemptions == 2, "its copy took the block that the longer one needs"
    assert (len(rows_of(second)), copies_of(second)) == (1, [])
    driver.drain()
    assert outputs(driver, choices) == choices.expected
    assert driver.tokens(longer) == longer.expected[0]


def test_choices_stay_held_when_the_first_one_gives_way_in_the_plan_that_would_draw() -> None:
    facts = make_facts(num_blocks=14, block_size=4, max_model_len=52)  # 13 blocks to use
    driver = CoreDriver(facts, make_config(long_prefill_token_threshold=4, pipeline_depth=1))
    driver.worker_ready()
    driver.submit(range(39), 1)
    driver.drain()
    choices = driver.prepare([9] * 12, 4, num_choices=3)  # three plans
    longer = driver.prepare(range(39), 8)  # finds 9 blocks; its third plan needs one more
    driver.submit_all(choices, longer)
    driver.step_until(lambda: driver.core.figures.num_preemptions)
    assert driver.core.figures.num_waiting == 1, "the others are not let go to compute the prompt each by itself"
    driver.drain()
    assert [entry.choice for entry in entries_of(driver, choices)][:2] == [0, 0]
    assert sum(len(forks_of(plan)) for plan in driver.plans) > 0
    assert outputs(driver, choices) == choices.expected
    assert driver.tokens(longer) == longer.expected[0]
