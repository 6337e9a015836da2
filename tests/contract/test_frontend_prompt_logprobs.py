"""Log-probabilities and echo of prompts through the gRPC door; the scheduler says what the test says."""

import asyncio
import math
from typing import Any

import pytest

from octavo.frontend import responses
from octavo.v1 import generation_pb2 as pb
from octavo.wire.columns import unpack_ints
from octavo.wire.requests import FinishReason, SubmitRequest
from tests.support.frontend_client import EOF, Service, collect, read, refusal
from tests.support.scripted_scheduler import ScriptedScheduler

LENGTH = FinishReason.LENGTH
ASKED = {"promptLogprobs": 2}


def assert_told(tokens: Any, prompt: bytes) -> None:
    assert [token.token_id for token in tokens] == list(prompt)
    assert [token.raw for token in tokens] == [bytes([byte]) for byte in prompt]
    assert not tokens[0].HasField("logprob")
    assert not tokens[0].top
    for position, token in enumerate(tokens[1:], 1):
        assert (token.logprob, token.rank) == (-position / 2, position)
        assert [(top.token_id, top.logprob, top.rank) for top in token.top] == [
            (position, 0.0, 1),
            ((position + 1) % 256, -0.25, 2),
        ]


async def test_they_come_between_start_and_text(service: Service, scheduler: ScriptedScheduler) -> None:
    call = service.stream(text="abcdef", output=ASKED)
    request = await scheduler.next(SubmitRequest)
    assert (request.sampling.prompt_logprobs, request.num_prompt_told) == (2, 1)
    scheduler.start_request(request)
    assert (await read(call)).HasField("started")
    first = (await read(call)).prompt_logprobs
    assert (first.first_position, [t.token_id for t in first.logprobs]) == (0, [ord("a")])
    scheduler.tell_prompt(request, 1, 4)
    second = (await read(call)).prompt_logprobs
    assert (second.first_position, len(second.logprobs)) == (1, 3)
    scheduler.tell_prompt(request, 4, 6)
    scheduler.emit(request, list(b"x"), finish=LENGTH)
    third = (await read(call)).prompt_logprobs
    assert third.first_position == 4
    assert_told([*first.logprobs, *second.logprobs, *third.logprobs], b"abcdef")
    assert (await read(call)).delta.text == "x"


@pytest.mark.parametrize("n", [1, 3])
async def test_a_whole_answer_has_them_once(service: Service, scheduler: ScriptedScheduler, n: int) -> None:
    asking = service.ask(text="abcdef", sampling={"n": n}, output=ASKED)
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    scheduler.tell_prompt(request, 1, 6)
    for choice in range(n):
        scheduler.emit(request, list(b"xy"), choice=choice, finish=LENGTH)
    answer = await asking
    assert_told(answer.prompt_logprobs, b"abcdef")
    assert [choice.text for choice in answer.choices] == ["xy"] * n


@pytest.mark.parametrize("prompt", ["a", "abc"])
async def test_max_tokens_0(service: Service, scheduler: ScriptedScheduler, prompt: str) -> None:
    fields: dict[str, Any] = {"text": prompt, "stopping": {"maxTokens": 0}, "output": ASKED | {"echo": True}}
    call, asking = service.stream(**fields), service.ask(**fields)
    for _ in range(2):
        request = await scheduler.next(SubmitRequest)
        assert request.max_tokens == 0
        if len(prompt) > 1:
            scheduler.start_request(request)
            scheduler.tell_prompt(request, 1, len(prompt))
        scheduler.emit(request, [], finish=LENGTH)
    streamed, answer = await collect(call), await asking
    for tokens in (streamed.prompt, answer.prompt_logprobs):
        assert_told(tokens, prompt.encode())
    assert streamed.text == {0: prompt}
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (prompt, pb.FINISH_REASON_LENGTH)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 0)
    assert streamed.finished[0].completion_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "echo"),
    [
        ({"text": "a<|end|>ä"}, "a<|end|>ä"),
        ({"tokenIds": {"ids": [97, 256, *"ä".encode()]}}, "aä"),
        ({"chat": {"messages": [{"role": "user", "content": "hi"}]}}, "user\nhi\nassistant\n"),
    ],
    ids=["text", "ids", "chat"],
)
async def test_echo_comes_first_and_stops_nothing(
    service: Service, scheduler: ScriptedScheduler, prompt: dict[str, Any], echo: str
) -> None:
    fields = prompt | {"sampling": {"n": 2}, "output": {"echo": True, "tokenIds": True}}
    fields |= {"stopping": {"stopStrings": ["a", "u"]}}
    call, asking = service.stream(**fields), service.ask(**fields)
    requests = [await scheduler.next(SubmitRequest) for _ in range(2)]
    for request in requests:
        scheduler.start_request(request)
    assert (await read(call)).HasField("started")
    assert (await read(call)).delta == pb.Delta(index=0, text=echo)
    assert (await read(call)).delta == pb.Delta(index=1, text=echo)
    for request in requests:
        for choice in range(2):
            scheduler.emit(request, list(b"xy"), choice=choice, finish=LENGTH)
    assert [(c.text, list(c.token_ids)) for c in (await asking).choices] == [(echo + "xy", list(b"xy"))] * 2
    assert (await read(call)).delta == pb.Delta(index=0, text="xy", token_ids=b"xy")


