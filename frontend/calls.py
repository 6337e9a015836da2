"""What both doors do with a request: check it whole, begin its stream, let go of it in the end."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from google.protobuf.message import Message

from octavo.frontend.access_log import note_stream
from octavo.frontend.bad_words import check_bad_words, with_bad_words
from octavo.frontend.budget import ByteBudget
from octavo.frontend.call_context import CallContext
from octavo.frontend.config import FrontendConfig
from octavo.frontend.constraint import Constraint, ConstraintKind, check_ending
from octavo.frontend.errors import (
    LOADING,
    DeadlineExceeded,
    Draining,
    InvalidArgument,
    ModelNotFound,
    TooManyStreams,
    Unavailable,
)
from octavo.frontend.grammars import Grammars
from octavo.frontend.journal import Journal
from octavo.frontend.large_messages import Unread
from octavo.frontend.long_prompts import refuse_by_beginning
from octavo.frontend.metadata import read_authorization, read_caller, read_request_id
from octavo.frontend.metrics import Metrics
from octavo.frontend.model import ModelFiles
from octavo.frontend.prompts import CheckedChat, check_chat, output_form, render_chat, required_form
from octavo.frontend.rpc import Incoming, known
from octavo.frontend.scheduler_client import SchedulerClient
from octavo.frontend.streams import Stream
from octavo.frontend.tools.parser import OutputForm
from octavo.frontend.tracing import CallTracer, current_trace
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
from octavo.wire.columns import unpack_ints
from octavo.wire.requests import StatusReport

DEFAULT_CHUNK_TOKENS = 64
"""Tokens of one choice that may share a message, where the caller does not say."""

MAX_INLINE_BYTES = 2048
"""Requests up to this size are tokenised at once (about half a millisecond): a busy loop hands the interpreter to
another thread only after its switch interval, so that the way there and back would take longer."""

M = TypeVar("M", bound=Message)

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]] | None


@dataclass(frozen=True)
class Checked:
    """A request that can run, what it runs on, and what reads its text; None: that is plain."""

    journal: Journal
    model: ModelFiles
    client: SchedulerClient
    form: OutputForm | None = None


@dataclass(frozen=True)
class Prompt:
    """What a request's prompt makes of it.

    Attributes:
        call: the request with its ids.
        form: what reads the text that follows; None if it is plain.
        required_calls: the form of calls that must be made; None if none must.
    """

    call: GenerationCall
    form: OutputForm | None = None
    required_calls: Constraint | None = None


class Calls:
    """The calls of all doors: counts them, checks their requests, and holds their streams.

    The law: a stream that was begun is let go of whatever ends its call.

    Args:
        config: limits.
        executor: where prompts are tokenised.
        metrics: where they are counted.
    """

    def __init__(self, config: FrontendConfig, executor: Executor, metrics: Metrics) -> None:
        self.config = config
        self.executor = executor
        self.metrics = metrics
        self.tracer: CallTracer | None = None  # tells of calls in spans, if somebody wants to know
        self.budget = ByteBudget(max(config.max_unread_bytes, config.max_message_bytes))
        self._model: ModelFiles | None = None
        self._client: SchedulerClient | None = None
        self._grammars: Grammars | None = None
        self._draining = False
        self._num_calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def attach(self, model: ModelFiles, client: SchedulerClient) -> None:
        """Begin to serve: the model has been read."""
        self._model, self._client = model, client
        self._grammars = Grammars(self.config.model_path, model.eos_ids)

    def refuse_new(self) -> None:
        """Take no further requests."""
        self._draining = True

    async def close(self) -> None:
        """Let go of what calls need beside their streams."""
        if self._grammars is not None:
            await self._grammars.close()

    async def wait_idle(self) -> None:
        """Wait until no call is running."""
        await self._idle.wait()

    @property
    def serving(self) -> bool:
        """Whether requests are taken and can run."""
        return self._client is not None and self._client.serving and not self._draining

    async def status(self, with_metrics: bool = False) -> StatusReport | None:
        """Return what the scheduler holds; None if it does not answer in time or cannot be asked."""
        return await self._client.status(with_metrics) if self._client is not None else None

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of prompt and output together; None while no worker has said so."""
        facts = self._client.facts if self._client is not None else None
        return None if facts is None else facts.max_model_len

    @contextmanager
    def counted(self, num_requests: int = 1) -> Iterator[None]:
        """Count a call, which makes this many requests, from its first moment to its last."""
        self._num_calls += num_requests
        self._idle.clear()
        try:
            yield
        finally:
            self._num_calls -= num_requests
            if not self._num_calls:
                self._idle.set()

    async def read(self, request: Incoming[M], kind: type[M]) -> M:
        """Return a request of gRPC that is one, has no field of its own that is not known, and is parsed now if large.

        Raises:
            ServiceError: it is none, or has one, or there are too many large ones.
        """
        if not isinstance(request, Unread):
            return known(request, kind)
        with self.budget.share() as share:
            share.grow(request.num_bytes)
            return await asyncio.get_running_loop().run_in_executor(self.executor, request.read)

    def context(self, metadata: Metadata, peer: str, deadline: float | None) -> CallContext:
        """Return what a call says besides its request; its key has been checked.

        Args:
            metadata: gRPC's, or the headers of HTTP, with lower-case names.
            peer: where it comes from, as gRPC writes it: ipv4:127.0.0.1:50051, ipv6:[::1]:50051, unix:.
            deadline: when the caller's time is over, on the event loop's clock; None for never.
        """
        identity = self.config.auth.identity(read_authorization(metadata)) or ""
        return CallContext(
            request_id=read_request_id(metadata),
            caller=identity or read_caller(peer),
            arrived_at=asyncio.get_running_loop().time(),
            identity=identity,
            trace=current_trace(),
            deadline=deadline,
        )

    @asynccontextmanager
    async def opened(
        self,
        request: pb.GenerationInput,
        context: CallContext,
        max_unsent_tokens: int | None,
        message_cost_s: float = 0.0,
    ) -> AsyncIterator[tuple[Stream, ModelFiles]]:
        """Check a request, begin its stream, and let go of it in the end.

        Raises:
            ServiceError: it is refused.
        """
        checked = await self.check(request, context)
        with self.begun(checked, context, max_unsent_tokens, message_cost_s) as stream:
            yield stream, checked.model

    async def check(self, request: pb.GenerationInput, context: CallContext, echo: str | None = None) -> Checked:
        """Check a request whole; what it takes long to do with its prompt is done in a thread.

        Args:
            request: the request.
            context: of its call.
            echo: what stands for the prompt's text before each choice's, if anything is to.

        Raises:
            ServiceError: it is refused.
        """
        if context.trace is None:
            return await self._check(request, context, echo)
        with context.trace.tokenising(request, context.request_id):
            return await self._check(request, context, echo)

    async def _check(self, request: pb.GenerationInput, context: CallContext, echo: str | None) -> Checked:
        model, client = self.admit(request.model)
        bounds = self.bounds()
        check_prompt_form(request, bounds, model.tokenizer.max_prompt_bytes(bounds.max_model_len))
        params = check_params(request, bounds)
        resolve = _prompt_work(request, params, bounds, model, echo)
        grammar = await self._compile(params.constraint)
        facts = client.facts
        # Not to learn from a fast answer what the holder of another key has asked.
        tenant = "" if self.config.share_prefix_cache else context.identity

        def work() -> tuple[Checked, Constraint | None]:
            prompt = resolve()
            journal = Journal(prompt.call, model.digest, context.caller, tenant, grammar, context.request_id)
            if facts is not None:
                journal.hash_prompt(facts)
            return Checked(journal, model, client, prompt.form), prompt.required_calls

        if request.ByteSize() <= MAX_INLINE_BYTES:
            checked, required = work()
        else:
            checked, required = await asyncio.get_running_loop().run_in_executor(self.executor, work)
        if required is not None:
            checked.journal.grammar = await self._compile(required)
        return checked

    async def _compile(self, constraint: Constraint | None) -> bytes:
        """Return the grammar that a request's text must follow, as it travels; empty: it need not.

        Raises:
            ServiceError: there is none, or it cannot be had at the moment.
        """
        if constraint is None:
            return b""
        if self._grammars is None:
            raise Unavailable(LOADING)
        return await self._grammars.compile(constraint)

    @contextmanager
    def begun(
        self, checked: Checked, context: CallContext, max_unsent_tokens: int | None, message_cost_s: float = 0.0
    ) -> Iterator[Stream]:
        """Begin the stream of a checked request, and let go of it in the end.

        Raises:
            DeadlineExceeded: the caller's time is over already.
        """
        loop, deadline = asyncio.get_running_loop(), context.deadline
        if deadline is not None and loop.time() >= deadline:
            raise DeadlineExceeded("the deadline had passed before the request could begin")
        params, tokenizer, client = checked.journal.call.params, checked.model.tokenizer, checked.client
        form, handle = checked.form, client.streams.new_handle()
        shown = checked.model.marker_ids if form is not None else frozenset()
        make = (lambda: tokenizer.detokenizer(params.skip_special_tokens, shown)) if params.detokenize else None
        stream = Stream(handle, checked.journal, make, form, max_unsent_tokens, deadline, client, message_cost_s)
        meter = self.metrics.meter(stream, context.arrived_at, loop.time)
        stream.on_flush = meter.flush
        if context.trace is not None:
            stream.watcher = trace = context.trace.begin_stream(stream, context.arrived_at)
            checked.journal.trace = trace.traceparent
        timers: list[asyncio.TimerHandle] = []
        try:
            client.add(stream)
            if deadline is not None:
                timers.append(loop.call_at(deadline, stream.fail, DeadlineExceeded("the deadline has passed")))
            if params.time_limit_s is not None:
                timers.append(loop.call_at(context.arrived_at + params.time_limit_s, stream.end_by_time_limit))
            yield stream
        finally:
            for timer in timers:
                timer.cancel()
            meter.end()
            note_stream(stream, context.arrived_at)
            client.release(stream)
            if stream.watcher is not None:
                stream.watcher.end()

    def admit(self, model_name: str) -> tuple[ModelFiles, SchedulerClient]:
        """Return what a request for a model runs on; an empty name is the default model.

        Raises:
            ServiceError: no such model, or no request is taken at the moment.
        """
        if self._draining:
            raise Draining("draining: no new requests are taken")
        self.check_model(model_name)
        model, client = self._model, self._client
        if model is None or client is None:
            raise Unavailable(LOADING)
        if not client.accepting:
            raise Unavailable(client.reason or "no worker is ready")
        if self._num_calls > self.config.max_streams:
            raise TooManyStreams(f"{self.config.max_streams} requests are running here, the limit")
        return model, client

    def check_model(self, name: str) -> None:
        """See that a model is served; an empty name is the default model.

        Raises:
            ModelNotFound: it is not.
        """
        if name and name not in self.config.served_model_names:
            names = ", ".join(self.config.served_model_names)
            raise ModelNotFound(f"no model {name[:200]!r} is served; there is {names}", model=name)

    def bounds(self) -> Bounds:
        """Return what a request may ask for.

        Raises:
            Unavailable: it is not known yet.
        """
        model, facts = self._model, self._client.facts if self._client is not None else None
        if model is None or facts is None:
            raise Unavailable("no worker is ready")
        return Bounds(
            self.config,
            facts.vocab_size,
            facts.max_model_len,
            model.defaults,
            model.eos_ids,
            facts.scheduling_policy,
            facts.takes_priorities,
        )


