"""One client process of `octavo bench serve`: makes its part of the load and reports what it saw.

    python -m octavo.cli.bench_serve_client < job

The job (JSON, one line) comes first; the process answers READY once it is connected; then a line with the time to start at
(time.monotonic(), which all processes of a machine share); at the end it writes its report (msgpack) and ends.
"""

import asyncio
import json
import ssl
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec

from octavo.cli.bench_serve_h2 import H2Connection, request_headers
from octavo.cli.bench_serve_http import HttpConnection
from octavo.cli.bench_serve_job import READY, Failure, Job, Report, Target
from octavo.cli.bench_serve_transport import CallFailed, connect
from octavo.cli.bench_workloads import Request, Workload
from octavo.cli.parent import exit_with_parent
from octavo.v1 import generation_pb2 as pb

MAX_EXAMPLE_CHARS = 300


class Reading:
    """What comes of one request."""

    __slots__ = ("_gaps", "first", "last", "num_messages", "num_prompt_tokens", "num_tokens")

    def __init__(self, gaps: "array[float]") -> None:
        self.first = self.last = 0.0
        self.num_messages = 0
        self.num_tokens = self.num_prompt_tokens = -1  # not told
        self._gaps = gaps

    def stamp(self) -> None:
        """Note that a message with new tokens is there."""
        now = time.monotonic()
        if self.num_messages:
            self._gaps.append(now - self.last)
        else:
            self.first = now
        self.last = now
        self.num_messages += 1

    def take_grpc(self, message: bytes) -> None:
        """Take an event of a stream."""
        event = pb.GenerateStreamResponse.FromString(message)
        if event.HasField("delta"):
            self.stamp()
        elif event.HasField("finished") and event.finished.HasField("usage"):
            self.num_tokens = event.finished.usage.completion_tokens
            self.num_prompt_tokens = event.finished.usage.prompt_tokens

    def take_http(self, data: bytes) -> None:
        """Take the data of an event.

        Raises:
            CallFailed: it is an error, or no completion.
        """
        try:
            event = _decode_event(data)
        except msgspec.MsgspecError as error:
            raise CallFailed("protocol", f"{error}: {data[:MAX_EXAMPLE_CHARS]!r}") from error
        if event.error is not None:
            words = event.error.get("message", event.error) if isinstance(event.error, dict) else event.error
            raise CallFailed("error event", str(words))
        # A choice without text that ends the answer brings no token; any other does, even if its text waits for more.
        if any(choice.text or choice.finish_reason is None for choice in event.choices):
            self.stamp()
        if event.usage is not None:
            self.num_tokens, self.num_prompt_tokens = event.usage.completion_tokens, event.usage.prompt_tokens


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, object] | str | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


class Door(Protocol):
    """A way to a server."""

    async def open(self) -> None:
        """Connect as far as can be done before the load."""
        ...

    def encode(self, request: Request, number: int) -> bytes:
        """Return a request as it is sent."""
        ...

    async def send(self, body: bytes, reading: Reading) -> None:
        """Send a request and take its answer."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


class GrpcDoor:
    """GenerateStream over a few connections; a call goes to the one with the fewest."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._connections: list[H2Connection] = []
        metadata = _authorization(job.target)
        self._headers = request_headers(job.target.authority, job.target.path, job.target.is_tls, metadata)

    async def open(self) -> None:
        """Open the connections."""
        target = self._job.target
        tls = tls_context(target, "h2")
        for _ in range(self._job.num_connections):
            self._connections.append(await connect(H2Connection, target.host, target.port, tls))

    def encode(self, request: Request, number: int) -> bytes:
        """Return the message."""
        job = self._job
        source = pb.GenerationInput(
            model=job.target.model,
            token_ids=pb.TokenIds(ids=request.prompt_ids),
            sampling=pb.SamplingParams(temperature=job.temperature, seed=number),
            stopping=pb.StoppingParams(max_tokens=request.num_output_tokens, ignore_eos=job.ignore_eos),
        )
        return pb.GenerateStreamRequest(input=source).SerializeToString()

    async def send(self, body: bytes, reading: Reading) -> None:
        """Call the method."""
        connection = min(self._connections, key=lambda each: each.num_calls)
        if connection.lost is not None:
            target = self._job.target
            fresh = await connect(H2Connection, target.host, target.port, tls_context(target, "h2"))
            self._connections = [fresh if each is connection else each for each in self._connections]
            connection = fresh
        await connection.call(self._headers, body, reading.take_grpc)

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(connection.close() for connection in self._connections))


