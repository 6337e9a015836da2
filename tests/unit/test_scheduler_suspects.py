"""A request that kills its worker ends, alone; whoever is only near when workers die goes on (F36-F39)."""

from collections.abc import Mapping
from random import Random

import pytest

from octavo.scheduler.events import RequestCancelled, RequestSubmitted, WorkerLost, WorkerReady
from octavo.scheduler.instructions import EndWorkerSession
from octavo.scheduler.simulate.model import make_facts
from octavo.scheduler.suspects import DOUBT_S, MAX_DEATHS, MAX_DEATHS_IN_DOUBT
from octavo.wire.columns import unpack_ints
from octavo.wire.ids import BootId, SessionId
from octavo.wire.requests import BeamParams, CancelRequest, FailureCode
from tests.support.core_by_hand import EPOCH, result, started
from tests.support.core_driver import FRONTEND, NOT_AGAIN, Client, CoreDriver, make_config
from tests.support.fake_frontend import make_submit

SMALL = make_facts(block_size=4, max_num_batched_tokens=32, max_num_seqs=8)


def ready(num_blocks: int = 65, **config: int) -> CoreDriver:
    facts = make_facts(num_blocks=num_blocks, block_size=4, max_num_batched_tokens=32, max_num_seqs=8)
    driver = CoreDriver(facts, make_config(**config))  # type: ignore[arg-type]
    driver.worker_ready()
    return driver


def run_deadly(driver: CoreDriver, deadly: Mapping[str, int], most_deaths: int = 20) -> int:
    """Run until all has ended; the worker dies when it has computed a deadly request so far. Return how often it died."""
    num_deaths = 0
    while any(client.is_live for client in driver.clients.values()):
        if driver.results:
            driver.deliver()
            continue
        plan = driver.sent[0]
        driver.execute()
        assert driver.model is not None
        computed = [driver.model.rows[row] for row in unpack_ints(plan.row)]
        if any(row.num_computed >= deadly.get(row.request, 10**6) for row in computed):
            num_deaths += 1
            assert num_deaths <= most_deaths, "workers die for ever"
            driver.lose_worker()
            driver.worker_ready()
    return num_deaths


def gave_up(driver: CoreDriver, client: Client) -> bool:
    failed = driver.received[client.frontend].failed.get(client.handle)
    return failed is not None and failed.code is FailureCode.INTERNAL and failed.message.endswith(NOT_AGAIN)


def finish_and_compare(driver: CoreDriver, guilty: list[Client]) -> None:
    driver.drain()
    for client in driver.clients.values():
        if client in guilty:
            assert gave_up(driver, client)
        else:
            assert [driver.tokens(client, n) for n in range(len(client.expected))] == client.expected


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("at", [1, 9, 10, 25])
def test_of_many_requests_only_the_deadly_one_ends(at: int, depth: int) -> None:
    driver = ready(pipeline_depth=depth)
    clients = [driver.submit(range(n, n + 9), 20, seed=n, tenant=None) for n in range(10)]
    guilty = clients[4]
    assert run_deadly(driver, {guilty.name: at}) == MAX_DEATHS
    assert driver.failure(guilty).message == (
        "3 workers in a row were lost while they computed this request, the last time alone: it is not tried again"
    )
    finish_and_compare(driver, [guilty])


@pytest.mark.parametrize("shape", ["choices", "beams", "long prompt"])
def test_deadly_requests_of_any_shape_are_found(shape: str) -> None:
    driver = ready()
    others = [driver.submit(range(n, n + 9), 12, seed=n, num_choices=1 + n % 3) for n in range(4)]
    if shape == "choices":
        guilty = driver.submit(range(30, 39), 20, num_choices=3)
    elif shape == "beams":
        guilty = driver.submit(range(30, 39), 20, num_choices=2, beams=BeamParams(3))
    else:
        guilty = driver.submit(range(100), 20)
    run_deadly(driver, {guilty.name: 15})
    assert len(driver.deaths) == MAX_DEATHS
    assert others
    finish_and_compare(driver, [guilty])


def test_two_deadly_requests_both_end_and_nobody_else() -> None:
    driver = ready()
    clients = [driver.submit(range(n, n + 9), 20, seed=n) for n in range(6)]
    assert run_deadly(driver, {clients[1].name: 12, clients[5].name: 11}) == 2 * MAX_DEATHS
    finish_and_compare(driver, [clients[1], clients[5]])


@pytest.mark.parametrize("seed", range(5))
def test_fifty_kills_under_load_end_nobody_that_gets_on_in_between(seed: int) -> None:
    random = Random(seed)
    driver = ready(num_blocks=129)
    for n in range(8):
        driver.submit([n], 400, seed=n)
    for _ in range(50):
        for _ in range(random.randint(10, 16)):
            driver.step()
        for _ in range(random.randint(0, 2)):
            driver.execute()
        driver.lose_worker()
        driver.worker_ready()
    assert len(driver.deaths) == 50
    finish_and_compare(driver, [])


def kill_at_once(driver: CoreDriver) -> None:
    driver.lose_worker()
    driver.worker_ready()


def test_who_is_suspected_twice_runs_alone_the_newest_first_and_others_keep_their_place() -> None:
    driver = ready()
    clients = [driver.submit([n], 30, seed=n) for n in range(3)]
    driver.step()
    kill_at_once(driver)
    kill_at_once(driver)
    late = driver.submit([9], 2)
    alone: list[str] = []
    while not driver.received[FRONTEND].tokens[late.handle, 0]:
        names = driver._plan_names[driver.sent[0].epoch, driver.sent[0].step]
        if len(names) == 1 and names.isdisjoint(alone):
            alone += names
        assert driver.step()
    assert alone == [client.name for client in reversed(clients)]
    assert driver.core.figures.num_running == 4
    finish_and_compare(driver, [])


