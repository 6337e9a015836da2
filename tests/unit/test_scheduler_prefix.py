"""The prefix cache, case by case: which blocks a request finds, and that what they hold is what it asked for."""

from collections.abc import Sequence

import pytest

from octavo.scheduler.core import Scheduler
from octavo.scheduler.events import CacheResetRequested, RequestSubmitted
from octavo.scheduler.instructions import AnswerCacheReset, EmitOutput, SendPlan
from octavo.scheduler.simulate.model import make_facts
from octavo.wire.columns import pack_ints
from octavo.wire.ids import SessionId
from octavo.wire.plan import FLAG_SAMPLE, NewRow, RowSampling, StepPlan
from octavo.wire.prefix import root_key
from octavo.wire.requests import FailureCode, PrefixCacheReset, RequestStarted, ResetPrefixCache, StepOutput
from tests.support.core_by_hand import EPOCH, started
from tests.support.core_driver import FRONTEND, Client, CoreDriver, Entry, entries_of, make_config, rows_of
from tests.support.fake_frontend import make_submit


def caching(num_blocks: int = 65, max_num_seqs: int = 16, budget: int = 256, max_preemptions: int = 3) -> CoreDriver:
    """Return a driver with blocks of 4 tokens, its worker ready."""
    facts = make_facts(
        num_blocks=num_blocks, block_size=4, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=128
    )
    driver = CoreDriver(facts, make_config(max_preemptions=max_preemptions))
    driver.worker_ready()
    return driver


def served(driver: CoreDriver, prompt: Sequence[int], max_tokens: int = 1, tenant: str | None = "") -> Client:
    """Serve a request from beginning to end."""
    client = driver.submit(prompt, max_tokens, tenant=tenant)
    driver.drain()
    return client


# What is found


