"""What the scheduler learns of a request's prefix, priority and caller, and how its cache is emptied."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]

from octavo.frontend import journal
from octavo.frontend.scheduler_client import MAX_QUESTIONS
from octavo.v1 import admin_pb2
from octavo.wire.model_digest import model_digest
from octavo.wire.prefix import KEY_BYTES, prompt_keys, root_key
from octavo.wire.requests import (
    FinishReason,
    PrefixCacheReset,
    ResetPrefixCache,
    StatusReport,
    StatusRequest,
    SubmitRequest,
)
from tests.support.frontend_client import WAIT_S, Service, collect, read, refusal, running_frontend
from tests.support.scripted_scheduler import FACTS, ScriptedScheduler

Code = grpc.StatusCode
LENGTH = FinishReason.LENGTH
CACHING = msgspec.structs.replace(FACTS, scheduling_policy="priority", prefix_caching=True, takes_priorities=True)
RESET = admin_pb2.ResetPrefixCacheRequest()


async def welcomed(service: Service, scheduler: ScriptedScheduler) -> None:
    await scheduler.session_begun()
    await service.until_health(serving=True)


@pytest.mark.parametrize("prompt", [{"text": "x" * 50}, {"tokenIds": {"ids": [120] * 50}}], ids=["text", "token_ids"])
async def test_prefix_priority_and_caller_reach_the_scheduler(
    tiny_model: Path, address: str, prompt: dict[str, Any]
) -> None:
    with ScriptedScheduler(address, CACHING) as scheduler:
        async with running_frontend(tiny_model, address) as service:
            await welcomed(service, scheduler)
            call = service.ask(**prompt, priority=-4, cacheSalt="pepper")
            request = await scheduler.next(SubmitRequest)
            root = root_key(model_digest(tiny_model), cache_salt="pepper")
            assert (request.prefix_root, request.prefix_keys) == (root, prompt_keys(root, request.prompt_ids, 16))
            assert len(request.prefix_keys) == 3 * KEY_BYTES
            assert (request.priority, request.caller) == (-4, "ipv4:127.0.0.1")
            scheduler.answer(request, [list(b"ok")], LENGTH)
            await call


async def test_a_long_prompt_is_hashed_in_a_thread(
    tiny_model: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def watched(root: bytes, ids: bytes, block_size: int) -> bytes:
        threads.append(threading.current_thread().name)
        return prompt_keys(root, ids, block_size)

    monkeypatch.setattr(journal, "prompt_keys", watched)
    facts = msgspec.structs.replace(CACHING, max_model_len=20_000)
    with ScriptedScheduler(address, facts) as scheduler:
        async with running_frontend(tiny_model, address) as service:
            await welcomed(service, scheduler)
            call = service.ask(text="x" * 10_000)
            request = await scheduler.next(SubmitRequest)
            assert request.prefix_keys == prompt_keys(request.prefix_root, request.prompt_ids, 16)
            assert len(request.prefix_keys) == 625 * KEY_BYTES
            assert [name.partition("_")[0] for name in threads] == ["tokenizer"]
            scheduler.answer(request, [list(b"ok")], LENGTH)
            await call


async def test_without_prefix_caching_nothing_is_sent(service: Service, scheduler: ScriptedScheduler) -> None:
    call = service.ask(text="x" * 50, cacheSalt="pepper")
    request = await scheduler.next(SubmitRequest)
    assert (request.prefix_root, request.prefix_keys, request.priority) == (b"", b"", 0)
    scheduler.answer(request, [list(b"ok")], LENGTH)
    await call


async def test_a_replay_follows_the_facts_of_its_session(tiny_model: Path, address: str) -> None:
    smaller = msgspec.structs.replace(CACHING, block_size=8, scheduling_policy="fcfs", takes_priorities=False)
    with ScriptedScheduler(address, CACHING) as first:
        async with running_frontend(tiny_model, address) as service:
            await welcomed(service, first)
            call = service.stream(text="x" * 50, priority=3)
            request = await first.next(SubmitRequest)
            assert (len(request.prefix_keys), request.priority) == (3 * KEY_BYTES, 3)
            first.start_request(request, num_cached_tokens=16)
            first.emit(request, list(b"ab"))
            assert (await read(call)).started.cached_prompt_tokens == 16
            assert (await read(call)).delta.text == "ab"  # else the next scheduler may be told of fewer ids
            first.vanish()
            with ScriptedScheduler(address, smaller) as second:
                again = await second.next(SubmitRequest)
                assert again.prefix_root == request.prefix_root
                assert again.prefix_keys == prompt_keys(again.prefix_root, again.prompt_ids, 8)
                assert again.priority == 0
                second.start_request(again, num_cached_tokens=48)
                second.emit(again, list(b"c"), position=2, finish=LENGTH)
                events = []
                async for event in call:
                    events.append(event)
                assert events[-1].finished.usage.cached_prompt_tokens == 16


@pytest.mark.parametrize("method", ["ask", "stream"])
async def test_cached_tokens_are_told(service: Service, scheduler: ScriptedScheduler, method: str) -> None:
    call = getattr(service, method)(text="x" * 40)
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request, num_cached_tokens=32)
    scheduler.emit(request, list(b"ok"), finish=LENGTH)
    if method == "ask":
        usage = (await call).usage
    else:
        found = await collect(call)
        assert found.started is not None
        assert found.started.cached_prompt_tokens == 32
        usage = found.finished[0].usage
    assert (usage.prompt_tokens, usage.cached_prompt_tokens) == (40, 32)


async def test_the_cache_is_reset_by_the_scheduler(service: Service, scheduler: ScriptedScheduler) -> None:
    reset = service.admin.ResetPrefixCache(RESET, timeout=WAIT_S)
    first = await scheduler.next(ResetPrefixCache)
    status = service.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=WAIT_S)
    asked = await scheduler.next(StatusRequest)
    other = service.admin.ResetPrefixCache(RESET, timeout=WAIT_S)
    second = await scheduler.next(ResetPrefixCache)
    assert len({first.tag_id, asked.tag_id, second.tag_id}) == 3
    scheduler.send(PrefixCacheReset(second.tag_id, 0))
    scheduler.send(StatusReport(asked.tag_id, (), 0, 0, 64, 64, 16, 0, 0))
    scheduler.send(PrefixCacheReset(second.tag_id, 5))  # of nobody any more
    scheduler.send(PrefixCacheReset(first.tag_id, 17))
    assert (await reset).dropped_blocks == 17
    assert (await other).dropped_blocks == 0
    assert (await status).scheduler.total_blocks == 64
    assert service.frontend.client is not None
    assert not service.frontend.client._questions


async def test_an_answer_of_another_kind_is_none(service: Service, scheduler: ScriptedScheduler) -> None:
    call = service.admin.ResetPrefixCache(RESET, timeout=WAIT_S)
    asked = await scheduler.next(ResetPrefixCache)
    scheduler.send(StatusReport(asked.tag_id, (), 0, 0, 64, 64, 16, 0, 0))
    assert (await refusal(call)).code == Code.UNAVAILABLE


async def test_a_reset_that_nobody_confirms(tiny_model: Path, scheduler: ScriptedScheduler, address: str) -> None:
    async with running_frontend(tiny_model, address, status_timeout_s=0.05) as service:
        await welcomed(service, scheduler)
        found = await refusal(service.admin.ResetPrefixCache(RESET, timeout=WAIT_S))
        assert (found.code, found.reason) == (Code.UNAVAILABLE, "UNAVAILABLE")
        assert found.unpack(error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0
        assert "0.05 s" in found.message


async def test_a_reset_without_a_scheduler(tiny_model: Path, address: str) -> None:
    async with running_frontend(tiny_model, address) as service:
        found = await refusal(service.admin.ResetPrefixCache(RESET, timeout=WAIT_S))
        assert (found.code, found.reason) == (Code.UNAVAILABLE, "UNAVAILABLE")
        assert found.message == "the scheduler cannot be reached yet"


async def test_a_reset_does_not_wait_for_a_scheduler_that_dies(
    tiny_model: Path, scheduler: ScriptedScheduler, address: str
) -> None:
    async with running_frontend(tiny_model, address, status_timeout_s=10 * WAIT_S) as service:
        await welcomed(service, scheduler)
        call = service.admin.ResetPrefixCache(RESET, timeout=WAIT_S)
        await scheduler.next(ResetPrefixCache)
        scheduler.vanish()
        found = await refusal(call)
        assert found.code == Code.UNAVAILABLE
        assert "the scheduler is gone" in found.message


async def test_questions_are_bounded(tiny_model: Path, scheduler: ScriptedScheduler, address: str) -> None:
    async with running_frontend(tiny_model, address, status_timeout_s=10 * WAIT_S) as service:
        await welcomed(service, scheduler)
        calls = [service.admin.ResetPrefixCache(RESET, timeout=WAIT_S) for _ in range(MAX_QUESTIONS)]
        asked = [await scheduler.next(ResetPrefixCache) for _ in calls]
        assert (await refusal(service.admin.ResetPrefixCache(RESET, timeout=WAIT_S))).code == Code.UNAVAILABLE
        assert scheduler.nothing_came()
        for question in asked:
            scheduler.send(PrefixCacheReset(question.tag_id, 1))
        answers = await asyncio.gather(*calls)
        assert [answer.dropped_blocks for answer in answers] == [1] * MAX_QUESTIONS


async def test_bytes_that_are_no_request_reset_nothing(service: Service, scheduler: ScriptedScheduler) -> None:
    method = service.channel.unary_unary("/octavo.v1.AdminService/ResetPrefixCache", None, None)
    found = await refusal(method(b"\xff" * 100, timeout=WAIT_S))
    assert found.code == Code.INVALID_ARGUMENT
    assert found.message == "the bytes are no octavo.v1.ResetPrefixCacheRequest"
    assert scheduler.nothing_came()
