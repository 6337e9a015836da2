"""Answers: streams, whole answers, and that they are the same."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.v1 import generation_pb2 as pb
from octavo.wire.columns import unpack_ints
from octavo.wire.requests import CancelRequest, FinishChoice, FinishReason, SubmitRequest
from tests.support.frontend_client import EOF, Collected, Service, collect, read, running_frontend
from tests.support.scripted_scheduler import ScriptedScheduler

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
EOS = 256


async def both(
    service: Service,
    scheduler: ScriptedScheduler,
    outputs: list[list[int]],
    finish: FinishReason,
    chunk: int = 64,
    **fields: Any,
) -> tuple[Collected, pb.GenerateResponse]:
    """Ask for the same twice, as a stream and whole; the scheduler says the same."""
    call = service.stream(chunk=chunk, **fields)
    scheduler.answer(await scheduler.next_submit(), outputs, finish)
    streamed = await collect(call)
    whole = service.ask(**fields)
    scheduler.answer(await scheduler.next_submit(), outputs, finish)
    return streamed, await whole


def assert_same(streamed: Collected, whole: pb.GenerateResponse) -> None:
    assert streamed.started is not None
    assert streamed.started.prompt_tokens == whole.usage.prompt_tokens
    assert sorted(streamed.finished) == [choice.index for choice in whole.choices]
    usages = [finished.usage for finished in streamed.finished.values() if finished.HasField("usage")]
    assert len(usages) == 1
    assert usages[0].completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        finished = streamed.finished[choice.index]
        assert streamed.text.get(choice.index, "") == choice.text
        assert streamed.ids.get(choice.index, []) == list(choice.token_ids)
        assert streamed.logprobs.get(choice.index, []) == list(choice.logprobs)
        assert finished.finish_reason == choice.finish_reason
        assert (finished.stop_string, finished.stop_token_id) == (choice.stop_string, choice.stop_token_id)


async def test_a_stream_of_text(service: Service, scheduler: ScriptedScheduler) -> None:
    call = service.stream(text="xyz", metadata=(("x-request-id", "abc-1"),))
    request = await scheduler.next(SubmitRequest)
    assert list(unpack_ints(request.prompt_ids)) == list(b"xyz")
    assert (request.num_choices, request.max_tokens) == (1, 253)
    assert list(unpack_ints(request.stop_token_ids)) == [EOS]
    assert request.deadline_s is not None
    assert 0 < request.deadline_s <= 21
    scheduler.start_request(request, num_cached_tokens=2, queue_s=0.125)
    first = await read(call)
    assert dict(await call.initial_metadata())["x-request-id"] == "abc-1"
    assert first.started == pb.Started(request_id="abc-1", model="tiny", prompt_tokens=3, cached_prompt_tokens=2)
    scheduler.emit(request, list(b"you"))
    assert (await read(call)).delta == pb.Delta(index=0, text="you", first_token=0)
    scheduler.emit(request, [*b"!", EOS], position=3, finish=STOP)
    assert (await read(call)).delta == pb.Delta(index=0, text="!", first_token=3)
    finished = (await read(call)).finished
    assert (finished.finish_reason, finished.completion_tokens) == (pb.FINISH_REASON_STOP, 5)
    assert finished.WhichOneof("stop_match") is None
    usage = finished.usage
    assert (usage.prompt_tokens, usage.cached_prompt_tokens, usage.completion_tokens) == (3, 2, 5)
    assert (usage.queue_time.nanos, usage.prefill_time.nanos, usage.decode_time.nanos) == (125e6, 250e6, 500e6)
    assert await read(call) is EOF
    assert await call.code() == grpc.StatusCode.OK
    await service.until_idle()
    assert scheduler.nothing_came()


async def test_a_whole_answer(service: Service, scheduler: ScriptedScheduler) -> None:
    call = service.ask(
        tokenIds={"ids": [1, 299]}, sampling={"n": 2}, stopping={"maxTokens": 3}, output={"tokenIds": True}
    )
    request = await scheduler.next(SubmitRequest)
    assert (list(unpack_ints(request.prompt_ids)), request.num_choices, request.max_tokens) == ([1, 299], 2, 3)
    scheduler.answer(request, [list(b"abc"), list(b"xyz")], LENGTH)
    response = await call
    assert [(c.index, c.text, list(c.token_ids)) for c in response.choices] == [
        (0, "abc", list(b"abc")),
        (1, "xyz", list(b"xyz")),
    ]
    assert {c.finish_reason for c in response.choices} == {pb.FINISH_REASON_LENGTH}
    assert (response.model, response.usage.completion_tokens) == ("tiny", 6)
    assert response.request_id == dict(await call.initial_metadata())["x-request-id"]
    assert not response.choices[0].HasField("cumulative_logprob")


async def test_chat(service: Service, scheduler: ScriptedScheduler) -> None:
    call = service.ask(chat={"messages": [{"role": "user", "content": "hi"}]}, model="alias")
    request = await scheduler.next(SubmitRequest)
    start, end = 257, 256
    assert list(unpack_ints(request.prompt_ids)) == [start, *b"user\nhi", end, *b"\n", start, *b"assistant\n"]
    scheduler.answer(request, [[*b"yo", EOS]], STOP)
    assert (await call).choices[0].text == "yo"


@pytest.mark.parametrize("seed", ["7", None])
async def test_seeds(service: Service, scheduler: ScriptedScheduler, seed: str | None) -> None:
    seeds = []
    for _ in range(2):
        call = service.ask(text="x", sampling={} if seed is None else {"seed": seed})
        request = await scheduler.next(SubmitRequest)
        seeds.append(request.sampling.seed)
        scheduler.answer(request, [[EOS]], STOP)
        await call
    assert (seeds == [7, 7]) if seed else (seeds[0] != seeds[1])


CASES = st.fixed_dictionaries(
    {
        "outputs": st.integers(1, 3).flatmap(
            lambda n: st.lists(
                st.lists(
                    st.sampled_from([*b"abc", *"é".encode(), *"\U0001f600".encode(), 257]), min_size=1, max_size=12
                ),
                min_size=n,
                max_size=n,
            )
        ),
        "stops": st.lists(st.text("abcé", min_size=1, max_size=3), max_size=2, unique=True),
        "include": st.booleans(),
        "token_ids": st.booleans(),
        "chunk": st.integers(1, 5),
    }
)


@settings(max_examples=40, deadline=None)
@given(case=CASES)
def test_streams_equal_whole_answers_and_the_decoded_ids(case: dict[str, Any], tiny_model: Path) -> None:
    """Any ids, stop strings, chunk limits and numbers of choices."""
    asyncio.run(check_both(tiny_model, case))


async def check_both(model: Path, case: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder, ScriptedScheduler(f"ipc://{folder}/s") as scheduler:
        async with running_frontend(model, f"ipc://{folder}/s") as service:
            await scheduler.session_begun()
            await service.until_health(serving=True)
            await compare(service, scheduler, case)


async def compare(service: Service, scheduler: ScriptedScheduler, case: dict[str, Any]) -> None:
    outputs, stops, include = case["outputs"], case["stops"], case["include"]
    fields: dict[str, Any] = {
        "text": "x",
        "sampling": {"n": len(outputs)},
        "stopping": {"stopStrings": stops, "includeStopString": include},
        "output": {"tokenIds": case["token_ids"]},
    }
    streamed, whole = await both(service, scheduler, outputs, LENGTH, chunk=case["chunk"], **fields)
    assert_same(streamed, whole)
    for choice in whole.choices:
        text = bytes(i for i in outputs[choice.index] if i < 256).decode("utf-8", "replace")
        if choice.finish_reason == pb.FINISH_REASON_LENGTH:
            assert choice.text == text
            assert not any(stop in text for stop in stops)
        else:
            shown = choice.text if include else choice.text + choice.stop_string
            assert text.startswith(shown)
            assert shown.endswith(choice.stop_string)
            assert not any(stop in shown[:-1] for stop in stops)
    await service.until_idle()


async def test_stop_strings_never_leak(service: Service, scheduler: ScriptedScheduler) -> None:
    stopping = {"stopStrings": ["RSTUV"]}
    streamed, whole = await both(service, scheduler, [list(b"PQRSTX")], LENGTH, text="x", stopping=stopping)
    assert whole.choices[0].text == "PQRSTX"
    assert_same(streamed, whole)
    call = service.stream(text="x", stopping=stopping, output={"tokenIds": True})
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    scheduler.emit(request, list(b"PQRSTUVWXYZ"))
    streamed = await collect(call)
    assert streamed.text == {0: "PQ"}
    assert bytes(streamed.ids[0]) == b"PQRSTUV"
    finished = streamed.finished[0]
    assert (finished.stop_string, finished.completion_tokens) == ("RSTUV", 7)
    assert (finished.finish_reason, finished.usage.completion_tokens) == (pb.FINISH_REASON_STOP, 7)
    assert await scheduler.next(FinishChoice) == FinishChoice(request.handle, 0, 7)
    await service.until_idle()
    assert scheduler.nothing_came()


async def test_stop_strings_wait_for_min_tokens(service: Service, scheduler: ScriptedScheduler) -> None:
    call = service.ask(text="x", stopping={"stopStrings": ["ab"], "minTokens": 5})
    request = await scheduler.next(SubmitRequest)
    assert list(unpack_ints(request.sampling.stop_token_ids)) == [EOS]
    scheduler.start_request(request)
    scheduler.emit(request, list(b"abcabcabc"))
    choice = (await call).choices[0]
    # The second one is complete with the fifth token.
    assert (choice.text, choice.stop_string) == ("abc", "ab")
    assert (await scheduler.next(FinishChoice)).num_tokens == 5


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
async def test_the_callers_stop_ids(service: Service, scheduler: ScriptedScheduler, include: bool, text: str) -> None:
    stopping = {"stopTokenIds": [ord("c")], "includeStopString": include}
    streamed, whole = await both(service, scheduler, [list(b"abc")], STOP, text="x", stopping=stopping)
    assert_same(streamed, whole)
    choice = whole.choices[0]
    assert (choice.text, choice.WhichOneof("stop_match"), choice.stop_token_id) == (text, "stop_token_id", ord("c"))
    assert whole.usage.completion_tokens == 3


async def test_special_tokens_and_no_text(service: Service, scheduler: ScriptedScheduler) -> None:
    ids = [*b"a", 257, EOS]
    for output, text in [
        ({}, "a"),
        ({"skipSpecialTokens": False}, "a<|start|><|end|>"),
        ({"detokenize": False, "tokenIds": True}, ""),
    ]:
        streamed, whole = await both(service, scheduler, [ids], STOP, text="x", output=output)
        assert_same(streamed, whole)
        assert whole.choices[0].text == text


async def test_half_characters_wait(service: Service, scheduler: ScriptedScheduler) -> None:
    call = service.stream(text="x")
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    for position, byte in enumerate("a\U0001f600".encode()):
        scheduler.emit(request, [byte], position=position)
    scheduler.emit(request, [0xE2], position=5, finish=LENGTH)
    streamed = await collect(call)
    assert streamed.text[0] == "a\U0001f600\ufffd"
    assert all(delta.text for delta in streamed.deltas)


async def test_logprobs(service: Service, scheduler: ScriptedScheduler) -> None:
    call = service.stream(text="x", output={"logprobs": 2, "tokenIds": True})
    request = await scheduler.next(SubmitRequest)
    assert request.sampling.logprobs == 2
    scheduler.start_request(request)
    scheduler.emit(request, [0x61, 0xE2], with_logprobs=2)
    scheduler.emit(request, [0x20], position=2, with_logprobs=2, finish=LENGTH)
    streamed = await collect(call)
    found = streamed.logprobs[0]
    assert [entry.token_id for entry in found] == streamed.ids[0] == [0x61, 0xE2, 0x20]
    assert [(entry.text, entry.raw) for entry in found] == [("a", b"a"), ("\ufffd", b"\xe2"), (" ", b" ")]
    assert [(entry.logprob, entry.rank) for entry in found] == [(-0.5, 1)] * 3
    assert [(top.token_id, top.raw, top.logprob, top.rank) for top in found[0].top] == [
        (0, b"\x00", -1.0, 1),
        (1, b"\x01", -1.0, 2),
    ]


async def test_cumulative_logprob(service: Service, scheduler: ScriptedScheduler) -> None:
    call = service.ask(text="x", output={"logprobs": 0})
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    scheduler.emit(request, [1, 2, 3], with_logprobs=0, finish=LENGTH)
    choice = (await call).choices[0]
    assert choice.cumulative_logprob == -1.5
    assert [len(entry.top) for entry in choice.logprobs] == [0, 0, 0]


@pytest.mark.parametrize("limit", [1, 3, 64])
async def test_tokens_share_messages_up_to_the_limit(
    service: Service, scheduler: ScriptedScheduler, limit: int
) -> None:
    call = service.stream(text="x", chunk=limit, output={"tokenIds": True})
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    scheduler.emit(request, list(range(97, 107)), finish=LENGTH)
    streamed = await collect(call)
    sizes = [len(delta.token_ids) for delta in streamed.deltas]
    assert sizes == [min(limit, 10 - first) for first in range(0, 10, limit)]
    assert [delta.first_token for delta in streamed.deltas] == list(range(0, 10, limit))


async def test_one_token_shares_no_message_even_without_text(service: Service, scheduler: ScriptedScheduler) -> None:
    call = service.stream(text="x", chunk=1)
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    scheduler.emit(request, list("\U0001f600a".encode()), finish=LENGTH)
    streamed = await collect(call)
    assert [(delta.first_token, delta.text) for delta in streamed.deltas] == [
        (0, ""),
        (1, ""),
        (2, ""),
        (3, "\U0001f600"),
        (4, "a"),
    ]


async def test_repeated_ids_are_dropped(service: Service, scheduler: ScriptedScheduler) -> None:
    call = service.stream(text="x", output={"tokenIds": True})
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    scheduler.emit(request, list(b"abc"))
    scheduler.emit(request, list(b"bcd"), position=1, finish=LENGTH)
    streamed = await collect(call)
    assert (streamed.text[0], bytes(streamed.ids[0])) == ("abcd", b"abcd")


async def test_ids_without_a_token_have_no_text(service: Service, scheduler: ScriptedScheduler) -> None:
    streamed, whole = await both(service, scheduler, [[97, 290, 98, 299]], LENGTH, text="x")
    assert_same(streamed, whole)
    assert whole.choices[0].text == "ab"


async def test_a_prompt_that_ends_in_half_a_character_is_not_repeated(
    service: Service, scheduler: ScriptedScheduler
) -> None:
    emoji = list("\U0001f600".encode())
    call = service.ask(tokenIds={"ids": [*b"good day ", *emoji[:2]]})
    scheduler.answer(await scheduler.next(SubmitRequest), [[*emoji[2:], *b"ok"]], LENGTH)
    assert (await call).choices[0].text == "\ufffd\ufffdok"


async def test_cancel_is_told_once(service: Service, scheduler: ScriptedScheduler) -> None:
    for begin in (service.stream, service.ask):
        call = begin(text="x")
        request = await scheduler.next(SubmitRequest)
        scheduler.start_request(request)
        call.cancel()
        assert await scheduler.next(CancelRequest) == CancelRequest(request.handle)
        scheduler.emit(request, [1])  # what crosses with the cancel is dropped
        await service.until_idle()
        assert scheduler.nothing_came()
