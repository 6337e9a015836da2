"""When a process that can be asked counts as stalled; the processes here are servers in the test's own event loop."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from octavo.cli import watchdog
from octavo.cli.watchdog import until_stalled

WAIT_S = 20.0
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"

Listen = Callable[[list[bytes | None]], Awaitable[asyncio.Event]]


@pytest.fixture
def path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
        yield f"{folder}/s"


@pytest.fixture
async def listen(path: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Listen]:
    """Return what serves a list of answers; None is none, and after the last the event is set."""
    monkeypatch.setattr(watchdog, "PROBE_INTERVAL_S", 0.0)
    servers: list[asyncio.Server] = []

    async def begin(answers: list[bytes | None]) -> asyncio.Event:
        left, over = list(answers), asyncio.Event()

        async def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                assert (await reader.readline()).startswith(b"GET /health ")
                answer = left.pop(0) if left else None
                if not left:
                    over.set()
                if answer is None:
                    await reader.read()  # until the asker has lost its patience
                else:
                    writer.write(answer)
            finally:
                writer.close()

        servers.append(await asyncio.start_unix_server(on_connect, path))
        return over

    yield begin
    for server in servers:
        server.close()


async def test_two_answers_in_a_row_must_be_missing(listen: Listen, path: str) -> None:
    over = await listen([OK, None, OK, OK, None, OK, None, None])
    async with asyncio.timeout(WAIT_S):
        assert await until_stalled(path, 0.1) == "it has not answered for 0.1 s"
    assert over.is_set()


async def test_what_answers_is_not_stalled(listen: Listen, path: str) -> None:
    watch = asyncio.create_task(until_stalled(path, 2 * WAIT_S))
    over = await listen([OK] * 50)
    async with asyncio.timeout(WAIT_S):
        await over.wait()
    assert not watch.done()
    watch.cancel()


async def test_good_answers_are_told_but_not_those_of_who_loads(listen: Listen, path: str) -> None:
    told: list[int] = []
    await listen([answer_of("loading"), b"noise", OK, answer_of("serving"), answer_of("stalled", "503 Busy")])
    async with asyncio.timeout(WAIT_S):
        assert await until_stalled(path, WAIT_S, lambda: told.append(1)) == "it hangs"
    assert len(told) == 2


async def test_a_process_that_never_begins_to_serve(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "PROBE_INTERVAL_S", 0.0)
    monkeypatch.setattr(watchdog, "MAX_START_S", 0.05)
    async with asyncio.timeout(WAIT_S):
        assert await until_stalled(path, WAIT_S) == "it has not begun to serve within 0.05 s"


@pytest.mark.parametrize("answer", [b"HTTP/1.1 503 Busy\r\n\r\n", b"noise", b""])
async def test_an_answer_that_is_none_is_no_life(
    listen: Listen, path: str, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr(watchdog, "MAX_START_S", 0.05)
    await listen([answer] * 10_000)
    async with asyncio.timeout(WAIT_S):
        assert "has not begun to serve" in await until_stalled(path, WAIT_S)


async def test_a_process_that_has_ended_is_not_stalled(listen: Listen, path: str) -> None:
    """Whoever waits for its end sees it; its successor is asked again."""
    watch = asyncio.create_task(until_stalled(path, 2 * WAIT_S))
    over = await listen([OK])
    async with asyncio.timeout(WAIT_S):
        await over.wait()
    os.unlink(path)
    again = await listen([OK, OK])
    async with asyncio.timeout(WAIT_S):
        await again.wait()
    assert not watch.done()
    watch.cancel()


def answer_of(state: str, status: str = "200 OK") -> bytes:
    return f'HTTP/1.1 {status}\r\n\r\n{{"state": "{state}", "reason": "it hangs"}}'.encode()


async def test_what_says_itself_that_it_hangs_is_stalled(listen: Listen, path: str) -> None:
    """F37."""
    await listen([OK, answer_of("serving"), answer_of("stalled", "503 Service Unavailable")])
    async with asyncio.timeout(WAIT_S):
        assert await until_stalled(path, WAIT_S) == "it hangs"


async def test_what_loads_may_be_silent_for_longer(listen: Listen, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOADING_SILENCE_S", 0.2)
    await listen([answer_of("loading"), None, None])
    async with asyncio.timeout(WAIT_S):
        assert await until_stalled(path, 0.01) == "it has not answered for 0.2 s"
