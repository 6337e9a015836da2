"""Cases of bad input that other servers got wrong, through the HTTP door in all its forms, and what logs must not hold.

The ids are those of the project's catalogue of faults (F) and of bugs seen elsewhere (B).
"""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from octavo.frontend.auth import Authenticator
from octavo.wire.requests import CancelRequest, FailureCode, FinishReason, SubmitRequest
from tests.support.frontend_client import read, refusal
from tests.support.http_client import Doors, raw_request, running_doors
from tests.support.scripted_scheduler import ScriptedScheduler
from tests.support.tiny_tokenizers import write_model_folder

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
USER = [{"role": "user", "content": "x"}]


# Written as JSON: what Python would not write is among it. {} stands in the place of the prompt or the messages.
BAD: list[tuple[str, str, str]] = [
    ("F15", '"temperature": -1', "temperature"),
    ("F15 B18", '"temperature": NaN', ""),
    ("F15 B18", '"temperature": Infinity', ""),
    ("F15", '"temperature": "1e309"', "temperature"),
    ("F15", '"temperature": 1e309', "temperature"),
    ("F16 B28", '"top_p": 0', "top_p"),
    ("F16 B28", '"top_p": 0.0', "top_p"),
    ("F16", '"top_p": -0.1', "top_p"),
    ("F16", '"top_p": 1.1', "top_p"),
    ("F16", '"top_p": true', "top_p"),
    ("F16", '"min_p": 1.1', "min_p"),
    ("F16", '"min_p": -1', "min_p"),
    ("F16", '"top_k": -2', "top_k"),
    ("F16", '"top_k": 0.5', "top_k"),
    ("F17", '"n": 0', "n"),
    ("F17", '"n": -1', "n"),
    ("F17", '"n": 1000000000', "n"),
    ("F17", '"n": 1.5', "n"),
    ("F17", '"n": true', "n"),
    ("F19", '"max_tokens": 0', "max_tokens"),
    ("F19", '"max_tokens": -1', "max_tokens"),
    ("F19", '"max_tokens": 2147483648', "max_tokens"),
    ("F19", '"max_tokens": 4294967296', "max_tokens"),
    ("F19", '"max_tokens": 1e3000', "max_tokens"),
    ("F19", '"min_tokens": 300', "min_tokens"),
    ("F20", '"stop": ""', "stop"),
    ("F20", '"stop": ["a", ""]', "stop[1]"),
    ("F20", '"stop": [' + ", ".join(['"a"'] * 10_000) + "]", "stop"),
    ("F20", '"stop": "' + "a" * 2**20 + '"', "stop"),
    ("F20", '"stop": [1]', "stop[0]"),
    ("F21 B21", '"logit_bias": {"305": 1}', "logit_bias[305]"),
    ("F21", '"logit_bias": {"-1": 1}', "logit_bias"),
    ("F21", '"logit_bias": {"x": 1}', "logit_bias"),
    ("F21", '"logit_bias": {"5": 1e9}', "logit_bias[5]"),
    ("F21", '"logit_bias": {"5": NaN}', ""),
    ("F21", '"logit_bias": {' + ", ".join(f'"{i}": 1' for i in range(10_000)) + "}", "logit_bias"),
    ("F21 B22", '"stop_token_ids": [301], "min_tokens": 1', "stop_token_ids[0]"),
    ("F21", '"stop_token_ids": [-1]', "stop_token_ids[0]"),
    ("F23", '"unknown": 1', "unknown"),
    ("F23", '"seed": "x"', "seed"),
    ("F23", '"seed": 18446744073709551616', "seed"),
    ("F23", '"stream": "yes"', "stream"),
    ("F23", '"model": 5', "model"),
    ("F23", '"user": ' + "[" * 100_000, ""),
    ("F23", '"user": ' + "[" * 100_000 + "]" * 100_000, ""),
    ("F23", '"metadata": ' + '{"a": ' * 100_000 + "1" + "}" * 100_000, ""),
]
BAD_PROMPTS: list[tuple[str, str, str]] = [
    ("F12", '""', "prompt"),
    ("F12", "[]", "prompt"),
    ("F12", "[[]]", "prompt[0]"),
    ("F12", '[""]', "prompt[0]"),
    ("F12", "null", "prompt"),
    ("F13 B23", "[-1]", "prompt[0]"),
    ("F13", "[1, 300]", "prompt[1]"),
    ("F13", "[2147483648]", "prompt[0]"),
    ("F13", "[9223372036854775808]", "prompt[0]"),
    ("F13", "[1.5]", "prompt[0]"),
    ("F13", "[true]", "prompt[0]"),
    ("F13", '[1, "a"]', "prompt"),
    ("F13", '[["1"]]', "prompt[0][0]"),
    ("F10", "[" + ", ".join(["5"] * 256) + "]", "prompt"),
    ("F9", "[" + ", ".join(["5"] * 5000) + "]", "prompt"),
    ("F9", '"' + "x" * 3000 + '"', "prompt"),
    ("F14 B12", r'"\ud800"', ""),
    ("F14", r'"\u0000"', "prompt"),
    ("F24 B35", '"' + "x" * 5_000_000 + '"', "prompt"),
    ("F17", "[" + ", ".join(['"x"'] * 200) + "]", "prompt"),
]
BAD_MESSAGES: list[tuple[str, str, str]] = [
    ("F25", "null", "messages"),
    ("F25", "[]", "messages"),
    ("F25", "{}", "messages"),
    ("F25", '[{"content": "x"}]', "messages[0].role"),
    ("F25", '[{"role": "", "content": "x"}]', "messages[0].role"),
    ("F25", '[{"role": "user", "content": null}]', "messages[0].content"),
    ("F25", '[{"role": "user", "content": 5}]', "messages[0].content"),
    ("F14 B12", r'[{"role": "user", "content": "\ud800"}]', ""),
]
LOGPROBS = [("F18", value) for value in ("1000000", "-2", "1.5", '"2"')]


