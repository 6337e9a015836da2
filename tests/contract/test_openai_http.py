"""The HTTP door itself: routes that generate nothing, refusals, keys, bounds on what clients send."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from octavo.frontend import http_protocol
from octavo.frontend.auth import Authenticator
from octavo.frontend.config import FrontendConfig
from octavo.frontend.listeners import CannotListen
from octavo.frontend.openai import call as call_module
from octavo.frontend.server import Frontend
from octavo.frontend.tls import TlsFiles
from octavo.wire.requests import CancelRequest, FailureCode, FinishReason, SubmitRequest
from tests.support.certificates import make_authority
from tests.support.frontend_client import WAIT_S
from tests.support.http_client import Doors, raw_request, running_doors
from tests.support.scripted_scheduler import ScriptedScheduler

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
KEY = "a-key-of-many-characters"

TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture
async def doors(tiny_model: Path, scheduler: ScriptedScheduler, address: str) -> AsyncIterator[Doors]:
    async with running_doors(tiny_model, address, max_message_bytes=100_000) as running:
        await scheduler.session_begun()
        await running.grpc.until_health(serving=True)
        yield running


async def test_models(doors: Doors) -> None:
    found = (await doors.openai.models.list()).data
    assert [(model.id, model.object, model.owned_by) for model in found] == [
        ("tiny", "model", "octavo"),
        ("alias", "model", "octavo"),
    ]
    one = await doors.openai.models.retrieve("alias")
    assert (one.id, one.model_extra) == ("alias", {"root": "tiny", "max_model_len": 256})
    with pytest.raises(openai.NotFoundError) as raised:
        await doors.openai.models.retrieve("owner/other")
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


async def test_health_ready_and_version(tiny_model: Path, scheduler: ScriptedScheduler, address: str) -> None:
    facts, scheduler.facts = scheduler.facts, None
    async with running_doors(tiny_model, address) as doors:
        assert (await doors.http.get("/health")).status_code == 200
        response = await doors.http.get("/ready")
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        status, error = await doors.error(COMPLETIONS, prompt="x")
        assert (status, error["code"]) == (503, "unavailable")
        assert (await doors.http.get("/v1/models/tiny")).json()["max_model_len"] is None
        scheduler.facts = facts
        await doors.grpc.until_health(serving=True)
        assert (await doors.http.get("/ready")).status_code == 200
        assert set((await doors.http.get("/version")).json()) == {"version"}


async def test_tokens_and_back(doors: Doors) -> None:
    found = (await doors.http.post("/tokenize", json={"prompt": "hello", "return_token_strs": True})).json()
    assert found == {"count": 3, "max_model_len": 256, "tokens": [259, 260, 111], "token_strs": ["he", "ll", "o"]}
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    chat = (await doors.http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False})).json()
    assert (chat["count"], chat["token_strs"]) == (len(chat["tokens"]), None)
    whole = await doors.http.post("/detokenize", json={"tokens": chat["tokens"]})
    assert whole.json() == {"prompt": "<|start|>user\nhi<|end|>\n"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x" * 300}, "prompt"),
        ("/tokenize", {"prompt": "x", "foo": 1}, "foo"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"x": 1}},
            "chat_template_kwargs",
        ),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}, "tools"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ("/detokenize", {"tokens": [1, 300]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1] * 300}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ],
)
async def test_bad_texts_and_tokens_are_refused(doors: Doors, path: str, body: dict[str, Any], param: str) -> None:
    status, error = await doors.error(path, **body)
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (COMPLETIONS, {"prompt": "x", "top_p": 3}, "top_p", "invalid_argument"),
        (COMPLETIONS, {"prompt": "x", "n": 129}, "n", "invalid_argument"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens", "invalid_argument"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 256}, "max_tokens", "context_length_exceeded"),
        (COMPLETIONS, {"prompt": "x" * 256}, "prompt", "context_length_exceeded"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "invalid_argument"),
        (COMPLETIONS, {"prompt": [5, 300]}, "prompt[1]", "invalid_argument"),
        (COMPLETIONS, {"prompt": "x", "stop": ["a", ""]}, "stop[1]", "invalid_argument"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"300": 1}}, "logit_bias[300]", "invalid_argument"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs", "invalid_argument"),
        (COMPLETIONS, {"prompt": "x", "priority": 1}, "priority", "invalid_argument"),
        (COMPLETIONS, {"prompt": "x", "temperature": 1e300}, "temperature", "invalid_argument"),
        (COMPLETIONS, {"prompt": "x", "stream_options": {}}, "stream_options", "invalid_argument"),
        (COMPLETIONS, {"prompt": "x", "messages": []}, "messages", "invalid_argument"),
        (COMPLETIONS, {"prompt": "x", "best_of": 3}, "best_of", "invalid_argument"),
        (CHATS, {"messages": []}, "messages", "invalid_argument"),
        (
            CHATS,
            {"messages": [{"role": "u", "content": "x"}], "logprobs": True, "top_logprobs": 21},
            "top_logprobs",
            "invalid_argument",
        ),
        (
            CHATS,
            {"messages": [{"role": "u", "content": "x"}], "max_completion_tokens": 300},
            "max_completion_tokens",
            "context_length_exceeded",
        ),
        (
            CHATS,
            {"messages": [{"role": "u", "content": "x"}], "chat_template_kwargs": {"a": 1}},
            "chat_template_kwargs",
            "invalid_argument",
        ),
        (
            CHATS,
            {"messages": [{"role": "u", "content": "x"}], "tools": [TOOL]},
            "tools",
            "invalid_argument",
        ),
        (
            CHATS,
            {"messages": [{"role": "u", "content": "x"}], "chat_template": "{{ x }}"},
            "chat_template",
            "invalid_argument",
        ),
    ],
)
async def test_bad_requests_name_the_field(
    doors: Doors, scheduler: ScriptedScheduler, path: str, body: dict[str, Any], param: str, code: str
) -> None:
    status, error = await doors.error(path, **body)
    assert (status, error["param"], error["code"]) == (400, param, code)
    assert error["message"].startswith(f"{param}: ")
    await doors.until_idle()
    assert scheduler.nothing_came()


async def test_openai_python_raises_its_own_errors(doors: Doors, scheduler: ScriptedScheduler) -> None:
    create = doors.openai.completions.create
    with pytest.raises(openai.NotFoundError) as unknown:
        await create(model="other", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await create(model="tiny", prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    asking = asyncio.ensure_future(create(model="tiny", prompt="x"))
    scheduler.fail(await scheduler.next(SubmitRequest), FailureCode.CALLER_LIMIT, "enough", 1.5)
    with pytest.raises(openai.RateLimitError) as limited:
        await asking
    assert limited.value.response.headers["retry-after"] == "2"
    asking = asyncio.ensure_future(create(model="tiny", prompt="x"))
    scheduler.fail(await scheduler.next(SubmitRequest), FailureCode.INTERNAL, "non-finite logits")
    with pytest.raises(openai.InternalServerError, match="non-finite logits"):
        await asking


@pytest.mark.parametrize("given_id", ["abc-1", None, "two words"])
async def test_request_ids_are_echoed_or_made(doors: Doors, scheduler: ScriptedScheduler, given_id: str | None) -> None:
    headers = {"x-request-id": given_id} if given_id else {}
    asking = asyncio.ensure_future(doors.http.post(COMPLETIONS, json={"prompt": "x"}, headers=headers))
    scheduler.answer(await scheduler.next(SubmitRequest), [[97]], FinishReason.LENGTH)
    response = await asking
    request_id = response.headers["x-request-id"]
    assert (request_id == given_id) == (given_id == "abc-1")
    assert response.json()["id"] == f"cmpl-{request_id}"
    assert "x-request-id" in (await doors.http.get("/nowhere")).headers


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("POST", "/v1/models", 405), ("GET", COMPLETIONS, 405), ("GET", "/v1/models/", 404)],
)
async def test_what_is_not_there_is_told_in_openais_shape(doors: Doors, method: str, path: str, status: int) -> None:
    response = await doors.http.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_handler_that_breaks_tells_the_log_alone(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("secret detail")

    monkeypatch.setattr("octavo.frontend.calls.check_params", broken)
    status, error = await doors.error(COMPLETIONS, prompt="x")
    assert (status, error["code"], error["type"]) == (500, "internal", "server_error")
    assert "secret" not in error["message"]
    await doors.until_idle()


async def test_bodies_are_bounded(doors: Doors) -> None:
    data = json.dumps({"prompt": "x" * 100_000}).encode()
    headers = {"content-type": "application/json"}
    response = await doors.http.post(COMPLETIONS, content=data, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")

    async def pieces() -> AsyncIterator[bytes]:  # without a length that would tell beforehand
        for start in range(0, len(data), 20_000):
            yield data[start : start + 20_000]

    response = await doors.http.post(COMPLETIONS, content=pieces(), headers=headers)
    assert response.status_code == 413
    assert (await doors.error(COMPLETIONS, prompt="x" * 90_000))[0] == 400


@pytest.mark.parametrize(
    ("headers", "data", "status"),
    [
        ({"content-type": "text/plain"}, b'{"prompt": "x"}', 415),
        ({"content-type": "application/x-www-form-urlencoded"}, b'{"prompt": "x"}', 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, b"\x1f\x8b", 415),
        ({"content-type": "application/json; charset=utf-8"}, b"{", 400),
        ({}, b"", 400),
    ],
)
async def test_bodies_that_are_no_json_are_refused(
    doors: Doors, headers: dict[str, str], data: bytes, status: int
) -> None:
    response = await doors.http.post(COMPLETIONS, content=data, headers=headers)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_a_body_that_does_not_come_is_given_up(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_module, "BODY_TIMEOUT_S", 0.05)
    assert b" 408 " in await _say(doors, raw_request(COMPLETIONS, prompt="x")[:-3])


async def test_headers_that_do_not_come_are_given_up(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_S", 0.05)
    assert await _say(doors, b"") == b""
    assert await _say(doors, b"GET /health HTTP/1.1\r\nx: y") == b""
    first = await _say(doors, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /hea")
    assert first.count(b"HTTP/1.1 200") == 1


async def test_headers_are_bounded(doors: Doors) -> None:
    assert b" 431 " in await _say(doors, b"GET /health HTTP/1.1\r\nx: " + b"y" * 400_000)
    assert b" 431 " in await _say(doors, b"GET /" + b"y" * 400_000)


async def test_trailers_are_bounded_and_dropped(doors: Doors) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    assert b"HTTP/1.1 200" not in await _say(doors, head + b"0\r\n" + b"a: b\r\n" * 100_000)
    assert b"HTTP/1.1 200" not in await _say(doors, head + b"0\r\na: " + b"b" * 400_000)
    assert (await doors.http.get("/health")).status_code == 200


async def test_a_client_that_pipelines_and_goes_away_cancels_its_request(
    doors: Doors, scheduler: ScriptedScheduler
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", doors.port)
    writer.write(raw_request(COMPLETIONS, prompt="x", max_tokens=5) + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    request = await scheduler.next_submit()
    writer.close()
    assert await scheduler.next(CancelRequest) == CancelRequest(request.handle)


async def test_what_is_pipelined_behind_a_running_request_is_not_answered(
    doors: Doors, scheduler: ScriptedScheduler
) -> None:
    pipelined = raw_request(COMPLETIONS, prompt="x", max_tokens=1) + raw_request("/v1/nothing", a="b")
    answer = asyncio.ensure_future(_say(doors, pipelined))
    request = await scheduler.next_submit()
    scheduler.start_request(request)
    scheduler.answer(request, [[5]], FinishReason.LENGTH)
    found = await answer  # the connection ends with the first answer
    assert found.count(b"HTTP/1.1") == 1
    assert b"HTTP/1.1 200" in found


@pytest.mark.parametrize("prompts", [1, 5000])
async def test_no_choices_are_refused_however_many_prompts_there_are(doors: Doors, prompts: int) -> None:
    status, error = await doors.error(COMPLETIONS, prompt=["x"] * prompts, n=0)
    assert (status, error["param"]) == (400, "n")


async def _say(doors: Doors, data: bytes) -> bytes:
    """Send something and nothing more; return all that is answered until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", doors.port)
    found = b""
    try:
        writer.write(data)
        async with asyncio.timeout(WAIT_S):
            while piece := await reader.read(65536):
                found += piece
    except ConnectionResetError:  # it closed with something of ours unread
        pass
    finally:
        writer.close()
    return found


