"""Clients that put requests of every kind through both doors, again and again, and write down all that they see."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import httpx2

from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as rpc
from tests.support.cluster import Target
from tests.support.history import (
    CANCELLED,
    OK,
    UNAVAILABLE,
    Ask,
    Delta,
    End,
    Expected,
    History,
    Started,
    Status,
    UsageTold,
)

DOORS = ("grpc-stream", "grpc", "http-stream", "http")
CALL_TIMEOUT_S = 300.0
"""Longer means that a request is lost."""

RETRY_S = 0.05
_RECONNECT = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)]
_HTTP_STATUSES = {503: UNAVAILABLE, 429: "RESOURCE_EXHAUSTED", 500: "INTERNAL"}


def make_asks(number: int, vocab_size: int, max_tokens: int, *, seed: int = 0, text: bool = False) -> list[Ask]:
    """Return requests of every kind: greedy and drawn, n of 2, penalties, stops, short and long prompts.

    Args:
        number: of them.
        vocab_size: ids of prompts are below it.
        max_tokens: of the longest.
        seed: chooses prompts.
        text: whether stop strings are of a language rather than of single bytes.
    """
    draw = random.Random(seed)
    stops = (" the", " and") if text else ("e", "q")
    made = []
    for index in range(number):
        prompt = tuple(draw.randrange(1, vocab_size) for _ in range(draw.choice((1, 3, 15, 16, 17, 33))))
        ask = Ask("greedy", prompt, draw.randrange(max_tokens // 2, max_tokens + 1), seed=index)
        match index % 6:
            case 1:
                ask = replace(ask, name="drawn", temperature=0.9, seed=draw.randrange(2**63))
            case 2:
                ask = replace(ask, name="n=2", n=2, temperature=1.0)
            case 3:
                ask = replace(ask, name="penalties", frequency_penalty=0.5, repetition_penalty=1.2)
            case 4:
                ask = replace(ask, name="stop string", stop_strings=stops, temperature=1.0, min_tokens=2)
            case 5:
                ask = replace(
                    ask, name="stop ids", stop_ids=(7, 42), min_tokens=min(4, ask.max_tokens), ignore_eos=False
                )
                ask = replace(ask, temperature=1.0)
        made.append(ask)
    return made


class Client:
    """Channels to each frontend, and everything that was seen through them."""

    def __init__(self, targets: Sequence[Target], model: str, timeout_s: float | None = CALL_TIMEOUT_S) -> None:
        self.histories: list[History] = []
        self.live: set[History] = set()
        self._model = model
        self._timeout_s = timeout_s
        self._targets = targets
        self._channels = [grpc.aio.insecure_channel(f"127.0.0.1:{t.grpc_port}", _RECONNECT) for t in targets]
        self._stubs: list[Any] = [rpc.GenerationServiceStub(channel) for channel in self._channels]
        limits = httpx2.Limits(max_keepalive_connections=0)  # a kept connection may be that of a dead process
        self._http = httpx2.AsyncClient(timeout=timeout_s, limits=limits, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()
        for channel in self._channels:
            await channel.close(None)

    async def ask(self, ask: Ask, door: str, frontend: int = 0, cancel_after: int | None = None) -> History:
        """Put a request and write down what comes of it.

        Args:
            ask: the request.
            door: one of DOORS.
            frontend: whom to ask.
            cancel_after: hang up when so many tokens have come (at the unary doors: after so many milliseconds).
        """
        history = History(ask, door, frontend, time.monotonic(), cancels=cancel_after is not None)
        self.histories.append(history)
        self.live.add(history)
        work = {"grpc-stream": self._grpc_stream, "grpc": self._grpc, "http-stream": self._http_stream}
        try:
            await work.get(door, self._http_whole)(history, cancel_after)
        finally:
            self.live.discard(history)
        return history

    async def _grpc_stream(self, history: History, cancel_after: int | None) -> None:
        request = pb.GenerateStreamRequest(input=history.ask.to_grpc())
        call = self._stubs[history.frontend].GenerateStream(request, timeout=self._timeout_s, wait_for_ready=True)
        try:
            async for event in call:
                _take_event(history, event)
                if cancel_after is not None and history.num_tokens >= cancel_after:
                    call.cancel()
        except grpc.aio.AioRpcError as error:
            _end(history, error.code().name, error.details() or "")
        except asyncio.CancelledError:
            if not call.cancelled() or not history.cancels:
                raise
            _end(history, CANCELLED)
        else:
            _end(history, OK)

    async def _grpc(self, history: History, cancel_after: int | None) -> None:
        request = pb.GenerateRequest(input=history.ask.to_grpc())
        call = self._stubs[history.frontend].Generate(request, timeout=self._timeout_s, wait_for_ready=True)
        if cancel_after is not None:
            asyncio.get_running_loop().call_later(cancel_after / 1000, call.cancel)
        try:
            answer: pb.GenerateResponse = await call
        except grpc.aio.AioRpcError as error:
            _end(history, error.code().name, error.details() or "")
        except asyncio.CancelledError:
            if not call.cancelled() or not history.cancels:
                raise
            _end(history, CANCELLED)
        else:
            now = time.monotonic()
            for choice in answer.choices:
                history.events.append(Delta(now, choice.index, 0, tuple(choice.token_ids), choice.text))
                history.events.append(End(now, choice.index, _reason(choice.finish_reason), None))
            history.events.append(UsageTold(now, answer.usage.prompt_tokens, answer.usage.completion_tokens))
            _end(history, OK)

    async def _http_stream(self, history: History, cancel_after: int | None) -> None:
        body, code, detail = history.ask.to_http(self._model, stream=True), "TRUNCATED", "no [DONE]"
        try:
            async with self._posted(history, body) as response:
                if response.status_code != 200:
                    code = _HTTP_STATUSES.get(response.status_code, str(response.status_code))
                    detail = (await response.aread()).decode(errors="replace")
                    return
                async for line in _lines(response):
                    data = line.removeprefix(b"data: ")
                    if data == b"[DONE]":
                        code, detail = OK, ""
                    elif data and (error := _take_chunk(history, json.loads(data))) is not None:
                        code, detail = error
                    if cancel_after is not None and history.num_tokens >= cancel_after:
                        code, detail = CANCELLED, ""
                        return
        except httpx2.TransportError as error:
            code, detail = UNAVAILABLE, repr(error)
        finally:
            _end(history, code, detail)

    async def _http_whole(self, history: History, cancel_after: int | None) -> None:
        body = history.ask.to_http(self._model, stream=False)
        try:
            async with asyncio.timeout(None if cancel_after is None else cancel_after / 1000):
                async with self._posted(history, body) as response:
                    data = await response.aread()
        except TimeoutError:
            _end(history, CANCELLED)
            return
        except httpx2.TransportError as error:
            _end(history, UNAVAILABLE, repr(error))
            return
        if response.status_code == 200:
            _take_chunk(history, json.loads(data))
            _end(history, OK)
        else:
            code = _HTTP_STATUSES.get(response.status_code, str(response.status_code))
            _end(history, code, data.decode(errors="replace"))

    @asynccontextmanager
    async def _posted(self, history: History, body: dict[str, Any]) -> AsyncIterator[httpx2.Response]:
        """Post to a frontend; while nobody listens there, wait as gRPC does."""
        url = f"http://127.0.0.1:{self._targets[history.frontend].http_port}/v1/completions"
        while True:
            try:
                async with self._http.stream("POST", url, json=body) as response:
                    yield response
                    return
            except httpx2.ConnectError:
                await asyncio.sleep(RETRY_S)


async def _lines(response: httpx2.Response) -> AsyncIterator[bytes]:
    """Yield the lines of events; unlike `aiter_lines` at line feeds alone, for a text may hold a U+0085."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line


