"""Requests that want log-probabilities of their prompt: what is computed for them, told, and ended."""

from typing import Any

import msgspec
import pytest

from octavo.scheduler.instructions import EndWorkerSession
from octavo.scheduler.simulate.model import make_facts
from octavo.wire.columns import pack_floats, pack_ints
from octavo.wire.errors import MalformedMessage
from octavo.wire.plan import FAULT_NONFINITE_LOGITS, StepResult
from octavo.wire.prompt_logprobs import PromptLogprobs
from octavo.wire.requests import FailureCode, FinishReason
from tests.support.core_driver import FRONTEND, CoreDriver, entries_of, make_config, rows_of

FACTS = make_facts(num_blocks=17, block_size=4, vocab_size=50, max_model_len=60, max_num_seqs=4)
PROMPT = list(range(1, 34))


def make_driver(max_num_batched_tokens: int | None = None) -> CoreDriver:
    driver = CoreDriver(FACTS, make_config(max_num_batched_tokens=max_num_batched_tokens))
    driver.worker_ready()
    return driver


def told(driver: CoreDriver, handle: int) -> list[tuple[int, int]]:
    """Return first position and number of positions of each part that a frontend was told."""
    return [(part.first_position, part.count) for part in driver.received[FRONTEND].prompts[handle]]


def test_chunks_are_told_as_they_come_and_nothing_is_looked_up() -> None:
    driver = make_driver(max_num_batched_tokens=10)
    for _ in range(2):  # the second would find the first one's blocks
        client = driver.submit(PROMPT, 3, prompt_logprobs=2)
        driver.drain()
        assert told(driver, client.handle) == [(1, 10), (11, 10), (21, 10), (31, 2)]
        assert driver.num_cached(client) == 0
    finding = driver.submit(PROMPT, 1)
    driver.drain()
    assert driver.num_cached(finding) == 32, "what they computed can be found by others"


def test_the_prompt_of_many_choices_is_computed_and_told_once() -> None:
    driver = make_driver()
    client = driver.submit(PROMPT, 3, num_choices=3, prompt_logprobs=0)
    driver.drain()
    assert told(driver, client.handle) == [(1, 32)]
    assert [entry.choice for entry in entries_of(driver, client)] == [0]


@pytest.mark.parametrize("num_steps", range(5))
def test_after_a_loss_no_choice_draws_before_the_prompt_is_told(num_steps: int) -> None:
    """F36: the other choices had been forked in the plan whose result, with the rest of the prompt, was lost."""
    driver = make_driver(max_num_batched_tokens=10)
    client = driver.submit(PROMPT, 3, num_choices=3, prompt_logprobs=0)
    for _ in range(num_steps):
        driver.step()
    was_told = driver.received[FRONTEND].num_prompt_told(client.handle) == len(PROMPT) if num_steps else False
    assert was_told == (num_steps > 3)
    driver.lose_worker()
    num_plans = len(driver.plans)
    driver.worker_ready()
    while driver.received[FRONTEND].num_prompt_told(client.handle) != len(PROMPT):
        assert not any(driver.tokens(client, choice) for choice in (0, 1, 2))
        driver.step()
    driver.drain()
    again = [new.choice for plan in driver.plans[num_plans:] for new in plan.new_rows]
    assert again == ([0, 1, 2] if was_told else [0]), "the others are forked once the prompt is computed"


def test_max_tokens_0_ends_without_a_draw() -> None:
    driver = make_driver(max_num_batched_tokens=20)
    client = driver.submit(PROMPT, 0, num_choices=3, prompt_logprobs=1)
    driver.drain()
    assert [rows_of(plan) for plan in driver.plans if plan.row] == [[(0, 20, 0)], [(0, 12, 0)]]
    assert [driver.reason(client, choice) for choice in range(3)] == [FinishReason.LENGTH] * 3
    assert told(driver, client.handle) == [(1, 20), (21, 12)]


@pytest.mark.parametrize(("prompt", "prompt_logprobs"), [(PROMPT, -1), ([7], 2)])
def test_what_needs_no_computation_ends_at_once(prompt: list[int], prompt_logprobs: int) -> None:
    driver = make_driver()
    driver.submit(prompt, 0, num_choices=2, prompt_logprobs=prompt_logprobs)
    assert driver.core.is_idle
    driver.drain()
    assert not driver.plans


def test_who_was_preempted_tells_only_what_is_missing() -> None:
    driver = make_driver(max_num_batched_tokens=12)
    old = driver.submit([9] * 20, 40)
    driver.step_until(lambda: driver.tokens(old))
    client = driver.submit(PROMPT, 20, prompt_logprobs=0)
    driver.drain()
    entries = entries_of(driver, client)
    parts = told(driver, client.handle)
    assert sum(count for _, count in parts) == 32
    assert len(entries) >= 1
    firsts = [new.first_prompt_logprob for plan in driver.plans for new in plan.new_rows if new.request == client.name]
    assert firsts[0] == 1
    assert driver.core.figures.num_preemptions > 0