@pytest.mark.parametrize("stream", ["", ', "stream": true'], ids=["whole", "stream"])
@pytest.mark.parametrize("door", ["completions", "chats"])
async def test_bad_requests_are_refused_in_every_form(
    doors: Doors, scheduler: ScriptedScheduler, door: str, stream: str
) -> None:
    """One test for all cases of a form: a service for each of them would take minutes."""
    is_chat = door == "chats"
    path, good = (CHATS, f'"messages": {json.dumps(USER)}') if is_chat else (COMPLETIONS, '"prompt": "x"')
    name, prompts = ("messages", BAD_MESSAGES) if is_chat else ("prompt", BAD_PROMPTS)
    cases = [(case, f"{{{good}, {field}{stream}}}", param) for case, field, param in BAD]
    cases += [(case, f'{{"{name}": {value}{stream}}}', param) for case, value, param in prompts]
    wanted, more = ("top_logprobs", '"logprobs": true, ') if is_chat else ("logprobs", "")
    cases += [(case, f'{{{good}, {more}"{wanted}": {value}{stream}}}', wanted) for case, value in LOGPROBS]
    wrong = []
    for case, body, param in cases:
        response = await doors.http.post(path, content=body.encode(), headers=JSON)
        found = response.json().get("error", {}).get("param") or ""
        is_named = found.startswith(param) if param else not found
        if response.status_code != 400 or not is_named or len(response.content) > 2000:
            wrong.append((case, body[:100], response.text[:200]))
    assert not wrong
    await doors.until_idle()
    assert scheduler.nothing_came()


async def test_lengths_are_told_with_their_true_numbers(doors: Doors) -> None:
    """F9, F10: all numbers; F19: what is left is taken where nothing is said."""
    _, error = await doors.error(COMPLETIONS, prompt=[5] * 250, max_tokens=7)
    assert [number in error["message"] for number in ("250", "7", "256")] == [True] * 3
    _, error = await doors.error(COMPLETIONS, prompt=[5] * 5000)
    assert [number in error["message"] for number in ("5000", "256")] == [True] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_the_longest_prompt_has_room_for_one_token(
    doors: Doors, scheduler: ScriptedScheduler, stream: bool
) -> None:
    """F10."""
    asking = asyncio.ensure_future(
        doors.http.post(COMPLETIONS, json={"prompt": [5] * 255, "max_tokens": 1, "stream": stream})
    )
    request = await scheduler.next(SubmitRequest)
    assert request.max_tokens == 1
    scheduler.answer(request, [[97]], FinishReason.LENGTH)
    response = await asking
    assert '"finish_reason":"length"' in response.text.replace(": ", ":")


@pytest.mark.parametrize(
    ("fields", "name", "meant"),
    [
        ({"prompt": " \n "}, "temperature", 1.0),  # F12: white space is text
        ({"prompt": "x", "temperature": 1e-6}, "temperature", 0.0),  # F15
        ({"prompt": "x", "temperature": 0}, "temperature", 0.0),
        ({"prompt": "x", "top_p": 1e-9}, "top_p", 1e-9),  # F16
        ({"prompt": "x", "top_k": 10**9}, "top_k", 0),
        ({"prompt": "x", "top_k": -1}, "top_k", 0),
        ({"prompt": "x", "top_k": 0}, "top_k", 0),
        ({"prompt": "x", "stop": ["a", "b", "c", "d"]}, "temperature", 1.0),  # F20
        ({"prompt": "x", "stop": []}, "temperature", 1.0),
    ],
)
async def test_what_looks_odd_and_is_good(
    doors: Doors, scheduler: ScriptedScheduler, fields: dict[str, Any], name: str, meant: float
) -> None:
    asking = asyncio.ensure_future(doors.http.post(COMPLETIONS, json=fields))
    request = await scheduler.next(SubmitRequest)
    assert getattr(request.sampling, name) == pytest.approx(meant)
    scheduler.answer(request, [[120]], FinishReason.LENGTH)
    assert (await asking).status_code == 200