def _end(history: History, code: str, detail: str = "") -> None:
    history.events.append(Status(time.monotonic(), code, detail))


def _reason(reason: pb.FinishReason.ValueType) -> str:
    return pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


def _take_event(history: History, event: pb.GenerateStreamResponse) -> None:
    now = time.monotonic()
    match event.WhichOneof("event"):
        case "started":
            history.events.append(Started(now, event.started.prompt_tokens))
        case "delta":
            delta = event.delta
            history.events.append(Delta(now, delta.index, delta.first_token, tuple(delta.token_ids), delta.text))
        case "finished":
            done = event.finished
            history.events.append(End(now, done.index, _reason(done.finish_reason), done.completion_tokens))
            if done.HasField("usage"):
                told = UsageTold(now, done.usage.prompt_tokens, done.usage.completion_tokens)
                history.events.append(told)


def _take_chunk(history: History, chunk: dict[str, Any]) -> tuple[str, str] | None:
    """Take an event of a stream, or a whole answer; return status and words if it is an error."""
    now = time.monotonic()
    if "error" in chunk:
        error = chunk["error"]
        return str(error.get("code") or error.get("type")).upper(), str(error.get("message"))
    for choice in chunk["choices"]:
        ids = tuple(choice.get("token_ids") or ())
        if ids or choice["text"]:
            history.events.append(Delta(now, choice["index"], None, ids, choice["text"]))
        if choice.get("finish_reason"):
            history.events.append(End(now, choice["index"], choice["finish_reason"], None))
    if usage := chunk.get("usage"):
        history.events.append(UsageTold(now, usage["prompt_tokens"], usage["completion_tokens"]))
    return None


async def undisturbed(client: Client, asks: Sequence[Ask]) -> dict[Ask, Expected]:
    """Return the answers that requests get one after the other, with nobody beside them."""
    return {ask: Expected.of(await client.ask(ask, "grpc-stream")) for ask in asks}


@dataclass
class Load:
    """Closed loops: each puts a request, reads it to its end, and puts the next one, until it is told to stop.

    Attributes:
        client: what they ask through.
        asks: what they choose from.
        num_streams: how many there are.
        frontends: whom they ask.
        seed: of their choices.
        cancel_share: of requests whose client hangs up.
    """

    client: Client
    asks: Sequence[Ask]
    num_streams: int
    frontends: Sequence[int] = (0,)
    seed: int = 0
    cancel_share: float = 0.1
    doors: Sequence[str] = DOORS
    _stopping: bool = field(default=False, init=False)
    _tasks: "list[asyncio.Task[None]]" = field(default_factory=list, init=False)

    def start(self) -> None:
        """Begin all loops."""
        self._stopping = False
        self._tasks = [asyncio.create_task(self._loop(index)) for index in range(self.num_streams)]

    async def stop(self) -> None:
        """Let each request that runs come to its end, and no other one begin."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def once(self, each: int = 1) -> None:
        """Let each loop put so many requests."""
        await asyncio.gather(*(self._loop(index, each) for index in range(self.num_streams)))

    async def _loop(self, index: int, limit: int | None = None) -> None:
        draw = random.Random(f"{self.seed}/{index}")
        frontend = self.frontends[index % len(self.frontends)]
        while not self._stopping and limit != 0:
            ask, door = draw.choice(self.asks), draw.choice(self.doors)
            cancel_after = draw.randrange(1, ask.max_tokens + 1) if draw.random() < self.cancel_share else None
            await self.client.ask(ask, door, frontend, cancel_after)
            limit = None if limit is None else limit - 1