@pytest.mark.parametrize(
    ("length", "num_hits"), [(1, 0), (3, 0), (4, 0), (5, 1), (7, 1), (8, 1), (9, 2), (11, 2), (12, 2), (13, 3)]
)
def test_a_second_prompt_finds_all_full_blocks_but_leaves_a_token_to_compute(length: int, num_hits: int) -> None:
    driver = caching()
    first, second = served(driver, range(length), 3), served(driver, range(length), 3)
    assert driver.tokens(first) == driver.tokens(second) == first.expected[0]
    (before,), (after,) = entries_of(driver, first), entries_of(driver, second)
    assert (before.num_computed, after.num_computed) == (0, 4 * num_hits)
    assert after.blocks[:num_hits] == before.blocks[:num_hits]
    assert set(after.blocks[num_hits:]).isdisjoint(before.blocks[: length // 4]), "the copy of a full one is another"
    assert (driver.num_cached(first), driver.num_cached(second)) == (0, 4 * num_hits)
    figures = driver.core.figures
    assert (figures.num_prompt_tokens, figures.num_cached_prompt_tokens) == (2 * length, 4 * num_hits)


def test_a_hit_computes_the_rest_only() -> None:
    core = started(make_facts(block_size=4), pipeline_depth=1)
    root = root_key("digest")
    submits = [make_submit(n, range(10), 5, prefix_root=root, block_size=4) for n in range(2)]
    instructions = core.on_events([RequestSubmitted(FRONTEND, submit) for submit in submits], 100.0)
    sampling, ids = RowSampling(seed=0, min_tokens=0, logprobs=-1), pack_ints(range(10))
    assert instructions == [
        SendPlan(
            StepPlan(
                epoch=EPOCH,
                step=1,
                row=pack_ints([0, 1]),
                num_tokens=pack_ints([10, 2]),
                flags=pack_ints([FLAG_SAMPLE, FLAG_SAMPLE]),
                new_rows=(
                    NewRow(0, f"{FRONTEND:x}-0", 0, 10, 0, ids, sampling),
                    NewRow(1, f"{FRONTEND:x}-1", 0, 10, 8, ids, sampling),
                ),
                append_row=pack_ints([0, 0, 0, 1, 1, 1]),
                append_block=pack_ints([1, 2, 3, 1, 2, 4]),
            )
        ),
        EmitOutput(FRONTEND, StepOutput(started=(RequestStarted(0, 0, 0.0), RequestStarted(1, 8, 0.0)))),
    ]


def test_blocks_are_found_in_the_very_plan_that_fills_them() -> None:
    driver = caching()
    clients = [driver.prepare(range(20), 4, seed=n) for n in range(3)]
    driver.submit_all(*clients)
    assert [entry.step for client in clients for entry in entries_of(driver, client)] == [1, 1, 1]
    assert [driver.num_cached(client) for client in clients] == [0, 16, 16]
    driver.drain()


def test_chunks_are_found_as_far_as_they_are_planned() -> None:
    driver = caching(budget=10, max_num_seqs=2)
    first = driver.submit(range(20), 2)
    second = driver.prepare(range(20), 2)
    driver.submit_all(second)
    driver.drain()
    assert entries_of(driver, first)[0].step == 1
    assert entries_of(driver, second)[0].step == 3
    assert driver.num_cached(second) == 16, "the third plan computes what was left of the first"
    assert driver.tokens(first) == driver.tokens(second)


def test_only_whole_equal_blocks_from_the_beginning_are_found() -> None:
    driver = caching()
    served(driver, range(16))
    cases = {4: [0, 1, 2, 3, 9, 9, 9, 9, 8, 9, 10, 11, 12], 8: [*range(8), 99], 0: [5, *range(1, 16)]}
    for num_cached, prompt in cases.items():
        assert driver.num_cached(served(driver, prompt)) == num_cached, prompt
    assert driver.num_cached(served(driver, [*range(4, 8), *range(4)])) == 0, "the same tokens at another place"


def test_a_follow_up_prompt_finds_what_was_generated() -> None:
    driver = caching()
    first = served(driver, range(6), 15)
    turn = [*range(6), *driver.tokens(first), 7, 7, 7]
    assert driver.num_cached(served(driver, turn)) == 20, "of 21 tokens the last was never computed"
    beside = [*range(6), *driver.tokens(first)[:5], 999, 999]
    assert driver.num_cached(served(driver, beside)) == 8


def test_generated_blocks_of_a_running_request_are_found() -> None:
    driver = caching()
    first = driver.submit(range(6), 60)
    while len(driver.tokens(first)) < 16:
        driver.step()
    second = driver.submit([*range(6), *driver.tokens(first)], 3)
    driver.drain()
    assert driver.num_cached(second) == 20
    assert driver.tokens(second) == second.expected[0]


def test_a_hundred_equal_prompts_get_equal_tokens() -> None:
    for length in (15, 16, 17):
        driver = caching(num_blocks=40)
        clients = [driver.submit(range(length), 6) for _ in range(100)]
        driver.drain()
        assert {tuple(driver.tokens(client)) for client in clients} == {tuple(clients[0].expected[0])}
        figures = driver.core.figures
        assert figures.num_cached_prompt_tokens >= 99 * 4 * ((length - 1) // 4)


def test_a_replay_finds_its_prompt() -> None:
    driver = caching()
    driver.submit(range(9), 40, frontend=SessionId(1))
    for _ in range(12):
        driver.step()
    driver.replay(SessionId(1), SessionId(2))
    (again,) = (client for client in driver.clients.values() if client.frontend == 2)
    driver.drain()
    (entry,) = entries_of(driver, again)
    assert entry.num_computed == driver.num_cached(again) == 8, "its keys are those of the prompt"


# Who finds it


def test_two_tenants_never_share_and_one_tenant_does() -> None:
    driver = caching()
    names = ["a", "b", "a", "b", None, None]
    clients = [driver.prepare(range(16), 30, tenant=name) for name in names]
    driver.submit_all(*clients)
    blocks: dict[str | None, set[int]] = {}
    for name, client in zip(names, clients, strict=True):
        (entry,) = entries_of(driver, client)
        assert entry.num_computed == (12 if name in blocks and name is not None else 0)
        assert all(set(entry.blocks).isdisjoint(held) for other, held in blocks.items() if other != name)
        blocks.setdefault(name, set()).update(entry.blocks)
    driver.drain()
    for name in ("a", "b", "c"):
        assert driver.num_cached(served(driver, range(16), tenant=name)) == (0 if name == "c" else 12)


def test_without_caching_nothing_is_shared() -> None:
    facts = make_facts(block_size=4)
    driver = CoreDriver(facts, make_config(enable_prefix_caching=False))
    driver.worker_ready()
    clients = [driver.submit(range(16), 4) for _ in range(2)]
    driver.drain()
    assert [driver.num_cached(client) for client in clients] == [0, 0]
    assert driver.core.figures.num_cached_blocks == 0


def test_the_end_of_a_request_leaves_those_who_share_its_blocks_alone() -> None:
    for index in range(24):
        driver = caching(num_blocks=13)
        first = driver.submit(range(14), 8)
        sharer = driver.submit(range(14), 20)
        for n in range(index):
            if n % 2:
                driver.deliver()
            else:
                driver.execute()
        driver.cancel(first)
        other = driver.submit([9] * 14, 4)  # takes what the first one gave back
        driver.drain()
        assert driver.num_cached(sharer) == 12
        assert driver.tokens(sharer) == sharer.expected[0]
        assert driver.tokens(other) == other.expected[0]


# What stays


def test_a_free_block_that_is_found_is_not_given_to_another() -> None:
    driver = caching(num_blocks=6)
    served(driver, range(8))
    both = [driver.prepare([*range(8), 1, 1], 2), driver.prepare([9] * 8, 1)]
    driver.submit_all(*both)
    (hit,), (new,) = entries_of(driver, both[0]), entries_of(driver, both[1])
    assert (hit.num_computed, hit.blocks) == (8, [1, 2, 3])
    assert new.blocks == [4, 5]
    driver.drain()


def free_blocks(driver: CoreDriver) -> list[int]:
    """Return the free blocks in the order in which they will be taken."""
    worker = driver.core._worker
    assert worker is not None
    return list(worker.planner.pool.free_blocks())


def test_blocks_of_the_cache_are_taken_last_least_recently_used_first_leaves_before_parents() -> None:
    driver = caching(num_blocks=9)
    served(driver, [1] * 12)
    assert free_blocks(driver) == [4, 5, 6, 7, 8, 3, 2, 1]
    served(driver, [2] * 12)
    assert free_blocks(driver) == [7, 8, 3, 2, 1, 6, 5, 4]
    served(driver, [3] * 16)
    assert free_blocks(driver) == [1, 6, 5, 4, 2, 3, 8, 7]
    assert driver.core.figures.num_cached_blocks == 8
    assert driver.num_cached(served(driver, [1] * 12)) == 4, "the first block is left of this one"


def test_what_is_found_becomes_the_most_recently_used() -> None:
    driver = caching(num_blocks=9)
    served(driver, [1] * 12)
    served(driver, [2] * 12)
    assert driver.num_cached(served(driver, [1] * 12)) == 8
    assert free_blocks(driver) == [7, 8, 3, 6, 5, 4, 2, 1], "the seventh held the third block once more"


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    driver = caching(num_blocks=11, max_preemptions=3)
    clients = [driver.submit([n] * 8, 20, seed=n) for n in range(2)]
    driver.drain()
    figures = driver.core.figures
    assert figures.num_preemptions > 0
    returns = [entry for client in clients for entry in entries_of(driver, client)[1:]]
    assert len(returns) == figures.num_preemptions
    assert any(entry.num_computed > 0 for entry in returns)
    assert [driver.tokens(client) for client in clients] == [client.expected[0] for client in clients]


def test_a_lost_workers_blocks_are_not_found_at_the_next_one() -> None:
    driver = caching()
    running = driver.submit(range(16), 8)
    driver.step()
    driver.lose_worker()
    assert driver.core.figures.num_cached_blocks == 0
    driver.worker_ready()
    driver.drain()
    assert [entry.num_computed for entry in entries_of(driver, running)] == [0, 0]
    assert driver.num_cached(served(driver, range(16))) == 12


def test_keys_of_blocks_of_another_size_are_forgotten_with_the_worker() -> None:
    driver = caching()
    running = driver.submit(range(16), 8)
    driver.lose_worker()
    driver.facts = make_facts(block_size=8)
    driver.worker_ready()
    twin = driver.submit(range(16), 8)
    driver.drain()
    assert entries_of(driver, running)[-1].num_computed == driver.num_cached(twin) == 0
    assert driver.num_cached(served(driver, range(17))) == 16, "what came after takes part again"


# Limits


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (2, 2), (256, 3)])
def test_hashing_of_generated_blocks_is_bounded_in_each_step(
    monkeypatch: pytest.MonkeyPatch, limit: int, most: int
) -> None:
    monkeypatch.setattr("octavo.scheduler.cache.MAX_HASHES_PER_STEP", limit)
    driver = CoreDriver(make_facts(block_size=1, num_blocks=200), make_config(pipeline_depth=1))
    driver.worker_ready()
    clients = [driver.prepare([n], 20) for n in range(3)]
    driver.submit_all(*clients)
    gains = []
    while all(client.is_live for client in clients):
        before = driver.core.figures.num_cached_blocks
        driver.step()
        gains.append(driver.core.figures.num_cached_blocks - before)
    assert max(gains[:-1]) == most
    driver.drain()


def test_keys_that_do_not_fit_the_prompt_are_refused_with_both_numbers() -> None:
    core = started(make_facts(block_size=4))
    message = make_submit(1, range(16), 1, prefix_root=root_key("digest"), block_size=8)
    (output,) = core.on_event(RequestSubmitted(FRONTEND, message), 100.0)
    assert isinstance(output, EmitOutput)
    (failed,) = output.output.failed
    assert failed.code is FailureCode.INVALID
    assert failed.message == "prefix keys of 2 blocks, the prompt fills 4 of 4 tokens"


# Reset


def test_a_reset_answers_with_the_number_of_blocks_that_could_be_found() -> None:
    driver = caching()
    served(driver, range(17))
    served(driver, [9] * 4)
    reset = CacheResetRequested(FRONTEND, ResetPrefixCache(31))
    assert driver.tell(reset) == [AnswerCacheReset(FRONTEND, PrefixCacheReset(31, 5))]
    assert driver.tell(reset) == [AnswerCacheReset(FRONTEND, PrefixCacheReset(31, 0))]
    assert driver.core.figures.num_cached_blocks == 0
    assert driver.num_cached(served(driver, range(17))) == 0
    assert driver.num_cached(served(driver, range(17))) == 16, "what is computed since then is found"


def test_a_reset_without_a_worker_is_answered() -> None:
    core = Scheduler(make_config())
    reset = CacheResetRequested(FRONTEND, ResetPrefixCache(1))
    assert core.on_event(reset, 0.0) == [AnswerCacheReset(FRONTEND, PrefixCacheReset(1, 0))]


def test_running_requests_go_on_after_a_reset_and_publish_nothing_more() -> None:
    driver = caching(budget=10)
    first = driver.submit(range(22), 12)
    sharer = driver.submit(range(22), 12)
    driver.step()
    assert driver.reset_cache() > 0
    driver.drain()
    assert driver.tokens(first) == driver.tokens(sharer) == first.expected[0]
    assert driver.core.figures.num_cached_blocks == 0
    assert driver.num_cached(sharer) == 20, "it came before the reset"
    assert driver.num_cached(served(driver, range(22))) == 0


def test_choices_forked_after_a_reset_publish_nothing_either() -> None:
    driver = caching(budget=10)
    client = driver.submit(range(26), 12, num_choices=3)
    assert all(not plan.fork_dst for plan in driver.plans), "the third plan will reach the end of the prompt"
    driver.reset_cache()
    driver.drain()
    assert sum(len(plan.fork_dst) for plan in driver.plans) == 2 * 4
    assert [driver.tokens(client, n) for n in range(3)] == client.expected
    assert driver.core.figures.num_cached_blocks == 0


def test_sharers_of_a_block_keep_it_over_a_reset() -> None:
    driver = caching()
    first, sharer = driver.submit(range(16), 12), driver.submit(range(16), 12)
    driver.step()
    driver.step()
    driver.reset_cache()
    driver.cancel(first)
    driver.drain()
    assert driver.num_cached(sharer) == 12
    assert driver.tokens(sharer) == sharer.expected[0]


def test_entries_are_what_the_worker_was_told() -> None:
    driver = caching()
    client = driver.submit(range(10), 1)
    assert entries_of(driver, client) == [Entry(step=1, choice=0, num_computed=0, blocks=[1, 2, 3])]
    assert rows_of(driver.plans[0]) == [(0, 10, FLAG_SAMPLE)]
    driver.drain()