async def test_keys_open_all_but_health(tiny_model: Path, scheduler: ScriptedScheduler, address: str) -> None:
    async with running_doors(tiny_model, address, key=KEY, auth=Authenticator([KEY])) as doors:
        await scheduler.session_begun()
        await doors.grpc.until_health(serving=True)
        assert (await doors.http.get("/health")).status_code == 200
        assert (await doors.http.get("/ready")).status_code == 200
        calls = [("GET", "/v1/models"), ("GET", "/version"), ("POST", COMPLETIONS), ("POST", "/tokenize")]
        for method, path in calls:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY}):
                response = await doors.http.request(method, path, headers=headers)
                assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
                assert response.json()["error"]["code"] == "invalid_api_key"
        asking = asyncio.ensure_future(doors.openai.completions.create(model="tiny", prompt="x"))
        request = await scheduler.next(SubmitRequest)
        assert request.caller.startswith("key:")
        scheduler.answer(request, [[97]], FinishReason.LENGTH)
        assert (await asking).choices[0].text == "a"


@pytest.mark.parametrize("mutual", [False, True])
async def test_tls(tiny_model: Path, address: str, tmp_path: Path, mutual: bool) -> None:
    authority = make_authority(tmp_path, "authority")
    tls = TlsFiles(*authority.issue("server"), ca_certs=authority.certificate if mutual else None)
    config = FrontendConfig(tiny_model, ("tiny",), address, grpc_port=0, http_port=0, tls=tls)
    frontend = Frontend(config)
    await frontend.start()
    try:
        trusting = ssl.create_default_context(cafile=authority.certificate)
        known = ssl.create_default_context(cafile=authority.certificate)
        known.load_cert_chain(*authority.issue("client"))
        for context, is_let_in in [(known, True), (trusting, not mutual), (ssl.create_default_context(), False)]:
            async with httpx2.AsyncClient(verify=context, timeout=WAIT_S) as http:
                try:
                    found = (await http.get(f"https://127.0.0.1:{frontend.http_port}/health")).status_code
                except httpx2.TransportError:
                    found = None
                assert found == (200 if is_let_in else None)
    finally:
        await frontend.stop()


async def test_a_taken_port_is_told(doors: Doors, tiny_model: Path, address: str) -> None:
    frontend = Frontend(FrontendConfig(tiny_model, ("tiny",), address, grpc_port=0, http_port=doors.port))
    try:
        with pytest.raises(CannotListen, match=rf"{doors.port} \(HTTP\)"):
            await frontend.start()
    finally:
        await frontend.stop()


@pytest.mark.parametrize("escape", [r"\ud800", r"\udc00"])
async def test_half_a_surrogate_pair_is_no_text(doors: Doors, escape: str) -> None:
    for path, body in [
        (COMPLETIONS, '{"prompt": "%s"}'),
        (COMPLETIONS, '{"prompt": "x", "stop": "%s"}'),
        (CHATS, '{"messages": [{"role": "user", "content": "%s"}]}'),
        ("/tokenize", '{"prompt": "%s"}'),
    ]:
        data = (body % escape).encode()
        response = await doors.http.post(path, content=data, headers={"content-type": "application/json"})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
