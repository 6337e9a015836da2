"""Bounds that hold whatever callers, frontends and workers do: of queues, of overtaking, of what is believed."""

import dataclasses
import gc
import math

import msgspec
import pytest

from octavo.scheduler.config import resolve_limits
from octavo.scheduler.events import FrontendLost, RequestSubmitted, StepCompleted
from octavo.scheduler.instructions import EmitOutput, EndFrontendSession
from octavo.scheduler.policy.fair import MAX_PASSED
from octavo.scheduler.sequence import Request, Sequence
from octavo.scheduler.simulate.model import make_facts
from octavo.wire.columns import pack_floats, pack_ints
from octavo.wire.errors import MalformedMessage
from octavo.wire.ids import SessionId
from octavo.wire.plan import RowLogprobs, StepResult
from octavo.wire.prefix import KEY_BYTES, root_key
from octavo.wire.requests import MAX_REQUESTS_OF_FRONTEND, BeamParams, FailureCode
from tests.support.core_by_hand import EPOCH, result, started
from tests.support.core_driver import Client, CoreDriver, entries_of, make_config
from tests.support.fake_frontend import make_submit

FRONTEND = SessionId(7)


def prioritised(num_blocks: int = 21, max_num_seqs: int = 8, max_waiting_requests: int = 1024) -> CoreDriver:
    facts = make_facts(
        num_blocks=num_blocks, block_size=4, max_model_len=80, max_num_seqs=max_num_seqs, max_num_batched_tokens=64
    )
    config = make_config(scheduling_policy="priority", max_waiting_requests=max_waiting_requests)
    driver = CoreDriver(facts, config)
    driver.worker_ready()
    return driver


def test_requests_that_evict_each_other_do_not_outgrow_the_queue() -> None:
    """Who lost its blocks has started, and is not counted among those that never did."""
    driver = prioritised(num_blocks=4, max_num_seqs=2, max_waiting_requests=4)
    clients = []
    for n in range(40):
        clients.append(driver.submit([n] * 8, 3, priority=-n, tenant=None))
        driver.step()
    assert driver.core.figures.num_requests <= 4 + 2
    refused = [c for c in clients if driver.received[c.frontend].failed.get(c.handle)]
    assert refused
    assert driver.failure(refused[0]).message == "6 requests run or wait, the limit is 6"
    driver.drain()


def test_a_victims_blocks_that_it_shares_with_another_victim_are_a_gain() -> None:
    driver = prioritised()
    driver.submit(range(60), 18, num_choices=2, priority=9, tenant=None)  # 15 blocks in both tables
    while driver.core.figures.num_running < 2:
        driver.step()
    urgent = driver.submit([7] * 40, 2, priority=0, tenant=None)
    while not entries_of(driver, urgent):
        assert driver.core.figures.num_preemptions <= 2
        driver.step()
    assert driver.core.figures.num_preemptions == 2
    driver.drain()


def test_a_known_caller_is_not_passed_for_ever_by_new_ones() -> None:
    """Each newcomer starts at the least counter: without a bound of its own, who was served before would starve."""
    facts = make_facts(num_blocks=65, block_size=4, max_num_seqs=2, max_model_len=64)
    driver = CoreDriver(facts, make_config(scheduling_policy="fair"))
    driver.worker_ready()
    stays = driver.submit([1], 60, caller="stays", tenant=None)
    driver.submit(range(40), 20, caller="old", tenant=None)
    for _ in range(25):
        driver.step()
    waiting: list[Client] = [driver.submit([n], 2, caller=f"new {n}", tenant=None) for n in range(4)]
    old = driver.submit([1, 2], 2, caller="old", tenant=None)
    num_new = 4
    while not entries_of(driver, old):
        assert num_new < 2 * MAX_PASSED, "it starves"
        waiting = [client for client in waiting if not entries_of(driver, client)]
        while len(waiting) < 4:
            waiting.append(driver.submit([num_new % 900], 2, caller=f"new {num_new}", tenant=None))
            num_new += 1
        driver.step()
    passed = sum(
        bool(found := entries_of(driver, c)) and found[0].step < entries_of(driver, old)[0].step
        for c in driver.clients.values()
        if c.message.caller.startswith("new") and c.handle > old.handle
    )
    assert 100 < passed <= MAX_PASSED
    assert stays.handle
    driver.drain()


