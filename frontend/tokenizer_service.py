"""TokenizerService: the frontend's tokenizer and chat template, under the limits of generation's prompts."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc

from octavo.frontend.calls import MAX_INLINE_BYTES, Calls
from octavo.frontend.errors import (
    LOADING,
    ContextLengthExceeded,
    Draining,
    InvalidArgument,
    TooManyStreams,
    Unavailable,
)
from octavo.frontend.lifecycle import Lifecycle
from octavo.frontend.long_prompts import refuse_by_beginning
from octavo.frontend.model import ModelFiles
from octavo.frontend.prompts import RenderedChat, check_chat, render_chat
from octavo.frontend.rpc import Context, Incoming, answer, parse
from octavo.frontend.tokenizer import ModelTokenizer
from octavo.frontend.unknown_fields import chat_messages, check_known
from octavo.frontend.validation import Bounds, check_prompt_form, check_prompt_length, check_token_ids
from octavo.v1 import generation_pb2
from octavo.v1 import tokenizer_pb2 as pb

TOKENIZER_SERVICE = "octavo.v1.TokenizerService"

MAX_CALLS = 256
"""Calls of this service at one time; each holds its request."""

T = TypeVar("T")


class TokenizerServicer:
    """Tokenises, detokenises and renders; it asks nobody.

    The law: all but one of the tokenizer threads are in use here at most (one, where there is but one), so that prompts
    of generation find one.

    Args:
        calls: names and limits of generation's requests, and the threads where its prompts are tokenised.
        lifecycle: whether new requests are taken.
    """

    def __init__(self, calls: Calls, lifecycle: Lifecycle) -> None:
        self._calls = calls
        self._lifecycle = lifecycle
        self._model: ModelFiles | None = None
        self._threads = asyncio.Semaphore(max(1, calls.config.num_tokenizer_threads - 1))
        self._num_calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Offer the service."""
        handlers = {
            "Tokenize": grpc.unary_unary_rpc_method_handler(
                self._tokenize, parse(pb.TokenizeRequest), pb.TokenizeResponse.SerializeToString
            ),
            "Detokenize": grpc.unary_unary_rpc_method_handler(
                self._detokenize, parse(pb.DetokenizeRequest), pb.DetokenizeResponse.SerializeToString
            ),
            "RenderChat": grpc.unary_unary_rpc_method_handler(
                self._render_chat, parse(pb.RenderChatRequest), pb.RenderChatResponse.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(TOKENIZER_SERVICE, handlers),))

    def attach(self, model: ModelFiles) -> None:
        """Begin to serve: the model has been read."""
        self._model = model

    async def wait_idle(self) -> None:
        """Wait until no call is running."""
        await self._idle.wait()

    async def tokens_of(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        """Return the ids of a text or a conversation, for any door.

        Raises:
            ServiceError: it is refused; fields are named by their path in the request.
        """
        with self._admitted(request.model) as (model, bounds):
            return await self._run(_tokenizing(request, model, bounds), request.ByteSize())

    async def text_of(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        """Return the text of ids, for any door.

        Raises:
            ServiceError: it is refused; fields are named by their path in the request.
        """
        with self._admitted(request.model) as (model, bounds):
            return await self._run(_detokenizing(request, model, bounds), request.ByteSize())

    async def rendered(self, request: pb.RenderChatRequest) -> pb.RenderChatResponse:
        """Return what the chat template makes of a conversation, for any door.

        Raises:
            ServiceError: it is refused; fields are named by their path in the request.
        """
        with self._admitted(request.model) as (model, bounds):
            return await self._run(_rendering(request, model, bounds), request.ByteSize())

    async def _tokenize(self, request: Incoming[pb.TokenizeRequest], context: Context) -> pb.TokenizeResponse:

        async def work() -> pb.TokenizeResponse:
            return await self.tokens_of(await self._calls.read(request, pb.TokenizeRequest))

        return await answer(context, work)

    async def _detokenize(self, request: Incoming[pb.DetokenizeRequest], context: Context) -> pb.DetokenizeResponse:

        async def work() -> pb.DetokenizeResponse:
            return await self.text_of(await self._calls.read(request, pb.DetokenizeRequest))

        return await answer(context, work)

    async def _render_chat(self, request: Incoming[pb.RenderChatRequest], context: Context) -> pb.RenderChatResponse:

        async def work() -> pb.RenderChatResponse:
            return await self.rendered(await self._calls.read(request, pb.RenderChatRequest))

        return await answer(context, work)

    @contextmanager
    def _admitted(self, name: str) -> Iterator[tuple[ModelFiles, Bounds]]:
        """Count a call that can be served while it runs."""
        if self._lifecycle.draining:
            raise Draining("draining: no new requests are taken")
        self._calls.check_model(name)
        if self._model is None:
            raise Unavailable(LOADING)
        bounds = self._calls.bounds()
        if self._num_calls >= MAX_CALLS:
            raise TooManyStreams(f"{MAX_CALLS} calls of the tokenizer are running here, the limit")
        self._num_calls += 1
        self._idle.clear()
        try:
            yield self._model, bounds
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self._idle.set()

    async def _run(self, work: Callable[[], T], num_bytes: int) -> T:
        """Do the work: of a short request at once, as in generation, of another one in a thread."""
        if num_bytes <= MAX_INLINE_BYTES:
            return work()
        await self._threads.acquire()
        done = asyncio.get_running_loop().run_in_executor(self._calls.executor, work)
        # A thread cannot be interrupted: it counts until it has ended, though nobody waits for it any more.
        done.add_done_callback(lambda _: self._threads.release())
        return await asyncio.shield(done)


def _tokenizing(request: pb.TokenizeRequest, model: ModelFiles, bounds: Bounds) -> Callable[[], pb.TokenizeResponse]:
    """Check what can be told before a prompt is tokenised; return the rest of the work."""
    form = request.WhichOneof("prompt")
    if form is None:
        raise InvalidArgument("one of text and chat must be set", field_path="prompt")
    if form == "chat":
        if request.HasField("add_special_tokens"):
            message = "must be unset for a conversation: its special tokens are those of the template"
            raise InvalidArgument(message, field_path="add_special_tokens")
        encode = _encoding_chat(request.chat, model, bounds)
    else:
        with _renamed_fields("input."):
            prompt = generation_pb2.GenerationInput(text=request.text)
            check_prompt_form(prompt, bounds, model.tokenizer.max_prompt_bytes(bounds.max_model_len))
        encode = _encoding_text(request, model.tokenizer, bounds)

    def work() -> pb.TokenizeResponse:
        ids = encode()
        check_prompt_length(len(ids), bounds, form)
        tokens = _describe(ids, model.tokenizer) if request.with_tokens else ()
        return pb.TokenizeResponse(ids=ids, tokens=tokens, count=len(ids), max_model_len=bounds.max_model_len)

    return work


def _encoding_text(request: pb.TokenizeRequest, tokenizer: ModelTokenizer, bounds: Bounds) -> Callable[[], list[int]]:
    with_specials = request.add_special_tokens if request.HasField("add_special_tokens") else True

    def encode() -> list[int]:
        refuse_by_beginning(tokenizer, [request.text], bounds.max_model_len, "text")
        return tokenizer.encode_text(request.text, with_specials)

    return encode


def _encoding_chat(chat: generation_pb2.ChatPrompt, model: ModelFiles, bounds: Bounds) -> Callable[[], list[int]]:
    render = _checked_chat(chat, model, bounds)
    return lambda: render().ids


def _detokenizing(
    request: pb.DetokenizeRequest, model: ModelFiles, bounds: Bounds
) -> Callable[[], pb.DetokenizeResponse]:
    num_ids, limit = len(request.ids), bounds.max_model_len
    if num_ids > limit:
        raise ContextLengthExceeded(
            f"{num_ids} ids, limit {limit} (max_model_len)",
            field_path="ids",
            metadata={"tokens": str(num_ids), "max_model_len": str(limit)},
        )
    if num_ids:
        with _renamed_fields("input.token_ids."):
            check_token_ids(request.ids, bounds)
    skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
    return lambda: pb.DetokenizeResponse(text=model.tokenizer.decode(request.ids, skip))


def _rendering(request: pb.RenderChatRequest, model: ModelFiles, bounds: Bounds) -> Callable[[], pb.RenderChatResponse]:
    if not request.HasField("chat"):
        raise InvalidArgument("a conversation is needed", field_path="chat")
    render = _checked_chat(request.chat, model, bounds)

    def work() -> pb.RenderChatResponse:
        rendered = render()
        check_prompt_length(len(rendered.ids), bounds, "chat")
        return pb.RenderChatResponse(text=rendered.text, count=len(rendered.ids), max_model_len=bounds.max_model_len)

    return work


def _checked_chat(chat: generation_pb2.ChatPrompt, model: ModelFiles, bounds: Bounds) -> Callable[[], RenderedChat]:
    """Check a conversation as far as the template need not run; return what gives its text and its ids."""
    with _renamed_fields("input."):
        prompt = generation_pb2.GenerationInput(chat=chat)
        check_prompt_form(prompt, bounds, model.tokenizer.max_prompt_bytes(bounds.max_model_len))
        for path, message in chat_messages(chat):
            check_known(message, path)
        checked = check_chat(chat, model)

    def render() -> RenderedChat:
        with _renamed_fields("input."):
            contents = [message.content for message in chat.messages]
            refuse_by_beginning(model.tokenizer, contents, bounds.max_model_len, "input.chat")
            return render_chat(model, chat, checked)

    return render


def _describe(ids: list[int], tokenizer: ModelTokenizer) -> Iterator[pb.Token]:
    known_tokens: dict[int, pb.Token] = {}
    for token_id in ids:
        token = known_tokens.get(token_id)
        if token is None:
            raw = tokenizer.token_bytes(token_id)
            token = pb.Token(token_id=token_id, text=raw.decode("utf-8", "replace"), raw=raw)
            known_tokens[token_id] = token
        yield token


@contextmanager
def _renamed_fields(prefix: str) -> Iterator[None]:
    """Let errors name fields of this service's requests, where the checks know those of a GenerationInput."""
    try:
        yield
    except InvalidArgument as error:
        error.field_path = error.field_path.removeprefix(prefix)
        raise
