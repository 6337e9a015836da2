"""AdminService: the status while it changes, and the way to an end without broken requests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from octavo.frontend import admin
from octavo.v1 import admin_pb2 as pb
from octavo.wire.handshake import Goodbye
from octavo.wire.requests import (
    FinishReason,
    FrontendDrains,
    ProcessInfo,
    ReplaceScheduler,
    SchedulerLeaves,
    ServiceDrains,
    StatusReport,
    StatusRequest,
    SubmitRequest,
)
from tests.support.frontend_client import EOF, WAIT_S, Service, collect, read, refusal, running_frontend
from tests.support.scripted_scheduler import ScriptedScheduler

Code = grpc.StatusCode
DRAINING = "draining: no new requests are taken"
LEAST = Duration(nanos=100_000_000)


def watch(service: Service, interval: Duration | None = LEAST, metadata: Any = None) -> Any:
    return service.admin.WatchStatus(pb.WatchStatusRequest(interval=interval), timeout=WAIT_S, metadata=metadata)


async def welcomed(service: Service, scheduler: ScriptedScheduler) -> None:
    await scheduler.session_begun()
    await service.until_health(serving=True)


async def report(scheduler: ScriptedScheduler, running: int) -> None:
    """Answer the next question for the status."""
    asked = await scheduler.next(StatusRequest)
    scheduler.send(StatusReport(asked.tag_id, (), running, 0, 64, 60, 16, 7, 0))


@contextlib.asynccontextmanager
async def reporting(scheduler: ScriptedScheduler) -> AsyncIterator[Callable[[int], None]]:
    """Answer all questions for the status; the function yielded says how many requests run from then on."""
    running = 1

    async def answer_all() -> None:
        while True:
            asked = await scheduler.next(StatusRequest)
            scheduler.send(StatusReport(asked.tag_id, (), running, 0, 64, 60, 16, 7, 0))

    def set_running(number: int) -> None:
        nonlocal running
        running = number

    task = asyncio.create_task(answer_all())
    try:
        yield set_running
    finally:
        task.cancel()


async def drain(service: Service) -> pb.DrainResponse:
    answer: pb.DrainResponse = await service.admin.Drain(pb.DrainRequest(), timeout=WAIT_S)
    return answer


async def next_status(call: Any) -> pb.GetStatusResponse:
    message: pb.WatchStatusResponse = await read(call)
    assert message is not EOF
    return message.status


async def test_a_watch_tells_what_has_changed_and_nothing_else(service: Service, scheduler: ScriptedScheduler) -> None:
    call = watch(service, metadata=(("x-request-id", "r-9"),))
    for running in (3, 3, 3, 5, 5, 3):
        await report(scheduler, running)
    seen = [await next_status(call) for _ in range(3)]
    assert [status.scheduler.running_requests for status in seen] == [3, 5, 3]
    assert all(status.ready and status.models == ["tiny", "alias"] for status in seen)
    assert dict(await call.initial_metadata())["x-request-id"] == "r-9"
    call.cancel()


async def test_a_watch_says_at_once_what_get_status_says(tiny_model: Path, address: str) -> None:
    async with running_frontend(tiny_model, address) as service:
        call = watch(service, Duration(seconds=60))
        status = await service.admin.GetStatus(pb.GetStatusRequest(), timeout=WAIT_S)
        assert await next_status(call) == status
        assert (status.ready, status.reason) == (False, "the scheduler cannot be reached yet")
        call.cancel()


async def test_an_interval_is_waited_for(
    tiny_model: Path, scheduler: ScriptedScheduler, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: asyncio.Queue[float] = asyncio.Queue()
    monkeypatch.setattr(admin, "DEFAULT_INTERVAL_S", 30.0)

    async def recorded(_lifecycle: object, timeout_s: float) -> None:
        waits.put_nowait(timeout_s)
        await asyncio.Event().wait()

    async with running_frontend(tiny_model, address) as service:
        await scheduler.session_begun()
        monkeypatch.setattr("octavo.frontend.lifecycle.Lifecycle.wait_over", recorded)
        for interval, least, most in ((None, 1.0, 30.0), (Duration(seconds=60), 30.0, 60.0), (LEAST, -WAIT_S, 0.1)):
            call = watch(service, interval)
            await report(scheduler, 1)
            await next_status(call)
            async with asyncio.timeout(WAIT_S):
                assert least < await waits.get() <= most
            call.cancel()


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        (Duration(), "0 s"),
        (Duration(nanos=99_999_999), "0.1 s must be"),
        (Duration(seconds=60, nanos=1), "60 s"),
        (Duration(seconds=-1), "-1 s"),
        (Duration(seconds=2**62), "4.61169e+18 s"),
    ],
)
async def test_bad_intervals_are_refused(service: Service, interval: Duration, words: str) -> None:
    found = await refusal(watch(service, interval))
    assert (found.code, found.reason, found.field) == (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "interval")
    assert words in found.message
    assert "from 0.1 to 60 s" in found.message


async def test_watches_are_bounded_and_end_with_their_client(
    tiny_model: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "MAX_WATCHES", 2)
    async with running_frontend(tiny_model, address) as service:
        calls = [watch(service) for _ in range(2)]
        for call in calls:
            await next_status(call)
        found = await refusal(watch(service))
        assert (found.code, found.reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS")
        for call in calls:
            call.cancel()
        async with asyncio.timeout(WAIT_S):
            while True:  # until the frontend has seen that they are gone
                again = watch(service)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await next_status(again)
                    break
        again.cancel()


async def test_a_drain_lets_running_requests_end(service: Service, scheduler: ScriptedScheduler) -> None:
    call = service.stream(text="x")
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    scheduler.num_requests = 1
    async with reporting(scheduler) as set_running:
        watched = watch(service)
        assert (await next_status(watched)).ready
        assert (await drain(service)).running_requests == 1
        await service.until_health(serving=False)
        await service.until_health(serving=False, service="tiny")
        for late in (service.ask(text="y"), service.stream(text="y")):
            found = await refusal(late)
            assert (found.code, found.reason, found.message) == (Code.UNAVAILABLE, "DRAINING", DRAINING)
        status = await next_status(watched)
        assert (status.ready, status.reason, status.processes[0].state) == (False, DRAINING, "draining")
        assert not watched.done()  # a request still runs
        assert scheduler.drains == [FrontendDrains(drained=False)]
        set_running(0)
        scheduler.emit(request, list(b"all"), finish=FinishReason.LENGTH)
        assert (await collect(call)).text == {0: "all"}
        last = await next_status(watched)
        while last.processes[0].state == "draining":
            last = await next_status(watched)
        assert last.scheduler.running_requests == 0
        assert await read(watched) is EOF
        assert scheduler.drains == [FrontendDrains(drained=False), FrontendDrains(drained=True)]
        assert await watched.code() == Code.OK
    assert not service.frontend.lifecycle.stopped


async def test_the_asked_frontend_drains_whatever_the_scheduler_says(
    service: Service, scheduler: ScriptedScheduler
) -> None:
    assert service.frontend.client is not None
    boot_ids = (service.frontend.client.boot_id, "another")
    await drain(service)
    async with asyncio.timeout(WAIT_S):
        await service.frontend.wait_idle()
    call = service.admin.GetStatus(pb.GetStatusRequest(), timeout=WAIT_S)
    asked = await scheduler.next(StatusRequest)
    processes = tuple(ProcessInfo("frontend", 7, boot_id, 1, "ready") for boot_id in boot_ids)
    scheduler.send(StatusReport(asked.tag_id, processes, 0, 0, 64, 64, 16, 7, 0))
    assert [process.state for process in (await call).processes] == ["drained", "ready"]


async def test_to_drain_twice_changes_nothing(service: Service, scheduler: ScriptedScheduler) -> None:
    assert (await drain(service)).running_requests == 0
    assert (await drain(service)).running_requests == 0
    call = watch(service, Duration(seconds=60))
    await report(scheduler, 0)
    status = await next_status(call)
    assert (status.ready, status.reason) == (False, DRAINING)
    assert await read(call) is EOF
    assert await call.code() == Code.OK
    scheduler.vanish()  # nothing makes it serve again
    await service.until_health(serving=False)


async def test_a_frontend_can_drain_before_it_serves(tiny_model: Path, address: str) -> None:
    async with running_frontend(tiny_model, address) as service:
        assert (await drain(service)).running_requests == 0
        with ScriptedScheduler(address) as scheduler:
            await scheduler.session_begun()
            await service.until_health(serving=False)
            assert (await refusal(service.ask(text="x"))).reason == "DRAINING"


async def test_a_watch_waits_for_the_other_frontends(service: Service, scheduler: ScriptedScheduler) -> None:
    await drain(service)
    call = watch(service)
    for state in ("ready", "draining", "drained"):
        asked = await scheduler.next(StatusRequest)
        other = ProcessInfo("frontend", 7, "another", 1, state)
        scheduler.send(StatusReport(asked.tag_id, (other,), 0, 0, 64, 64, 16, 7, 0))
        status = await next_status(call)
        assert [process.state for process in status.processes if process.boot_id == "another"] == [state]
    assert await read(call) is EOF
    assert await call.code() == Code.OK


async def test_another_frontend_was_asked_to_drain_the_service(service: Service, scheduler: ScriptedScheduler) -> None:
    scheduler.send(ServiceDrains())
    await service.until_health(serving=False)
    assert (await refusal(service.ask(text="x"))).reason == "DRAINING"
    scheduler.vanish()
    scheduler.start()  # one that nobody has told
    await scheduler.session_begun()
    async with asyncio.timeout(WAIT_S):
        await scheduler.until(lambda: scheduler.num_drains == 1)
    assert scheduler.drains[-1] == FrontendDrains(drained=True)


async def test_a_frontend_that_ends_alone_does_not_drain_the_others(
    service: Service, scheduler: ScriptedScheduler
) -> None:
    await service.frontend.drain()
    await scheduler.until(lambda: len(scheduler.drains) == 2)
    scheduler.vanish()
    scheduler.start()
    await scheduler.session_begun()
    await scheduler.until(lambda: len(scheduler.drains) == 3)
    call = service.admin.GetStatus(pb.GetStatusRequest(), timeout=WAIT_S)
    await report(scheduler, 0)
    await call
    assert scheduler.num_drains == 0


async def test_a_watch_ends_unavailable_when_the_frontend_stops(service: Service, scheduler: ScriptedScheduler) -> None:
    running = service.stream(text="x")
    await scheduler.next(SubmitRequest)
    call = watch(service, Duration(seconds=60))
    await report(scheduler, 1)
    await next_status(call)
    await service.frontend.stop()
    found = await refusal(call)
    assert (found.code, found.reason, found.message) == (Code.UNAVAILABLE, "UNAVAILABLE", "the frontend has stopped")
    assert (await refusal(running)).code == Code.UNAVAILABLE


async def test_a_watch_ends_well_when_the_frontend_has_drained_before_it_stops(
    service: Service, scheduler: ScriptedScheduler
) -> None:
    async with reporting(scheduler):
        call = watch(service, Duration(seconds=60))
        await next_status(call)
        await service.frontend.drain()
        await service.frontend.stop()
        assert (await next_status(call)).reason == DRAINING
        assert await read(call) is EOF
        assert await call.code() == Code.OK


@pytest.mark.parametrize("method", ["WatchStatus", "Drain", "ReplaceScheduler"])
@pytest.mark.parametrize(("data", "words"), [(b"\xff" * 9, "the bytes are no octavo.v1."), (b"\xc8\x3e\x01", "1001")])
async def test_what_is_no_request_does_nothing(service: Service, method: str, data: bytes, words: str) -> None:
    call = service.channel.unary_stream(f"/octavo.v1.AdminService/{method}", None, None)(data, timeout=WAIT_S)
    found = await refusal(call)
    assert (found.code, found.reason) == (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert words in found.message
    await service.until_health(serving=True)
    assert not service.frontend.lifecycle.draining


async def test_the_scheduler_is_told_to_make_room(service: Service, scheduler: ScriptedScheduler) -> None:
    await welcomed(service, scheduler)
    call = service.admin.ReplaceScheduler(pb.ReplaceSchedulerRequest(), timeout=WAIT_S)
    asked = await scheduler.next(ReplaceScheduler)
    scheduler.send(SchedulerLeaves(asked.tag_id, 5))
    scheduler.send(Goodbye("the next one takes its place"))
    assert (await call).running_requests == 5


async def test_a_scheduler_that_does_not_confirm_its_end(service: Service, scheduler: ScriptedScheduler) -> None:
    await welcomed(service, scheduler)
    call = service.admin.ReplaceScheduler(pb.ReplaceSchedulerRequest(), timeout=WAIT_S)
    await scheduler.next(ReplaceScheduler)
    scheduler.vanish()
    assert (await refusal(call)).code == Code.UNAVAILABLE
