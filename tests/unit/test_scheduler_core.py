"""The core, case by case: exactly which instructions come out."""

import math
from collections.abc import Sequence

import msgspec
import pytest

from octavo.scheduler.events import ChoiceStopped, RequestSubmitted, StepCompleted
from octavo.scheduler.instructions import EmitOutput, SendPlan
from octavo.scheduler.simulate.model import make_facts
from octavo.wire.columns import pack_ints, unpack_ints
from octavo.wire.plan import FLAG_SAMPLE, NewRow, RowLogprobs, RowSampling, StepPlan, StepResult
from octavo.wire.requests import (
    ChoiceFinished,
    ChoiceLogprobs,
    FailureCode,
    FinishChoice,
    FinishReason,
    RequestFailed,
    RequestStarted,
    StepOutput,
)
from tests.support.core_by_hand import EPOCH, counting, result, started
from tests.support.core_driver import FRONTEND, CoreDriver, make_config, rows_of
from tests.support.fake_frontend import make_submit


def shapes(plans: Sequence[StepPlan]) -> list[list[tuple[int, int, int]]]:
    return [rows_of(plan) for plan in plans]


# Plans


def test_a_request_is_planned_twice_before_its_first_result() -> None:
    core = started()
    instructions = core.on_event(RequestSubmitted(FRONTEND, make_submit(1, [10, 11, 12], 5, seed=3)), 100.0)
    sampling = RowSampling(seed=3, min_tokens=0, logprobs=-1)
    assert instructions == [
        SendPlan(
            StepPlan(
                epoch=EPOCH,
                step=1,
                row=pack_ints([0]),
                num_tokens=pack_ints([3]),
                flags=pack_ints([FLAG_SAMPLE]),
                new_rows=(NewRow(0, f"{FRONTEND:x}-1", 0, 3, 0, pack_ints([10, 11, 12]), sampling),),
                append_row=pack_ints([0]),
                append_block=pack_ints([1]),
            )
        ),
        SendPlan(
            StepPlan(epoch=EPOCH, step=2, row=pack_ints([0]), num_tokens=pack_ints([1]), flags=pack_ints([FLAG_SAMPLE]))
        ),
        EmitOutput(FRONTEND, StepOutput(started=(RequestStarted(1, 0, 0.0),))),
    ]


def test_a_result_emits_its_token_and_lets_the_next_plan_go() -> None:
    core = started()
    core.on_event(RequestSubmitted(FRONTEND, make_submit(1, [10], 5)), 100.0)
    plan, output = core.on_event(result(1, [0], [77]), 100.5)
    assert isinstance(plan, SendPlan)
    assert (plan.plan.step, rows_of(plan.plan)) == (3, [(0, 1, FLAG_SAMPLE)])
    assert output == EmitOutput(
        FRONTEND,
        StepOutput(handle=pack_ints([1]), choice=pack_ints([0]), position=pack_ints([0]), token=pack_ints([77])),
    )


def test_a_long_prompt_is_split_at_the_budget_and_samples_only_at_its_end() -> None:
    driver = CoreDriver(make_facts(max_num_batched_tokens=8))
    driver.worker_ready()
    driver.submit(range(19), 2)
    driver.drain()
    assert shapes(driver.plans) == [
        [(0, 8, 0)],
        [(0, 8, 0)],
        [(0, 3, FLAG_SAMPLE)],
        [(0, 1, FLAG_SAMPLE)],
    ]


def test_the_chunk_cap_leaves_budget_for_others() -> None:
    driver = CoreDriver(make_facts(max_num_batched_tokens=10), make_config(long_prefill_token_threshold=4))
    driver.worker_ready()
    driver.core.on_events((), driver.now)
    driver.submit(range(9), 1)
    driver.step()
    assert shapes(driver.plans) == [[(0, 4, 0)], [(0, 4, 0)], [(0, 1, FLAG_SAMPLE)]]
    driver.submit(range(9), 1, seed=1)
    driver.drain()


def test_decodes_and_prefill_chunks_share_a_step_within_the_budget() -> None:
    driver = CoreDriver(make_facts(max_num_batched_tokens=6), make_config(pipeline_depth=1))
    driver.worker_ready()
    driver.submit(range(2), 8)
    driver.submit(range(12), 2, seed=1)
    driver.step()
    driver.step()
    assert shapes(driver.plans) == [
        [(0, 2, FLAG_SAMPLE)],
        [(0, 1, FLAG_SAMPLE), (1, 5, 0)],
        [(0, 1, FLAG_SAMPLE), (1, 5, 0)],
    ]
    driver.step()
    assert rows_of(driver.plans[-1]) == [(0, 1, FLAG_SAMPLE), (1, 2, FLAG_SAMPLE)]
    driver.drain()


def test_rows_bound_what_runs_at_once() -> None:
    driver = CoreDriver(make_facts(), make_config(max_num_seqs=2))
    driver.worker_ready()
    clients = [driver.submit([n], 3, seed=n) for n in range(3)]
    while driver.core.figures.num_waiting:
        assert driver.core.figures.num_running <= 2
        driver.step()
    assert not clients[0].is_live, "the third began before the first had ended"
    driver.drain()


