"""Echo and log-probabilities of prompts over HTTP, in the forms of OpenAI and vLLM."""

import asyncio
from typing import Any

import pytest

from octavo.wire.requests import FinishReason, SubmitRequest
from tests.support.http_client import Doors, read_events
from tests.support.scripted_scheduler import ScriptedScheduler

LENGTH = FinishReason.LENGTH
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TURNS: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]


async def ask(doors: Doors, scheduler: ScriptedScheduler, path: str, output: bytes = b"xy", **body: Any) -> Any:
    """Ask for an answer whose prompt is told and whose choices are all the same."""
    asking = asyncio.ensure_future(doors.http.post(path, json=body))
    await tell(scheduler, output)
    return (await asking).json()


async def tell(scheduler: ScriptedScheduler, output: bytes) -> None:
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    if request.sampling.prompt_logprobs >= 0:
        scheduler.tell_prompt(request, 1, len(request.prompt_ids) // 4)
    logprobs = request.sampling.logprobs if request.sampling.logprobs >= 0 else None
    for choice in range(request.num_choices):
        scheduler.emit(request, list(output), choice=choice, finish=LENGTH, with_logprobs=logprobs)


def at(token: str, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": token}


PROMPT_LOGPROBS = [
    None,
    {"98": at("b", -0.5, 1), "1": at("\x01", 0.0, 1), "2": at("\x02", -0.25, 2)},
    {"99": at("c", -1.0, 2), "2": at("\x02", 0.0, 1), "3": at("\x03", -0.25, 2)},
]


async def test_prompt_logprobs_of_a_completion(doors: Doors, scheduler: ScriptedScheduler) -> None:
    found = await ask(doors, scheduler, COMPLETIONS, prompt="abc", n=2, prompt_logprobs=2)
    assert [choice["prompt_logprobs"] for choice in found["choices"]] == [PROMPT_LOGPROBS] * 2
    assert [choice["text"] for choice in found["choices"]] == ["xy"] * 2
    assert found["choices"][0]["logprobs"] is None
    plain = await ask(doors, scheduler, COMPLETIONS, prompt="abc")
    assert "prompt_logprobs" not in plain["choices"][0]


async def test_prompt_logprobs_of_a_chat(doors: Doors, scheduler: ScriptedScheduler) -> None:
    found = await ask(doors, scheduler, CHATS, messages=TURNS, prompt_logprobs=0)
    assert found["prompt_logprobs"][0] is None
    assert found["prompt_logprobs"][1] == {"117": at("u", -0.5, 1)}
    assert len(found["prompt_logprobs"]) == found["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_log_probabilities_covers_the_prompt(
    doors: Doors, scheduler: ScriptedScheduler, stream: bool
) -> None:
    body: dict[str, Any] = {"prompt": "abc", "echo": True, "logprobs": 1, "n": 2}
    if stream:
        asking = asyncio.ensure_future(read_events(doors.http, COMPLETIONS, **body))
        await tell(scheduler, b"xy")
        choices = [choice for chunk in (await asking).chunks for choice in chunk["choices"]]
    else:
        choices = (await ask(doors, scheduler, COMPLETIONS, **body))["choices"]
    for index in range(2):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "abcxy"
        columns: dict[str, list[Any]] = {}
        for choice in mine:
            for name, column in (choice["logprobs"] or {}).items():
                columns.setdefault(name, []).extend(column)
        assert columns["tokens"] == ["a", "b", "c", "x", "y"]
        assert columns["text_offset"] == [0, 1, 2, 3, 4]
        assert columns["token_logprobs"] == [None, -0.5, -1.0, -0.5, -0.5]
        assert columns["top_logprobs"] == [
            None,
            {"\x01": 0.0, "b": -0.5},
            {"\x02": 0.0, "c": -1.0},
            {"\x00": -1.0, "x": -0.5},
            {"\x00": -1.0, "y": -0.5},
        ]
        assert "prompt_logprobs" not in mine[0], "nobody asked for it under this name"


async def test_both_kinds_at_once_get_their_own_numbers(doors: Doors, scheduler: ScriptedScheduler) -> None:
    found = await ask(doors, scheduler, COMPLETIONS, prompt="abc", echo=True, logprobs=0, prompt_logprobs=2)
    (choice,) = found["choices"]
    assert choice["prompt_logprobs"] == PROMPT_LOGPROBS
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"b": -0.5}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prompt", "text"), [("a<|end|>", "a<|end|>"), ([97, 256, 98], "ab")], ids=["text", "ids"])
async def test_max_tokens_0_with_echo(
    doors: Doors, scheduler: ScriptedScheduler, stream: bool, prompt: Any, text: str
) -> None:
    body = {"prompt": prompt, "echo": True, "max_tokens": 0}
    if stream:
        asking = asyncio.ensure_future(read_events(doors.http, COMPLETIONS, **body))
        await tell(scheduler, b"")
        events = await asking
        assert events.done
        choices = [choice for chunk in events.chunks for choice in chunk["choices"]]
        assert choices[0]["text"] == text, "it comes first"
    else:
        found = await ask(doors, scheduler, COMPLETIONS, b"", **body)
        assert found["usage"]["completion_tokens"] == 0
        choices = found["choices"]
    assert "".join(choice["text"] for choice in choices) == text
    assert choices[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "echoed"),
    [
        ({}, "you"),
        ({"continue_final_message": True}, "you"),
        ({"messages": TURNS[:1]}, ""),
        ({"messages": TURNS[:1], "continue_final_message": True}, "hi"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_echo_of_a_chat_is_the_message_that_goes_on(
    doors: Doors, scheduler: ScriptedScheduler, fields: dict[str, Any], echoed: str, stream: bool
) -> None:
    body = {"messages": TURNS, "echo": True} | fields
    if stream:
        asking = asyncio.ensure_future(read_events(doors.http, CHATS, **body))
        await tell(scheduler, b"xy")
        deltas = [choice["delta"] for chunk in (await asking).chunks for choice in chunk["choices"]]
        assert "".join(delta.get("content", "") for delta in deltas) == echoed + "xy"
    else:
        found = await ask(doors, scheduler, CHATS, **body)
        assert found["choices"][0]["message"]["content"] == echoed + "xy"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0, "echo": False}, "max_tokens"),
        (CHATS, {"messages": TURNS, "max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
async def test_what_is_refused(doors: Doors, path: str, body: dict[str, Any], param: str) -> None:
    response = await doors.http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
