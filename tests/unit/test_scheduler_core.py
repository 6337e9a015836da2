"""The core, case by case: exactly which instructions come out."""

import math
from collections.abc import Sequence

import msgspec
import pytest

from octavo.scheduler.core import Scheduler
from octavo.scheduler.events import (
    ChoiceStopped,
    FrontendLost,
    RequestSubmitted,
    StepCompleted,
    WorkerLost,
    WorkerReady,
)
from octavo.scheduler.instructions import EmitOutput, EndFrontendSession, EndWorkerSession, SendPlan
from octavo.wire.columns import pack_ints, unpack_ints
from octavo.wire.handshake import WorkerFacts
from octavo.wire.ids import SessionId
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
from tests.support.core_driver import FRONTEND, Client, CoreDriver, make_config
from tests.support.fake_frontend import make_submit
from octavo.scheduler.simulate.model import make_facts

EPOCH = SessionId(5)


def counting(vocab_size: int = 1000) -> CoreDriver:
    """Return a driver whose model counts upwards, with its worker ready."""
    driver = CoreDriver(make_facts(vocab_size=vocab_size), rule=lambda ids, seed, choice: (ids[-1] + 1) % vocab_size)
    driver.worker_ready()
    return driver


def started(facts: WorkerFacts | None = None, **settings: int) -> Scheduler:
    """Return a core with a worker that answers by hand."""
    core = Scheduler(make_config(**settings))
    assert core.on_event(WorkerReady(EPOCH, facts or make_facts()), 100.0) == []
    return core


def result(step: int, row: Sequence[int], token: Sequence[int], epoch: int = EPOCH) -> StepCompleted:
    return StepCompleted(StepResult(epoch, step, pack_ints(row), pack_ints(token)))