def test_at_depth_1_no_plan_goes_before_the_result() -> None:
    driver = CoreDriver(make_facts(), make_config(pipeline_depth=1))
    driver.worker_ready()
    driver.submit([1], 5)
    assert len(driver.plans) == 1
    driver.execute()
    assert len(driver.plans) == 1
    driver.deliver()
    assert len(driver.plans) == 2


def test_requests_start_in_the_order_in_which_they_came() -> None:
    driver = CoreDriver(make_facts(), make_config(max_num_seqs=1))
    driver.worker_ready()
    clients = [driver.submit([n], 3, seed=n) for n in range(5)]
    driver.drain()
    entered = [new.request for plan in driver.plans for new in plan.new_rows]
    assert entered == [client.name for client in clients]


def test_a_prompt_is_admitted_only_when_those_before_it_have_their_blocks() -> None:
    facts = make_facts(num_blocks=13, block_size=4, max_model_len=40, max_num_batched_tokens=8)
    driver = CoreDriver(facts, make_config(long_prefill_token_threshold=4))
    driver.worker_ready()
    driver.submit(range(32), 1)
    driver.submit(range(32), 1, seed=1)
    driver.drain()
    assert driver.core.figures.num_preemptions == 0, "12 blocks hold one prompt of 8 and not two"


def test_a_freed_row_is_freed_and_taken_by_one_plan() -> None:
    core = started(max_num_seqs=1)
    core.on_event(RequestSubmitted(FRONTEND, make_submit(1, [1], 1)), 100.0)
    core.on_event(RequestSubmitted(FRONTEND, make_submit(2, [2], 1)), 100.0)
    plan = core.on_event(result(1, [0], [9]), 100.0)[0]
    assert isinstance(plan, SendPlan)
    assert plan.plan.freed_rows == pack_ints([0])
    assert [new.request for new in plan.plan.new_rows] == [f"{FRONTEND:x}-2"]
    assert plan.plan.append_block == pack_ints([1]), "a block that cannot be found again is taken first"


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9])
def test_blocks_are_appended_where_tokens_come(length: int) -> None:
    driver = CoreDriver(make_facts(block_size=4, num_blocks=20))
    driver.worker_ready()
    driver.submit(range(length), 6)
    driver.drain()
    appended = [len(unpack_ints(plan.append_block)) for plan in driver.plans]
    stored = 0
    for plan, count in zip(driver.plans, appended, strict=True):
        before, stored = stored, stored + sum(unpack_ints(plan.num_tokens))
        assert count == math.ceil(stored / 4) - math.ceil(before / 4)
    assert stored == length + 5, "the last token is not computed"


# Ends


def test_a_stop_id_ends_the_choice_and_the_token_run_ahead_is_discarded() -> None:
    driver = counting()
    client = driver.submit([10], 50, stop_ids=[13])
    driver.drain()
    assert driver.tokens(client) == [11, 12, 13]
    assert driver.reason(client) is FinishReason.STOP
    assert driver.model is not None
    assert driver.model.computed_tokens == 4, "one token, no more, was wasted"


def test_a_stop_id_before_min_tokens_does_not_end_the_choice() -> None:
    driver = counting()
    client = driver.submit([10], 50, stop_ids=[13, 16], min_tokens=3)
    driver.drain()
    assert driver.tokens(client) == [11, 12, 14, 15, 16]


def test_a_stop_id_counts_only_once_min_tokens_came_before_it() -> None:
    core = started()
    core.on_event(RequestSubmitted(FRONTEND, make_submit(1, [1], 9, stop_ids=[7], min_tokens=1)), 100.0)
    core.on_event(result(1, [0], [7]), 100.0)  # a worker would have masked it
    assert core.figures.num_running == 1
    core.on_event(result(2, [0], [7]), 100.0)
    assert core.figures.num_running == 0


def test_max_tokens_1_takes_one_plan() -> None:
    driver = counting()
    client = driver.submit([1, 2, 3], 1)
    driver.drain()
    assert (driver.tokens(client), driver.reason(client)) == ([4], FinishReason.LENGTH)
    assert shapes(driver.plans) == [[(0, 3, FLAG_SAMPLE)]]


def test_the_longest_prompt_gets_one_token() -> None:
    driver = counting()
    client = driver.submit([1] * 511, 1)
    driver.drain()
    assert (driver.tokens(client), driver.reason(client)) == ([2], FinishReason.LENGTH)


def test_choices_run_apart_and_end_apart() -> None:
    driver = CoreDriver(
        make_facts(), rule=lambda ids, seed, choice: 500 if len(ids) == 3 + choice else 100 * choice + len(ids)
    )
    driver.worker_ready()
    client = driver.submit([1, 2], 4, num_choices=3, stop_ids=[500])
    driver.drain()
    assert [driver.tokens(client, n) for n in range(3)] == [[2, 500], [102, 103, 500], [202, 203, 204, 500]]
    assert [driver.reason(client, n) for n in range(3)] == [FinishReason.STOP] * 3


