"""Frontend, scheduler and a worker without tensors: what a client sees while processes come and go."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]

from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.policy import POLICIES
from octavo.scheduler.policy.priority import ByPriority
from octavo.scheduler.simulate.model import make_facts
from octavo.v1 import admin_pb2
from octavo.v1 import generation_pb2 as pb
from octavo.wire.model_digest import model_digest
from tests.support.fake_frontend import LoopThread
from tests.support.fake_worker import FakeWorker
from tests.support.frontend_client import WAIT_S, Collected, Service, collect, read, refusal, running_frontend
from tests.support.tiny_tokenizers import VOCAB_SIZE

FACTS = make_facts(vocab_size=VOCAB_SIZE, max_model_len=256, num_blocks=65, block_size=16, max_num_seqs=8)


def counted(first: int, number: int) -> list[int]:
    """Return what the fake worker says after id `first - 1`."""
    return [(first + i) % VOCAB_SIZE for i in range(number)]


@pytest.fixture
def config(address: str, tiny_model: Path) -> SchedulerConfig:
    return SchedulerConfig(address=address, config_digest=model_digest(tiny_model))


@pytest.fixture
def worker(config: SchedulerConfig) -> Iterator[FakeWorker]:
    with FakeWorker(config.address, config.config_digest, FACTS) as running:
        yield running


@pytest.fixture
async def frontend(tiny_model: Path, config: SchedulerConfig, worker: FakeWorker) -> AsyncIterator[Service]:
    async with running_frontend(tiny_model, config.address) as running:
        yield running


def ask(service: Service, prompt_id: int, max_tokens: int, **sampling: Any) -> Any:
    return service.stream(
        tokenIds={"ids": [prompt_id]},
        sampling=sampling,
        stopping={"maxTokens": max_tokens, "ignoreEos": True},
        output={"tokenIds": True},
    )


async def everything_is_free(service: Service) -> None:
    """See that neither frontend nor scheduler holds anything."""
    await service.until_idle()
    async with asyncio.timeout(WAIT_S):
        while True:
            status = await service.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=WAIT_S)
            held = status.scheduler
            if held.total_blocks and held.free_blocks == held.total_blocks and not held.running_requests:
                assert held.waiting_requests == 0
                return


async def test_concurrent_streams_with_cancels(frontend: Service, config: SchedulerConfig) -> None:
    draw = random.Random(7)
    with LoopThread(config):
        await frontend.until_health(serving=True)

        async def one(prompt_id: int, max_tokens: int, cancel_after: int | None) -> None:
            call = ask(frontend, prompt_id, max_tokens, n=draw.choice([1, 1, 2]))
            if cancel_after is not None:
                for _ in range(cancel_after):
                    await read(call)
                call.cancel()
                return
            found = await collect(call)
            for ids in found.ids.values():
                assert ids == counted(prompt_id + 1, max_tokens)

        cases = [(draw.randrange(200), draw.randrange(1, 120)) for _ in range(30)]
        await asyncio.gather(*(one(*case, draw.choice([None, None, 0, 1])) for case in cases))
        await everything_is_free(frontend)


async def read_with_help(call: Any, worker: FakeWorker) -> Any:
    """Read an event, while the worker answers as few plans as that takes."""
    reading = asyncio.ensure_future(read(call))
    while not reading.done():
        worker.release(1)
        await asyncio.wait({reading}, timeout=0.1)
    return reading.result()


async def test_a_scheduler_that_dies_and_comes_back(
    frontend: Service, config: SchedulerConfig, worker: FakeWorker
) -> None:
    with LoopThread(config):
        await frontend.until_health(serving=True)
        worker.hold()
        calls = [ask(frontend, i, 100 + i, n=1 + i % 2) for i in range(4)]
        seen = [Collected() for _ in calls]
        for call, collected in zip(calls, seen):
            collected.add(await read_with_help(call, worker))
    worker.release()
    with LoopThread(config):
        found = await asyncio.gather(*(collect(call, begun) for call, begun in zip(calls, seen)))
        for i, collected in enumerate(found):
            assert list(collected.ids.values()) == [counted(i + 1, 100 + i)] * (1 + i % 2)
            assert {end.completion_tokens for end in collected.finished.values()} == {100 + i}
        await everything_is_free(frontend)


async def test_a_worker_that_dies_and_is_replaced(
    tiny_model: Path, config: SchedulerConfig, frontend: Service, worker: FakeWorker
) -> None:
    with LoopThread(config):
        await frontend.until_health(serving=True)
        worker.hold()
        calls = [ask(frontend, i, 50) for i in range(3)]
        worker.release(3)
        await asyncio.to_thread(worker.wait_for_plans, 4)
        worker.kill()
        with FakeWorker(config.address, config.config_digest, FACTS):
            found = await asyncio.gather(*map(collect, calls))
            assert [collected.ids[0] for collected in found] == [counted(i + 1, 50) for i in range(3)]
            await everything_is_free(frontend)


async def test_stop_strings_free_their_blocks(frontend: Service, config: SchedulerConfig) -> None:
    with LoopThread(config):
        await frontend.until_health(serving=True)
        call = frontend.ask(
            tokenIds={"ids": [ord("a")]}, sampling={"n": 2}, stopping={"stopStrings": ["hij"], "maxTokens": 100}
        )
        response = await call
        assert [(c.text, c.stop_string) for c in response.choices] == [("bcdefg", "hij")] * 2
        assert response.usage.completion_tokens == 18
        await everything_is_free(frontend)


async def test_prefixes_are_found_by_salt_until_the_cache_is_reset(frontend: Service, config: SchedulerConfig) -> None:
    ids = [7] * 40  # two full blocks and a half

    async def cached(salt: str = "") -> int:
        response = await frontend.ask(tokenIds={"ids": ids}, stopping={"maxTokens": 1}, cacheSalt=salt)
        number: int = response.usage.cached_prompt_tokens
        return number

    with LoopThread(config):
        await frontend.until_health(serving=True)
        assert [await cached() for _ in range(2)] == [0, 32]
        assert [await cached("pepper") for _ in range(2)] == [0, 32]
        status = await frontend.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=WAIT_S)
        held = status.scheduler
        assert (held.cached_blocks, held.prompt_tokens, held.cached_prompt_tokens) == (4, 160, 64)
        assert held.failed_checks == 0
        reset = await frontend.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(), timeout=WAIT_S)
        assert reset.dropped_blocks == 4
        assert [await cached() for _ in range(2)] == [0, 32]
        await everything_is_free(frontend)


async def test_without_prefix_caching_nothing_is_found(frontend: Service, config: SchedulerConfig) -> None:
    with LoopThread(replace(config, enable_prefix_caching=False)):
        await frontend.until_health(serving=True)
        for _ in range(2):
            response = await frontend.ask(tokenIds={"ids": [7] * 40}, stopping={"maxTokens": 1})
            assert response.usage.cached_prompt_tokens == 0
        reset = await frontend.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(), timeout=WAIT_S)
        assert reset.dropped_blocks == 0
        status = await frontend.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=WAIT_S)
        assert not status.scheduler.prefix_caching


async def test_status_names_the_policy_and_the_sessions(frontend: Service, config: SchedulerConfig) -> None:
    with LoopThread(replace(config, scheduling_policy="fair")):
        await frontend.until_health(serving=True)
        status = await frontend.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=WAIT_S)
    held = status.scheduler
    assert (held.scheduling_policy, held.prefix_caching, held.max_num_seqs) == ("fair", True, 8)
    epochs = {process.role: process.epoch for process in status.processes}
    assert epochs["scheduler"] == epochs["worker"] > 0, "what the contract says of the scheduler's epoch"
    assert epochs["frontend"] not in (0, epochs["worker"])


@pytest.mark.parametrize("policy", ["fcfs", "fair", "priority", "one's own"])
async def test_priorities_are_taken_under_policies_that_use_them(
    frontend: Service, config: SchedulerConfig, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "one's own", ByPriority)
    with LoopThread(replace(config, scheduling_policy=policy)):
        await frontend.until_health(serving=True)
        call = frontend.ask(tokenIds={"ids": [7]}, stopping={"maxTokens": 3}, output={"tokenIds": True}, priority=-1)
        if POLICIES[policy].uses_priorities:
            assert list((await call).choices[0].token_ids) == [8, 9, 10]
        else:
            found = await refusal(call)
            assert (found.code, found.field) == (grpc.StatusCode.INVALID_ARGUMENT, "input.priority")


async def test_the_requests_of_one_address_are_bounded(
    frontend: Service, config: SchedulerConfig, worker: FakeWorker
) -> None:
    with LoopThread(replace(config, max_requests_per_caller=2)):
        await frontend.until_health(serving=True)
        worker.hold()
        calls = [ask(frontend, i, 5) for i in range(2)]
        for call in calls:
            assert (await read_with_help(call, worker)).WhichOneof("event") == "started"
        found = await refusal(ask(frontend, 3, 5))
        assert (found.code, found.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "CALLER_LIMIT_EXCEEDED")
        assert dict(found.unpack(error_details_pb2.ErrorInfo).metadata) == {
            "max_requests_per_caller": "2",
            "requests": "2",
        }
        assert found.unpack(error_details_pb2.RetryInfo).retry_delay.seconds == 1
        assert "--max-requests-per-caller" in found.message
        worker.release()
        rest = [await collect(call, Collected(started=pb.Started())) for call in calls]
        assert [collected.ids[0] for collected in rest] == [counted(i + 1, 5) for i in range(2)]
        await collect(ask(frontend, 3, 5))
