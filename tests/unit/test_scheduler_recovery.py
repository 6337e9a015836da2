"""What the core does when frontends and workers come and go."""

import pytest

from octavo.scheduler.events import FrontendLost, RequestSubmitted, StepCompleted, WorkerLost, WorkerReady
from octavo.scheduler.instructions import EmitOutput, EndFrontendSession, EndWorkerSession, SendPlan
from octavo.scheduler.planner import Planner
from octavo.scheduler.simulate.model import make_facts
from octavo.wire.columns import pack_ints
from octavo.wire.ids import BootId, SessionId
from octavo.wire.plan import FLAG_SAMPLE
from octavo.wire.requests import ChoiceFinished, FailureCode, FinishReason, RequestFailed, StepOutput
from tests.support.core_by_hand import EPOCH, counting, result, started
from tests.support.core_driver import FRONTEND, CoreDriver, rows_of
from tests.support.fake_frontend import make_submit

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
    core.on_event(WorkerReady(SessionId(6), make_facts(), BootId("w2")), 100.0)
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
    assert rows_of(first.plan) == [(0, 5, FLAG_SAMPLE)]
    (new,) = first.plan.new_rows
    assert (new.num_prompt_tokens, new.token_ids) == (2, pack_ints([1, 2, 3, 4, 5]))
    output = core.on_event(result(1, [0], [6]), 100.0)[-1]
    assert isinstance(output, EmitOutput)
    assert output.output.position == pack_ints([3])


# Readiness is forward progress (I27)


def test_work_without_a_finished_step_is_a_stall_though_the_worker_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    core = started()
    monkeypatch.setattr(Planner, "build", lambda *_: None)
    core.on_event(RequestSubmitted(FRONTEND, make_submit(1, [1], 5)), 200.0)
    assert core.next_timer == pytest.approx(500.0)
    told = []
    for now in (499.0, 500.0):
        core.on_events((), now)
        told.append(core.stall)
    assert told == ["", "requests wait, and no step has finished for 300 s"]
    assert not core.next_timer, "it is told once"
    core.on_event(FrontendLost(FRONTEND), 501.0)
    core.on_events((), 502.0)
    assert not core.stall, "nothing to do is no stall"


def test_a_crash_loop_is_a_stall_until_a_step_finishes() -> None:
    """F39: workers that come and die in between make nothing ready."""
    core = started()
    core.on_event(RequestSubmitted(FRONTEND, make_submit(1, [1], 5)), 100.0)
    for n in range(4):
        core.on_event(WorkerLost(SessionId(EPOCH + n), "test", is_orderly=True), 100.0 + 80.0 * n)
        core.on_event(WorkerReady(SessionId(EPOCH + n + 1), make_facts(), BootId(f"w{n}")), 101.0 + 80.0 * n)
    core.on_events((), 401.0)
    assert core.stall
    core.on_event(result(1, [0], [9], epoch=EPOCH + 4), 402.0)
    assert core.stall == ""