def _prompt_work(
    request: pb.GenerationInput, params: GenerationParams, bounds: Bounds, model: ModelFiles, echo: str | None
) -> Callable[[], Prompt]:
    """Return what turns the prompt into ids and checks their number; it runs in a thread.

    The prompt's text, where it is wanted, is `echo`, else what the caller wrote, else that of the ids.

    Raises:
        InvalidArgument: names a field.
    """
    checked = check_chat(request.chat, model) if request.HasField("chat") else CheckedChat()
    if checked.tools is not None and checked.tools.required:
        if params.constraint is not None:
            message = "a call that must be made has a form of its own (tool_choice)"
            raise InvalidArgument(message, field_path=params.constraint.path)
        form = Constraint(ConstraintKind.STRUCTURAL_TAG, field_path="input.chat.tool_choice")
        check_ending(form, request.stopping, request.sampling, bounds.eos_ids)
    bad_words = request.sampling.bad_words
    check_bad_words(bad_words)

    def work() -> Prompt:
        prompt = resolve()
        if not params.echo:
            return prompt
        if (text := echo) is None:
            ids = unpack_ints(prompt.call.prompt_ids)
            text = request.text or model.tokenizer.decode(ids, params.skip_special_tokens)
        return replace(prompt, call=replace(prompt.call, echo=text))

    def resolve() -> Prompt:
        full = with_bad_words(params, bad_words, model.tokenizer, bounds.vocab_size)
        if request.HasField("token_ids"):
            ids = list(request.token_ids.ids)
            check_token_ids(ids, bounds)
            return Prompt(resolve_call(full, "token_ids", ids, bounds))
        if request.HasField("chat"):
            contents = [message.content for message in request.chat.messages]
            refuse_by_beginning(model.tokenizer, contents, bounds.max_model_len, "input.chat")
            rendered = render_chat(model, request.chat, checked)
            # A text of a given form has that form from its first character on: nothing is thought before it.
            start = rendered.start if params.constraint is None else None
            call = resolve_call(full, "chat", rendered.ids, bounds)
            return Prompt(call, output_form(model, checked, start), required_form(model, request.chat, checked, start))
        refuse_by_beginning(model.tokenizer, [request.text], bounds.max_model_len, "input.text")
        return Prompt(resolve_call(full, "text", model.tokenizer.encode_text(request.text), bounds))

    return work
