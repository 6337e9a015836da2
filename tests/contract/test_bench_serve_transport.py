"""The benchmark's own clients of both doors, against a real frontend: whole answers, errors, flow control."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.bench_serve_client import tls_context
from octavo.cli.bench_serve_h2 import H2Connection, request_headers
from octavo.cli.bench_serve_http import HttpConnection
from octavo.cli.bench_serve_job import Target
from octavo.cli.bench_serve_transport import CallFailed, ConnectionLost, connect
from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import Frontend
from octavo.frontend.tls import TlsFiles
from octavo.v1 import generation_pb2 as pb
from octavo.wire.requests import CancelRequest, FailureCode, FinishReason, SubmitRequest
from tests.support.certificates import make_authority
from tests.support.frontend_client import WAIT_S, parse
from tests.support.http_client import Doors
from tests.support.scripted_scheduler import ScriptedScheduler

HOST = "127.0.0.1"
STREAM = "/octavo.v1.GenerationService/GenerateStream"
TEXT = list(b"All the tokens of a text")


def message(**fields: object) -> bytes:
    return pb.GenerateStreamRequest(input=parse(**fields)).SerializeToString()


async def test_calls_over_one_http2_connection(doors: Doors, scheduler: ScriptedScheduler) -> None:
    connection = await connect(H2Connection, HOST, doors.grpc.frontend.port, None)
    headers = request_headers("x", STREAM, is_tls=False, metadata=[("x-request-id", "abc-1")])
    texts: list[list[pb.GenerateStreamResponse]] = [[], [], []]

    def take(index: int, data: bytes) -> None:
        texts[index].append(pb.GenerateStreamResponse.FromString(data))

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        for index in range(len(texts)):
            group.create_task(connection.call(headers, message(text="x"), lambda data, i=index: take(i, data)))  # type: ignore[misc]
        for _ in texts:
            scheduler.answer(await scheduler.next(SubmitRequest), [TEXT], FinishReason.LENGTH)
    for events in texts:
        assert events[0].started.request_id == "abc-1"
        assert "".join(event.delta.text for event in events) == bytes(TEXT).decode()
        assert events[-1].finished.completion_tokens == len(TEXT)
    await connection.close()
    await doors.until_idle()


async def test_a_large_request_waits_for_the_servers_window(doors: Doors) -> None:
    connection = await connect(H2Connection, HOST, doors.grpc.frontend.port, None)
    with pytest.raises(CallFailed, match=r"longer|exceed|most|limit") as failed:
        async with asyncio.timeout(WAIT_S):
            await connection.call(request_headers("x", STREAM, False), message(text="x" * 2_000_000), lambda _: None)
    assert failed.value.kind == "INVALID_ARGUMENT"
    await connection.close()


async def test_a_grpc_call_that_is_given_up_is_cancelled(doors: Doors, scheduler: ScriptedScheduler) -> None:
    connection = await connect(H2Connection, HOST, doors.grpc.frontend.port, None)
    call = asyncio.create_task(connection.call(request_headers("x", STREAM, False), message(text="x"), lambda _: None))
    await scheduler.next(SubmitRequest)
    call.cancel()
    await scheduler.next(CancelRequest)
    await asyncio.wait([call])
    await connection.close()


async def test_errors_over_grpc_have_their_statuses(doors: Doors, scheduler: ScriptedScheduler) -> None:
    connection = await connect(H2Connection, HOST, doors.grpc.frontend.port, None)
    call = asyncio.create_task(connection.call(request_headers("x", STREAM, False), message(text="x"), lambda _: None))
    scheduler.fail(await scheduler.next(SubmitRequest), FailureCode.QUEUE_FULL, "the queue is füll")
    with pytest.raises(CallFailed, match="RESOURCE_EXHAUSTED: the queue is füll"):
        await call
    with pytest.raises(CallFailed, match="UNIMPLEMENTED"):
        await connection.call(request_headers("x", "/octavo.v1.GenerationService/Nothing", False), b"", lambda _: None)
    await connection.close()
    with pytest.raises(ConnectionLost):
        await connection.call(request_headers("x", STREAM, False), b"", lambda _: None)


async def test_what_the_taker_raises_fails_its_call_alone(doors: Doors, scheduler: ScriptedScheduler) -> None:
    connection = await connect(H2Connection, HOST, doors.grpc.frontend.port, None)

    def refuse(_: bytes) -> None:
        raise CallFailed("wrong", "not what was asked for")

    call = asyncio.create_task(connection.call(request_headers("x", STREAM, False), message(text="x"), refuse))
    scheduler.start_request(await scheduler.next(SubmitRequest))
    with pytest.raises(CallFailed, match="wrong"):
        await call
    assert connection.lost is None
    await connection.close()


async def test_calls_over_one_http_connection(doors: Doors, scheduler: ScriptedScheduler) -> None:
    connection = await connect(HttpConnection, HOST, doors.port, None)
    body = json.dumps({"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 100}).encode()
    for _ in range(2):
        events: list[bytes] = []
        call = asyncio.create_task(connection.post("x", "/v1/completions", (), body, events.append))
        scheduler.answer(await scheduler.next(SubmitRequest), [TEXT], FinishReason.LENGTH)
        await asyncio.wait_for(call, WAIT_S)
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == bytes(TEXT).decode()
    await connection.close()
    await doors.until_idle()


async def test_errors_over_http_have_their_statuses(doors: Doors, scheduler: ScriptedScheduler) -> None:
    connection = await connect(HttpConnection, HOST, doors.port, None)
    body = {"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 100}
    wrong = json.dumps(body | {"temperature": -1}).encode()
    with pytest.raises(CallFailed, match=r"HTTP 400: .*temperature"):
        await connection.post("x", "/v1/completions", (), wrong, lambda _: None)
    connection = await connect(HttpConnection, HOST, doors.port, None)
    call = asyncio.create_task(connection.post("x", "/v1/completions", (), json.dumps(body).encode(), lambda _: None))
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    scheduler.emit(request, TEXT[:1])
    scheduler.fail(request, FailureCode.INTERNAL, "logits")
    with pytest.raises(CallFailed, match=r"incomplete"):
        await call


async def test_both_doors_over_mutual_tls(
    tiny_model: Path, scheduler: ScriptedScheduler, address: str, tmp_path: Path
) -> None:
    authority = make_authority(tmp_path, "authority")
    certificate, key = map(str, authority.issue("both"))
    files = TlsFiles(Path(certificate), Path(key), authority.certificate)
    config = FrontendConfig(tiny_model, ("tiny",), address, grpc_port=0, http_port=0, tls=files)
    frontend = Frontend(config)
    await frontend.start()
    try:
        await frontend.load()
        await scheduler.session_begun()
        trusted: dict[str, Any] = {
            "is_tls": True,
            "tls_ca": str(authority.certificate),
            "tls_cert": certificate,
            "tls_key": key,
        }
        over_grpc = Target("grpc", HOST, frontend.port, STREAM, "tiny", **trusted)
        connection = await connect(H2Connection, HOST, frontend.port, tls_context(over_grpc, "h2"))
        events: list[bytes] = []
        call = asyncio.create_task(
            connection.call(request_headers("x", STREAM, is_tls=True), message(text="x"), events.append)
        )
        scheduler.answer(await scheduler.next(SubmitRequest), [TEXT], FinishReason.LENGTH)
        await asyncio.wait_for(call, WAIT_S)
        await connection.close()
        assert events
        assert frontend.http_port is not None
        over_http = Target("http", HOST, frontend.http_port, "/v1/completions", "tiny", **trusted)
        posted = await connect(HttpConnection, HOST, frontend.http_port, tls_context(over_http, "http/1.1"))
        body = json.dumps({"model": "tiny", "prompt": "x", "stream": True}).encode()
        post = asyncio.create_task(posted.post("x", "/v1/completions", (), body, events.append))
        scheduler.answer(await scheduler.next(SubmitRequest), [TEXT], FinishReason.LENGTH)
        await asyncio.wait_for(post, WAIT_S)
        await posted.close()
        with pytest.raises(ConnectionLost, match="certificate"):
            untrusted = Target("http", HOST, frontend.http_port, "/", "tiny", is_tls=True)
            await connect(HttpConnection, HOST, frontend.http_port, tls_context(untrusted, "http/1.1"))
    finally:
        await frontend.stop()


async def test_nobody_listens(unused_tcp_port: int) -> None:
    with pytest.raises(ConnectionLost, match=str(unused_tcp_port)):
        await connect(HttpConnection, HOST, unused_tcp_port, None)


async def test_no_http2_there(doors: Doors) -> None:
    connection = await connect(H2Connection, HOST, doors.port, None)
    with pytest.raises(ConnectionLost):
        async with asyncio.timeout(WAIT_S):
            await connection.call(request_headers("x", STREAM, False), message(text="x"), lambda _: None)
