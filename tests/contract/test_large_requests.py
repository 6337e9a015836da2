"""Large requests through both doors: read off the event loop, bounded in what they hold, alone and together."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from octavo.frontend import large_messages
from octavo.frontend.openai import bodies
from octavo.frontend.openai import call as call_module
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import tokenizer_pb2
from octavo.wire.requests import FinishReason, SubmitRequest
from tests.support.frontend_client import WAIT_S, refusal
from tests.support.http_client import Doors, raw_request, running_doors
from tests.support.scripted_scheduler import ScriptedScheduler

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
BIG = "x" * 100_000


async def until(condition: Callable[[], bool]) -> None:
    """Let the frontend, which runs in the same loop, go on until something holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (nothing tells when bytes have come)
            await asyncio.sleep(0)


@pytest.fixture
async def doors(tiny_model: Path, scheduler: ScriptedScheduler, address: str) -> AsyncIterator[Doors]:
    async with running_doors(tiny_model, address, max_unread_bytes=300_000, max_message_bytes=300_000) as running:
        await scheduler.session_begun()
        await running.grpc.until_health(serving=True)
        yield running
        await running.until_idle()
        assert running.grpc.frontend._calls.budget.used == 0


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the names of the threads that read requests."""
    found: list[str] = []

    def noted(work: Any) -> Any:
        def run(*arguments: Any) -> None:
            found.append(threading.current_thread().name)
            work(*arguments)

        return run

    monkeypatch.setattr(call_module, "check_values", noted(bodies.check_values))
    monkeypatch.setattr(large_messages, "check_fields", noted(large_messages.check_fields))
    return found


async def test_large_requests_are_read_in_a_thread_and_small_ones_are_not(doors: Doors, threads: list[str]) -> None:
    for text, expected in ((BIG, "tokenizer"), ("x" * 300, "MainThread")):
        threads.clear()
        assert (await doors.error(COMPLETIONS, prompt=text))[1]["code"] == "context_length_exceeded"
        assert (await doors.error(CHATS, messages=[{"role": "user", "content": text}]))[0] == 400
        assert (await doors.error("/tokenize", prompt=text))[0] == 400
        assert (await doors.error("/detokenize", tokens=[1] * (200 + len(text) // 3)))[0] == 400
        assert [name.partition("_")[0] for name in threads] == [expected] * 4
        threads.clear()
        for call in (doors.grpc.ask(text=text), doors.grpc.stream(text=text)):
            assert (await refusal(call)).reason == "CONTEXT_LENGTH_EXCEEDED"
        assert [name.partition("_")[0] for name in threads] == [expected] * 2 * (text is BIG)


async def test_a_large_request_runs(doors: Doors, scheduler: ScriptedScheduler) -> None:
    """Most of it is a field that costs nothing: the prompt itself must fit."""
    asking = asyncio.ensure_future(doors.http.post(COMPLETIONS, json={"prompt": "x", "user": BIG}))
    request = await scheduler.next(SubmitRequest)
    scheduler.answer(request, [list(b"ok")], FinishReason.LENGTH)
    assert (await asking).json()["choices"][0]["text"] == "ok"


async def test_many_values_and_fields_are_refused(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies.check_values, "__defaults__", (20_000,))
    monkeypatch.setattr(large_messages.check_fields, "__defaults__", (20_000,))
    many: list[dict[str, Any]] = [
        {"prompt": [1] * 50_000},
        {"prompt": [[]] * 50_000 + [[1]]},
        {"prompt": "x", "user": [0] * 50_000},
    ]
    for body in many:
        status, error = await doors.error(COMPLETIONS, **body)
        assert status == 400
        assert "more than 20000 values" in error["message"]
    request = pb.GenerateRequest()
    request.input.stopping.stop_strings.extend([""] * 50_000)
    found = await refusal(doors.grpc.stub.Generate(request, timeout=WAIT_S))
    assert (found.code, found.field) == (grpc.StatusCode.INVALID_ARGUMENT, "input.stopping")
    assert "more than 20000 fields" in found.message


@pytest.mark.parametrize("data", [b"\xff" * 40_000, b"\x0a\xb7\xb8\x02\x12\xb3\xb8\x02" + b"\xff" * 39_987])
async def test_large_messages_that_are_none_are_refused(doors: Doors, data: bytes) -> None:
    for name in ("GenerationService/Generate", "GenerationService/GenerateStream", "TokenizerService/Tokenize"):
        found = await refusal(doors.grpc.channel.unary_unary(f"/octavo.v1.{name}", None, None)(data, timeout=WAIT_S))
        assert found.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_methods_that_need_little_take_no_large_messages(doors: Doors) -> None:
    data = tokenizer_pb2.TokenizeRequest(model=BIG).SerializeToString()
    for name in ("ModelService/GetModel", "ModelService/ListModels", "AdminService/Drain"):
        found = await refusal(doors.grpc.channel.unary_unary(f"/octavo.v1.{name}", None, None)(data, timeout=WAIT_S))
        assert found.code is grpc.StatusCode.INVALID_ARGUMENT
        assert "limit 32768" in found.message


async def test_bodies_that_come_slowly_are_bounded_together(doors: Doors) -> None:
    """Two bodies that never end hold most of the budget: a third large one has no place, a small one does."""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 250000\r\n\r\n"
    writers = []
    budget = doors.grpc.frontend._calls.budget

    def holds(num_bytes: int) -> bool:
        return budget.used >= num_bytes

    for number in (1, 2):
        _, writer = await asyncio.open_connection("127.0.0.1", doors.port)
        writers.append(writer)
        writer.write(head.encode() + b" " * 200_000)
        await until(partial(holds, number * (200_000 - 65_536)))
    response = await doors.http.post(COMPLETIONS, content=json.dumps({"prompt": BIG}).encode(), headers=JSON)
    assert (response.status_code, response.json()["error"]["code"]) == (429, "too_many_bytes")
    assert (response.headers["retry-after"], response.headers["connection"]) == ("1", "close")
    found = await refusal(doors.grpc.ask(text=BIG))
    assert (found.code, found.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_BYTES")
    assert (await doors.error(COMPLETIONS, prompt="x" * 300))[1]["code"] == "context_length_exceeded"
    for writer in writers:
        writer.close()
    await until(lambda: not budget.used)
    assert (await doors.error(COMPLETIONS, prompt=BIG))[1]["code"] == "context_length_exceeded"


async def test_one_connection_takes_large_and_small_requests_in_turn(doors: Doors) -> None:
    """Head and body of the second come in one piece, as from most clients."""
    reader, writer = await asyncio.open_connection("127.0.0.1", doors.port)
    for text in (BIG * 2, "x" * 300, BIG * 2, "x" * 300):
        writer.write(raw_request(COMPLETIONS, prompt=text))
        async with asyncio.timeout(WAIT_S):
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 400 " in head
            length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(int(length.partition(b": ")[2]))
    writer.close()