def test_times_are_told_with_the_end() -> None:
    core = started()
    core.on_event(RequestSubmitted(FRONTEND, make_submit(1, [1], 3)), 100.0)
    core.on_event(result(1, [0], [7]), 101.0)
    core.on_event(result(2, [0], [8]), 101.5)
    (output,) = core.on_event(result(3, [0], [9]), 103.0)
    assert isinstance(output, EmitOutput)
    assert output.output.finished == (ChoiceFinished(1, 0, FinishReason.LENGTH, 3, prefill_s=1.0, decode_s=2.0),)


def test_time_in_the_queue_is_told_at_the_start() -> None:
    core = started(max_num_seqs=1)
    core.on_event(RequestSubmitted(FRONTEND, make_submit(1, [1], 1)), 100.0)
    core.on_event(RequestSubmitted(FRONTEND, make_submit(2, [1], 1)), 101.0)
    output = core.on_event(result(1, [0], [7]), 104.0)[-1]
    assert isinstance(output, EmitOutput)
    assert output.output.started == (RequestStarted(2, 0, 3.0),)


def test_logprobs_travel_with_their_tokens() -> None:
    core = started()
    core.on_event(RequestSubmitted(FRONTEND, make_submit(1, [1], 2, logprobs=1)), 100.0)
    entry = RowLogprobs(0, -0.25, 2, pack_ints([5]), b"\0\0\0\0")
    answer = StepResult(EPOCH, 1, pack_ints([0]), pack_ints([7]), logprobs=(entry,))
    output = core.on_event(StepCompleted(answer), 100.0)[-1]
    assert isinstance(output, EmitOutput)
    assert output.output.logprobs == (ChoiceLogprobs(1, 0, 0, -0.25, 2, pack_ints([5]), b"\0\0\0\0"),)


def test_cancel_at_every_index_frees_everything_and_no_later_plan_names_it() -> None:
    for index in range(30):
        driver = CoreDriver(make_facts(block_size=4, max_num_batched_tokens=6))
        driver.worker_ready()
        client = driver.submit(range(14), 8, num_choices=2)
        other = driver.submit(range(5), 8, seed=1)
        for n in range(index):
            if n % 2:
                driver.deliver()
            else:
                driver.execute()
        driver.cancel(client)
        driver.drain()
        assert driver.tokens(other) == other.expected[0]


def test_a_stopped_choice_gets_nothing_more_and_its_siblings_go_on() -> None:
    driver = CoreDriver(make_facts())
    driver.worker_ready()
    client = driver.submit([1], 6, num_choices=2)
    driver.step()
    driver.step()
    driver.stop_choice(client, 0)
    driver.drain()
    assert len(driver.tokens(client, 0)) == 2
    assert driver.tokens(client, 1) == client.expected[1]


def test_ends_of_what_does_not_exist_are_ignored() -> None:
    driver = counting()
    client = driver.submit([1], 2)
    driver.tell(
        ChoiceStopped(FRONTEND, FinishChoice(client.handle, 7, 0)), ChoiceStopped(FRONTEND, FinishChoice(9, 0, 0))
    )
    driver.drain()
    driver.stop_choice(client, 0)
    driver.cancel(client)
    assert driver.tokens(client) == [2, 3]


def test_a_deadline_ends_a_running_request_and_one_in_the_queue() -> None:
    driver = CoreDriver(make_facts(), make_config(max_num_seqs=1))
    driver.worker_ready()
    running = driver.submit([1], 100, deadline_s=5.0)
    waiting = driver.submit([2], 100, deadline_s=3.0)
    assert driver.core.next_timer == driver.now + 3.0
    driver.now += 3.0
    driver.tell()
    assert driver.failure(waiting) == RequestFailed(waiting.handle, FailureCode.DEADLINE, "the deadline has passed")
    assert running.is_live
    driver.now += 2.0
    driver.tell()
    assert driver.failure(running).code is FailureCode.DEADLINE
    driver.drain()


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan])
def test_a_deadline_that_has_passed_is_never_planned(seconds: float) -> None:
    driver = counting()
    client = driver.submit([1], 5, deadline_s=seconds)
    assert driver.failure(client).code is FailureCode.DEADLINE
    assert driver.plans == []


def test_sampling_lists_count_against_the_size_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with long lists enter over several plans, so that no plan outgrows a message."""
    monkeypatch.setattr("octavo.scheduler.planner.MAX_NEW_IDS", 50)
    sampling = RowSampling(seed=0, allowed_token_ids=pack_ints(range(10, 50)))
    submits = [msgspec.structs.replace(make_submit(handle, [10], 5), sampling=sampling) for handle in range(3)]
    instructions = started().on_events([RequestSubmitted(FRONTEND, submit) for submit in submits], 0.0)
    plans = [i.plan for i in instructions if isinstance(i, SendPlan)]
    assert [len(plan.new_rows) for plan in plans] == [1, 1]