async def test_events_are_bounded(
    service: Service, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "MAX_PROMPT_EVENT_BYTES", 400)
    call = service.stream(text="abcdefgh" * 4, output=ASKED)
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    scheduler.tell_prompt(request, 1, 32)
    scheduler.emit(request, list(b"x"), finish=LENGTH)
    sizes, tokens = [], []
    while (event := await read(call)) is not EOF:
        if event.HasField("prompt_logprobs"):
            sizes.append(event.ByteSize())
            tokens += event.prompt_logprobs.logprobs
    assert_told(tokens, b"abcdefgh" * 4)
    assert len(sizes) > 4
    assert max(sizes) <= 400


async def test_after_a_new_session_what_is_known_is_not_told_again(
    service: Service, scheduler: ScriptedScheduler
) -> None:
    call = service.stream(text="abcdef", output=ASKED)
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    scheduler.tell_prompt(request, 1, 3)
    assert (await read(call)).HasField("started")
    tokens = list((await read(call)).prompt_logprobs.logprobs)
    while len(tokens) < 3:
        tokens += (await read(call)).prompt_logprobs.logprobs
    scheduler.vanish()
    scheduler.start()
    again = await scheduler.next(SubmitRequest)
    assert (again.num_prompt_told, again.output_ids) == (3, (b"",))
    scheduler.start_request(again)
    scheduler.tell_prompt(again, 1, 5)  # one that starts over all the same
    scheduler.tell_prompt(again, 5, 6)
    scheduler.emit(again, list(b"x"), finish=LENGTH)
    while (event := await read(call)).HasField("prompt_logprobs"):
        assert event.prompt_logprobs.first_position == len(tokens)
        tokens += event.prompt_logprobs.logprobs
    assert_told(tokens, b"abcdef")
    assert event.delta.text == "x"


@pytest.mark.parametrize("gap", ["positions", "token", "end"])
async def test_what_was_lost_ends_the_session(service: Service, scheduler: ScriptedScheduler, gap: str) -> None:
    asking = asyncio.ensure_future(service.ask(text="abcdef", output=ASKED))
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    if gap == "positions":
        scheduler.tell_prompt(request, 2, 6)
    else:
        scheduler.tell_prompt(request, 1, 5)
        scheduler.emit(request, [] if gap == "end" else [1], finish=LENGTH)
    again = await scheduler.next(SubmitRequest)
    assert unpack_ints(again.prompt_ids) == unpack_ints(request.prompt_ids)
    scheduler.start_request(again)
    scheduler.tell_prompt(again, again.num_prompt_told, 6)
    scheduler.emit(again, list(b"x"), finish=LENGTH)
    assert_told((await asking).prompt_logprobs, b"abcdef")


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"output": {"promptLogprobs": 21}}, "input.output.prompt_logprobs"),
        ({"output": {"echo": True, "detokenize": False}}, "input.output.echo"),
        ({"stopping": {"maxTokens": 0}}, "input.stopping.max_tokens"),
        ({"stopping": {"maxTokens": 0, "minTokens": 1}, "output": {"echo": True}}, "input.stopping.min_tokens"),
    ],
)
async def test_what_is_refused(service: Service, fields: dict[str, Any], path: str) -> None:
    for call in (service.ask(text="x", **fields), service.stream(text="x", **fields)):
        assert (await refusal(call)).field == path


def test_minus_infinity_is_a_log_probability() -> None:
    assert pb.TokenLogprob(logprob=-math.inf).logprob == -math.inf
