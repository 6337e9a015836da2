"""GenerationService: both methods on one path; Generate takes the stream whole."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import TypeVar

import grpc

from octavo.frontend.choice import Chunk
from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import (
    DeadlineExceeded,
    Draining,
    InvalidArgument,
    ModelNotFound,
    ServiceError,
    TooManyStreams,
    Unavailable,
    abort,
    internal_error,
)
from octavo.frontend.health import GENERATION_SERVICE
from octavo.frontend.journal import Journal
from octavo.frontend.metadata import read_caller, read_request_id, read_trace
from octavo.frontend.model import ModelFiles
from octavo.frontend.prompts import check_chat, encode_chat
from octavo.frontend.responses import delta_event, finished_event, started_event, whole_response
from octavo.frontend.rpc import parse
from octavo.frontend.scheduler_client import SchedulerClient
from octavo.frontend.streams import Stream
from octavo.frontend.validation import (
    Bounds,
    GenerationCall,
    GenerationParams,
    check_params,
    check_prompt_form,
    check_token_ids,
    resolve_call,
)
from octavo.v1 import generation_pb2 as pb

DEFAULT_CHUNK_TOKENS = 64
MAX_CHUNK_TOKENS = 65536

MAX_INLINE_BYTES = 2048
"""Requests up to this size are tokenised at once (about half a millisecond): a busy loop hands the interpreter to
another thread only after its switch interval, so that the way there and back would take longer."""

T = TypeVar("T")

Context = grpc.aio.ServicerContext[object, object]


class GenerationServicer:
    """Turns calls into streams of the scheduler client.

    The law: a call holds at most one stream, and lets go of it whatever ends the call.

    Args:
        config: limits.
        executor: where prompts are tokenised.
    """

    def __init__(self, config: FrontendConfig, executor: Executor) -> None:
        self._config = config
        self._executor = executor
        self._model: ModelFiles | None = None
        self._client: SchedulerClient | None = None
        self._draining = False
        self._num_calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

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

    def attach(self, model: ModelFiles, client: SchedulerClient) -> None:
        """Begin to serve: the model has been read."""
        self._model, self._client = model, client

    def refuse_new(self) -> None:
        """Take no further calls."""
        self._draining = True

    async def wait_idle(self) -> None:
        """Wait until no call is running."""
        await self._idle.wait()

    async def generate(self, request: pb.GenerateRequest | None, context: Context) -> pb.GenerateResponse:
        """Return the whole answer."""

        async def work(request_id: str) -> pb.GenerateResponse:
            if request is None:
                raise _malformed(pb.GenerateRequest.DESCRIPTOR.full_name)
            async with self._opened(request.input, context, max_unsent_tokens=None) as (stream, model):
                while not stream.ended:
                    await stream.changed()
                if stream.error is not None:
                    raise stream.error
                return whole_response(stream, request_id, self._config.served_model_names[0], model.tokenizer)

        return await self._answer(context, work)

    async def generate_stream(self, request: pb.GenerateStreamRequest | None, context: Context) -> None:
        """Send what is new until all choices have ended."""

        async def work(request_id: str) -> None:
            if request is None:
                raise _malformed(pb.GenerateStreamRequest.DESCRIPTOR.full_name)
            limit = _chunk_limit(request)
            unsent = self._config.max_unsent_tokens
            async with self._opened(request.input, context, max_unsent_tokens=unsent) as (stream, model):
                await self._send_all(stream, model, context, request_id, limit)

        await self._answer(context, work)

    async def _send_all(self, stream: Stream, model: ModelFiles, context: Context, request_id: str, limit: int) -> None:
        task = asyncio.current_task()
        interrupt = task.cancel if task is not None else None
        num_running = len(stream.choices)
        started = False
        while num_running:
            await stream.changed()
            stream.interrupt = interrupt
            try:
                if not started and stream.started:
                    started = True
                    await context.write(started_event(stream, request_id, self._config.served_model_names[0]))
                for item in stream.take(limit):
                    if isinstance(item, Chunk):
                        event = delta_event(stream, item, model.tokenizer)
                    else:
                        num_running -= 1
                        event = finished_event(stream, *item, is_last=num_running == 0)
                    await context.write(event)
            except asyncio.CancelledError:
                if stream.error is None or task is None:
                    raise
                # The stream itself interrupted a write that a slow client blocks; it is not the caller going away.
                task.uncancel()
            finally:
                stream.interrupt = None
            if stream.error is not None:
                raise stream.error

    async def _answer(self, context: Context, work: Callable[[str], Awaitable[T]]) -> T:
        """Give the call its request id, do its work, and turn what goes wrong into its status."""
        request_id = read_request_id(context.invocation_metadata())
        self._num_calls += 1
        self._idle.clear()
        try:
            await context.send_initial_metadata((("x-request-id", request_id),))
            try:
                return await work(request_id)
            except ServiceError as raised:
                # Its traceback holds this frame, which holds the request: a cycle that would keep megabytes until the
                # next collection.
                error = raised.with_traceback(None)
            except Exception:  # noqa: BLE001 (the last resort: logged, and told as INTERNAL)
                error = internal_error(request_id)
            await abort(context, error, request_id)
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self._idle.set()

    @asynccontextmanager
    async def _opened(
        self, request: pb.GenerationInput, context: Context, max_unsent_tokens: int | None
    ) -> AsyncIterator[tuple[Stream, ModelFiles]]:
        """Check a request, begin its stream, and let go of it in the end."""
        loop = asyncio.get_running_loop()
        left = context.time_remaining()
        deadline = None if left is None else loop.time() + left
        model, client = self._admit(request)
        journal = await self._open_journal(request, context, model, client)
        if deadline is not None and loop.time() >= deadline:
            raise DeadlineExceeded("the deadline had passed before the request could begin")
        params = journal.call.params
        make = (lambda: model.tokenizer.detokenizer(params.skip_special_tokens)) if params.detokenize else None
        stream = Stream(client.streams.new_handle(), journal, make, max_unsent_tokens, deadline, client)
        timer = None
        try:
            client.add(stream)
            if deadline is not None:
                timer = loop.call_at(deadline, stream.fail, DeadlineExceeded("the deadline has passed"))
            yield stream, model
        finally:
            if timer is not None:
                timer.cancel()
            client.release(stream)

    def _admit(self, request: pb.GenerationInput) -> tuple[ModelFiles, SchedulerClient]:
        if self._draining:
            raise Draining("the frontend is about to stop")
        if request.model and request.model not in self._config.served_model_names:
            names = ", ".join(self._config.served_model_names)
            raise ModelNotFound(f"no model {request.model[:200]!r} is served; there is {names}", model=request.model)
        model, client = self._model, self._client
        if model is None or client is None:
            raise Unavailable("the model is being loaded")
        if not client.accepting:
            raise Unavailable(client.reason or "no worker is ready")
        if self._num_calls > self._config.max_streams:
            raise TooManyStreams(f"{self._config.max_streams} requests are running here, the limit")
        return model, client

    async def _open_journal(
        self, request: pb.GenerationInput, context: Context, model: ModelFiles, client: SchedulerClient
    ) -> Journal:
        """Check a request whole; what it takes long to do with its prompt is done in a thread."""
        if client.facts is None:
            raise Unavailable("no worker is ready")
        facts = client.facts
        bounds = Bounds(
            self._config,
            facts.vocab_size,
            facts.max_model_len,
            model.defaults,
            model.eos_ids,
            facts.scheduling_policy,
            facts.takes_priorities,
        )
        check_prompt_form(request, bounds, model.tokenizer.max_prompt_bytes(bounds.max_model_len))
        resolve = _prompt_work(request, check_params(request, bounds), bounds, model)
        caller, trace = read_caller(context.peer()), read_trace(context.invocation_metadata())

        def work() -> Journal:
            journal = Journal(resolve(), model.digest, caller, trace)
            journal.hash_prompt(facts)
            return journal

        if request.ByteSize() <= MAX_INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def _prompt_work(
    request: pb.GenerationInput, params: GenerationParams, bounds: Bounds, model: ModelFiles
) -> Callable[[], GenerationCall]:
    """Return what turns the prompt into ids and checks their number; it runs in a thread."""
    variables = check_chat(request.chat, model.chat_template) if request.HasField("chat") else {}

    def work() -> GenerationCall:
        if request.HasField("token_ids"):
            ids = list(request.token_ids.ids)
            check_token_ids(ids, bounds)
            return resolve_call(params, "token_ids", ids, bounds)
        if request.HasField("chat"):
            return resolve_call(params, "chat", encode_chat(model, request.chat, variables), bounds)
        return resolve_call(params, "text", model.tokenizer.encode_text(request.text), bounds)

    return work


def _malformed(name: str) -> InvalidArgument:
    return InvalidArgument(f"the bytes are no {name}", field_path="")


def _chunk_limit(request: pb.GenerateStreamRequest) -> int:
    if not request.HasField("max_chunk_tokens"):
        return DEFAULT_CHUNK_TOKENS
    if not 1 <= request.max_chunk_tokens <= MAX_CHUNK_TOKENS:
        message = f"{request.max_chunk_tokens} must be from 1 to {MAX_CHUNK_TOKENS}"
        raise InvalidArgument(message, field_path="max_chunk_tokens")
    return request.max_chunk_tokens