async def test_two_requests_without_a_seed_differ(doors: Doors, scheduler: ScriptedScheduler) -> None:
    """B27."""
    seeds = set()
    for fields in ({}, {}, {"seed": 5}, {"seed": 5}):
        asking = asyncio.ensure_future(doors.http.post(COMPLETIONS, json={"prompt": "x", **fields}))
        request = await scheduler.next(SubmitRequest)
        seeds.add(request.sampling.seed)
        scheduler.answer(request, [[120]], FinishReason.LENGTH)
        await asking
    assert len(seeds) == 3


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_connections_that_close_free_what_they_hold(
    doors: Doors, scheduler: ScriptedScheduler, stream: bool, path: str
) -> None:
    """F1, F2, F3, F6, B51: while it waits, after its first token, and all at once."""
    fields: dict[str, Any] = {"prompt": "x"} if path == COMPLETIONS else {"messages": USER}
    for number in range(50):
        _, writer = await asyncio.open_connection("127.0.0.1", doors.port)
        writer.write(raw_request(path, stream=stream, max_tokens=200, **fields))
        request = await scheduler.next(SubmitRequest)
        if number % 2:
            scheduler.start_request(request)
            scheduler.emit(request, [97])
        if number % 3:
            writer.close()
        else:
            writer.transport.abort()
        assert await scheduler.next(CancelRequest) == CancelRequest(request.handle)
    await doors.until_idle()
    assert scheduler.nothing_came()


async def test_conversations_that_a_template_refuses(
    tmp_path: Path, scheduler: ScriptedScheduler, address: str
) -> None:
    """F25, B37: the template's own words, at every door and in every form."""
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('only users speak') }}{% endif %}x"
    async with running_doors(write_model_folder(tmp_path, chat_template=template), address) as doors:
        await scheduler.session_begun()
        await doors.grpc.until_health(serving=True)
        messages = [{"role": "system", "content": "x"}]
        for stream in (False, True):
            status, error = await doors.error(CHATS, messages=messages, stream=stream)
            assert (status, error["param"]) == (400, "messages")
            assert "only users speak" in error["message"]
        for call in (doors.grpc.ask(chat={"messages": messages}), doors.grpc.stream(chat={"messages": messages})):
            assert "only users speak" in (await refusal(call)).message
        both = {"add_generation_prompt": True, "continue_final_message": True}
        assert (await doors.error(CHATS, messages=USER, **both))[0] == 400


SECRET = "the butler did it with 1234567890"
KEY = "sk-a-key-of-many-characters"


async def test_logs_hold_neither_texts_nor_keys(
    tiny_model: Path, scheduler: ScriptedScheduler, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """F61: at the level of debugging, of all loggers, whatever becomes of a request."""
    caplog.set_level(logging.DEBUG)
    for name in ("httpx2", "httpcore2", "openai"):  # the clients' own
        logging.getLogger(name).setLevel(logging.WARNING)
    async with running_doors(tiny_model, address, key=KEY, auth=Authenticator([KEY])) as doors:
        await scheduler.session_begun()
        await doors.grpc.until_health(serving=True)
        allowed, told = {"authorization": f"Bearer {KEY}"}, []
        bodies = [
            (COMPLETIONS, {"prompt": SECRET, "top_p": 3}),
            (COMPLETIONS, {"prompt": SECRET * 200}),
            (COMPLETIONS, {"prompt": SECRET, "stop": ["", SECRET]}),
            (CHATS, {"messages": [{"role": "", "content": SECRET}]}),
            (CHATS, {"messages": [{"role": "user", "content": SECRET}], "n": 0}),
            ("/tokenize", {"prompt": SECRET * 200}),
        ]
        for path, body in bodies:
            for headers in (allowed, {"authorization": f"Bearer {KEY}x"}, {"authorization": KEY}):
                told.append((await doors.http.post(path, json=body, headers=headers)).text)
        told.append((await doors.http.post(COMPLETIONS, content=SECRET.encode(), headers=allowed | JSON)).text)
        metadata = (("authorization", f"Bearer {KEY}"),)
        for fields in ({"text": SECRET, "sampling": {"n": 0}}, {"text": SECRET * 200}, {"text": SECRET + "\0"}):
            told.append((await refusal(doors.grpc.ask(metadata=metadata, **fields))).message)
        told.append((await refusal(doors.grpc.ask(metadata=(("authorization", KEY),), text=SECRET))).message)
        for code in (FailureCode.INTERNAL, FailureCode.QUEUE_FULL):
            asking = asyncio.ensure_future(doors.http.post(COMPLETIONS, json={"prompt": SECRET}, headers=allowed))
            scheduler.fail(await scheduler.next(SubmitRequest), code, "so it is")
            told.append((await asking).text)
        call = doors.grpc.stream(text=SECRET, metadata=metadata)
        scheduler.start_request(await scheduler.next(SubmitRequest))
        await read(call)
        scheduler.vanish()
    assert caplog.records
    for secret in (SECRET, KEY, "butler", KEY[3:]):
        assert secret not in caplog.text
        assert not [text for text in told if secret in text]