def test_a_replay_goes_on_where_it_was() -> None:
    driver = make_driver(max_num_batched_tokens=10)
    client = driver.submit(PROMPT, 2, prompt_logprobs=0)
    driver.step()
    assert told(driver, client.handle) == [(1, 10)]
    driver.replay(FRONTEND, type(FRONTEND)(FRONTEND + 1))
    driver.drain()
    (new,) = [new for plan in driver.plans[3:] for new in plan.new_rows]
    assert (new.num_computed_tokens, new.first_prompt_logprob) == (0, 11)


def test_values_that_broke_before_anything_is_drawn_fail_the_request() -> None:
    driver = CoreDriver(FACTS, make_config(max_num_batched_tokens=10), fault_rule=lambda ids, seed, _: seed == 1)
    driver.worker_ready()
    client = driver.submit(PROMPT, 0, seed=1, prompt_logprobs=0, is_faulty=True)
    other = driver.submit([5, 6], 4)
    driver.drain()
    assert driver.failure(client).code is FailureCode.INTERNAL
    assert driver.failure(client).message == "non-finite logits"
    assert driver.tokens(other) == other.expected[0]


def altered(result: StepResult, how: str) -> StepResult:
    (part,) = result.prompt_logprobs
    fields: dict[str, dict[str, Any]] = {
        "first": {"first_position": 2},
        "row": {"of": 1},
        "top": {"top_ids": b"", "top_logprobs": b""},
    }
    match how:
        case "missing":
            parts: tuple[PromptLogprobs, ...] = ()
        case "twice":
            parts = (part, part)
        case "short":
            parts = (part.without(1),)
        case _:
            parts = (msgspec.structs.replace(part, **fields[how]),)
    return msgspec.structs.replace(result, prompt_logprobs=parts)


@pytest.mark.parametrize("how", ["missing", "twice", "short", "first", "row", "top"])
def test_a_worker_that_tells_something_else_is_given_up(how: str) -> None:
    driver = make_driver()
    driver.submit(PROMPT, 2, prompt_logprobs=1)
    driver.execute()
    driver.results[0] = altered(driver.results[0], how)
    driver.deliver()
    assert [type(end) for end in driver.ended_sessions] == [EndWorkerSession]
    driver.worker_ready()
    driver.drain()


def test_a_fault_excuses_from_telling() -> None:
    driver = make_driver(max_num_batched_tokens=10)
    client = driver.submit(PROMPT, 2, prompt_logprobs=1, is_faulty=True)
    driver.execute()
    fault = {"fault_row": pack_ints([0]), "fault": pack_ints([FAULT_NONFINITE_LOGITS])}
    driver.results[0] = msgspec.structs.replace(driver.results[0], prompt_logprobs=(), **fault)
    driver.deliver()
    assert not driver.ended_sessions
    assert driver.failure(client).code is FailureCode.INTERNAL
    driver.drain()


def test_what_is_left_after_some_positions() -> None:
    whole = PromptLogprobs(
        7, 3, pack_floats([-1, -2, -3]), pack_ints([1, 2, 3]), pack_ints(range(6)), pack_floats([-0.5] * 6)
    )
    assert (whole.count, whole.num_top) == (3, 2)
    rest = whole.without(2)
    assert rest == PromptLogprobs(7, 5, pack_floats([-3]), pack_ints([3]), pack_ints([4, 5]), pack_floats([-0.5] * 2))
    assert whole.without(0) == whole


@pytest.mark.parametrize(
    ("logprob", "rank", "top_ids", "top_logprobs"),
    [
        ([], [], [], []),
        ([-1.0], [1, 2], [], []),
        ([-1.0, -1.0], [1, 2], [5], [-1.0]),
        ([-1.0], [1], [5], []),
        ([float("nan")], [1], [], []),
        ([float("inf"), -float("inf")], [1, 1], [], []),
        ([-1.0], [1], [5], [float("nan")]),
    ],
)
def test_parts_that_contradict_are_no_message(
    logprob: list[float], rank: list[int], top_ids: list[int], top_logprobs: list[float]
) -> None:
    columns = (pack_floats(logprob), pack_ints(rank), pack_ints(top_ids), pack_floats(top_logprobs))
    with pytest.raises(MalformedMessage, match="prompt"):
        PromptLogprobs(0, 1, *columns)


def test_minus_infinity_is_a_log_probability() -> None:
    assert PromptLogprobs(0, 1, pack_floats([-float("inf")]), pack_ints([9])).count == 1
