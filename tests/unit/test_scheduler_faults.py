"""Rows whose values are broken: they end alone, and nobody goes on with what they wrote."""

from collections.abc import Sequence

import pytest

from octavo.scheduler.core import Scheduler
from octavo.scheduler.events import RequestSubmitted
from octavo.scheduler.instructions import EmitOutput, EndWorkerSession, Instruction, SendPlan
from octavo.scheduler.simulate.model import FaultRule, make_facts
from octavo.wire.plan import FAULT_NO_CANDIDATE, FAULT_NONFINITE_LOGITS
from octavo.wire.prefix import root_key
from octavo.wire.requests import FailureCode, RequestFailed, StepOutput
from tests.support.core_by_hand import EPOCH, result, started
from tests.support.core_driver import FRONTEND, Client, CoreDriver, entries_of, make_config
from tests.support.fake_frontend import make_submit

FACTS = make_facts(block_size=4)
SICK = 666
"""Seed of the requests whose rows break."""


def sick_from(num_tokens: int) -> FaultRule:
    """Let rows of seed SICK write garbage once they reach so many tokens."""

    def rule(ids: Sequence[int], seed: int, choice: int) -> bool:
        return seed == SICK and len(ids) >= num_tokens

    return rule


def make_driver(rule: FaultRule, budget: int = 256, num_blocks: int = 65, depth: int = 2) -> CoreDriver:
    """Return a driver with blocks of 4 tokens, its worker ready."""
    facts = make_facts(block_size=4, num_blocks=num_blocks, max_num_batched_tokens=budget, max_num_seqs=6)
    driver = CoreDriver(facts, make_config(pipeline_depth=depth), fault_rule=rule)
    driver.worker_ready()
    return driver


def submit(core: Scheduler, handle: int, prompt: Sequence[int], max_tokens: int = 9) -> list[Instruction]:
    message = make_submit(handle, prompt, max_tokens, prefix_root=root_key("digest"), block_size=4)
    return core.on_event(RequestSubmitted(FRONTEND, message), 100.0)


def assert_broken(driver: CoreDriver, client: Client) -> None:
    assert driver.failure(client) == RequestFailed(client.handle, FailureCode.INTERNAL, "non-finite logits")


def assert_solo(driver: CoreDriver, *clients: Client) -> None:
    for client in clients:
        assert [driver.tokens(client, n) for n in range(len(client.expected))] == client.expected


# One row


def test_nonfinite_logits_of_one_choice_end_the_request_and_nothing_else() -> None:
    driver = make_driver(lambda ids, seed, choice: seed == SICK and choice == 1 and len(ids) == 5)
    client = driver.submit([1, 2, 3], 9, num_choices=3, seed=SICK, is_faulty=True)
    other = driver.submit([1, 2, 3], 9, num_choices=2)
    driver.drain()
    assert_broken(driver, client)
    assert_solo(driver, other)


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        (FAULT_NONFINITE_LOGITS, FailureCode.INTERNAL, "non-finite logits"),
        (FAULT_NO_CANDIDATE, FailureCode.INVALID, "masks and filters left no id that could be drawn"),
        (77, FailureCode.INTERNAL, "fault 77"),
    ],
)
def test_a_fault_is_named(fault: int, code: FailureCode, message: str) -> None:
    core = started(FACTS)
    submit(core, 1, [1])
    (output,) = core.on_event(result(1, [], [], fault_row=[0], fault=[fault]), 100.0)
    assert output == EmitOutput(FRONTEND, StepOutput(failed=(RequestFailed(1, code, message),)))
    core.check()


def test_a_fault_of_a_row_that_did_not_sample_ends_the_workers_session() -> None:
    core = started(FACTS)
    submit(core, 1, [1])
    (ending,) = core.on_event(result(1, [0], [5], fault_row=[3], fault=[FAULT_NONFINITE_LOGITS]), 100.0)
    assert ending == EndWorkerSession(EPOCH, "plan 1: rows [3] fault, but [0] sampled")


def test_an_id_outside_the_vocabulary_ends_its_request() -> None:
    core = started(FACTS)
    submit(core, 1, [1])
    (output,) = core.on_event(result(1, [0], [1000]), 100.0)
    failed = RequestFailed(1, FailureCode.INTERNAL, "the worker drew id 1000, outside [0, 1000)")
    assert output == EmitOutput(FRONTEND, StepOutput(failed=(failed,)))


