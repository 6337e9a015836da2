"""Texts that are none, through every door: refused with the field's name, before anything is asked of the scheduler."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx2
import pytest

from octavo.v1 import tokenizer_pb2
from tests.support.frontend_client import WAIT_S, parse, refusal
from tests.support.http_client import Doors
from tests.support.scripted_scheduler import ScriptedScheduler

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture(autouse=True)
async def nothing_reaches_the_scheduler(doors: Doors, scheduler: ScriptedScheduler) -> AsyncIterator[None]:
    yield
    await doors.until_idle()
    assert scheduler.nothing_came()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "a\0"}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "\0b"]}, "prompt[1]"),
        (CHATS, {"messages": [{"role": "user", "content": "a\0b"}]}, "messages[0].content"),
        (CHATS, {"messages": [{"role": "us\0er", "content": "a"}]}, "messages[0].role"),
        (CHATS, {"messages": [{"role": "user", "content": "a", "name": "\0"}]}, "messages[0].name"),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "text", "text": "\0"}]}]}, "messages[0].content"),
        ("/tokenize", {"prompt": "\0"}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "\0"}]}, "messages[0].content"),
        (CHATS, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (CHATS, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHATS, {"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ("/tokenize", {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        *(
            (CHATS, {"messages": [{"role": "user", "content": [{"type": "text"} | part]}]}, "messages[0].content[0]")
            for part in (
                {"text": "a", "image_url": {"url": "http://127.0.0.1/x.png"}},
                {"text": "a", "input_audio": {"data": ""}},
                {"text": "a", "file": {"file_id": "x"}},
                {"text": "a", "refusal": "no"},
                {"text": None},
            )
        ),
        (COMPLETIONS, {"prompt": "x", "best_of": 0}, "best_of"),
        (COMPLETIONS, {"prompt": "x", "best_of": 3}, "best_of"),
    ],
)
async def test_what_is_no_text_is_refused_over_http(doors: Doors, path: str, body: dict[str, Any], param: str) -> None:
    for fields in (body, {**body, "stream": True}) if path != "/tokenize" else (body,):
        status, error = await doors.error(path, **fields)
        assert (status, error["param"], error["code"]) == (400, param, "invalid_argument")
        assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize("method", ["ask", "stream"])
@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"text": "a\0"}, "input.text"),
        ({"chat": {"messages": [{"role": "user", "content": "\0"}]}}, "input.chat.messages[0].content"),
        ({"chat": {"messages": [{"role": "\0", "content": "a"}]}}, "input.chat.messages[0].role"),
    ],
)
async def test_nul_is_refused_over_grpc(doors: Doors, method: str, fields: dict[str, Any], path: str) -> None:
    found = await refusal(getattr(doors.grpc, method)(**fields))
    assert (found.code, found.field) == (grpc.StatusCode.INVALID_ARGUMENT, path)
    assert "NUL" in found.message


@pytest.mark.parametrize(("name", "kind"), [("Tokenize", "TokenizeRequest"), ("RenderChat", "RenderChatRequest")])
async def test_nul_is_refused_by_the_tokenizer(doors: Doors, name: str, kind: str) -> None:
    request = getattr(tokenizer_pb2, kind)(chat=parse(chat={"messages": [{"role": "u", "content": "\0"}]}).chat)
    method = doors.grpc.channel.unary_unary(f"/octavo.v1.TokenizerService/{name}", None, None)
    found = await refusal(method(request.SerializeToString(), timeout=WAIT_S))
    assert (found.code, found.field) == (grpc.StatusCode.INVALID_ARGUMENT, "chat.messages[0].content")


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',  # half a surrogate pair, as three bytes
        b'{"prompt": "\xc0\x80"}',  # NUL, longer than it may be
        b'{"\xff": 1}',
        b'{"\\ud800": 1, "prompt": "x"}',
        b'{"prompt": "x", "user": {"\\ud800": "\\udc00"}, "\\udc00": 1}',
        b'{"prompt": "x", "logit_bias": {"\\ud800": 1}}',
    ],
)
async def test_bytes_that_are_no_utf_8_are_refused(doors: Doors, body: bytes) -> None:
    for path in (COMPLETIONS, CHATS, "/tokenize", "/detokenize"):
        _is_told(await doors.http.post(path, content=body, headers=JSON), 400)


async def test_the_name_of_an_unknown_field_is_not_repeated_whole(doors: Doors) -> None:
    for name in ("x" * 50_000, "é" * 50_000, "`$." * 1000):
        status, error = await doors.error(COMPLETIONS, prompt="x", **{name: 1})
        assert status == 400
        assert len(error["param"].encode()) <= 200
        assert len(error["message"].encode()) <= 1000


async def test_no_header_lets_other_origins_in(doors: Doors) -> None:
    asking = {"origin": "https://elsewhere.example", "access-control-request-method": "POST"}
    for method, path in (("OPTIONS", CHATS), ("GET", "/v1/models"), ("GET", "/health")):
        response = await doors.http.request(method, path, headers=asking)
        assert not [name for name in response.headers if name.startswith("access-control-")]


def _is_told(response: httpx2.Response, status: int) -> None:
    assert response.status_code == status, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
