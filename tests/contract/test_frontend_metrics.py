"""GET /metrics of a running frontend, after calls of all kinds at both doors."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.frontend.auth import Authenticator
from octavo.v1 import admin_pb2
from octavo.wire.requests import CancelRequest, FailureCode, FinishReason, StatusReport, StatusRequest
from tests.support.frontend_client import WAIT_S, collect, refusal
from tests.support.http_client import Doors, read_events, running_doors
from tests.support.scripted_scheduler import ScriptedScheduler

KEY, ADMIN_KEY = "a-key-of-this-service", "a-key-of-an-operator"


async def scrape(
    doors: Doors, scheduler: ScriptedScheduler | None = None, key: str | None = None
) -> dict[tuple[str, ...], float]:
    """Return all values by name and labels' values, but for the model's; the scheduler answers if it is given."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    asking = asyncio.create_task(doors.http.get("/metrics", headers=headers))
    if scheduler is not None:
        asked = await scheduler.next(StatusRequest)
        scheduler.send(StatusReport(asked.tag_id, (), 2, 1, 64, 60, 16, 7, 0))
    response = await asking
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, *(value for name, value in sorted(sample.labels.items()) if name != "model_name")): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def calls_of(found: dict[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    """Return the calls by status, door and method."""
    return {key[1:]: value for key, value in found.items() if key[0] == "octavo_requests_total"}


@pytest.fixture
async def doors(tiny_model: Path, scheduler: ScriptedScheduler, address: str) -> AsyncIterator[Doors]:
    async with running_doors(tiny_model, address, status_timeout_s=WAIT_S) as running:
        await scheduler.session_begun()
        await running.grpc.until_health(serving=True)
        yield running


async def test_calls_tokens_and_ends_at_both_doors(doors: Doors, scheduler: ScriptedScheduler) -> None:
    service, ids = doors.grpc, list(b"abc")

    async def answer() -> None:
        request = await scheduler.next_submit()
        scheduler.answer(request, [ids], FinishReason.LENGTH)

    body = {"prompt": "xy", "max_tokens": 3}
    usages = []
    for ask in (
        collect(service.stream(text="xy")),
        service.ask(text="xy"),
        doors.http.post("/v1/completions", json=body),
        read_events(doors.http, "/v1/completions", **body),
    ):
        asked = asyncio.ensure_future(ask)
        await answer()
        usages.append(await asked)
    await refusal(service.ask(text=""))
    await doors.error("/v1/chat/completions", messages=[])
    await doors.error("/v1/completions", prompt="x", model="none")
    full = asyncio.create_task(doors.error("/v1/completions", prompt="x"))
    scheduler.fail(await scheduler.next_submit(), FailureCode.QUEUE_FULL, "full", 2.0)
    assert (await full)[0] == 429
    gone = service.stream(text="xy")
    scheduler.start_request(await scheduler.next_submit())
    gone.cancel()
    await scheduler.next(CancelRequest)
    late = service.stream(text="xy", timeout=0.2)
    assert (await refusal(late)).code == grpc.StatusCode.DEADLINE_EXCEEDED
    await scheduler.next_submit()
    await scheduler.next(CancelRequest)
    await doors.until_idle()
    found = await scrape(doors, scheduler)
    stream, unary = "octavo.v1.GenerationService/GenerateStream", "octavo.v1.GenerationService/Generate"
    assert calls_of(found) == {
        ("OK", "grpc", stream): 1,
        ("OK", "grpc", unary): 1,
        ("INVALID_ARGUMENT", "grpc", unary): 1,
        ("CANCELLED", "grpc", stream): 1,
        ("DEADLINE_EXCEEDED", "grpc", stream): 1,
        ("200", "http", "/v1/completions"): 2,
        ("400", "http", "/v1/chat/completions"): 1,
        ("404", "http", "/v1/completions"): 1,
        ("429", "http", "/v1/completions"): 1,
    }
    unary_usage = usages[1].usage
    assert found["octavo_generation_tokens_total",] == 4 * unary_usage.completion_tokens == 12
    assert found["octavo_prompt_tokens_total",] == 5 * unary_usage.prompt_tokens  # one began and was given up
    assert found["octavo_request_success_total", "length"] == 4
    assert found["octavo_time_to_first_token_seconds_count",] == 4
    assert found["octavo_request_time_per_output_token_seconds_count",] == 4
    assert found["octavo_stream_aborts_total", "cancelled"] == 1
    assert found["octavo_stream_aborts_total", "deadline"] == 1
    assert found["octavo_stream_aborts_total", "failed"] == 0  # who was turned away had not begun
    assert (found["octavo_num_requests_running",], found["octavo_kv_cache_free_blocks",]) == (2, 60)
    assert found["octavo_process_resident_memory_bytes", "frontend", "frontend"] > 2**20


async def test_a_scrape_needs_a_key_where_there_are_keys(
    tiny_model: Path, scheduler: ScriptedScheduler, address: str
) -> None:
    auth = Authenticator([KEY], [ADMIN_KEY])
    async with running_doors(tiny_model, address, auth=auth, health_port=0) as doors:
        base = f"http://127.0.0.1:{doors.grpc.frontend.health_port}"
        async with httpx2.AsyncClient(base_url=base, timeout=WAIT_S) as private:
            for client in (doors.http, private):
                assert (await client.get("/metrics")).status_code == 401
                assert (await client.get("/health")).status_code == 200
        await refusal(doors.grpc.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=WAIT_S))
        await refusal(doors.grpc.channel.unary_unary("/octavo.v1.Nobody/Knows", None, None)(b"", timeout=WAIT_S))
        assert (await doors.http.get("/nowhere")).status_code == 404
        await scheduler.session_begun()
        for key in (KEY, ADMIN_KEY):
            found = await scrape(doors, scheduler, key)
    assert calls_of(found) == {
        ("UNAUTHENTICATED", "grpc", "octavo.v1.AdminService/GetStatus"): 1,
        ("UNAUTHENTICATED", "grpc", "other"): 1,
        ("401", "http", "/metrics"): 1,
        ("200", "http", "/metrics"): 1,
        ("200", "http", "/health"): 1,
        ("404", "http", "other"): 1,
    }


async def test_without_a_scheduler_there_are_the_frontends_own_numbers(tiny_model: Path, address: str) -> None:
    async with running_doors(tiny_model, address) as doors:
        found = await scrape(doors)
    assert found["octavo_scheduler_up",] == 0
    assert found["octavo_generation_tokens_total",] == 0


async def test_a_client_that_leaves_is_counted(doors: Doors, scheduler: ScriptedScheduler) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", doors.port)
    body = b'{"prompt": "x", "stream": true}'
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    request = await scheduler.next_submit()
    scheduler.start_request(request)
    scheduler.emit(request, list(b"a"))
    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    writer.close()
    await scheduler.next(CancelRequest)
    await doors.until_idle()
    found = await scrape(doors, scheduler)
    assert calls_of(found) == {("499", "http", "/v1/completions"): 1}
    assert found["octavo_stream_aborts_total", "cancelled"] == 1
    assert found["octavo_generation_tokens_total",] == 1


async def test_the_admin_service_tells_what_a_scrape_tells(doors: Doors, scheduler: ScriptedScheduler) -> None:
    asking = asyncio.ensure_future(doors.grpc.admin.GetMetrics(admin_pb2.GetMetricsRequest(), timeout=WAIT_S))
    asked = await scheduler.next(StatusRequest)
    assert asked.with_metrics
    scheduler.send(StatusReport(asked.tag_id, (), 2, 1, 64, 60, 16, 7, 0))
    text = (await asking).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert [sample.value for sample in families["octavo_num_requests_running"].samples] == [2.0]
    assert "octavo_requests" in families