# What it had published


def test_what_a_faulting_row_published_is_found_no_more() -> None:
    core = started(FACTS)
    submit(core, 1, range(9))
    assert core.figures.num_cached_blocks == 2
    core.on_event(result(1, [], [], fault_row=[0], fault=[FAULT_NONFINITE_LOGITS]), 100.0)
    assert core.figures.num_cached_blocks == 0
    core.on_event(result(2, [], [], fault_row=[0], fault=[FAULT_NONFINITE_LOGITS]), 100.0)
    (plan, *_) = submit(core, 2, range(9))
    assert isinstance(plan, SendPlan)
    assert plan.plan.new_rows[0].num_computed_tokens == 0


def test_a_row_without_candidates_withdraws_nothing() -> None:
    core = started(FACTS)
    submit(core, 1, range(9))
    core.on_event(result(1, [], [], fault_row=[0], fault=[FAULT_NO_CANDIDATE]), 100.0)
    assert core.figures.num_cached_blocks == 2, "its values are sound"
    core.on_event(result(2, [], [], fault_row=[0], fault=[FAULT_NO_CANDIDATE]), 100.0)
    (plan, *_) = submit(core, 2, range(9))
    assert isinstance(plan, SendPlan)
    assert plan.plan.new_rows[0].num_computed_tokens == 8


def test_a_row_without_candidates_is_not_given_a_second_chance_on_found_blocks() -> None:
    core = started(FACTS, pipeline_depth=1)
    submit(core, 1, range(9), max_tokens=1)
    submit(core, 2, range(9))
    core.on_event(result(1, [0], [5]), 100.0)
    (output,) = core.on_event(result(2, [], [], fault_row=[0], fault=[FAULT_NO_CANDIDATE]), 100.0)
    assert isinstance(output, EmitOutput)
    assert [failed.handle for failed in output.output.failed] == [2]


def test_who_holds_blocks_of_a_faulting_row_is_recomputed() -> None:
    """The sharer's own plan has not reported yet: it learns of the broken blocks before it draws from them."""
    driver = make_driver(sick_from(1), budget=7)
    broken = driver.submit(range(12), 5, seed=SICK, is_faulty=True)  # 7 tokens in plan 1, 5 in plan 2
    sharer = driver.submit(range(16), 5)
    while not entries_of(driver, sharer):
        driver.step()
    assert entries_of(driver, sharer)[0].num_computed > 0
    driver.drain()
    assert_broken(driver, broken)
    assert [entry.num_computed for entry in entries_of(driver, sharer)][1:] == [0]
    assert driver.core.figures.num_recomputed_tokens > 0
    assert_solo(driver, sharer)


def test_sharers_in_the_very_step_of_the_fault_finish_with_their_own_output() -> None:
    driver = make_driver(sick_from(1))
    filler = driver.submit([500], 3)
    group = [driver.prepare(range(16), 6, seed=SICK, is_faulty=True)]
    group += [driver.prepare(range(16), 6, seed=n, num_choices=n) for n in (1, 2, 3)]
    driver.submit_all(*group)
    driver.drain()
    assert_broken(driver, group[0])
    assert [driver.num_cached(client) for client in group] == [0, 12, 12, 12]
    assert_solo(driver, filler, *group[1:])


def test_blocks_chained_on_broken_ones_are_withdrawn_with_them() -> None:
    """The second computes on the first one's blocks, the third on the second one's."""
    driver = make_driver(sick_from(1), budget=12)
    prompts = [range(12), range(24), range(36)]
    first = driver.submit(prompts[0], 4, seed=SICK, is_faulty=True)
    rest = [driver.submit(prompt, 4, seed=n) for n, prompt in enumerate(prompts[1:])]
    while driver.step():
        assert driver.core.figures.num_cached_blocks <= 9
    driver.drain()
    assert_broken(driver, first)
    assert_solo(driver, *rest)
    late = driver.submit(prompts[2], 1)
    driver.drain()
    assert_solo(driver, late)


def test_what_others_computed_before_is_only_lost_to_be_found_not_to_its_holders() -> None:
    driver = make_driver(sick_from(13))
    sound = driver.submit(range(12), 30)
    driver.step()
    driver.step()
    broken = driver.submit([*range(12), 99, 99, 99, 99], 5, seed=SICK, is_faulty=True)
    driver.drain()
    assert driver.num_cached(broken) == 12
    assert_broken(driver, broken)
    assert len(entries_of(driver, sound)) == 1, "it goes on: its blocks are its own"
    assert_solo(driver, sound)


