"""Completions and chats over HTTP, as openai-python and plain clients see them; the scheduler says what the test says."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo.wire.columns import unpack_ints
from octavo.wire.requests import CancelRequest, FailureCode, FinishReason, SubmitRequest
from tests.support.frontend_client import WAIT_S
from tests.support.http_client import Doors, Events, raw_request, read_events, running_doors
from tests.support.scripted_scheduler import ScriptedScheduler

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
EOS = 256
HELLO: Any = [{"role": "user", "content": "hello"}]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


async def test_a_completion(doors: Doors, scheduler: ScriptedScheduler) -> None:
    asking = asyncio.ensure_future(doors.openai.completions.create(model="alias", prompt="xyz"))
    request = await scheduler.next(SubmitRequest)
    assert list(unpack_ints(request.prompt_ids)) == list(b"xyz")
    assert request.max_tokens == 16, "OpenAI's default"
    assert request.caller == "ipv4:127.0.0.1", "the same caller as through gRPC"
    scheduler.start_request(request, num_cached_tokens=2)
    scheduler.emit(request, [*b"you!", EOS], finish=STOP)
    found = await asking
    assert (found.object, found.model) == ("text_completion", "tiny")
    (choice,) = found.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, "you!", "stop")
    assert choice.logprobs is None
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (3, 5, 8)
    assert found.usage.prompt_tokens_details is not None
    assert found.usage.prompt_tokens_details.cached_tokens == 2
    await doors.until_idle()


async def test_a_chat(doors: Doors, scheduler: ScriptedScheduler) -> None:
    asking = asyncio.ensure_future(doors.openai.chat.completions.create(model="tiny", messages=HELLO, n=2))
    request = await scheduler.next(SubmitRequest)
    assert request.max_tokens == 256 - len(unpack_ints(request.prompt_ids)), "the remaining context"
    scheduler.answer(request, [[*b"you", EOS], list(b"who")], LENGTH)
    found = await asking
    assert found.object == "chat.completion"
    assert [(c.index, c.message.role, c.message.content, c.finish_reason) for c in found.choices] == [
        (0, "assistant", "you", "length"),
        (1, "assistant", "who", "length"),
    ]
    assert found.usage is not None
    assert found.usage.completion_tokens == 7


async def test_a_chat_streams(doors: Doors, scheduler: ScriptedScheduler) -> None:
    asking = asyncio.ensure_future(
        read_events(doors.http, CHATS, messages=HELLO, stream_options={"include_usage": True})
    )
    scheduler.answer(await scheduler.next(SubmitRequest), [[*b"hey", EOS]], STOP)
    events = await asking
    assert events.done
    first, *middle, end, usage = events.chunks
    assert first["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
    ]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle) == "hey"
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "stop")
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in (first, *middle, end))
    assert {chunk["object"] for chunk in events.chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"]) for chunk in events.chunks}) == 1
    await doors.until_idle()


async def test_without_include_usage_a_stream_says_nothing_of_it(doors: Doors, scheduler: ScriptedScheduler) -> None:
    asking = asyncio.ensure_future(read_events(doors.http, COMPLETIONS, prompt="x"))
    scheduler.answer(await scheduler.next(SubmitRequest), [list(b"ab")], LENGTH)
    events = await asking
    assert events.done
    assert not any("usage" in chunk for chunk in events.chunks)


async def test_one_event_carries_all_that_is_queued(doors: Doors, scheduler: ScriptedScheduler) -> None:
    asking = asyncio.ensure_future(read_events(doors.http, COMPLETIONS, prompt="x", n=2, return_token_ids=True))
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    scheduler.emit(request, list(range(97, 107)), finish=LENGTH)
    scheduler.emit(request, list(range(97, 100)), choice=1, finish=LENGTH)
    events = await asking
    choices = [chunk["choices"][0] for chunk in events.chunks if "prompt_token_ids" not in chunk["choices"][0]]
    assert [c["token_ids"] for c in choices if c["index"] == 0 and not c["finish_reason"]] == [list(range(97, 107))]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length", "length"]
    prompts = [c["prompt_token_ids"] for chunk in events.chunks for c in chunk["choices"] if "prompt_token_ids" in c]
    assert prompts == [[ord("x")]] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_lists_of_prompts(doors: Doors, scheduler: ScriptedScheduler, stream: bool) -> None:
    async def ask() -> dict[int, str]:
        body: dict[str, Any] = {"prompt": ["a", "b", "c"], "n": 2}
        if stream:
            events = await read_events(doors.http, COMPLETIONS, **body)
            texts: dict[int, str] = {}
            for chunk in events.chunks:
                for choice in chunk["choices"]:
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            return texts
        response = (await doors.http.post(COMPLETIONS, json=body)).json()
        assert response["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 12,
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        return {choice["index"]: choice["text"] for choice in response["choices"]}

    asking = asyncio.ensure_future(ask())
    requests = [await scheduler.next(SubmitRequest) for _ in range(3)]
    for request in reversed(requests):
        (prompt_id,) = unpack_ints(request.prompt_ids)
        scheduler.answer(request, [[prompt_id, 48], [prompt_id, 49]], LENGTH)
    assert await asking == {0: "a0", 1: "a1", 2: "b0", 3: "b1", 4: "c0", 5: "c1"}
    await doors.until_idle()


async def test_prompts_of_ids(doors: Doors, scheduler: ScriptedScheduler) -> None:
    cases: list[tuple[Any, list[list[int]]]] = [([97, 98], [[97, 98]]), ([[97], [98, 99]], [[97], [98, 99]])]
    for prompt, expected in cases:
        asking = asyncio.ensure_future(doors.openai.completions.create(model="tiny", prompt=prompt))
        for ids in expected:
            request = await scheduler.next(SubmitRequest)
            assert list(unpack_ints(request.prompt_ids)) == ids
            scheduler.answer(request, [list(b"k")], LENGTH)
        assert [choice.text for choice in (await asking).choices] == ["k"] * len(expected)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_fails_ends_the_others(doors: Doors, scheduler: ScriptedScheduler, stream: bool) -> None:
    asking = asyncio.ensure_future(
        doors.http.post(COMPLETIONS, json={"prompt": ["a", "b"], "stream": stream}, timeout=WAIT_S)
    )
    first, second = [await scheduler.next(SubmitRequest) for _ in range(2)]
    scheduler.fail(first, FailureCode.QUEUE_FULL, "full", 2.5)
    response = await asking
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.json()["error"]["code"] == "queue_full"
    assert await scheduler.next(CancelRequest) == CancelRequest(second.handle)
    await doors.until_idle()


async def test_a_list_is_checked_whole_before_any_of_it_begins(doors: Doors, scheduler: ScriptedScheduler) -> None:
    status, error = await doors.error(COMPLETIONS, prompt=["a", "b", ""])
    assert (status, error["param"]) == (400, "prompt[2]")
    status, error = await doors.error(COMPLETIONS, prompt=[[97], [98, 999]])
    assert (status, error["param"]) == (400, "prompt[1][1]")
    status, error = await doors.error(COMPLETIONS, prompt=["a"] * 65, n=2)
    assert (status, error["param"]) == (400, "prompt")
    assert "130 choices, limit 128" in error["message"]
    await doors.until_idle()
    assert scheduler.nothing_came()


async def test_logprobs_of_a_chat(doors: Doors, scheduler: ScriptedScheduler) -> None:
    asking = asyncio.ensure_future(
        doors.openai.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=2)
    )
    request = await scheduler.next(SubmitRequest)
    assert request.sampling.logprobs == 2
    scheduler.start_request(request)
    scheduler.emit(request, [0x61, 0xE2], with_logprobs=2, finish=LENGTH)
    found = (await asking).choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert [(entry.token, entry.bytes, entry.logprob) for entry in found.content] == [
        ("a", [0x61], -0.5),
        ("\ufffd", [0xE2], -0.5),
    ]
    assert [(top.token, top.bytes, top.logprob) for top in found.content[0].top_logprobs] == [
        ("\x00", [0], -1.0),
        ("\x01", [1], -1.0),
    ]


async def test_logprobs_of_a_completion(doors: Doors, scheduler: ScriptedScheduler) -> None:
    async def stream() -> Events:
        return await read_events(doors.http, COMPLETIONS, prompt="x", logprobs=1)

    async def whole() -> Events:
        response = await doors.http.post(COMPLETIONS, json={"prompt": "x", "logprobs": 1})
        return Events([response.json()])

    for ask in (stream, whole):
        asking = asyncio.ensure_future(ask())
        request = await scheduler.next(SubmitRequest)
        scheduler.start_request(request)
        scheduler.emit(request, [0x61, 0xE2], with_logprobs=1)
        scheduler.emit(request, [0x62], position=2, with_logprobs=1, finish=LENGTH)
        columns = [chunk["choices"][0]["logprobs"] for chunk in (await asking).chunks]
        found = {name: [entry for c in columns if c for entry in c[name]] for name in columns[0]}
        assert found["tokens"] == ["a", "bytes:\\xe2", "b"]
        assert found["token_logprobs"] == [-0.5] * 3
        assert found["text_offset"] == [0, 1, 2]
        assert found["top_logprobs"] == [{"\x00": -1.0, token: -0.5} for token in found["tokens"]]


async def test_stop_strings_and_stop_ids_are_told(doors: Doors, scheduler: ScriptedScheduler) -> None:
    stops: list[tuple[dict[str, Any], str | int]] = [({"stop": "lo"}, "lo"), ({"stop_token_ids": [ord("o")]}, ord("o"))]
    for stop, reason in stops:
        asking = asyncio.ensure_future(doors.http.post(COMPLETIONS, json={"prompt": "x", **stop}))
        request = await scheduler.next_submit()
        scheduler.start_request(request)
        scheduler.emit(request, list(b"hello"), finish=STOP)
        (choice,) = (await asking).json()["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
            "hel" if reason == "lo" else "hell",
            "stop",
            reason,
        )


async def test_every_parameter_reaches_the_scheduler(doors: Doors, scheduler: ScriptedScheduler) -> None:
    body = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "seed": -1,
        "logit_bias": {"5": -100},
        "allowed_token_ids": [5, 6],
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "user": "somebody",
        "metadata": {"a": [1]},
        "store": False,
        "stream_options": None,
    }
    asking = asyncio.ensure_future(doors.http.post(COMPLETIONS, json={"prompt": "x", **body}))
    request = await scheduler.next(SubmitRequest)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 7, 0.125)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
    assert (sampling.seed, sampling.min_tokens, request.max_tokens) == (2**64 - 1, 2, 9)
    assert list(unpack_ints(sampling.logit_bias_ids)) == [5]
    assert list(unpack_ints(sampling.allowed_token_ids)) == [5, 6]
    assert list(unpack_ints(request.stop_token_ids)) == []
    scheduler.answer(request, [[5, 6]], LENGTH)
    assert (await asking).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("started", [False, True])
async def test_a_client_that_goes_away_ends_its_request(
    doors: Doors, scheduler: ScriptedScheduler, stream: bool, started: bool
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", doors.port)
    writer.write(raw_request(COMPLETIONS, prompt="x", stream=stream))
    request = await scheduler.next(SubmitRequest)
    if started:
        scheduler.start_request(request)
        scheduler.emit(request, list(b"he"))
    writer.close()
    assert await scheduler.next(CancelRequest) == CancelRequest(request.handle)
    await doors.until_idle()
    assert scheduler.nothing_came()


async def test_openai_python_may_leave_a_stream(doors: Doors, scheduler: ScriptedScheduler) -> None:
    asking = asyncio.ensure_future(doors.openai.completions.create(model="tiny", prompt="x", stream=True))
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    scheduler.emit(request, list(b"he"))
    async with await asking as stream:
        assert (await anext(aiter(stream))).choices[0].text
    assert await scheduler.next(CancelRequest) == CancelRequest(request.handle)
    await doors.until_idle()


async def test_an_error_in_a_stream_is_its_last_event(doors: Doors, scheduler: ScriptedScheduler) -> None:
    asking = asyncio.ensure_future(doors.openai.completions.create(model="tiny", prompt="x", stream=True))
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    scheduler.emit(request, list(b"he"))
    stream = await asking
    assert (await anext(aiter(stream))).choices[0].text == "he"
    scheduler.fail(request, FailureCode.INTERNAL, "non-finite logits")
    with pytest.raises(openai.APIError, match="non-finite logits") as raised:
        await anext(aiter(stream))
    assert raised.value.code == "internal"
    await doors.until_idle()


async def test_slow_readers_are_cut_off(tiny_model: Path, scheduler: ScriptedScheduler, address: str) -> None:
    async with running_doors(tiny_model, address, max_unsent_tokens=256) as doors:
        await scheduler.session_begun()
        await doors.grpc.until_health(serving=True)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", doors.port))
        client.sendall(raw_request(CHATS, messages=HELLO, stream=True, logprobs=True, top_logprobs=20))
        request = await scheduler.next(SubmitRequest)
        scheduler.start_request(request)
        cancelled = asyncio.ensure_future(scheduler.next(CancelRequest))
        position = 0
        async with asyncio.timeout(WAIT_S):
            while not cancelled.done():
                scheduler.emit(request, [position % 200], position=position, with_logprobs=20)
                position += 1
                await asyncio.sleep(0)
        assert cancelled.result() == CancelRequest(request.handle)
        reader, writer = await asyncio.open_connection(sock=client)
        data = await asyncio.wait_for(_until_last_chunk(reader), WAIT_S)
        writer.close()
        await writer.wait_closed()
        assert b'"code":"slow_reader"' in data
        assert b"[DONE]" not in data
        await doors.until_idle()


async def _until_last_chunk(reader: asyncio.StreamReader) -> bytes:
    data = b""
    while not data.endswith(b"\r\n0\r\n\r\n"):
        piece = await reader.read(65536)
        assert piece, "the connection ended without the last chunk"
        data = data[-65536:] + piece
    return data


async def test_a_drain_lets_streams_end_and_takes_no_new_ones(doors: Doors, scheduler: ScriptedScheduler) -> None:
    asking = asyncio.ensure_future(read_events(doors.http, COMPLETIONS, prompt="x"))
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    scheduler.emit(request, list(b"he"))
    draining = asyncio.ensure_future(doors.grpc.frontend.drain())
    await doors.grpc.until_health(serving=False)
    status, error = await doors.error(COMPLETIONS, prompt="y")
    assert (status, error["code"]) == (503, "draining")
    assert (await doors.http.get("/ready")).status_code == 503
    assert (await doors.http.get("/health")).status_code == 200
    scheduler.emit(request, list(b"y"), position=2, finish=LENGTH)
    events = await asking
    assert events.done
    assert "".join(chunk["choices"][0]["text"] for chunk in events.chunks) == "hey"
    async with asyncio.timeout(WAIT_S):
        await draining


async def test_a_stop_ends_streams_with_an_error(doors: Doors, scheduler: ScriptedScheduler) -> None:
    asking = asyncio.ensure_future(doors.openai.completions.create(model="tiny", prompt="x", stream=True))
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    scheduler.emit(request, list(b"he"))
    stream = await asking
    await anext(aiter(stream))
    await doors.grpc.frontend.stop()
    with pytest.raises(openai.APIError, match="the frontend has stopped") as raised:
        await anext(aiter(stream))
    assert raised.value.code == "unavailable"
