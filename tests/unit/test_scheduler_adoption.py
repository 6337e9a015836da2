"""F40: a scheduler that begins with a worker that had rows: who goes on from them, and what is computed again."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from octavo.scheduler.adoption import GRACE_S, HOLD_S, Adopted
from octavo.scheduler.events import WorkerLost, WorkerReady
from octavo.scheduler.instructions import SendPlan, TellAdopted
from octavo.scheduler.simulate.model import make_facts
from octavo.wire.columns import pack_ints, unpack_ints
from octavo.wire.held_rows import HeldRow
from octavo.wire.ids import BootId, SessionId
from octavo.wire.plan import StepPlan
from octavo.wire.requests import BeamParams
from tests.support.core_driver import Client, CoreDriver, make_config
from tests.support.core_restart import Report, restart, resubmit

FACTS = make_facts(block_size=4, num_blocks=41, max_num_batched_tokens=64)
PROMPT = list(range(20, 31))  # 11 tokens: two blocks and a part


def running(*clients: tuple[Sequence[int], int], steps: int = 4) -> tuple[CoreDriver, list[Client]]:
    """Return a driver some steps after its requests (prompt, max_tokens) have come."""
    driver = CoreDriver(FACTS)
    driver.worker_ready()
    submitted = [driver.submit(prompt, count, seed=n) for n, (prompt, count) in enumerate(clients)]
    for _ in range(steps):
        driver.step()
    return driver, submitted


def finish(driver: CoreDriver, clients: Sequence[Client]) -> None:
    """Run to the end, and see that nobody noticed."""
    while any(client.is_live for client in clients):
        assert driver.deliver() or driver.execute()
    for client in clients:
        for choice, expected in enumerate(client.expected):
            assert driver.tokens(client, choice) == expected
    while driver.execute() or driver.deliver():
        pass
    figures = driver.core.figures
    assert (figures.num_running, figures.num_free_blocks) == (0, driver.facts.num_blocks - 1)


def first_plan(driver: CoreDriver) -> StepPlan:
    return next(plan for plan in driver.plans if plan.epoch == driver.epoch)


def test_rows_go_on_and_only_their_last_token_is_computed_again() -> None:
    driver, clients = running((PROMPT, 9), (PROMPT[3:], 9))
    restart(driver)
    resubmit(driver)
    plan = first_plan(driver)
    known = [len(client.prompt) + len(driver.tokens(client)) for client in clients]
    assert [new.num_computed_tokens for new in plan.new_rows] == [count - 1 for count in known]
    assert list(unpack_ints(plan.num_tokens)) == [1, 1]
    figures = driver.core.figures
    assert (figures.num_adopted_rows, figures.num_adopted_tokens) == (2, sum(known) - 2)
    assert figures.num_recomputed_tokens <= 2
    finish(driver, clients)


@pytest.mark.parametrize("num_lost", range(6))
def test_ids_that_never_arrived_are_drawn_again(num_lost: int) -> None:
    driver, clients = running((PROMPT, 12), steps=7)
    restart(driver)
    resubmit(driver, num_lost=num_lost)
    (new,) = first_plan(driver).new_rows
    assert new.num_computed_tokens == len(unpack_ints(new.token_ids)) - 1
    finish(driver, clients)


@pytest.mark.parametrize("index", range(14))
def test_outputs_are_the_same_whenever_the_scheduler_is_lost(index: int) -> None:
    driver = CoreDriver(FACTS, make_config(max_num_batched_tokens=7))
    driver.worker_ready()
    clients = [driver.submit(PROMPT, 6, seed=n, num_choices=2) for n in range(2)]
    for n in range(index):
        driver.deliver() if n % 2 else driver.execute()
    for _ in range(2):
        restart(driver)
        resubmit(driver)
    finish(driver, clients)


def test_choices_share_what_they_shared() -> None:
    driver = CoreDriver(FACTS)
    driver.worker_ready()
    client = driver.submit(PROMPT, 9, num_choices=2, tenant=None)
    for _ in range(4):
        driver.step()
    held = restart(driver)
    tables = [list(unpack_ints(row.block_table)) for row in held]
    assert tables[0][:2] == tables[1][:2]
    resubmit(driver)
    plan = first_plan(driver)
    assert {block for table in tables for block in table} == set(unpack_ints(plan.append_block))
    assert driver.core.figures.num_adopted_rows == 2
    finish(driver, [client])


def test_a_block_that_choices_share_in_part_is_not_written() -> None:
    """Right after a fork both name the prompt's last block: each computes that part anew, in a block of its own."""
    driver = CoreDriver(FACTS)
    driver.worker_ready()
    client = driver.submit(PROMPT, 9, num_choices=2)
    driver.step()
    assert [len(driver.tokens(client, choice)) for choice in range(2)] == [1, 1]
    held = restart(driver)
    assert held[0].block_table == held[1].block_table
    resubmit(driver)
    assert sorted(new.num_computed_tokens for new in first_plan(driver).new_rows) == [8, 11]
    finish(driver, [client])


def test_what_is_adopted_can_be_found_by_others() -> None:
    driver, clients = running((PROMPT, 9))
    restart(driver)
    resubmit(driver)
    other = driver.submit(PROMPT, 3, seed=7)
    driver.step_until(lambda: driver.tokens(other))
    assert driver.num_cached(other) == 8
    finish(driver, [*clients, other])


