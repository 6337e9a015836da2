"""The routes that generate nothing: models, tokens, version."""

import time
from importlib.metadata import version

import msgspec

from octavo.frontend.calls import Calls
from octavo.frontend.errors import InvalidArgument, ModelNotFound
from octavo.frontend.openai.call import HttpCall
from octavo.frontend.openai.errors import bad_field, to_http
from octavo.frontend.openai.schema import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from octavo.frontend.openai.translate import chat_prompt, json_rest
from octavo.frontend.tokenizer_service import TokenizerServicer
from octavo.v1 import tokenizer_pb2 as pb

_TOKENIZE_TEXTS = msgspec.json.Decoder(TokenizeTextBody)
_TOKENIZE_CHATS = msgspec.json.Decoder(TokenizeChatBody)
_FORMS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)


class Endpoints:
    """Answers from what the frontend knows.

    Args:
        calls: names and limits, and whether requests are taken.
        tokenizer: tokenises for both doors.
    """

    def __init__(self, calls: Calls, tokenizer: TokenizerServicer) -> None:
        self._calls = calls
        self._tokenizer = tokenizer
        self._created = int(time.time())

    async def version(self, call: HttpCall) -> None:
        """GET /version."""
        await call.reply(msgspec.json.encode({"version": version("octavo")}))

    async def models(self, call: HttpCall) -> None:
        """GET /v1/models."""
        data = [self._describe(name) for name in self._calls.config.served_model_names]
        await call.reply(msgspec.json.encode({"object": "list", "data": data}))

    async def model(self, call: HttpCall) -> None:
        """GET /v1/models/{id}."""
        name = call.path_params["model"]
        if not name:
            raise ModelNotFound("a model's name is missing", model="")
        self._calls.check_model(name)
        await call.reply(msgspec.json.encode(self._describe(name)))

    async def tokenize(self, call: HttpCall) -> None:
        """POST /tokenize."""
        request = await call.read_as(_tokenize_request)
        try:
            found = await self._tokenizer.tokens_of(request)
        except InvalidArgument as error:
            raise to_http(error, _param(error)) from None
        strings = [token.text for token in found.tokens] if request.with_tokens else None
        answer = {
            "count": found.count,
            "max_model_len": found.max_model_len,
            "tokens": list(found.ids),
            "token_strs": strings,
        }
        await call.reply(msgspec.json.encode(answer))

    async def detokenize(self, call: HttpCall) -> None:
        """POST /detokenize."""
        body = await call.read(_DETOKENIZE)
        request = pb.DetokenizeRequest(model=body.model or "", ids=body.tokens, skip_special_tokens=False)
        try:
            found = await self._tokenizer.text_of(request)
        except InvalidArgument as error:
            raise to_http(error, _param(error)) from None
        await call.reply(msgspec.json.encode({"prompt": found.text}))

    def _describe(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "octavo",
            "root": self._calls.config.served_model_names[0],
            "max_model_len": self._calls.max_model_len,
        }


def _tokenize_request(raw: bytes) -> pb.TokenizeRequest:
    return _chat_request(raw) if "messages" in _FORMS.decode(raw) else _text_request(raw)


def _text_request(raw: bytes) -> pb.TokenizeRequest:
    body = _TOKENIZE_TEXTS.decode(raw)
    return pb.TokenizeRequest(
        model=body.model or "",
        text=body.prompt,
        add_special_tokens=body.add_special_tokens,
        with_tokens=bool(body.return_token_strs),
    )


def _chat_request(raw: bytes) -> pb.TokenizeRequest:
    body = _TOKENIZE_CHATS.decode(raw)
    if body.add_special_tokens:
        raise bad_field("add_special_tokens", "a conversation's special tokens are those of its template")
    return pb.TokenizeRequest(model=body.model or "", chat=chat_prompt(body), with_tokens=bool(body.return_token_strs))


_PARAMS = {"text": "prompt", "ids": "tokens", "chat": "messages", "chat.template_kwargs_json": "chat_template_kwargs"}


def _param(error: InvalidArgument) -> str | None:
    """Return the JSON name of a field of the tokenizer's requests."""
    path = error.field_path
    if path in _PARAMS:
        return _PARAMS[path]
    name, bracket, rest = path.partition("[")
    name = _PARAMS.get(name, name.removeprefix("chat."))
    return (name + json_rest(name, bracket + rest)) or None
