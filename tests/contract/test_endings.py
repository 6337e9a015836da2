"""Every kind of call, ended in every way at every stage: afterwards nobody holds anything, and its neighbour never noticed.

The scheduler is the real one; the worker computes without tensors and answers only as many plans as a stage takes.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
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
from tests.support.frontend_client import EOF, WAIT_S, collect, read
from tests.support.http_client import Doors, raw_request, running_doors
from tests.support.tiny_tokenizers import VOCAB_SIZE

FACTS = make_facts(
    vocab_size=VOCAB_SIZE, max_model_len=256, num_blocks=65, block_size=16, max_num_seqs=4, max_num_batched_tokens=32
)
PROMPT = "abcdefgh" * 10  # three steps of prefill
MAX_TOKENS = 12


Begin = Callable[[Doors, float | None], Awaitable["Call"]]


class Call:
    """A call that a test can give up: by `cancel`, in the way of its door."""

    def __init__(self, cancel: Callable[[], Any], done: Awaitable[Any]) -> None:
        self.cancel = cancel
        self.done = asyncio.ensure_future(done)

    async def over(self) -> None:
        """Wait until its client knows that it is over, however it ended."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError, ConnectionError):
            await asyncio.wait_for(self.done, WAIT_S)


async def drain(call: Any) -> None:
    while await read(call) is not EOF:
        pass


def grpc_call(whole: bool, **more: Any) -> Begin:
    async def begin(doors: Doors, limit_s: float | None) -> Call:
        fields = {"text": PROMPT, "stopping": {"maxTokens": MAX_TOKENS, "ignoreEos": True}} | more
        if whole:
            call = doors.grpc.ask(timeout=limit_s, **fields)
            return Call(call.cancel, call)
        call = doors.grpc.stream(timeout=limit_s, **fields)
        return Call(call.cancel, drain(call))

    return begin


def http_call(path: str, stream: bool, **more: Any) -> Begin:
    async def begin(doors: Doors, _: float | None) -> Call:
        fields: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": stream}
        text = {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
        reader, writer = await asyncio.open_connection("127.0.0.1", doors.port)
        writer.write(raw_request(path, **fields, **(text | more)))

        async def whole() -> None:
            try:
                await reader.read(-1)
            finally:
                writer.transport.abort()

        return Call(writer.transport.abort, whole())

    return begin


COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
KINDS: dict[str, Begin] = {
    "grpc stream": grpc_call(whole=False),
    "grpc whole": grpc_call(whole=True),
    "grpc choices": grpc_call(whole=False, sampling={"n": 3}),
    "completion stream": http_call(COMPLETIONS, stream=True),
    "completion whole": http_call(COMPLETIONS, stream=False),
    "completion list": http_call(COMPLETIONS, stream=True, prompt=[PROMPT, PROMPT + "i"]),
    "chat stream": http_call(CHATS, stream=True),
    "chat whole": http_call(CHATS, stream=False, n=2),
}
PLANS_OF_STAGE = {"unplanned": 0, "prefill": 1, "first token": 4, "last token": 3 + MAX_TOKENS}


@pytest.fixture
def config(address: str, tiny_model: Path) -> SchedulerConfig:
    return SchedulerConfig(address=address, config_digest=model_digest(tiny_model))


@pytest.fixture
def worker(config: SchedulerConfig) -> Iterator[FakeWorker]:
    with FakeWorker(config.address, config.config_digest, FACTS) as running:
        yield running


@pytest.fixture
async def doors(tiny_model: Path, config: SchedulerConfig, worker: FakeWorker) -> AsyncIterator[Doors]:
    with LoopThread(config):
        async with running_doors(tiny_model, config.address) as running:
            await running.grpc.until_health(serving=True)
            yield running


async def held_requests(doors: Doors, number: int) -> admin_pb2.SchedulerStatus:
    """Wait until the scheduler holds so many requests; return its state."""
    async with asyncio.timeout(WAIT_S):
        while True:
            status = await doors.grpc.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=WAIT_S)
            held: admin_pb2.SchedulerStatus = status.scheduler
            if held.running_requests + held.waiting_requests == number:
                return held


async def nothing_is_held(doors: Doors) -> None:
    await doors.until_idle()
    held = await held_requests(doors, 0)
    assert held.free_blocks == held.total_blocks


@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_ends_a_call_nothing_is_left(doors: Doors, worker: FakeWorker, kind: str) -> None:
    """F1, F2, F3, F5, F6: given up by its client, or by its deadline, in the queue, in its prefill, and at its tokens."""
    for stage, num_plans in PLANS_OF_STAGE.items():
        for way in ("cancel", "deadline"):
            if way == "deadline" and not kind.startswith("grpc"):
                continue
            worker.hold()
            neighbour = asyncio.ensure_future(collect(doors.grpc.stream(tokenIds={"ids": [65]}, stopping=STOPPING)))
            seen = len(worker.plans)
            await asyncio.to_thread(worker.wait_for_plans, seen + 1)
            call = await KINDS[kind](doors, 0.3 if way == "deadline" else WAIT_S)
            for _ in range(num_plans):
                seen = len(worker.plans)
                worker.release(1)
                if call.done.done():
                    break
                await asyncio.to_thread(worker.wait_for_plans, seen + 1)
            if way == "cancel":
                call.cancel()
            await call.over()
            if not neighbour.done():
                await held_requests(doors, 1)  # the worker stands still: so it was ended, and did not come to its end
            worker.release()
            found = await neighbour
            assert found.text[0], f"{stage}, {way}"
            assert found.finished[0].completion_tokens == NEIGHBOURS_TOKENS
            await nothing_is_held(doors)


NEIGHBOURS_TOKENS = 40
STOPPING = {"maxTokens": NEIGHBOURS_TOKENS, "ignoreEos": True}


async def test_two_hundred_connections_cut_of_each_kind(doors: Doors, worker: FakeWorker) -> None:
    """B51, F3: streams and whole answers whose connection is cut leave nothing, though no step ends meanwhile."""
    worker.hold()
    for kind in ("completion stream", "completion whole"):
        for number in range(200):
            call = await KINDS[kind](doors, None)
            if number % 2:
                await asyncio.sleep(0)
            call.cancel()
            await call.over()
    await held_requests(doors, 0)
    worker.release()
    await nothing_is_held(doors)
