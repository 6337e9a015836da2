"""GenerationService: both methods on one path; Generate takes the stream whole."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from octavo.frontend.call_context import CallContext
from octavo.frontend.calls import DEFAULT_CHUNK_TOKENS, Calls
from octavo.frontend.choice import Chunk
from octavo.frontend.errors import InvalidArgument
from octavo.frontend.health import GENERATION_SERVICE
from octavo.frontend.model import ModelFiles
from octavo.frontend.responses import delta_event, finished_event, prompt_events, started_event, whole_response
from octavo.frontend.rpc import Context, Incoming, answer, parse
from octavo.frontend.streams import Stream, Writing
from octavo.v1 import generation_pb2 as pb

MAX_CHUNK_TOKENS = 65536

MESSAGE_COST_S = 70e-6
"""CPU time of a message of a stream, about (benchmarks/frontend_cpu.py)."""

T = TypeVar("T")


class GenerationServicer:
    """The gRPC door of generation.

    Args:
        calls: checks requests and holds their streams.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._config = calls.config

    def add_to(self, server: grpc.aio.Server) -> None:
        """Offer the service."""
        handlers = {
            "Generate": grpc.unary_unary_rpc_method_handler(
                self.generate, parse(pb.GenerateRequest), pb.GenerateResponse.SerializeToString
            ),
            "GenerateStream": grpc.unary_stream_rpc_method_handler(
                self.generate_stream, parse(pb.GenerateStreamRequest), pb.GenerateStreamResponse.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(GENERATION_SERVICE, handlers),))

    async def generate(self, request: Incoming[pb.GenerateRequest], context: Context) -> pb.GenerateResponse:
        """Return the whole answer."""

        async def work(call: CallContext) -> pb.GenerateResponse:
            checked = await self._calls.read(request, pb.GenerateRequest)
            async with self._calls.opened(checked.input, call, max_unsent_tokens=None) as (stream, model):
                while not stream.ended:
                    await stream.changed()
                if stream.error is not None:
                    raise stream.error
                return await whole_response(
                    stream, call.request_id, self._config.served_model_names[0], model.tokenizer
                )

        return await self._answer(context, work)

    async def generate_stream(self, request: Incoming[pb.GenerateStreamRequest], context: Context) -> None:
        """Send what is new until all choices have ended."""

        async def work(call: CallContext) -> None:
            checked = await self._calls.read(request, pb.GenerateStreamRequest)
            limit = _chunk_limit(checked)
            unsent = self._config.max_unsent_tokens
            async with self._calls.opened(checked.input, call, unsent, MESSAGE_COST_S) as (stream, model):
                await self._send_all(stream, model, context, call.request_id, limit)

        await self._answer(context, work)

    async def _send_all(self, stream: Stream, model: ModelFiles, context: Context, request_id: str, limit: int) -> None:
        writing = Writing(stream)
        num_running = len(stream.choices)
        started = False
        while num_running:
            await stream.changed()
            with writing:
                if not started and stream.started:
                    started = True
                    await context.write(started_event(stream, request_id, self._config.served_model_names[0]))
                for told in prompt_events(stream, model.tokenizer):
                    await context.write(told)
                for item in stream.take(limit):
                    if isinstance(item, Chunk):
                        event = delta_event(stream, item, model.tokenizer)
                    else:
                        num_running -= 1
                        event = finished_event(stream, *item, is_last=num_running == 0)
                    await context.write(event)
            if stream.error is not None:
                raise stream.error

    async def _answer(self, context: Context, work: Callable[[CallContext], Awaitable[T]]) -> T:
        """Give the call its request id, do its work, and turn what goes wrong into its status."""
        left = context.time_remaining()
        deadline = None if left is None else asyncio.get_running_loop().time() + left
        call = self._calls.context(context.invocation_metadata(), context.peer(), deadline)
        with self._calls.counted():
            return await answer(context, lambda: work(call), call.request_id)


def _chunk_limit(request: pb.GenerateStreamRequest) -> int:
    if not request.HasField("max_chunk_tokens"):
        return DEFAULT_CHUNK_TOKENS
    if not 1 <= request.max_chunk_tokens <= MAX_CHUNK_TOKENS:
        message = f"{request.max_chunk_tokens} must be from 1 to {MAX_CHUNK_TOKENS}"
        raise InvalidArgument(message, field_path="max_chunk_tokens")
    return request.max_chunk_tokens