def lie(how: str) -> Report:
    """Return what makes of true rows ones of which the second is not."""

    def report(rows: list[HeldRow]) -> list[HeldRow]:
        first, second = rows
        table = unpack_ints(second.block_table)
        changed: dict[str, dict[str, Any]] = {
            "digest": {"prompt_digest": first.prompt_digest},
            "output": {"output_ids": pack_ints([999, *unpack_ints(second.output_ids)[1:]])},
            "null block": {"block_table": pack_ints([0, *table[1:]])},
            "foreign block": {"block_table": pack_ints([*table[:-1], unpack_ints(first.block_table)[-1]])},
            "another's name": {"request": first.request, "choice": 1},
        }
        return [first, msgspec.structs.replace(second, **changed[how])]

    return report


@pytest.mark.parametrize("how", ["digest", "output", "null block", "foreign block", "another's name"])
def test_rows_that_contradict_are_all_discarded(how: str) -> None:
    driver, clients = running((PROMPT, 9), (PROMPT[3:], 9))
    restart(driver, lie(how))
    resubmit(driver, clients[1])
    resubmit(driver, clients[0])
    assert driver.core.figures.num_adopted_rows == 0
    driver.now += GRACE_S
    (told,) = [one for one in driver.tell() if isinstance(one, TellAdopted)]
    assert (told.adopted.num_rows, bool(told.adopted.discarded)) == (0, True)
    finish(driver, clients)
    assert driver.core.figures.num_recomputed_tokens > 20


def test_beams_begin_anew() -> None:
    driver = CoreDriver(FACTS)
    driver.worker_ready()
    client = driver.submit(PROMPT, 6, num_choices=2, beams=BeamParams(2), tenant=None)
    driver.step()
    restart(driver, lambda rows: rows)
    resubmit(driver)
    assert driver.core.figures.num_adopted_rows == 0
    finish(driver, [client])


def test_who_tells_of_a_prompt_computes_it() -> None:
    driver = CoreDriver(FACTS, make_config(max_num_batched_tokens=6))
    driver.worker_ready()
    client = driver.submit(PROMPT, 4, prompt_logprobs=1)
    driver.step()
    assert restart(driver) == []
    client.message = msgspec.structs.replace(client.message, num_prompt_told=7)
    resubmit(driver)
    assert driver.core.figures.num_adopted_rows == 0
    finish(driver, [client])


def test_a_pool_that_is_full_goes_on_without_preemptions() -> None:
    """Who waited is submitted first, and must not take the blocks of those who ran."""
    facts = make_facts(block_size=4, num_blocks=13, max_num_batched_tokens=64)
    driver = CoreDriver(facts, make_config(max_num_seqs=4))
    driver.worker_ready()
    clients = [driver.submit([n] * 15, 16, seed=n) for n in range(3)]
    driver.step_until(lambda: len(driver.tokens(clients[0])) > 4)
    held = {row.request for row in restart(driver)}
    waiting = [client for client in clients if client.name not in held]
    assert len(waiting) == 1
    resubmit(driver, *waiting)
    assert not driver.sent, "it waits for those who may go on from rows"
    assert driver.core.figures.waiting_reason == "requests that may go on from the worker's rows"
    resubmit(driver, *(client for client in clients if client not in waiting))
    assert driver.core.figures.num_adopted_rows == 2
    finish(driver, clients)


def test_nobody_waits_for_long_for_requests_that_do_not_come() -> None:
    facts = make_facts(block_size=4, num_blocks=13, max_num_batched_tokens=64)
    driver = CoreDriver(facts)
    driver.worker_ready()
    old = driver.submit([1] * 32, 8)
    driver.step()
    restart(driver)
    old.is_gone = True
    new = driver.submit([2] * 24, 4)
    assert not driver.sent
    assert driver.core.next_timer == driver.now + GRACE_S
    driver.now += GRACE_S
    assert any(isinstance(one, SendPlan) for one in driver.tell())
    driver.now += HOLD_S
    (told,) = [one for one in driver.tell() if isinstance(one, TellAdopted)]
    assert told.adopted == Adopted(1, 0, 0, "")
    driver.drain()
    assert driver.tokens(new) == new.expected[0]


def test_who_comes_after_the_blocks_were_given_out_computes_the_rest() -> None:
    facts = make_facts(block_size=4, num_blocks=13, max_num_batched_tokens=64)
    driver = CoreDriver(facts)
    driver.worker_ready()
    old = driver.submit([1] * 32, 8, tenant=None)
    driver.step()
    restart(driver)
    driver.now += GRACE_S
    other = driver.submit([2] * 20, 3)
    driver.step_until(lambda: not other.is_live)
    resubmit(driver)
    driver.drain()
    figures = driver.core.figures
    assert figures.num_adopted_rows == 1
    assert 0 < figures.num_adopted_tokens < 32
    assert driver.tokens(old) == old.expected[0]


def test_after_a_reset_of_the_cache_nobody_finds_what_is_adopted() -> None:
    driver, clients = running((PROMPT, 9))
    restart(driver)
    driver.reset_cache()
    resubmit(driver)
    other = driver.submit(PROMPT, 3, seed=7)
    driver.step_until(lambda: driver.tokens(other))
    assert driver.num_cached(other) == 0
    assert driver.core.figures.num_adopted_rows == 1
    finish(driver, [*clients, other])


def test_the_same_scheduler_goes_on_as_well_when_its_worker_comes_back() -> None:
    driver, clients = running((PROMPT, 9))
    assert driver.model is not None
    held = driver.model.report()
    driver.model.forget(held)
    driver.sent.clear()
    driver.results.clear()
    driver._row_names.clear()
    driver.tell(WorkerLost(driver.epoch, "a clogged link"))
    driver.epoch = SessionId(driver.epoch + 1)
    driver.tell(WorkerReady(driver.epoch, driver.facts, BootId("w1"), tuple(held)))
    assert driver.core.figures.num_adopted_rows == 1
    finish(driver, clients)
