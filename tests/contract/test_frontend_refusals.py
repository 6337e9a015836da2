"""Bad input over real sockets: the status, its details, and that nothing else is harmed."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]

from octavo.frontend import calls
from octavo.frontend.validation import Bounds, GenerationParams, check_params
from octavo.v1 import generation_pb2 as pb
from octavo.wire.requests import CancelRequest, FailureCode, FinishReason, SubmitRequest
from tests.support.frontend_client import SMALL_WINDOWS, Service, collect, read, refusal, running_frontend
from tests.support.scripted_scheduler import WAIT_S, ScriptedScheduler

Code = grpc.StatusCode
CONTEXT = "CONTEXT_LENGTH_EXCEEDED"
BAD: list[tuple[dict[str, Any], str, str, list[str]]] = [
    ({}, "input.prompt", "INVALID_ARGUMENT", ["text, token_ids and chat"]),
    ({"text": ""}, "input.text", "INVALID_ARGUMENT", ["empty"]),
    ({"tokenIds": {}}, "input.token_ids.ids", "INVALID_ARGUMENT", ["at least one token"]),
    ({"tokenIds": {"ids": [1, 300]}}, "input.token_ids.ids[1]", "INVALID_ARGUMENT", ["300", "[0, 300)"]),
    ({"tokenIds": {"ids": [2**32 - 1]}}, "input.token_ids.ids[0]", "INVALID_ARGUMENT", ["4294967295"]),
    ({"tokenIds": {"ids": [5] * 20000}}, "input.token_ids", CONTEXT, ["20000", "256"]),
    ({"text": "x" * 256}, "input.text", CONTEXT, ["256"]),
    ({"text": "x" * 250, "stopping": {"maxTokens": 7}}, "input.stopping.max_tokens", CONTEXT, ["250", "7", "256"]),
    ({"text": "x" * 10**6}, "input.text", CONTEXT, ["1000000 bytes"]),
    ({"text": "x", "sampling": {"n": 10**9}}, "input.sampling.n", "INVALID_ARGUMENT", ["1000000000", "128"]),
    ({"text": "x", "sampling": {"temperature": "NaN"}}, "input.sampling.temperature", "INVALID_ARGUMENT", ["nan"]),
    ({"text": "x", "sampling": {"topP": 0}}, "input.sampling.top_p", "INVALID_ARGUMENT", ["0", "1"]),
    (
        {"text": "x", "stopping": {"stopTokenIds": [300]}},
        "input.stopping.stop_token_ids[0]",
        "INVALID_ARGUMENT",
        ["300"],
    ),
    ({"text": "x", "priority": -5}, "input.priority", "INVALID_ARGUMENT", ["-5", "'priority'", "'fcfs'"]),
    ({"text": "x", "cacheSalt": "é" * 129}, "input.cache_salt", "INVALID_ARGUMENT", ["258 bytes", "256"]),
    ({"chat": {}}, "input.chat.messages", "INVALID_ARGUMENT", ["at least one message"]),
    ({"chat": {"messages": [{"content": "x"}]}}, "input.chat.messages[0].role", "INVALID_ARGUMENT", ["role"]),
]


@pytest.mark.parametrize("method", ["ask", "stream"])
@pytest.mark.parametrize(("fields", "path", "reason", "words"), BAD, ids=[str(bad[0])[:50] for bad in BAD])
async def test_bad_input(
    service: Service,
    scheduler: ScriptedScheduler,
    method: str,
    fields: dict[str, Any],
    path: str,
    reason: str,
    words: list[str],
) -> None:
    found = await refusal(getattr(service, method)(**fields))
    assert (found.code, found.reason, found.field) == (Code.INVALID_ARGUMENT, reason, path)
    assert all(word in found.message for word in words), found.message
    await service.until_idle()
    assert scheduler.nothing_came()


async def test_chunk_limits(service: Service, scheduler: ScriptedScheduler) -> None:
    found = await refusal(service.stream(text="x", chunk=0))
    assert (found.code, found.field) == (Code.INVALID_ARGUMENT, "max_chunk_tokens")
    assert scheduler.nothing_came()


async def test_unknown_models(service: Service) -> None:
    found = await refusal(service.ask(text="x", model="no-such-model"))
    assert (found.code, found.reason) == (Code.NOT_FOUND, "MODEL_NOT_FOUND")
    resource = found.unpack(error_details_pb2.ResourceInfo)
    assert (resource.resource_type, resource.resource_name) == ("model", "no-such-model")
    assert "tiny" in found.message


async def test_refusals_harm_nobody(service: Service, scheduler: ScriptedScheduler) -> None:
    good = service.stream(text="x")
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    await asyncio.gather(*(refusal(service.ask(**fields)) for fields, *_ in BAD))
    scheduler.emit(request, list(b"fine"), finish=FinishReason.LENGTH)
    assert (await collect(good)).text == {0: "fine"}
    await service.until_idle()
    assert scheduler.nothing_came()


@pytest.mark.parametrize(
    ("failure", "code", "reason", "detail"),
    [
        (FailureCode.INVALID, Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "BadRequest"),
        (FailureCode.QUEUE_FULL, Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", "RetryInfo"),
        (FailureCode.CALLER_LIMIT, Code.RESOURCE_EXHAUSTED, "CALLER_LIMIT_EXCEEDED", "RetryInfo"),
        (FailureCode.UNAVAILABLE, Code.UNAVAILABLE, "UNAVAILABLE", "RetryInfo"),
        (FailureCode.DEADLINE, Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "ErrorInfo"),
        (FailureCode.INTERNAL, Code.INTERNAL, "INTERNAL", "RequestInfo"),
    ],
)
@pytest.mark.parametrize("method", ["ask", "stream"])
async def test_failures_at_the_scheduler(
    service: Service,
    scheduler: ScriptedScheduler,
    method: str,
    failure: FailureCode,
    code: grpc.StatusCode,
    reason: str,
    detail: str,
) -> None:
    call = getattr(service, method)(text="x", metadata=(("x-request-id", "r-5"),))
    request = await scheduler.next(SubmitRequest)
    scheduler.fail(request, failure, "so it is", retry_after_s=4.0)
    found = await refusal(call)
    assert (found.code, found.reason) == (code, reason)
    assert detail in found.details
    assert "so it is" in found.message
    if detail == "RetryInfo":
        assert found.unpack(error_details_pb2.RetryInfo).retry_delay.seconds == 4
    if detail == "RequestInfo":
        assert found.unpack(error_details_pb2.RequestInfo).request_id == "r-5"
    await service.until_idle()
    assert scheduler.nothing_came()


async def test_a_failure_after_some_tokens(service: Service, scheduler: ScriptedScheduler) -> None:
    call = service.stream(text="x")
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    scheduler.emit(request, list(b"ab"))
    assert (await read(call)).WhichOneof("event") == "started"
    assert (await read(call)).delta.text == "ab"
    # Only now: a client of gRPC drops events that it has not read when a status other than OK arrives.
    scheduler.fail(request, FailureCode.INTERNAL, "non-finite logits")
    found = await refusal(call)
    assert (found.code, found.message) == (Code.INTERNAL, "non-finite logits")


@pytest.mark.parametrize("method", ["ask", "stream"])
async def test_deadlines(service: Service, scheduler: ScriptedScheduler, method: str) -> None:
    call = getattr(service, method)(text="x", timeout=0.3)
    request = await scheduler.next(SubmitRequest)
    assert request.deadline_s is not None
    assert request.deadline_s <= 0.35
    assert (await refusal(call)).code == Code.DEADLINE_EXCEEDED
    assert await scheduler.next(CancelRequest) == CancelRequest(request.handle)
    await service.until_idle()
    assert scheduler.nothing_came()


async def test_a_deadline_that_has_passed_is_never_submitted(
    service: Service, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(request: pb.GenerationInput, bounds: Bounds) -> GenerationParams:
        time.sleep(0.1)
        return check_params(request, bounds)

    monkeypatch.setattr(calls, "check_params", slow)
    assert (await refusal(service.ask(text="x", timeout=0.05))).code == Code.DEADLINE_EXCEEDED
    await service.until_idle()
    assert scheduler.nothing_came()


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-1", True), ("x" * 128, True), ("x" * 129, False), ("two words", False), ("", False)],
)
async def test_request_ids_are_echoed_or_made(
    service: Service, scheduler: ScriptedScheduler, given: str, kept: bool
) -> None:
    call = service.ask(text="x", metadata=(("x-request-id", given), ("traceparent", "nonsense")))
    request = await scheduler.next(SubmitRequest)
    assert request.trace == ""
    scheduler.answer(request, [[256]], FinishReason.STOP)
    response = await call
    assert (response.request_id == given) is kept
    assert dict(await call.initial_metadata())["x-request-id"] == response.request_id != ""


async def test_equal_request_ids_harm_nobody(service: Service, scheduler: ScriptedScheduler) -> None:
    calls = [service.ask(text="x", metadata=(("x-request-id", "same"),)) for _ in range(2)]
    requests = [await scheduler.next(SubmitRequest) for _ in calls]
    assert requests[0].handle != requests[1].handle
    for request, text in zip(requests, (b"one", b"two")):
        scheduler.answer(request, [list(text)], FinishReason.LENGTH)
    assert sorted([(await call).choices[0].text for call in calls]) == ["one", "two"]


async def test_what_nobody_expected_is_internal_and_keeps_its_text(
    service: Service, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret path")

    monkeypatch.setattr(calls, "check_params", broken)
    found = await refusal(service.ask(text="x", metadata=(("x-request-id", "r-9"),)))
    assert (found.code, found.reason) == (Code.INTERNAL, "INTERNAL")
    assert "secret" not in found.message
    assert found.unpack(error_details_pb2.RequestInfo).request_id == "r-9"
    assert "secret path" in caplog.text
    monkeypatch.undo()
    call = service.ask(text="x")
    scheduler.answer(await scheduler.next(SubmitRequest), [[256]], FinishReason.STOP)
    await call


@pytest.fixture
async def small(tiny_model: Path, scheduler: ScriptedScheduler, address: str) -> AsyncIterator[Service]:
    limits: dict[str, Any] = {"max_message_bytes": 100_000, "max_streams": 2, "max_unsent_tokens": 256}
    async with running_frontend(tiny_model, address, SMALL_WINDOWS, **limits) as running:
        await scheduler.session_begun()
        await running.until_health(serving=True)
        yield running


async def test_large_messages_are_refused_by_size(small: Service, scheduler: ScriptedScheduler) -> None:
    assert (await refusal(small.ask(text="x" * 100_001))).code == Code.RESOURCE_EXHAUSTED
    assert scheduler.nothing_came()


async def test_more_requests_than_may_run(small: Service, scheduler: ScriptedScheduler) -> None:
    calls = [small.ask(text="x") for _ in range(2)]
    requests = [await scheduler.next(SubmitRequest) for _ in calls]
    found = await refusal(small.ask(text="x"))
    assert (found.code, found.reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS")
    for request in requests:
        scheduler.answer(request, [[256]], FinishReason.STOP)
    await asyncio.gather(*calls)
    await small.until_idle()


async def test_slow_readers_are_cut_off_and_others_are_not(small: Service, scheduler: ScriptedScheduler) -> None:
    slow = small.stream(text="slow", chunk=1, output={"logprobs": 20})
    slow_request = await scheduler.next(SubmitRequest)
    scheduler.start_request(slow_request)
    quick = small.stream(text="quick")
    quick_request = await scheduler.next(SubmitRequest)
    scheduler.start_request(quick_request)
    await read(quick)
    async with asyncio.timeout(WAIT_S):
        for position in range(100_000):
            scheduler.emit(slow_request, [position % 200], position=position, with_logprobs=20)
            scheduler.emit(quick_request, [97], position=position)
            assert (await read(quick)).delta.text == "a"
            if not scheduler.nothing_came():
                break
    assert await scheduler.next(CancelRequest) == CancelRequest(slow_request.handle)
    quick.cancel()
    found = await refusal(slow)
    assert (found.code, found.reason) == (Code.RESOURCE_EXHAUSTED, "SLOW_READER")
    assert "256" in found.message
    assert await scheduler.next(CancelRequest) == CancelRequest(quick_request.handle)
    await small.until_idle()


@pytest.mark.parametrize("chunk", [None, 65536])
@pytest.mark.parametrize("n", [1, 3])
async def test_who_wants_neither_text_nor_ids_is_no_slow_reader(
    small: Service, scheduler: ScriptedScheduler, chunk: int | None, n: int
) -> None:
    """There is nothing to read of such tokens: they wait for the end, however many."""
    call = small.stream(
        text="x", chunk=chunk, sampling={"n": n}, output={"detokenize": False}, stopping={"maxTokens": 250}
    )
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    for choice in range(n):
        scheduler.emit(request, [97] * 200, choice=choice)
    for choice in range(n):
        scheduler.emit(request, [97] * 50, choice=choice, position=200, finish=FinishReason.LENGTH)
    found = await collect(call)
    assert [end.completion_tokens for end in found.finished.values()] == [250] * n
    assert set(found.text.values()) <= {""}
    await small.until_idle()
    assert scheduler.nothing_came()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500,
        b"\xff" * 4096,
    ],
    ids=["http1", "tls", "bytes"],
)
async def test_garbage_on_the_port_closes_that_connection_alone(
    service: Service, scheduler: ScriptedScheduler, garbage: bytes
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", service.frontend.port)
    writer.write(garbage)
    await writer.drain()
    async with asyncio.timeout(WAIT_S):
        while await reader.read(65536):
            pass
    writer.close()
    call = service.ask(text="x")
    scheduler.answer(await scheduler.next(SubmitRequest), [list(b"ok")], FinishReason.LENGTH)
    assert (await call).choices[0].text == "ok"


@pytest.mark.parametrize(
    "data",
    [b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x7f", b"\x0a\x04\x12\x02\xff\xfe", b"\x0b" * 10_000],
    ids=["bytes", "length", "utf8", "groups"],
)
async def test_messages_that_are_none_are_refused(service: Service, data: bytes) -> None:
    method = service.channel.unary_unary("/octavo.v1.GenerationService/Generate", None, None)
    found = await refusal(method(data, timeout=WAIT_S))
    assert (found.code, found.reason) == (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert found.message == "the bytes are no octavo.v1.GenerateRequest"


async def test_a_port_that_is_taken_is_named(tiny_model: Path, address: str) -> None:
    from octavo.frontend.config import FrontendConfig
    from octavo.frontend.listeners import CannotListen
    from octavo.frontend.server import Frontend

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        frontend = Frontend(FrontendConfig(tiny_model, ("tiny",), address, grpc_port=port))
        with pytest.raises(CannotListen, match=str(port)):
            await frontend.start()
        await frontend.stop()


async def test_empty_input_message(service: Service) -> None:
    found = await refusal(service.stub.Generate(pb.GenerateRequest(), timeout=WAIT_S))
    assert (found.code, found.field) == (Code.INVALID_ARGUMENT, "input.prompt")
