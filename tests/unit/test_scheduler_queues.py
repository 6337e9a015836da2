"""The waiting queue, what each caller may have in it, and how a step is shared among prompts and decodes."""

import pytest

from octavo.scheduler.config import ConfigConflict
from octavo.scheduler.errors import InvariantViolation
from octavo.scheduler.events import RequestSubmitted
from octavo.scheduler.intake import Intake
from octavo.scheduler.policy import POLICIES
from octavo.scheduler.queues import WaitingQueue
from octavo.scheduler.sequence import Sequence, Status
from octavo.scheduler.simulate.model import make_facts
from octavo.wire.ids import Row, SessionId
from octavo.wire.requests import FailureCode, RequestFailed
from tests.support.core_driver import Client, CoreDriver, entries_of, make_config, rows_of
from tests.support.fake_frontend import make_submit

# The queue itself


def queue_of(policy: str, *messages: tuple[str, int]) -> tuple[WaitingQueue, list[Sequence]]:
    """Return a queue with one sequence for each (caller, priority)."""
    chosen, intake = POLICIES[policy](), Intake(True)
    queue = WaitingQueue(chosen)
    sequences = []
    for n, (caller, priority) in enumerate(messages):
        request = intake.make_request(SessionId(1), make_submit(n, [1], 1, caller=caller, priority=priority), 0.0)
        chosen.on_admitted(request)
        sequences += request.sequences
    for sequence in reversed(sequences):
        queue.add(sequence)
    queue.check()
    return queue, sequences


def drained(queue: WaitingQueue, sequences: list[Sequence]) -> list[int]:
    order = []
    while (head := queue.head) is not None:
        order.append(sequences.index(head))
        queue.remove(head)
        queue.check()
    assert len(queue) == 0
    return order


@pytest.mark.parametrize(
    ("policy", "messages", "order"),
    [
        ("fcfs", [("a", 0), ("b", 0), ("a", 0)], [0, 1, 2]),
        ("priority", [("a", 2), ("b", 1), ("a", 1), ("b", -1)], [3, 1, 2, 0]),
        ("fair", [("a", 0), ("b", 0), ("a", 0)], [0, 2, 1]),
    ],
)
def test_whatever_the_order_of_arrival_the_head_is_the_policys(
    policy: str, messages: list[tuple[str, int]], order: list[int]
) -> None:
    queue, sequences = queue_of(policy, *messages)
    assert len(queue) == len(list(queue)) == len(messages)
    expected = sorted(order) if policy == "fair" else order  # callers with equal counters: the earlier head is next
    assert drained(queue, sequences) == expected


def test_what_does_not_wait_cannot_be_taken_out() -> None:
    queue, sequences = queue_of("fcfs", ("a", 0), ("a", 0))
    queue.remove(sequences[0])
    with pytest.raises(InvariantViolation, match="1-0/0 does not wait"):
        queue.remove(sequences[0])
    queue.remove(sequences[1])
    assert queue.head is None


def test_the_check_of_the_queue_can_fail() -> None:
    queue, sequences = queue_of("fcfs", ("a", 0), ("a", 0))
    sequences[0].take_row(Row(0), 1)
    with pytest.raises(InvariantViolation, match="does not wait"):
        queue.check()
    sequences[0].status, sequences[0].row = Status.WAITING, None
    queue._size += 1
    with pytest.raises(InvariantViolation, match="counts 3"):
        queue.check()
    queue._size -= 1
    (lane,) = queue._lanes.values()
    lane.reverse()
    with pytest.raises(InvariantViolation, match="out of order"):
        queue.check()


# What a caller may have


def limited(max_requests: int = 0, max_tokens: int = 0, max_num_seqs: int = 1) -> CoreDriver:
    config = make_config(
        max_num_seqs=max_num_seqs, max_requests_per_caller=max_requests, max_waiting_tokens_per_caller=max_tokens
    )
    driver = CoreDriver(make_facts(), config)
    driver.worker_ready()
    return driver


def refused(driver: CoreDriver, client: Client, message: str, **figures: int) -> None:
    assert driver.failure(client) == RequestFailed(
        client.handle, FailureCode.CALLER_LIMIT, message, retry_after_s=1.0, figures=tuple(figures.items())
    )


def test_requests_of_a_caller_are_bounded_running_ones_among_them() -> None:
    driver = limited(max_requests=2)
    first = [driver.submit([1], 3, caller="a") for _ in range(2)]
    message = "this caller has 2 requests, the limit is 2 (--max-requests-per-caller)"
    refused(driver, driver.submit([1], 3, caller="a"), message, max_requests_per_caller=2, requests=2)
    other = driver.submit([1], 3, caller="b")
    assert other.is_live
    driver.step_until(lambda: not first[0].is_live)
    assert driver.submit([1], 3, caller="a").is_live, "one has ended"
    driver.drain()


