"""A time limit ends a request with what there is of it, wherever the request is."""

import asyncio

import grpc
import pytest

from octavo.v1 import generation_pb2 as pb
from octavo.wire.requests import CancelRequest, FinishReason, SubmitRequest
from tests.support.frontend_client import EOF, WAIT_S, Service, collect, read
from tests.support.scripted_scheduler import ScriptedScheduler

TIME_LIMIT = pb.FINISH_REASON_TIME_LIMIT
SHORT, LONG = {"timeLimit": "0.25s"}, {"timeLimit": "1000s"}


def let_time_pass(service: Service) -> None:
    """Let the limit of the only request pass: what came before it is then no matter of luck."""
    assert service.frontend.client is not None
    (stream,) = service.frontend.client.streams
    stream.end_by_time_limit()


async def until_received(service: Service, num_tokens: int) -> None:
    """Wait until the frontend has so many tokens of the only request."""
    assert service.frontend.client is not None
    (stream,) = service.frontend.client.streams
    came, on_token = asyncio.Event(), stream.on_token

    def watched(choice: int, position: int, token_id: int) -> bool:
        wakes = on_token(choice, position, token_id)
        came.set()
        return wakes

    stream.on_token = watched  # type: ignore[method-assign]
    async with asyncio.timeout(WAIT_S):
        while stream.journal.num_completion_tokens < num_tokens:
            came.clear()
            await came.wait()


async def test_a_running_stream_ends_with_its_text(service: Service, scheduler: ScriptedScheduler) -> None:
    call = service.stream(text="x", sampling={"n": 2}, stopping=LONG)
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request, num_cached_tokens=1)
    scheduler.emit(request, list(b"abc"))
    scheduler.emit(request, list(b"d"), choice=1, finish=FinishReason.STOP)
    await until_received(service, 4)
    let_time_pass(service)
    found = await collect(call)
    assert found.text == {0: "abc", 1: "d"}
    assert {i: end.finish_reason for i, end in found.finished.items()} == {0: TIME_LIMIT, 1: pb.FINISH_REASON_STOP}
    assert found.finished[0].completion_tokens == 3
    usage = found.finished[0].usage
    assert (usage.completion_tokens, usage.cached_prompt_tokens) == (4, 1)
    assert (await scheduler.next(CancelRequest)).handle == request.handle
    await service.until_idle()


async def test_half_a_character_is_shown_at_the_end(service: Service, scheduler: ScriptedScheduler) -> None:
    asking = service.ask(text="x", stopping=LONG)
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    scheduler.emit(request, list("aä".encode())[:2])
    await until_received(service, 2)
    let_time_pass(service)
    (choice,) = (await asking).choices
    assert (choice.text, choice.finish_reason) == ("a\ufffd", TIME_LIMIT)


async def test_time_in_the_queue_counts(service: Service, scheduler: ScriptedScheduler) -> None:
    call, asking = service.stream(text="x", stopping=SHORT), service.ask(text="x", stopping=SHORT)
    requests = [await scheduler.next(SubmitRequest) for _ in range(2)]
    first = await read(call)
    assert (first.started.prompt_tokens, first.started.cached_prompt_tokens) == (1, 0)
    end = (await read(call)).finished
    assert (end.finish_reason, end.completion_tokens) == (TIME_LIMIT, 0)
    assert end.usage.queue_time.nanos == 250e6
    assert await read(call) is EOF
    (choice,) = (await asking).choices
    assert (choice.text, choice.finish_reason) == ("", TIME_LIMIT)
    assert {(await scheduler.next(CancelRequest)).handle for _ in range(2)} == {r.handle for r in requests}


async def test_without_a_scheduler_as_well(service: Service, scheduler: ScriptedScheduler) -> None:
    call = service.stream(text="x", stopping=LONG)
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    scheduler.emit(request, list(b"ab"))
    assert (await read(call)).HasField("started")
    assert (await read(call)).delta.text == "ab"
    scheduler.vanish()
    let_time_pass(service)
    assert (await read(call)).finished.finish_reason == TIME_LIMIT
    scheduler.start()
    await scheduler.session_begun()
    assert scheduler.nothing_came(), "what has ended is not submitted again"
    await service.until_idle()


async def test_what_ends_before_is_not_touched(service: Service, scheduler: ScriptedScheduler) -> None:
    asking = service.ask(text="x", stopping={"timeLimit": "86400s"})
    scheduler.answer(await scheduler.next(SubmitRequest), [list(b"ab")], FinishReason.LENGTH)
    assert (await asking).choices[0].finish_reason == pb.FINISH_REASON_LENGTH
    assert scheduler.nothing_came()


@pytest.mark.parametrize("limit", [{"timeLimit": "0s"}, {"timeLimit": "-1s"}, {"timeLimit": "86400.5s"}])
async def test_limits_of_the_limit(service: Service, limit: dict[str, str]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await service.ask(text="x", stopping=limit)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "86400" in (raised.value.details() or "")
