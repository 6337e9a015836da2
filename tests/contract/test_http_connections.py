"""Many connections, and what is no HTTP: the door keeps room for health, and says in JSON what is wrong."""

import asyncio
import json
import resource
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from octavo.frontend import http_protocol, http_server
from octavo.frontend.config import FrontendConfig
from octavo.wire.requests import CancelRequest
from tests.support.frontend_client import WAIT_S
from tests.support.http_client import Doors, raw_request, running_doors
from tests.support.scripted_scheduler import ScriptedScheduler

LIMIT = 4
COMPLETIONS = "/v1/completions"


@pytest.fixture
async def doors(tiny_model: Path, scheduler: ScriptedScheduler, address: str) -> AsyncIterator[Doors]:
    limits: dict[str, Any] = {"max_streams": LIMIT // http_server.CONNECTIONS_PER_STREAM}
    async with running_doors(tiny_model, address, **limits) as running:
        await scheduler.session_begun()
        await running.grpc.until_health(serving=True)
        yield running


class Connection:
    """A plain connection to the door."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, doors: Doors, data: bytes = b"") -> "Connection":
        found = cls(*await asyncio.open_connection("127.0.0.1", doors.port))
        found.writer.write(data)
        return found

    async def ask(self, path: str) -> int:
        """Return the status of GET; 0 if the connection is closed."""
        self.writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        return (await self.answer())[0]

    async def answer(self) -> tuple[int, Any]:
        """Return status and JSON of the next answer; 0 if the connection is closed."""
        async with asyncio.timeout(WAIT_S):
            try:
                head = await self.reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionResetError):
                return 0, None
            lines = head.decode().lower().split("\r\n")
            assert "content-type: application/json" in lines, head
            length = next((int(line.split(": ")[1]) for line in lines if line.startswith("content-length")), None)
            body = await self.reader.read() if length is None else await self.reader.readexactly(length)
            return int(lines[0].split()[1]), json.loads(body) if length is not None else None

    async def is_closed(self) -> bool:
        try:
            return await asyncio.wait_for(self.reader.read(1), WAIT_S) == b""
        except ConnectionResetError:
            return True


@pytest.fixture
async def opened(doors: Doors) -> AsyncIterator[Any]:
    """Open connections that are closed in the end; each is known to the door when this returns."""
    found: list[Connection] = []

    async def open_one(data: bytes = b"") -> Connection:
        found.append(await Connection.open(doors, data))
        return found[-1]

    yield open_one
    for one in found:
        one.writer.close()


async def until_busy(doors: Doors, count: int) -> None:
    """Wait until so many connections run a request."""
    table = doors.grpc.frontend._http[0]._server.config.http_protocol_class.args[0]  # type: ignore[attr-defined]
    async with asyncio.timeout(WAIT_S):
        while table.num_busy < count:  # noqa: ASYNC110 (nothing tells when bytes have come)
            await asyncio.sleep(0)


async def test_those_that_rest_longest_make_room(doors: Doors, opened: Any) -> None:
    silent = await opened()
    slow = await opened(b"GET /health HTTP/1.1\r\nx: ")
    used = [await opened() for _ in range(LIMIT - 2)]
    for connection in used:
        assert await connection.ask("/version") == 200
    for _ in range(3):
        assert await (await opened()).ask("/version") == 200
    assert await silent.is_closed()
    assert await slow.is_closed()
    assert await used[0].is_closed()
    assert await used[1].ask("/version") == 200


async def test_there_is_room_for_health_when_all_are_busy(
    doors: Doors, opened: Any, scheduler: ScriptedScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    half = raw_request(COMPLETIONS, prompt="x")[:-3]
    busy = [await opened(half) for _ in range(LIMIT)]
    await until_busy(doors, LIMIT)
    probe = await opened()
    assert [await probe.ask(path) for path in ("/health", "/ready", "/health")] == [200] * 3
    for path in ("/version", "/v1/models", "/nowhere"):
        late = await opened()
        assert await late.ask(path) == 503
        assert await late.is_closed()
    assert caplog.text.count("HTTP connections, the limit") == 1
    assert await probe.ask("/health") == 200
    for one in busy[:2]:
        one.writer.write(b"   ")  # no JSON
        assert (await one.answer())[0] == 400
    # There is room again: for new ones, for those that came late, and for those that were always in.
    assert await (await opened()).ask("/version") == 200
    assert await busy[1].ask("/version") == 200
    assert scheduler.nothing_came()


async def test_the_room_for_health_is_bounded(doors: Doors, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "ROOM_FOR_HEALTH", 1)
    half = raw_request(COMPLETIONS, prompt="x")[:-3]
    for _ in range(LIMIT):
        await opened(half)
    await until_busy(doors, LIMIT)
    waiting = await opened(b"GET /health HTTP/1.1\r\nx: ")
    # The oldest of those makes room: there is always a place for who asks for health.
    for _ in range(3):
        assert await (await opened()).ask("/health") == 200
    assert await waiting.is_closed()


async def test_the_limit_follows_the_files_that_may_be_open(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = FrontendConfig(tiny_model, ("tiny",), "ipc:///tmp/x", max_streams=100)
    for files, expected in ((256, 128), (1, 1), (10_000, 200), (resource.RLIM_INFINITY, 200)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert http_server._max_connections(config) == expected


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"\xff" * 100, 400, "invalid_http"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500, 400, "invalid_http"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "invalid_http"),
        (b"GET /health HTTP/1.1\r\nhost x\r\n\r\n", 400, "invalid_http"),
        (b"GET /health HTTP/1.1\r\nx: " + b"y" * 400_000, 431, "headers_too_large"),
        (b"GET /" + b"y" * 400_000, 431, "headers_too_large"),
        (b"POST /tokenize HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400, "invalid_http"),
        (b"POST /tokenize HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400, "invalid_http"),
        (b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n", 400, "invalid_http"),
    ],
)
async def test_what_is_no_http_is_told_in_json(doors: Doors, opened: Any, data: bytes, status: int, code: str) -> None:
    connection = await opened(data)
    found, body = await connection.answer()
    assert (found, body["error"]["code"], set(body["error"])) == (status, code, {"message", "type", "param", "code"})
    assert await connection.is_closed()
    assert await (await opened()).ask("/health") == 200


async def test_what_is_no_http_is_not_answered_into_a_running_answer(
    doors: Doors, opened: Any, scheduler: ScriptedScheduler
) -> None:
    connection = await opened(raw_request(COMPLETIONS, prompt="x", stream=True))
    request = await scheduler.next_submit()
    connection.writer.write(b"\xff\xff")
    assert await scheduler.next(CancelRequest) == CancelRequest(request.handle)
    assert await connection.is_closed()