@pytest.mark.parametrize("num_choices", [1, 2])
def test_a_replay_without_output_was_admitted_before_and_is_not_refused_for_load(num_choices: int) -> None:
    core = started(max_waiting_requests=1, max_num_seqs=1, max_requests_per_caller=1)
    empty: list[list[int]] = [[]] * num_choices
    for handle in (1, 2):
        message = make_submit(handle, [1, 2, 3], 2, num_choices=num_choices, output_ids=empty)
        core.on_event(RequestSubmitted(FRONTEND, message), 100.0)
    assert core.figures.num_requests == 2
    core.check()


def test_choices_of_a_replay_without_output_wait_for_the_first_ones_prompt() -> None:
    core = started(max_num_seqs=4)
    message = make_submit(1, range(40), 3, num_choices=3, output_ids=[[], [], []])
    plans = [i.plan for i in core.on_event(RequestSubmitted(FRONTEND, message), 100.0) if hasattr(i, "plan")]
    assert [len(plan.new_rows) for plan in plans] == [1, 0]
    assert plans[0].fork_choice == pack_ints([1, 2])


def test_a_key_that_comes_twice_would_put_a_block_into_a_table_twice() -> None:
    core = started()
    message = make_submit(1, range(40), 3, prefix_root=root_key("digest"))
    twice = msgspec.structs.replace(message, prefix_keys=message.prefix_keys[:KEY_BYTES] * 2)
    (output,) = core.on_event(RequestSubmitted(FRONTEND, twice), 100.0)
    assert isinstance(output, EmitOutput)
    (failed,) = output.output.failed
    assert (failed.code, failed.message) == (FailureCode.INVALID, "prefix keys of 2 blocks name one of them twice")


def test_a_result_that_waited_for_this_process_is_progress() -> None:
    """The scheduler was stopped for longer than the step timeout; the worker answered long ago."""
    core = started()
    core.on_event(RequestSubmitted(FRONTEND, make_submit(1, [1], 5)), 100.0)
    instructions = core.on_event(result(1, [0], [9]), 100.0 + 301.0)
    assert core.figures.num_running == 1
    assert [type(i).__name__ for i in instructions] == ["SendPlan", "EmitOutput"]


def answer_with_logprobs(step: int, token: int) -> StepCompleted:
    entry = RowLogprobs(0, -1.0, 1, pack_ints([3]), pack_floats([-1.0]))
    return StepCompleted(StepResult(EPOCH, step, pack_ints([0]), pack_ints([token]), logprobs=(entry,)))


@pytest.mark.parametrize(("asked", "told"), [(-1, 0), (0, 1), (1, 1)])
def test_only_log_probabilities_that_were_asked_for_are_told(asked: int, told: int) -> None:
    core = started()
    core.on_event(RequestSubmitted(FRONTEND, make_submit(1, [1], 5, logprobs=asked)), 100.0)
    output = core.on_event(answer_with_logprobs(1, 9), 100.0)[-1]
    assert isinstance(output, EmitOutput)
    assert len(output.output.logprobs) == told


@pytest.mark.parametrize(
    ("logprob", "top"), [(math.nan, [-1.0]), (-1.0, [math.nan]), (-1.0, [])], ids=["drawn", "top", "length"]
)
def test_log_probabilities_that_are_no_numbers_do_not_get_past_the_decoder(logprob: float, top: list[float]) -> None:
    with pytest.raises(MalformedMessage):
        RowLogprobs(0, logprob, 1, pack_ints([3]), pack_floats(top))


def parts_of_requests() -> list[object]:
    return [item for item in gc.get_objects() if type(item) in (Request, Sequence)]


