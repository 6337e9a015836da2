"""Two frontends with one scheduler: what is asked of one holds for both."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.simulate.model import make_facts
from octavo.v1 import admin_pb2
from octavo.wire.model_digest import model_digest
from tests.support.fake_frontend import LoopThread
from tests.support.fake_worker import FakeWorker
from tests.support.frontend_client import WAIT_S, Service, read, refusal, running_frontend
from tests.support.http_client import Doors, running_doors
from tests.support.tiny_tokenizers import VOCAB_SIZE

FACTS = make_facts(vocab_size=VOCAB_SIZE, max_model_len=256, num_blocks=65, block_size=16, max_num_seqs=8)
STATUS = admin_pb2.GetStatusRequest()


@pytest.fixture
def config(address: str, tiny_model: Path) -> SchedulerConfig:
    return SchedulerConfig(address=address, config_digest=model_digest(tiny_model))


@pytest.fixture
def worker(config: SchedulerConfig) -> Iterator[FakeWorker]:
    with FakeWorker(config.address, config.config_digest, FACTS) as running:
        yield running


@pytest.fixture
async def pair(tiny_model: Path, config: SchedulerConfig, worker: FakeWorker) -> AsyncIterator[list[Doors]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(running_doors(tiny_model, config.address)) for _ in range(2)]


def ask(service: Service, max_tokens: int) -> Any:
    return service.stream(tokenIds={"ids": [1]}, stopping={"maxTokens": max_tokens, "ignoreEos": True})


async def begun(call: Any, worker: FakeWorker) -> None:
    """Wait for a stream's first event, while the worker answers as few plans as that takes."""
    reading = asyncio.ensure_future(read(call))
    while not reading.done():
        worker.release(1)
        await asyncio.wait({reading}, timeout=0.1)


async def ended_well(call: Any) -> None:
    """Read what is left of a stream."""
    async for _ in call:
        pass
    assert await call.code() == grpc.StatusCode.OK


async def states(service: Service) -> list[str]:
    status = await service.admin.GetStatus(STATUS, timeout=WAIT_S)
    return [process.state for process in status.processes if process.role == "frontend"]


async def until_states(service: Service, wanted: list[str]) -> None:
    async with asyncio.timeout(WAIT_S):
        while await states(service) != wanted:
            pass


async def test_a_drain_asked_of_one_drains_all(
    pair: list[Doors], tiny_model: Path, config: SchedulerConfig, worker: FakeWorker
) -> None:
    first, second = (doors.grpc for doors in pair)
    with LoopThread(config):
        for service in (first, second):
            await service.until_health(serving=True)
        worker.hold()
        calls = [ask(first, 100), ask(second, 100)]
        for call in calls:
            await begun(call, worker)
        watch = first.admin.WatchStatus(admin_pb2.WatchStatusRequest(), timeout=WAIT_S)
        drained = await first.admin.Drain(admin_pb2.DrainRequest(), timeout=WAIT_S)
        assert drained.running_requests == 2
        for service in (first, second):
            await service.until_health(serving=False)
            found = await refusal(ask(service, 1))
            assert (found.code, found.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert (await pair[1].error("/v1/completions", prompt="x"))[0] == 503
        assert (await pair[1].http.get("/ready")).status_code == 503
        await until_states(second, ["draining", "draining"])
        # One that starts now learns it, before it takes a request.
        async with running_frontend(tiny_model, config.address) as third:
            await until_states(first, ["draining", "draining", "drained"])
            assert (await refusal(ask(third, 1))).reason == "DRAINING"
        worker.release()
        await asyncio.gather(*map(ended_well, calls))
        *_, last = [message.status async for message in watch]
        assert await watch.code() == grpc.StatusCode.OK
        assert {one.state for one in last.processes if one.role == "frontend"} == {"drained"}
        assert last.scheduler.running_requests == 0
    # A scheduler that knows of nothing is told, and tells the others.
    with LoopThread(config) as loop:
        await until_states(second, ["drained", "drained"])
        assert loop.sessions.is_draining


async def test_limits_of_callers_and_of_the_queue_are_those_of_the_service(
    pair: list[Doors], config: SchedulerConfig, worker: FakeWorker
) -> None:
    limited = replace(config, max_requests_per_caller=2)
    with LoopThread(limited):
        for doors in pair:
            await doors.grpc.until_health(serving=True)
        worker.hold()
        calls = [ask(doors.grpc, 100) for doors in pair]
        for call in calls:
            await begun(call, worker)
        for doors in pair:
            found = await refusal(ask(doors.grpc, 1))
            assert (found.code, found.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "CALLER_LIMIT_EXCEEDED")
            assert "RetryInfo" in found.details
            response = await doors.http.post("/v1/completions", json={"prompt": "x"})
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
        worker.release()
        await asyncio.gather(*map(ended_well, calls))


async def test_a_full_queue_is_told_at_both_doors_of_both(
    pair: list[Doors], config: SchedulerConfig, worker: FakeWorker
) -> None:
    with LoopThread(replace(config, max_waiting_requests=1)):
        for doors in pair:
            await doors.grpc.until_health(serving=True)
        worker.hold()
        running = []
        for number in range(FACTS.max_num_seqs):
            running.append(ask(pair[number % 2].grpc, 100))
            await begun(running[-1], worker)
        waiting = ask(pair[0].grpc, 20)
        async with asyncio.timeout(WAIT_S):
            while (await pair[0].grpc.admin.GetStatus(STATUS)).scheduler.waiting_requests != 1:
                pass
        for doors in pair:
            found = await refusal(ask(doors.grpc, 1))
            assert (found.code, found.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
            assert "RetryInfo" in found.details
            for stream in (False, True):
                response = await doors.http.post("/v1/completions", json={"prompt": "x", "stream": stream})
                assert response.status_code == 429
                assert int(response.headers["retry-after"]) >= 1
        worker.release()
        await asyncio.gather(*map(ended_well, (*running, waiting)))
