"""Beam search through both doors: the same continuations in every way to ask, whole, and only at the end."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.simulate.model import make_facts
from octavo.v1 import generation_pb2 as pb
from octavo.wire.columns import pack_ints
from octavo.wire.model_digest import model_digest
from octavo.wire.requests import (
    BeamParams,
    CancelRequest,
    ChoiceFinished,
    FinishChoice,
    FinishReason,
    StepOutput,
    SubmitRequest,
)
from tests.support.fake_frontend import LoopThread
from tests.support.fake_worker import FakeWorker
from tests.support.frontend_client import WAIT_S, Collected, Service, collect, read, refusal
from tests.support.http_client import Doors, read_events, running_doors
from tests.support.scripted_scheduler import ScriptedScheduler
from tests.support.tiny_tokenizers import VOCAB_SIZE

FACTS = make_facts(vocab_size=VOCAB_SIZE, max_model_len=256, num_blocks=65, block_size=16, max_num_seqs=8)
SEARCH = {"n": 2, "beamSearch": {"width": 3}}
ASKED: dict[str, Any] = {
    "tokenIds": {"ids": [9, 8, 7]},
    "sampling": {"n": 3, "beamSearch": {"width": 3, "lengthPenalty": 0.5}},
    "stopping": {"maxTokens": 20, "ignoreEos": True},
    "output": {"tokenIds": True},
}


@pytest.fixture
async def doors(tiny_model: Path, address: str) -> AsyncIterator[Doors]:
    """Return a whole service, its worker without tensors."""
    config = SchedulerConfig(address=address, config_digest=model_digest(tiny_model))
    with FakeWorker(address, config.config_digest, FACTS), LoopThread(config):
        async with running_doors(tiny_model, address) as running:
            await running.grpc.until_health(serving=True)
            yield running


async def test_unary_stream_and_http_find_the_same(doors: Doors) -> None:
    whole = await doors.grpc.ask(**ASKED)
    ids = [list(choice.token_ids) for choice in whole.choices]
    assert [len(found) for found in ids] == [20] * 3
    assert len({tuple(found) for found in ids}) == 3
    logprobs = [choice.cumulative_logprob for choice in whole.choices]
    assert sorted(logprobs, reverse=True) == logprobs
    assert [choice.finish_reason for choice in whole.choices] == [pb.FINISH_REASON_LENGTH] * 3
    assert whole.usage.completion_tokens == 60

    streamed = await collect(doors.grpc.stream(chunk=8, **ASKED))
    assert [streamed.ids[i] for i in range(3)] == ids
    assert max(len(delta.token_ids) for delta in streamed.deltas) <= 8
    assert [streamed.text[i] for i in range(3)] == [choice.text for choice in whole.choices]

    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": [9, 8, 7],
        "n": 3,
        "max_tokens": 20,
        "ignore_eos": True,
        "use_beam_search": True,
        "length_penalty": 0.5,
        "return_token_ids": True,
    }
    answer = (await doors.http.post("/v1/completions", json=body)).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == ids
    events = await read_events(doors.http, "/v1/completions", **body)
    texts = ["", "", ""]
    for chunk in events.chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in answer["choices"]]
    await doors.until_idle()


async def test_the_best_of_a_wider_search_come_back(doors: Doors) -> None:
    wide = await doors.grpc.ask(**ASKED)
    narrow = ASKED | {"sampling": {"beamSearch": {"width": 3, "lengthPenalty": 0.5}}}
    (choice,) = (await doors.grpc.ask(**narrow)).choices
    assert choice == wide.choices[0]


async def test_what_does_not_fit_is_refused_with_numbers(doors: Doors) -> None:
    wide = {"sampling": {"beamSearch": {"width": 9}}, "stopping": {"maxTokens": 5}}
    found = await refusal(doors.grpc.ask(**(ASKED | wide)))
    assert "9 beams run at once, the limit is 8 sequences (max_num_seqs)" in found.message
    long = {"sampling": {"beamSearch": {"width": 8}}, "stopping": {"maxTokens": 200}}
    found = await refusal(doors.grpc.ask(**(ASKED | long)))
    assert "can take 104 blocks of 16 tokens: there are 64" in found.message


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"n": 17}, "n", "17 must be from 1 to 16"),
        ({"length_penalty": 11}, "length_penalty", "11 must be"),
        ({"temperature": 0.7}, "temperature", "a beam search excludes it"),
        ({"logprobs": 1}, "logprobs", "a beam search excludes it"),
        ({"stop": "x"}, "stop", "a beam search excludes it"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty", "use_beam_search must be true"),
        ({"use_beam_search": None, "early_stopping": True}, "early_stopping", "use_beam_search must be true"),
    ],
)
async def test_http_names_the_field(doors: Doors, change: dict[str, Any], param: str, words: str) -> None:
    body = {"model": "tiny", "prompt": "x", "use_beam_search": True} | change
    status, error = await doors.error("/v1/completions", **body)
    assert (status, error["param"]) == (400, param)
    assert words in error["message"]


# The stream of a frontend, between a client and a scheduler that does what the test says


def finish(request: SubmitRequest, outputs: list[bytes], reason: FinishReason = FinishReason.LENGTH) -> StepOutput:
    """Return the end of a search in one message."""
    tokens = [(choice, place, token) for choice, ids in enumerate(outputs) for place, token in enumerate(ids)]
    return StepOutput(
        handle=pack_ints([request.handle] * len(tokens)),
        choice=pack_ints(choice for choice, _, _ in tokens),
        position=pack_ints(place for _, place, _ in tokens),
        token=pack_ints(token for _, _, token in tokens),
        finished=tuple(
            ChoiceFinished(request.handle, choice, reason, len(ids), cumulative_logprob=-1.5 - choice)
            for choice, ids in enumerate(outputs)
        ),
    )


async def test_what_came_of_a_lost_answer_is_forgotten(
    service: Service, scheduler: ScriptedScheduler, address: str
) -> None:
    call = service.stream(text="x", sampling=SEARCH)
    asking = service.ask(text="x", sampling=SEARCH)
    requests = [await scheduler.next(SubmitRequest) for _ in range(2)]
    assert requests[0].beams == BeamParams(3)
    for request in requests:
        scheduler.start_request(request)
        scheduler.emit(request, list(b"lost"))
    seen = Collected()
    seen.add(await read(call))
    scheduler.vanish()
    with ScriptedScheduler(address) as second:
        for _ in range(2):
            again = await second.next(SubmitRequest)
            assert again.output_ids == (b"", b"")
            second.start_request(again)
            second.send(finish(again, [b"abc", b"de"]))
        assert (await collect(call, seen)).text == {0: "abc", 1: "de"}
        whole = await asking
        assert [choice.text for choice in whole.choices] == ["abc", "de"]
        assert [choice.cumulative_logprob for choice in whole.choices] == [-1.5, -2.5]
        assert whole.usage.completion_tokens == 5
        await service.until_idle()


async def test_a_time_limit_ends_a_search_with_the_best_so_far(service: Service, scheduler: ScriptedScheduler) -> None:
    asking = service.ask(text="x", sampling=SEARCH, stopping={"timeLimit": "1000s"})
    request = await scheduler.next(SubmitRequest)
    assert service.frontend.client is not None
    (stream,) = service.frontend.client.streams
    begun, wake = asyncio.Event(), stream.wake
    stream.wake = lambda: (begun.set(), wake())  # type: ignore[method-assign,func-returns-value,assignment]
    scheduler.start_request(request)
    async with asyncio.timeout(WAIT_S):
        await begun.wait()
    stream.end_by_time_limit()
    assert (await scheduler.next(FinishChoice)).handle == request.handle
    scheduler.send(finish(request, [b"ab", b"c"], FinishReason.TIME_LIMIT))
    whole = await asking
    assert [(c.text, c.finish_reason) for c in whole.choices] == [
        ("ab", pb.FINISH_REASON_TIME_LIMIT),
        ("c", pb.FINISH_REASON_TIME_LIMIT),
    ]
    await service.until_idle()


async def test_a_search_that_has_not_begun_ends_empty_with_its_time(
    service: Service, scheduler: ScriptedScheduler
) -> None:
    asking = service.ask(text="x", sampling=SEARCH, stopping={"timeLimit": "0.2s"})
    request = await scheduler.next(SubmitRequest)
    whole = await asking
    assert [(c.text, c.finish_reason) for c in whole.choices] == [("", pb.FINISH_REASON_TIME_LIMIT)] * 2
    assert (await scheduler.next(CancelRequest)).handle == request.handle