def test_others_wait_for_suspects_for_a_bounded_number_of_steps() -> None:
    driver = ready()
    clients = [driver.submit(range(n, n + 40), 30, seed=n, tenant=None) for n in range(4)]
    for _ in range(8):
        driver.step()
    late = driver.submit([9], 2)
    kill_at_once(driver)
    kill_at_once(driver)
    num_steps = 0
    while not driver.received[FRONTEND].tokens[late.handle, 0]:
        driver.step()
        num_steps += 1
    longest = max(len(c.prompt) + len(driver.tokens(c)) for c in clients)
    assert num_steps <= 4 * (-(-longest // 32) + 2) + 8
    finish_and_compare(driver, [])


@pytest.mark.parametrize("num_blocks", [13, 16, 24])
def test_who_runs_alone_takes_rows_and_blocks_from_others_where_it_must(num_blocks: int) -> None:
    driver = ready(num_blocks=num_blocks, max_preemptions=1)
    clients = [driver.submit(range(n, n + 16), 24, seed=n, tenant=None) for n in range(6)]
    assert run_deadly(driver, {clients[2].name: 20}, most_deaths=40) >= MAX_DEATHS
    finish_and_compare(driver, [clients[2]])


def test_kills_in_quick_succession_end_one_request_at_the_third_and_clear_the_others() -> None:
    """No step has ever finished: from here nothing tells them from a request that kills."""
    driver = ready()
    clients = [driver.prepare([n], 5, seed=n) for n in range(4)]
    driver.submit_all(*clients)
    for _ in range(MAX_DEATHS):
        kill_at_once(driver)
    assert [gave_up(driver, client) for client in clients] == [False, False, False, True]
    assert len(driver._plan_names[driver.sent[0].epoch, 1]) == 3, "cleared: they run together"
    finish_and_compare(driver, [clients[3]])


def explained_by_nobody(driver: CoreDriver, how: str) -> None:
    if how == "idle":
        kill_at_once(driver)
        return
    first = driver.submit([1], 5)
    kill_at_once(driver)
    driver.drain()
    assert driver.tokens(first) == first.expected[0]


@pytest.mark.parametrize("how", ["idle", "got on"])
def test_where_workers_die_of_something_else_more_deaths_are_needed(how: str) -> None:
    driver = ready()
    explained_by_nobody(driver, how)
    client = driver.submit([1], 5)
    for _ in range(MAX_DEATHS_IN_DOUBT - 1):
        kill_at_once(driver)
    assert client.is_live
    kill_at_once(driver)
    assert gave_up(driver, client)


def test_doubts_end_after_a_while() -> None:
    driver = ready()
    explained_by_nobody(driver, "idle")
    driver.now += DOUBT_S
    client = driver.submit([1], 5)
    for _ in range(MAX_DEATHS):
        kill_at_once(driver)
    assert gave_up(driver, client)


def test_a_worker_that_comes_back_has_not_died() -> None:
    driver = ready()
    client = driver.submit([1], 5)
    for _ in range(10):
        driver.lose_worker()
        driver.worker_ready(is_same=True)
    driver.drain()
    assert driver.tokens(client) == client.expected[0]


def test_a_worker_that_takes_its_leave_blames_nobody() -> None:
    core = started()
    core.on_event(RequestSubmitted(FRONTEND, make_submit(1, [1], 5)), 100.0)
    for n in range(10):
        core.on_event(WorkerLost(SessionId(EPOCH + n), "it left", is_orderly=True), 100.0)
        core.on_event(WorkerReady(SessionId(EPOCH + n + 1), make_facts(), BootId(f"w{n}")), 100.0)
    assert core.figures.num_requests == 1


@pytest.mark.parametrize("how", ["hangs", "answers wrong"])
def test_a_worker_that_hangs_or_answers_wrong_counts_even_if_it_comes_back(how: str) -> None:
    core = started()
    now = 100.0
    core.on_event(RequestSubmitted(FRONTEND, make_submit(1, [1], 5)), now)
    for n in range(MAX_DEATHS):
        assert core.figures.num_requests == 1
        now += 301.0
        wrong = (result(2, [0], [9], epoch=EPOCH + n),) if how == "answers wrong" else ()
        assert isinstance(core.on_events(wrong, now)[-1], EndWorkerSession)
        core.on_event(WorkerReady(SessionId(EPOCH + n + 1), make_facts(), BootId("w")), now)
    assert core.figures.num_requests == 0


def test_who_is_cancelled_is_forgotten_and_the_others_are_cleared_as_they_get_on() -> None:
    core = started()
    for handle in (1, 2):
        core.on_event(RequestSubmitted(FRONTEND, make_submit(handle, [1], 5)), 100.0)
    core.on_event(WorkerLost(EPOCH, "test"), 100.0)
    core.on_event(RequestCancelled(FRONTEND, CancelRequest(2)), 100.0)
    core.on_event(WorkerReady(SessionId(6), make_facts(), BootId("w2")), 100.0)
    assert len(core._suspects) == 1
    core.on_event(result(1, [0], [7], epoch=6), 100.0)
    assert len(core._suspects) == 1, "two of its tokens were under way"
    core.on_event(result(2, [0], [7], epoch=6), 100.0)
    assert len(core._suspects) == 0