@pytest.mark.parametrize("end", ["cancel", "fail", "finish", "lost"])
def test_whatever_ends_a_request_gives_its_place_back(end: str) -> None:
    driver = limited(max_requests=1)
    one = driver.submit([1], 2, caller="a", deadline_s=5.0)
    if end == "cancel":
        driver.cancel(one)
    elif end == "fail":
        driver.now += 5.0
        driver.tell()
    elif end == "lost":
        driver.replay(one.frontend, SessionId(9))
        (one,) = (client for client in driver.clients.values() if client.is_live)
        driver.cancel(one)
    driver.drain()
    assert driver.submit([1], 2, caller="a").is_live
    driver.drain()


def test_waiting_tokens_of_a_caller_are_bounded_times_choices() -> None:
    driver = limited(max_tokens=10)
    driver.submit([1] * 30, 3, caller="a")  # it has started: it does not count
    driver.submit([1] * 4, 3, caller="a")
    client = driver.submit([1] * 4, 3, caller="a", num_choices=2)
    message = "4 tokens of this caller wait, 8 more would exceed the limit of 10 (--max-waiting-tokens-per-caller)"
    refused(driver, client, message, max_waiting_tokens_per_caller=10, waiting_tokens=4, request_tokens=8)
    assert driver.submit([1] * 4, 3, caller="b", num_choices=2).is_live
    assert driver.submit([1] * 3, 3, caller="a", num_choices=2).is_live
    driver.drain()
    assert driver.submit([1] * 40, 3, caller="a").is_live, "a single one may be larger"
    driver.drain()


def test_the_bound_of_the_queue_comes_before_that_of_the_caller() -> None:
    config = make_config(max_num_seqs=1, max_waiting_requests=1, max_requests_per_caller=1)
    driver = CoreDriver(make_facts(), config)
    driver.worker_ready()
    driver.submit([1], 3, caller="a")
    message = "this caller has 1 requests, the limit is 1 (--max-requests-per-caller)"
    refused(driver, driver.submit([1], 3, caller="a"), message, max_requests_per_caller=1, requests=1)
    driver.submit([1], 3, caller="b")
    full = driver.failure(driver.submit([1], 3, caller="a"))
    assert (full.code, full.message) == (FailureCode.QUEUE_FULL, "1 requests wait, the limit is 1")
    driver.drain()


def test_replays_are_not_turned_away_for_their_callers_bound() -> None:
    driver = limited(max_requests=1)
    driver.submit([1], 9, caller="a", frontend=SessionId(1))
    driver.step()
    message = make_submit(77, [1], 2, caller="a", output_ids=[[]])
    driver.core.on_event(RequestSubmitted(SessionId(2), message), driver.now)
    driver.core.check()
    assert driver.core.figures.num_requests == 2


@pytest.mark.parametrize("name", ["max_requests_per_caller", "max_waiting_tokens_per_caller"])
def test_a_bound_below_zero_is_a_conflict(name: str) -> None:
    with pytest.raises(ConfigConflict, match=f"{name} is -1: it must be at least 0"):
        make_config(**{name: -1})  # type: ignore[arg-type]


# How a step is shared


def test_with_a_chunk_cap_a_long_prompt_delays_nobody() -> None:
    steps = {}
    for cap in (0, 4):
        facts = make_facts(max_num_batched_tokens=10, max_num_seqs=4)
        driver = CoreDriver(facts, make_config(long_prefill_token_threshold=cap))
        driver.worker_ready()
        long, short = driver.prepare([1] * 60, 2), driver.prepare([2] * 5, 2)
        driver.submit_all(long, short)
        driver.drain()
        assert all(count <= (cap or 10) for plan in driver.plans for _, count, _ in rows_of(plan))
        steps[cap] = entries_of(driver, short)[0].step
        assert (driver.tokens(long), driver.tokens(short)) == (long.expected[0], short.expected[0])
    assert steps == {0: 7, 4: 1}, "without one it waits until six plans have computed the long prompt"


@pytest.mark.parametrize("budget", [1, 2, 5, 16])
@pytest.mark.parametrize("cap", [0, 1, 3])
def test_no_plan_exceeds_the_budget_or_the_cap_and_none_of_it_is_left_while_prompts_wait(budget: int, cap: int) -> None:
    driver = CoreDriver(
        make_facts(max_num_batched_tokens=budget, max_num_seqs=6), make_config(long_prefill_token_threshold=cap)
    )
    driver.worker_ready()
    clients = [driver.prepare([n] * (3 + n), 4, seed=n) for n in range(6)]
    driver.submit_all(*clients)
    driver.drain()
    for plan in driver.plans:
        counts = [count for _, count, _ in rows_of(plan)]
        assert sum(counts) <= budget
        assert max(counts) <= (cap or budget)
    if not cap and budget >= 5:  # else rows that have ended hold it back until their results are there
        full = (sum(len(client.prompt) for client in clients)) // budget
        assert all(sum(count for _, count, _ in rows_of(plan)) == budget for plan in driver.plans[:full])