def shape(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Return (row, tokens, flags) of a plan."""
    return list(zip(*map(unpack_ints, (plan.row, plan.num_tokens, plan.flags)), strict=True))


def shapes(plans: Sequence[StepPlan]) -> list[list[tuple[int, int, int]]]:
    return [shape(plan) for plan in plans]


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
    assert (plan.plan.step, shape(plan.plan)) == (3, [(0, 1, FLAG_SAMPLE)])
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
    assert shape(driver.plans[-1]) == [(0, 1, FLAG_SAMPLE), (1, 2, FLAG_SAMPLE)]
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


def test_nonfinite_logits_of_one_choice_end_the_request_and_nothing_else() -> None:
    driver = CoreDriver(make_facts(), fault_rule=lambda ids, seed, choice: seed == 1 and choice == 1 and len(ids) == 5)
    driver.worker_ready()
    client = driver.submit([1, 2, 3], 9, num_choices=3, seed=1, is_faulty=True)
    other = driver.submit([1, 2, 3], 9, num_choices=2)
    driver.drain()
    assert driver.failure(client) == RequestFailed(client.handle, FailureCode.INTERNAL, "non-finite logits")
    assert [driver.tokens(other, n) for n in range(2)] == other.expected


def test_an_id_outside_the_vocabulary_ends_its_request() -> None:
    core = started()
    core.on_event(RequestSubmitted(FRONTEND, make_submit(1, [1], 5)), 100.0)
    (output,) = core.on_event(result(1, [0], [1000]), 100.0)
    failed = RequestFailed(1, FailureCode.INTERNAL, "the worker drew id 1000, outside [0, 1000)")
    assert output == EmitOutput(FRONTEND, StepOutput(failed=(failed,)))


# Frontends and workers


def test_a_lost_frontend_takes_its_requests_along() -> None:
    driver = counting()
    gone = driver.submit([1], 5, frontend=SessionId(1))
    stays = driver.submit([1], 5, frontend=SessionId(2))
    gone.is_gone = True
    driver.tell(FrontendLost(SessionId(1)))
    driver.drain()
    assert driver.tokens(stays) == [2, 3, 4, 5, 6]


def test_a_lost_frontend_is_sent_nothing_more() -> None:
    core = started()
    core.on_event(RequestSubmitted(FRONTEND, make_submit(1, [1], 1)), 100.0)
    assert core.on_events([result(1, [0], [7]), FrontendLost(FRONTEND)], 100.0) == []


def test_a_handle_used_twice_ends_the_session() -> None:
    core = started()
    core.on_event(RequestSubmitted(FRONTEND, make_submit(1, [1], 5)), 100.0)
    instructions = core.on_event(RequestSubmitted(FRONTEND, make_submit(1, [1], 5)), 100.0)
    assert instructions == [EndFrontendSession(FRONTEND, "handle 1 is in use already")]
    assert core.figures.num_requests == 0


@pytest.mark.parametrize("index", range(12))
def test_outputs_are_the_same_when_the_worker_is_lost_at_any_moment(index: int) -> None:
    driver = CoreDriver(make_facts(block_size=4, max_num_batched_tokens=7))
    driver.worker_ready()
    clients = [driver.submit(range(9), 6, seed=n, num_choices=2) for n in range(2)]
    for n in range(index):
        if n % 2:
            driver.deliver()
        else:
            driver.execute()
    driver.lose_worker()
    assert driver.core.figures.num_running == 0
    driver.now += 60.0
    driver.worker_ready()
    driver.drain()
    for client in clients:
        assert [driver.tokens(client, n) for n in range(2)] == client.expected


def test_without_a_worker_requests_wait_and_then_fail() -> None:
    driver = counting()
    old = driver.submit([1], 5)
    driver.lose_worker()
    assert driver.core.next_timer == driver.now + 120.0
    new = driver.submit([1], 5)
    driver.now += 119.9
    driver.tell()
    assert (old.is_live, new.is_live) == (True, True)
    driver.now += 0.1
    late = driver.submit([1], 5)
    for client in (old, new, late):
        assert driver.failure(client) == RequestFailed(
            client.handle, FailureCode.UNAVAILABLE, "no worker for 120 s", retry_after_s=1.0
        )
    driver.worker_ready()
    again = driver.submit([1], 2)
    driver.drain()
    assert driver.tokens(again) == [2, 3]


def test_before_the_first_worker_requests_are_refused() -> None:
    driver = CoreDriver(make_facts())
    client = driver.submit([1], 5)
    assert driver.failure(client).code is FailureCode.UNAVAILABLE


def test_results_of_an_old_epoch_are_dropped_and_counted() -> None:
    core = started()
    core.on_event(RequestSubmitted(FRONTEND, make_submit(1, [1], 5)), 100.0)
    core.on_event(WorkerLost(EPOCH, "test"), 100.0)
    assert core.on_event(result(1, [0], [9]), 100.0) == []
    assert core.on_event(WorkerLost(SessionId(99), "another"), 100.0) == []
    core.on_event(WorkerReady(SessionId(6), make_facts()), 100.0)
    assert core.on_event(result(1, [0], [9]), 100.0) == []
    assert core.figures.num_old_results == 2
    (_, output) = core.on_event(result(1, [0], [7], epoch=6), 100.0)
    assert isinstance(output, EmitOutput)
    assert output.output.token == pack_ints([7])
    assert output.output.started == (), "a request starts once"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (result(2, [0], [9]), "result of plan 2, expected 1"),
        (result(1, [], []), "plan 1: tokens for rows [], expected [0]"),
        (result(1, [1], [9]), "plan 1: tokens for rows [1], expected [0]"),
        (result(1, [0, 1], [9, 9]), "plan 1: tokens for rows [0, 1], expected [0]"),
    ],
)
def test_a_worker_with_a_wrong_answer_is_given_up(answer: StepCompleted, message: str) -> None:
    core = started()
    core.on_event(RequestSubmitted(FRONTEND, make_submit(1, [1], 5)), 100.0)
    (ending,) = core.on_event(answer, 100.0)
    assert isinstance(ending, EndWorkerSession)
    assert ending.epoch == EPOCH
    assert ending.reason == message
    assert core.figures.num_waiting == 1


def test_a_worker_that_makes_no_progress_is_given_up() -> None:
    core = started()
    core.on_event(RequestSubmitted(FRONTEND, make_submit(1, [1], 5)), 100.0)
    assert core.next_timer == 400.0
    core.on_event(result(1, [0], [9]), 390.0)
    assert core.next_timer == 690.0, "a finished step is progress"
    assert core.on_events((), 689.0) == []
    assert core.on_events((), 690.0) == [EndWorkerSession(EPOCH, "no step finished for 300 s")]
    assert core.next_timer == 810.0


def test_a_smaller_worker_fails_what_it_cannot_hold() -> None:
    driver = counting()
    long = driver.submit([1] * 300, 100)
    short = driver.submit([1], 5)
    driver.lose_worker()
    driver.facts = make_facts(num_blocks=11)
    driver.worker_ready()
    assert driver.failure(long).code is FailureCode.UNAVAILABLE
    driver.drain()
    assert driver.tokens(short) == [2, 3, 4, 5, 6]


# Replay


@pytest.mark.parametrize("index", range(0, 14, 2))
def test_a_replay_goes_on_after_the_received_ids(index: int) -> None:
    driver = CoreDriver(make_facts(block_size=4, max_num_batched_tokens=7))
    driver.worker_ready()
    driver.submit(range(9), 6, num_choices=2, frontend=SessionId(1))
    for n in range(index):
        if n % 2:
            driver.deliver()
        else:
            driver.execute()
    driver.replay(SessionId(1), SessionId(2))
    assert len(driver.clients) == 2
    driver.drain()
    for again in (c for c in driver.clients.values() if c.frontend == 2):
        assert [driver.tokens(again, n) for n in range(2)] == again.expected


def test_a_replay_that_had_ended_ends_at_once() -> None:
    core = started()
    message = make_submit(1, [1], 3, num_choices=3, stop_ids=[9], output_ids=[[5, 9], [5, 6, 7], [5]], finished=[2])
    (output,) = core.on_event(RequestSubmitted(FRONTEND, message), 100.0)
    finished = (ChoiceFinished(1, 0, FinishReason.STOP, 2), ChoiceFinished(1, 1, FinishReason.LENGTH, 3))
    assert output == EmitOutput(FRONTEND, StepOutput(finished=finished))
    assert core.figures.num_requests == 0


def test_a_replay_computes_its_output_again_as_part_of_its_tokens() -> None:
    core = started()
    message = make_submit(1, [1, 2], 9, output_ids=[[3, 4, 5]])
    first = core.on_event(RequestSubmitted(FRONTEND, message), 100.0)[0]
    assert isinstance(first, SendPlan)
    assert shape(first.plan) == [(0, 5, FLAG_SAMPLE)]
    (new,) = first.plan.new_rows
    assert (new.num_prompt_tokens, new.token_ids) == (2, pack_ints([1, 2, 3, 4, 5]))
    output = core.on_event(result(1, [0], [6]), 100.0)[-1]
    assert isinstance(output, EmitOutput)
    assert output.output.position == pack_ints([3])


# Preemption


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


def test_sampling_lists_count_against_the_size_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with long lists enter over several plans, so that no plan outgrows a message."""
    monkeypatch.setattr("octavo.scheduler.planner.MAX_NEW_IDS", 50)
    sampling = RowSampling(seed=0, allowed_token_ids=pack_ints(range(10, 50)))
    submits = [msgspec.structs.replace(make_submit(handle, [10], 5), sampling=sampling) for handle in range(3)]
    instructions = started().on_events([RequestSubmitted(FRONTEND, submit) for submit in submits], 0.0)
    plans = [i.plan for i in instructions if isinstance(i, SendPlan)]
    assert [len(plan.new_rows) for plan in plans] == [1, 1]