def test_what_has_ended_is_freed_without_the_collector() -> None:
    """F6: cycles that live a while are found after thousands of requests, which looks like growth and stops a step."""
    facts = make_facts(num_blocks=33, block_size=4, max_model_len=80, max_num_seqs=8, max_num_batched_tokens=64)
    driver = CoreDriver(facts, fault_rule=lambda ids, seed, choice: seed == 13)
    driver.worker_ready()
    gc.collect()
    old = parts_of_requests()
    gc.disable()
    try:
        driver.submit(range(9), 6, num_choices=3)
        driver.submit(range(9), 4, num_choices=2, beams=BeamParams(3, 1.0, False))
        driver.submit(range(5), 6, seed=13, is_faulty=True)
        cancelled = [driver.submit(range(n), 30, num_choices=n % 2 + 1) for n in range(3, 7)]
        cancelled += [driver.submit(range(5), 9, num_choices=2, beams=BeamParams(2, 1.0, False))]
        driver.step()
        for client in cancelled:
            driver.cancel(client)
        driver.lose_worker()
        driver.worker_ready()
        lost = driver.submit(range(7), 30, frontend=SessionId(9))
        driver.step()
        lost.is_gone = True
        driver.tell(FrontendLost(SessionId(9)))
        driver.drain()
        assert driver.core.is_idle
        driver.submit([1], 2, tenant=None)  # the last plan's record stays until the next one
        driver.drain()
        assert len(parts_of_requests()) - len(old) <= 2
    finally:
        gc.enable()


@pytest.mark.parametrize("at_once", [1, MAX_REQUESTS_OF_FRONTEND])
def test_what_has_started_is_never_refused_for_a_full_queue(at_once: int) -> None:
    """F40. However little a new scheduler lets wait, and whoever comes first."""
    core = started(max_waiting_requests=1, max_num_seqs=1, max_requests_per_caller=1, max_waiting_tokens=1)
    for frontend in (1, 2):
        core.on_event(RequestSubmitted(SessionId(frontend), make_submit(9999, [1, 2, 3], 2)), 100.0)
        for handle in range(at_once - 1):
            message = make_submit(handle, [1, 2, 3], 9, output_ids=[[4]])
            instructions = core.on_event(RequestSubmitted(SessionId(frontend), message), 100.0)
            assert not any(isinstance(i, EmitOutput) and i.output.failed for i in instructions)
            assert not any(isinstance(i, EndFrontendSession) for i in instructions)


def test_a_frontend_with_more_requests_than_it_may_have_is_sent_away() -> None:
    core = started(max_num_seqs=1)
    for handle in range(MAX_REQUESTS_OF_FRONTEND):
        core.on_event(RequestSubmitted(FRONTEND, make_submit(handle, [1], 9, output_ids=[[4]])), 100.0)
    assert core.figures.num_requests == MAX_REQUESTS_OF_FRONTEND
    message = make_submit(MAX_REQUESTS_OF_FRONTEND, [1], 9, output_ids=[[4]])
    instructions = core.on_event(RequestSubmitted(FRONTEND, message), 100.0)
    assert EndFrontendSession(FRONTEND, "more than 4096 requests at a time") in instructions
    assert core.figures.num_requests == 0


@pytest.mark.parametrize(("device", "limit_s"), [("cuda:0", 60.0), ("cpu", 300.0)])
def test_the_step_timeout_suits_the_device_unless_it_is_set(device: str, limit_s: float) -> None:
    facts = msgspec.structs.replace(make_facts(), device=device)
    assert resolve_limits(make_config(), facts).step_timeout_s == limit_s
    core = started(facts)
    core.on_event(RequestSubmitted(FRONTEND, make_submit(1, [1], 5)), 100.0)
    assert core.next_timer == 100.0 + limit_s
    config = dataclasses.replace(make_config(), step_timeout_s=7.0)
    assert resolve_limits(config, facts).step_timeout_s == 7.0
