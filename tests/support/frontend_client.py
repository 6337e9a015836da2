"""A frontend in the test's own event loop, and a client of it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import any_pb2, json_format
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import Frontend
from octavo.v1 import admin_pb2_grpc, generation_pb2_grpc
from octavo.v1 import generation_pb2 as pb

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]


async def read(call: Any) -> Any:
    """Return the next event of a call, EOF after the last.

    The call's own `read` forgets events that it has not read when the status arrives.
    """
    return await anext(aiter(call), EOF)


"""What reading a stream returns at its end."""

WAIT_S = 20.0
"""Bound of every wait in here: longer means that the test has failed."""

SMALL_WINDOWS = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536))
"""Options of a client that takes little from a server before it reads."""


def parse(**fields: Any) -> pb.GenerationInput:
    """Return an input from its fields in proto JSON names."""
    return json_format.ParseDict(fields, pb.GenerationInput())


@dataclass
class Collected:
    """What a stream brought, put together; contiguity is asserted while it comes."""

    started: pb.Started | None = None
    text: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[pb.TokenLogprob]] = field(default_factory=dict)
    finished: dict[int, pb.Finished] = field(default_factory=dict)
    deltas: list[pb.Delta] = field(default_factory=list)
    reasoning: dict[int, str] = field(default_factory=dict)
    calls: dict[int, list[pb.ToolCall]] = field(default_factory=dict)
    prompt: list[pb.TokenLogprob] = field(default_factory=list)

    def add(self, event: pb.GenerateStreamResponse) -> None:
        """Take one event."""
        kind = event.WhichOneof("event")
        if kind == "started":
            assert self.started is None
            assert not self.deltas
            self.started = event.started
            return
        assert self.started is not None, "started must come first"
        if kind == "prompt_logprobs":
            assert not self.deltas
            assert not self.finished
            assert event.prompt_logprobs.first_position == len(self.prompt), "positions are contiguous"
            assert event.ByteSize() <= 2**20
            self.prompt.extend(event.prompt_logprobs.logprobs)
            return
        if kind == "finished":
            assert event.finished.index not in self.finished
            self.finished[event.finished.index] = event.finished
            return
        delta = event.delta
        assert delta.index not in self.finished, "nothing follows a choice's end"
        ids = self.ids.setdefault(delta.index, [])
        if delta.token_ids:
            assert delta.first_token == len(ids), "positions are contiguous"
        self.deltas.append(delta)
        self.text[delta.index] = self.text.get(delta.index, "") + delta.text
        ids.extend(delta.token_ids)
        self.reasoning[delta.index] = self.reasoning.get(delta.index, "") + delta.reasoning
        calls = self.calls.setdefault(delta.index, [])
        for call in delta.tool_calls:
            if call.name:
                assert call.tool_index == len(calls), "calls come one after the other"
                calls.append(pb.ToolCall(id=call.id, name=call.name))
            assert call.tool_index == len(calls) - 1
            calls[-1].arguments_json += call.arguments_json
        self.logprobs.setdefault(delta.index, []).extend(delta.logprobs)


class Service:
    """A running frontend with a client's channel to it."""

    def __init__(self, frontend: Frontend, channel: grpc.aio.Channel) -> None:
        self.frontend = frontend
        self.channel = channel
        self.stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        self.admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)

    def ask(self, *, timeout: float | None = WAIT_S, metadata: Any = None, **fields: Any) -> Any:
        """Begin a unary call."""
        return self.stub.Generate(pb.GenerateRequest(input=parse(**fields)), timeout=timeout, metadata=metadata)

    def stream(
        self, *, chunk: int | None = None, timeout: float | None = WAIT_S, metadata: Any = None, **fields: Any
    ) -> Any:
        """Begin a streaming call."""
        request = pb.GenerateStreamRequest(input=parse(**fields), max_chunk_tokens=chunk)
        return self.stub.GenerateStream(request, timeout=timeout, metadata=metadata)

    async def until_health(self, serving: bool, service: str = "") -> None:
        """Wait until health says so."""
        response = health_pb2.HealthCheckResponse
        wanted = response.SERVING if serving else response.NOT_SERVING
        call = self.health.Watch(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)
        async for event in call:
            if event.status == wanted:
                call.cancel()
                return

    async def until_idle(self) -> None:
        """Wait until no call is running in the frontend, and see that it holds nothing."""
        async with asyncio.timeout(WAIT_S):
            await self.frontend.wait_idle()
        assert self.frontend.client is not None
        assert len(self.frontend.client.streams) == 0


async def collect(call: Any, begun: Collected | None = None) -> Collected:
    """Read a stream to its end, perhaps after what was read of it before."""
    collected = begun or Collected()
    while (event := await read(call)) is not EOF:
        collected.add(event)
    assert await call.code() == grpc.StatusCode.OK
    return collected


@dataclass(frozen=True)
class Refusal:
    """A status with its details."""

    code: grpc.StatusCode
    message: str
    details: Mapping[str, any_pb2.Any]

    @property
    def reason(self) -> str:
        """The reason of its ErrorInfo."""
        return str(self.unpack(error_details_pb2.ErrorInfo).reason)

    @property
    def field(self) -> str:
        """The path of the field that a BadRequest names."""
        return str(self.unpack(error_details_pb2.BadRequest).field_violations[0].field)

    def unpack(self, kind: Any) -> Any:
        """Return a detail."""
        message = kind()
        assert self.details[kind.DESCRIPTOR.name].Unpack(message)
        return message


async def refusal(call: Any) -> Refusal:
    """Return the status of a call that must fail."""
    try:
        if hasattr(call, "read"):
            while await read(call) is not EOF:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
        details = {} if status is None else {d.type_url.rpartition(".")[2]: d for d in status.details}
        return Refusal(error.code(), error.details() or "", details)
    raise AssertionError("the call was accepted")


@asynccontextmanager
async def running_frontend(
    model: Path, address: str, options: Any = (), tracing: Any = None, **settings: Any
) -> AsyncIterator[Service]:
    """Run a frontend, and connect to it with a client of its own."""
    frontend = Frontend(FrontendConfig(model, ("tiny", "alias"), address, grpc_port=0, **settings), tracing)
    try:
        await frontend.start()
        await frontend.load()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{frontend.port}", options) as channel:
            yield Service(frontend, channel)
    finally:
        await frontend.stop()
