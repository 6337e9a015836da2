"""The scheduler comes, goes and comes back: streams pause and go on; health, status and refusals meanwhile."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from octavo.v1 import admin_pb2
from octavo.wire.columns import pack_ints, unpack_ints
from octavo.wire.handshake import ServiceFacts, WorkerState
from octavo.wire.requests import (
    CancelRequest,
    FinishReason,
    ProcessInfo,
    QueueLimits,
    StatusReport,
    StatusRequest,
    StepOutput,
    SubmitRequest,
)
from tests.support.frontend_client import WAIT_S, Collected, Service, collect, read, refusal, running_frontend
from tests.support.scripted_scheduler import FACTS, ScriptedScheduler

Code = grpc.StatusCode
LENGTH = FinishReason.LENGTH
Status = health_pb2.HealthCheckResponse


async def test_before_the_scheduler_is_there(tiny_model: Path, address: str) -> None:
    async with running_frontend(tiny_model, address) as service:
        for name in ("", "octavo.v1.GenerationService", "tiny", "alias"):
            answer = await service.health.Check(health_pb2.HealthCheckRequest(service=name), timeout=WAIT_S)
            assert answer.status == Status.NOT_SERVING
        found = await refusal(service.ask(text="x"))
        assert (found.code, found.reason) == (Code.UNAVAILABLE, "UNAVAILABLE")
        assert found.unpack(error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0
        with ScriptedScheduler(address) as scheduler:
            await scheduler.session_begun()
            for name in ("", "octavo.v1.GenerationService", "tiny", "alias"):
                await service.until_health(serving=True, service=name)


async def test_while_the_worker_loads(tiny_model: Path, address: str) -> None:
    with ScriptedScheduler(address, facts=None) as scheduler:
        async with running_frontend(tiny_model, address) as service:
            async with asyncio.timeout(WAIT_S):
                while "loads its weights" not in (await refusal(service.ask(text="x"))).message:
                    pass
            status = await service.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=WAIT_S)
            assert (status.ready, status.reason) == (False, "the worker loads its weights")
            assert not status.HasField("scheduler")
            scheduler.facts = FACTS
            await service.until_health(serving=True)


async def test_what_hello_says(service: Service, scheduler: ScriptedScheduler, tiny_model: Path) -> None:
    from octavo.wire.model_digest import model_digest

    assert scheduler.hellos[-1].config_digest == model_digest(tiny_model)
    assert service.frontend.client is not None
    assert scheduler.hellos[-1].boot_id == service.frontend.client.boot_id


async def test_streams_survive_the_scheduler(service: Service, scheduler: ScriptedScheduler, address: str) -> None:
    call = service.stream(text="x", sampling={"n": 2}, output={"tokenIds": True}, stopping={"maxTokens": 6})
    request = await scheduler.next(SubmitRequest)
    assert (request.output_ids, request.finished_choices) == ((), b"")
    scheduler.start_request(request, num_cached_tokens=1)
    scheduler.emit(request, list(b"ab"), choice=0)
    scheduler.emit(request, list(b"XY"), choice=1, finish=LENGTH)
    seen = Collected()
    for _ in range(4):
        seen.add(await read(call))
    scheduler.vanish()
    with ScriptedScheduler(address) as second:
        again = await second.next(SubmitRequest)
        assert [list(unpack_ints(ids)) for ids in again.output_ids] == [list(b"ab"), list(b"XY")]
        assert list(unpack_ints(again.finished_choices)) == [1]
        assert (again.prompt_ids, again.sampling, again.max_tokens) == (request.prompt_ids, request.sampling, 6)
        assert again.deadline_s is not None
        assert request.deadline_s is not None
        assert again.deadline_s < request.deadline_s
        second.start_request(again)
        # One id comes a second time, as from a scheduler that knew less.
        second.emit(again, list(b"bcd"), position=1, finish=LENGTH)
        rest = await collect(call, seen)
        assert rest.text == {0: "abcd", 1: "XY"}
        assert {i: bytes(ids) for i, ids in rest.ids.items()} == {0: b"abcd", 1: b"XY"}
        assert rest.started is not None
        assert rest.started.cached_prompt_tokens == 1
        usage = rest.finished[0].usage
        assert (usage.completion_tokens, usage.cached_prompt_tokens) == (6, 1)  # the second scheduler said 0
        await service.until_idle()
        assert second.nothing_came()


async def test_requests_that_come_in_a_pause_wait(service: Service, scheduler: ScriptedScheduler, address: str) -> None:
    scheduler.vanish()
    client = service.frontend.client
    assert client is not None
    async with asyncio.timeout(WAIT_S):
        while client.epoch:
            await service.health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
    call = service.ask(text="x")
    cancelled = service.ask(text="y")
    async with asyncio.timeout(WAIT_S):
        while len(client.streams) < 2:
            await service.health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
    cancelled.cancel()
    async with asyncio.timeout(WAIT_S):
        while len(client.streams) > 1:
            await service.health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
    with ScriptedScheduler(address) as second:
        second.answer(await second.next(SubmitRequest), [list(b"ok")], LENGTH)
        assert (await call).choices[0].text == "ok"
        assert second.nothing_came()


async def test_a_gap_ends_the_session_and_streams_go_on(service: Service, scheduler: ScriptedScheduler) -> None:
    call = service.ask(text="x")
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    scheduler.emit(request, list(b"ab"))
    num_hellos = len(scheduler.hellos)
    scheduler.emit(request, list(b"d"), position=3)  # position 2 is missing
    again = await scheduler.next(SubmitRequest)
    assert len(scheduler.hellos) == num_hellos + 1
    assert [list(unpack_ints(ids)) for ids in again.output_ids] == [list(b"ab")]
    scheduler.emit(again, list(b"cd"), position=2, finish=LENGTH)
    assert (await call).choices[0].text == "abcd"


async def test_a_lost_message_ends_the_session_and_streams_go_on(
    service: Service, scheduler: ScriptedScheduler
) -> None:
    call = service.ask(text="x")
    request = await scheduler.next(SubmitRequest)
    scheduler.send(StepOutput(), number=7)
    again = await scheduler.next(SubmitRequest)
    scheduler.answer(again, [list(b"ok")], LENGTH)
    assert (await call).choices[0].text == "ok"
    assert again.handle == request.handle


async def test_an_end_that_was_lost_with_the_session(
    service: Service, scheduler: ScriptedScheduler, address: str
) -> None:
    """All ids came, the end did not: nothing is left to ask the next scheduler for."""
    full = service.ask(text="x", stopping={"maxTokens": 2})
    stopped = service.ask(text="y")
    for ids in ([97, 98], [99, 256]):
        request = await scheduler.next(SubmitRequest)
        scheduler.start_request(request)
        scheduler.emit(request, ids)
    await tokens_received(service, 4)
    scheduler.vanish()
    with ScriptedScheduler(address) as second:
        first, other = (await full).choices[0], (await stopped).choices[0]
        assert {(first.text, first.finish_reason), (other.text, other.finish_reason)} == {("ab", 2), ("c", 1)}
        assert second.nothing_came()


async def tokens_received(service: Service, number: int) -> None:
    client = service.frontend.client
    assert client is not None
    async with asyncio.timeout(WAIT_S):
        while sum(stream.journal.num_completion_tokens for stream in client.streams) < number:
            await service.health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)


async def test_recovery_that_takes_too_long(tiny_model: Path, address: str) -> None:
    settings: dict[str, Any] = {"recovery_timeout_s": 0.5, "unready_after_s": 0.1}
    with ScriptedScheduler(address) as scheduler:
        async with running_frontend(tiny_model, address, **settings) as service:
            await scheduler.session_begun()
            await service.until_health(serving=True)
            calls = [service.ask(text="x"), service.stream(text="x")]
            for _ in calls:
                await scheduler.next(SubmitRequest)
            scheduler.vanish()
            await service.until_health(serving=False)
            for call in calls:
                found = await refusal(call)
                assert (found.code, found.reason) == (Code.UNAVAILABLE, "UNAVAILABLE")
            assert (await refusal(service.ask(text="x"))).code == Code.UNAVAILABLE
            await service.until_idle()
            scheduler.start()
            await service.until_health(serving=True)


async def test_a_worker_that_is_gone_shows_in_health(
    tiny_model: Path, scheduler: ScriptedScheduler, address: str
) -> None:
    async with running_frontend(tiny_model, address, unready_after_s=0.2) as service:
        await scheduler.session_begun()
        await service.until_health(serving=True)
        scheduler.send(WorkerState(False, "the worker died"))
        await service.until_health(serving=False)
        call = service.ask(text="x")  # the scheduler decides how long it waits
        request = await scheduler.next(SubmitRequest)
        scheduler.send(WorkerState(True))
        await service.until_health(serving=True)
        scheduler.answer(request, [[97]], LENGTH)
        await call


async def test_status(service: Service, scheduler: ScriptedScheduler) -> None:
    client = service.frontend.client
    assert client is not None
    call = service.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=WAIT_S)
    asked = await scheduler.next(StatusRequest)
    processes = (
        ProcessInfo("scheduler", 7, "5c4ed0000000b001", 0, "ready"),
        ProcessInfo("frontend", 8, client.boot_id, client.epoch, "ready"),
    )
    limits = QueueLimits(1024, 5000, 8, 900)
    report = StatusReport(asked.tag_id, processes, 1, 2, 64, 60, 16, 99, 3, 40, 1000, 250, 17, 1)
    scheduler.send(msgspec.structs.replace(report, limits=limits, waiting_tokens=70))
    status = await call
    assert (status.ready, list(status.models), status.max_model_len) == (True, ["tiny", "alias"], 256)
    assert [process.role for process in status.processes] == ["scheduler", "frontend"]
    held = status.scheduler
    assert (held.running_requests, held.waiting_requests, held.total_blocks, held.free_blocks) == (1, 2, 64, 60)
    assert (held.block_size, held.steps, held.preemptions) == (16, 99, 3)
    assert (held.cached_blocks, held.prompt_tokens, held.cached_prompt_tokens) == (40, 1000, 250)
    assert (held.recomputed_tokens, held.failed_checks) == (17, 1)
    told = held.limits
    assert (told.max_waiting_requests, told.max_waiting_tokens, held.waiting_tokens) == (1024, 5000, 70)
    assert (told.max_requests_per_caller, told.max_waiting_tokens_per_caller) == (8, 900)


async def test_status_does_not_wait_for_ever(tiny_model: Path, scheduler: ScriptedScheduler, address: str) -> None:
    async with running_frontend(tiny_model, address, status_timeout_s=0.05) as service:
        await scheduler.session_begun()
        status = await service.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=WAIT_S)
        assert not status.HasField("scheduler")
        assert [process.role for process in status.processes] == ["frontend"]


async def test_reflection_lists_the_services(service: Service) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(service.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=WAIT_S)
    answer = await read(call)
    names = {entry.name for entry in answer.list_services_response.service}
    assert {"octavo.v1.GenerationService", "octavo.v1.AdminService", "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize(
    ("facts", "refusal_text", "words"),
    [
        (None, "this is model A, you serve B", "model A"),
        (ServiceFacts(200, 256, 16, 8), None, "the embedding only 200 rows"),
    ],
)
async def test_a_frontend_that_can_never_serve_says_why(
    tiny_model: Path, address: str, facts: ServiceFacts | None, refusal_text: str | None, words: str
) -> None:
    with ScriptedScheduler(address, facts) as scheduler:
        scheduler.refusal = refusal_text
        async with running_frontend(tiny_model, address) as service:
            assert service.frontend.client is not None
            assert words in await asyncio.wait_for(service.frontend.client.refused, WAIT_S)


async def test_draining(service: Service, scheduler: ScriptedScheduler) -> None:
    call = service.stream(text="x")
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    assert (await read(call)).WhichOneof("event") == "started"
    drained = asyncio.create_task(service.frontend.drain())
    await service.until_health(serving=False)
    found = await refusal(service.ask(text="x"))
    assert (found.code, found.reason) == (Code.UNAVAILABLE, "DRAINING")
    assert found.unpack(error_details_pb2.RetryInfo)
    status = service.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=WAIT_S)
    asked = await scheduler.next(StatusRequest)
    scheduler.send(StatusReport(asked.tag_id, (), 0, 0, 0, 0, 16, 0, 0))
    assert not (await status).ready
    assert not drained.done()
    scheduler.emit(request, list(b"all"), finish=LENGTH)
    assert (await read(call)).delta.text == "all"
    assert (await read(call)).WhichOneof("event") == "finished"
    await asyncio.wait_for(drained, WAIT_S)
    await service.frontend.stop()
    await scheduler.session_over()


async def test_what_outlasts_the_grace_ends_unavailable(
    tiny_model: Path, scheduler: ScriptedScheduler, address: str
) -> None:
    async with running_frontend(tiny_model, address, grace_s=0.05) as service:
        await scheduler.session_begun()
        await service.until_health(serving=True)
        call = service.stream(text="x")
        request = await scheduler.next(SubmitRequest)
        scheduler.start_request(request)
        await read(call)
        await service.frontend.drain()
        stopped = asyncio.create_task(service.frontend.stop())
        assert (await refusal(call)).code == Code.UNAVAILABLE
        assert await scheduler.next(CancelRequest) == CancelRequest(request.handle)
        await stopped
        await scheduler.session_over()


async def test_many_requests_and_cancels_at_once(service: Service, scheduler: ScriptedScheduler) -> None:
    """More than a socket's queue takes in one turn: they wait their turn, the session goes on."""
    calls = [service.ask(text="x") for _ in range(1100)]
    handles = {(await scheduler.next(SubmitRequest)).handle for _ in calls}
    for call in calls:
        call.cancel()
    cancelled = {(await scheduler.next(CancelRequest)).handle for _ in calls}
    assert cancelled == handles
    assert len(handles) == 1100
    await service.until_idle()
    assert len(scheduler.hellos) == 1


async def test_outputs_of_unknown_requests_are_dropped(service: Service, scheduler: ScriptedScheduler) -> None:
    column = pack_ints([12345])
    scheduler.send(StepOutput(handle=column, choice=column, position=column, token=column))
    call = service.ask(text="x")
    scheduler.answer(await scheduler.next(SubmitRequest), [[97]], LENGTH)
    assert (await call).choices[0].text == "a"
    assert service.frontend.client is not None
    assert service.frontend.client.streams.num_unknown == 1