def test_a_fault_that_comes_after_the_cancel_still_withdraws() -> None:
    driver = make_driver(sick_from(1))
    broken = driver.submit(range(12), 9, seed=SICK, is_faulty=True)
    driver.cancel(broken)
    assert driver.core.figures.num_cached_blocks == 3
    sharer = driver.submit(range(16), 5)  # waits for room in the pipeline
    driver.drain()
    assert [entry.num_computed for entry in entries_of(driver, sharer)] == [0]
    assert_solo(driver, sharer)


# Found blocks that turn out to be broken


def with_broken_cache(rule: FaultRule) -> CoreDriver:
    """Return a driver whose cache holds broken blocks for range(12): who wrote them was cancelled before it drew."""
    driver = make_driver(rule, budget=12, depth=1)
    broken = driver.submit(range(24), 5, seed=SICK, is_faulty=True)
    driver.execute()
    driver.cancel(broken)
    driver.deliver()
    assert driver.core.figures.num_cached_blocks == 3
    return driver


def test_a_row_that_faults_on_found_blocks_is_computed_without_the_cache() -> None:
    driver = with_broken_cache(sick_from(1))
    client = driver.submit(range(16), 20)
    driver.drain()
    assert [entry.num_computed for entry in entries_of(driver, client)] == [12, 0]
    assert_solo(driver, client)
    again = driver.submit(range(16), 20)
    driver.drain()
    assert [entry.num_computed for entry in entries_of(driver, again)] == [0], "what faulted is not found"


def test_a_row_that_faults_without_found_blocks_fails() -> None:
    driver = with_broken_cache(lambda ids, seed, choice: seed == SICK or len(ids) > 16)
    client = driver.submit(range(16), 20, is_faulty=True)
    driver.drain()
    assert [entry.num_computed for entry in entries_of(driver, client)] == [12, 0]
    assert len(driver.tokens(client)) == 1, "what was drawn from 16 tokens"
    assert_broken(driver, client)


def test_forked_choices_that_fault_on_found_blocks_are_each_computed_anew() -> None:
    driver = with_broken_cache(sick_from(1))
    client = driver.submit(range(18), 6, num_choices=3)
    driver.drain()
    again = [(entry.choice, entry.num_computed) for entry in entries_of(driver, client)]
    assert again == [(0, 12), (0, 0), (1, 0), (2, 0)], "none of them trusts what it found or shared"
    assert_solo(driver, client)


def test_a_preempted_row_that_faults_is_recomputed_once() -> None:
    """Its blocks are gone by then, so nobody can tell whether they were its own."""
    for num_blocks in range(10, 16):
        driver = make_driver(sick_from(11), num_blocks=num_blocks)
        sound = [driver.submit([n] * 8, 24, seed=n) for n in range(2)]
        broken = driver.submit([7] * 8, 24, seed=SICK, is_faulty=True)
        driver.drain()
        assert_broken(driver, broken)
        assert_solo(driver, *sound)


@pytest.mark.parametrize("index", range(16))
def test_sharers_of_a_sick_row_get_their_own_output_whenever_they_come(index: int) -> None:
    for num_sick in (1, 6, 13, 17):
        driver = make_driver(sick_from(num_sick), budget=6)
        broken = driver.submit(range(14), 8, seed=SICK, num_choices=2, is_faulty=True)
        for n in range(index):
            if n % 2:
                driver.deliver()
            else:
                driver.execute()
        sharers = [driver.submit(range(14), 8, num_choices=2), driver.submit(range(20), 8, seed=2)]
        driver.drain()
        assert_broken(driver, broken)
        assert_solo(driver, *sharers)


def test_forked_choices_that_computed_nothing_of_the_broken_blocks_are_tried_again() -> None:
    """The first one published nothing, so that its fault says nothing of the others: each one has its own."""
    driver = with_broken_cache(sick_from(1))
    client = driver.submit(range(14), 6, num_choices=3)
    driver.drain()
    assert driver.num_cached(client) == 12
    assert sorted(entry.choice for entry in entries_of(driver, client)) == [0, 0, 1, 2]
    assert_solo(driver, client)