class HttpDoor:
    """OpenAI's completions as server-sent events; connections are kept and used again."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._idle: list[HttpConnection] = []
        self._headers = _authorization(job.target)
        self._tls = tls_context(job.target, "http/1.1")

    async def open(self) -> None:
        """Open one connection, so that a server that is not there is known before the load."""
        self._idle.append(await self._connect())

    def encode(self, request: Request, number: int) -> bytes:
        """Return the body: nothing but OpenAI's fields, unless the request asks for more."""
        job = self._job
        body: dict[str, object] = {
            "model": job.target.model,
            "prompt": request.prompt_ids,
            "max_tokens": request.num_output_tokens,
            "temperature": job.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if job.temperature > 0:
            body["seed"] = number
        if job.ignore_eos:
            body["ignore_eos"] = True
        return json.dumps(body, separators=(",", ":")).encode()

    async def send(self, body: bytes, reading: Reading) -> None:
        """Post the request."""
        connection = None
        while self._idle and connection is None:
            kept = self._idle.pop()
            connection = kept if kept.lost is None else None  # the server may close what is idle
        connection = connection or await self._connect()
        target = self._job.target
        await connection.post(target.authority, target.path, self._headers, body, reading.take_http)
        self._idle.append(connection)

    async def close(self) -> None:
        """Close the connections; those of failed calls are closed already."""
        await asyncio.gather(*(connection.close() for connection in self._idle))

    async def _connect(self) -> HttpConnection:
        return await connect(HttpConnection, self._job.target.host, self._job.target.port, self._tls)


class Load:
    """Makes a client's part of a load, and keeps what came of it.

    Args:
        job: of this client.
        workload: of all clients.
        door: to the server.
    """

    def __init__(self, job: Job, workload: Workload, door: Door) -> None:
        self._job, self._door = job, door
        requests = workload.requests
        indexes = job.own_requests(len(requests))
        self._wanted = [requests[index].num_output_tokens for index in indexes]
        self._bodies = [door.encode(requests[index], index) for index in indexes]
        self._arrivals_s = job.arrivals_s(len(requests))[indexes]
        concurrency = job.own_concurrency
        self._slots = None if concurrency is None else asyncio.Semaphore(concurrency)
        self._columns: dict[str, array[float]] = {name: array("d") for name in _COLUMNS}
        self._failures: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._num_messages = 0

    async def warm_up(self) -> None:
        """Send some requests, one after the other, that are not counted.

        Raises:
            CallFailed: one failed.
        """
        for body in self._bodies[: self._job.num_warmups]:
            async with asyncio.timeout(self._job.timeout_s):
                await self._door.send(body, Reading(array("d")))

    async def run(self, start: float) -> Report:
        """Send every request at its time, or as soon as one of the slots is free; wait for all answers."""
        await asyncio.sleep(max(0.0, start - time.monotonic()))
        began, cpu_began = time.monotonic(), time.process_time()
        async with asyncio.TaskGroup() as group:
            for place, arrival_s in enumerate(self._arrivals_s):
                due = began + float(arrival_s)
                if (wait_s := due - time.monotonic()) > 0:
                    await asyncio.sleep(wait_s)
                if self._slots is not None:
                    await self._slots.acquire()
                late_s = time.monotonic() - due if self._slots is None else 0.0
                group.create_task(self._send(place, late_s))
        return Report(
            began=began,
            ended=time.monotonic(),
            cpu_s=time.process_time() - cpu_began,
            num_messages=self._num_messages,
            failures=tuple(Failure(kind, n, self._examples[kind]) for kind, n in self._failures.items()),
            **{name: column.tobytes() for name, column in self._columns.items()},
        )

    async def _send(self, place: int, late_s: float) -> None:
        reading = Reading(self._columns["gaps"])
        sent = time.monotonic()
        try:
            async with asyncio.timeout(self._job.timeout_s):
                await self._door.send(self._bodies[place], reading)
            self._check(reading, self._wanted[place])
        except TimeoutError:
            self._fail("timeout", f"no whole answer within {self._job.timeout_s:g} s")
        except CallFailed as error:
            self._fail(error.kind, error.message)
        else:
            self._num_messages += reading.num_messages
            row = (sent, reading.first, reading.last, time.monotonic(), late_s)
            for name, value in zip(_COLUMNS, (*row, reading.num_prompt_tokens, reading.num_tokens), strict=False):
                self._columns[name].append(value)
        finally:
            if self._slots is not None:
                self._slots.release()

    def _check(self, reading: Reading, wanted: int) -> None:
        if reading.num_tokens < 0 or reading.num_messages == 0:
            raise CallFailed("incomplete", "the answer has no token or tells no usage")
        if self._job.ignore_eos and reading.num_tokens != wanted:
            raise CallFailed("wrong length", f"{reading.num_tokens} tokens instead of {wanted}")

    def _fail(self, kind: str, message: str) -> None:
        self._failures[kind] += 1
        self._examples.setdefault(kind, " ".join(message.split())[:MAX_EXAMPLE_CHARS])


_COLUMNS = ("sent", "first", "last", "end", "late", "num_prompt_tokens", "num_tokens", "gaps")
"""Columns of a report; gaps, the last one, has entries of its own."""


def tls_context(target: Target, protocol: str) -> ssl.SSLContext | None:
    """Return how to speak TLS with a server, None for a plain connection.

    Raises:
        OSError: a file of certificates cannot be read.
    """
    if not target.is_tls:
        return None
    context = ssl.create_default_context(cafile=target.tls_ca)
    if target.tls_cert is not None:
        context.load_cert_chain(target.tls_cert, target.tls_key)
    context.set_alpn_protocols([protocol])
    return context


def _authorization(target: Target) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {target.api_key}")] if target.api_key else []


async def run(job: Job, when_ready: Callable[[], float]) -> Report:
    """Make a client's part of a load.

    Args:
        job: of this client.
        when_ready: called when it is connected; returns when to start.

    Raises:
        CallFailed: the server cannot be reached, or a warm-up request failed.
        ConfigurationError: there is no such dataset.
    """
    door: Door = GrpcDoor(job) if job.target.door == "grpc" else HttpDoor(job)
    load = Load(job, job.dataset.load(), door)
    await door.open()
    await load.warm_up()
    report = await load.run(when_ready())
    await door.close()
    return report


def main() -> None:
    """Run as a process."""
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    exit_with_parent(job.parent_pid)

    def when_ready() -> float:
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()
        return float(sys.stdin.buffer.readline())

    try:
        report = asyncio.run(run(job, when_ready))
    except (CallFailed, OSError) as error:
        sys.exit(f"octavo: {error}")
    sys.stdout.buffer.write(msgspec.msgpack.encode(report))


if __name__ == "__main__":
    main()
