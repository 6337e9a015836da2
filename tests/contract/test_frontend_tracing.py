"""What a frontend tells of calls at both doors, and what it tells the scheduler of it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from octavo.v1 import model_pb2, model_pb2_grpc
from octavo.wire.handshake import WorkerState
from octavo.wire.requests import CancelRequest, FinishReason, SubmitRequest
from octavo.wire.tracing import start_tracing
from octavo.wire.tracing_export import Tracing
from tests.support.frontend_client import EOF, refusal
from tests.support.http_client import Doors, running_doors
from tests.support.otlp_collector import Collector, Told
from tests.support.scripted_scheduler import ScriptedScheduler

TRACE, SPAN = "0123456789abcdef0123456789abcdef", "0123456789abcdef"
SAMPLED = f"00-{TRACE}-{SPAN}-01"
COMPLETIONS = "/v1/completions"
SECRET = "Xanadu"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as one:
        yield one


@pytest.fixture
def tracing(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracing]:
    made = start_tracing("frontend", collector.endpoint, "life")
    assert made is not None
    yield made
    made.close()


@pytest.fixture
async def traced(
    tiny_model: Path, scheduler: ScriptedScheduler, address: str, tracing: Tracing
) -> AsyncIterator[Doors]:
    async with running_doors(tiny_model, address, tracing=tracing) as running:
        await scheduler.session_begun()
        await running.grpc.until_health(serving=True)
        yield running


def told(tracing: Tracing, collector: Collector) -> list[Told]:
    """Return all that has been told, in the order in which spans ended."""
    assert tracing._provider.force_flush()
    return collector.spans


async def answered(doors: Doors, scheduler: ScriptedScheduler, *parents: str, text: str = "x") -> SubmitRequest:
    """Ask over gRPC, answer with one token, and return what the scheduler got."""
    call = doors.grpc.ask(text=text, metadata=[("traceparent", parent) for parent in parents])
    request = await scheduler.next(SubmitRequest)
    scheduler.answer(request, [[97]], FinishReason.LENGTH)
    await call
    await doors.grpc.until_idle()
    return request


async def test_without_tracing_a_callers_trace_goes_no_further(doors: Doors, scheduler: ScriptedScheduler) -> None:
    assert (await answered(doors, scheduler, SAMPLED)).trace == ""
    headers = {"traceparent": SAMPLED}
    asking = asyncio.ensure_future(doors.http.post(COMPLETIONS, json={"prompt": "x"}, headers=headers))
    request = await scheduler.next(SubmitRequest)
    assert request.trace == ""
    scheduler.answer(request, [[97]], FinishReason.LENGTH)
    await asking


async def test_the_scheduler_is_told_the_span_of_the_stream(
    traced: Doors, scheduler: ScriptedScheduler, tracing: Tracing, collector: Collector
) -> None:
    request = await answered(traced, scheduler, SAMPLED)
    tokenize, generate, top = told(tracing, collector)
    assert (tokenize.name, generate.name) == ("octavo.tokenize", "octavo.generate")
    assert top.name == "octavo.v1.GenerationService/Generate"
    assert request.trace == f"00-{TRACE}-{generate.span.span_id.hex()}-01"
    assert tokenize.span.parent_span_id == generate.span.parent_span_id == top.span.span_id
    assert top.span.parent_span_id.hex() == SPAN


async def test_who_is_not_sampled_is_not_told_of(
    traced: Doors, scheduler: ScriptedScheduler, tracing: Tracing, collector: Collector
) -> None:
    assert (await answered(traced, scheduler, f"00-{TRACE}-{SPAN}-00")).trace == ""
    assert told(tracing, collector) == []


@pytest.mark.parametrize(
    "parents",
    [(), ("nonsense",), (f"ff-{TRACE}-{SPAN}-01",), (f"00-{'0' * 32}-{SPAN}-01",), ("x" * 4000,)],
)
async def test_what_is_no_parent_is_ignored(
    traced: Doors, scheduler: ScriptedScheduler, tracing: Tracing, collector: Collector, parents: tuple[str, ...]
) -> None:
    request = await answered(traced, scheduler, *parents)
    top = told(tracing, collector)[-1].span
    assert not top.parent_span_id
    assert top.trace_id.hex() not in (TRACE, "0" * 32)
    assert request.trace.split("-")[1] == top.trace_id.hex()


async def test_two_parents_are_none(
    traced: Doors, scheduler: ScriptedScheduler, tracing: Tracing, collector: Collector
) -> None:
    await traced.http.get("/v1/models", headers=[("traceparent", SAMPLED), ("traceparent", SAMPLED)])
    (top,) = told(tracing, collector)
    assert not top.span.parent_span_id


async def test_several_prompts_are_streams_of_one_call(
    traced: Doors, scheduler: ScriptedScheduler, tracing: Tracing, collector: Collector
) -> None:
    body = {"prompt": ["one", "three"], "max_tokens": 2, "temperature": 0.5}
    asking = asyncio.ensure_future(traced.http.post(COMPLETIONS, json=body, headers={"traceparent": SAMPLED}))
    for _ in range(2):
        scheduler.answer(await scheduler.next(SubmitRequest), [[97, 98]], FinishReason.LENGTH)
    assert (await asking).status_code == 200
    await traced.grpc.until_idle()
    spans = told(tracing, collector)
    assert [span.name for span in spans] == ["octavo.tokenize"] * 2 + ["octavo.generate"] * 2 + ["POST /v1/completions"]
    top = spans[-1].attributes
    assert (top["gen_ai.usage.input_tokens"], top["gen_ai.usage.output_tokens"]) == (8, 4)
    assert top["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert top["gen_ai.request.temperature"] == 0.5
    assert "gen_ai.latency.time_to_first_token" not in top
    assert all("gen_ai.latency.time_to_first_token" in span.attributes for span in spans[2:4])


async def test_refusals_are_told_without_their_words(
    traced: Doors, scheduler: ScriptedScheduler, tracing: Tracing, collector: Collector
) -> None:
    assert (await refusal(traced.grpc.ask(text=SECRET, model="none"))).code == grpc.StatusCode.NOT_FOUND
    assert (await traced.http.post(COMPLETIONS, json={"prompt": SECRET, "max_tokens": SECRET})).status_code == 400
    await traced.grpc.until_idle()
    tokenize, by_grpc, by_http = told(tracing, collector)
    assert tokenize.attributes["error.type"] == "ModelNotFound"
    assert by_grpc.attributes["error.type"] == by_grpc.attributes["rpc.response.status_code"] == "NOT_FOUND"
    assert (by_http.attributes["error.type"], by_http.attributes["http.response.status_code"]) == ("400", 400)
    # The caller is to blame.
    assert {one.span.status.code for one in (by_grpc, by_http)} == {Status.STATUS_CODE_UNSET}
    assert not any(SECRET.encode() in body for body in collector.bodies)


async def test_a_failure_of_ours_is_an_error(
    traced: Doors, scheduler: ScriptedScheduler, tracing: Tracing, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(SECRET)

    monkeypatch.setattr("octavo.frontend.calls.check_params", fail)
    assert (await refusal(traced.grpc.ask(text="x"))).code == grpc.StatusCode.INTERNAL
    assert (await traced.http.post(COMPLETIONS, json={"prompt": "x"})).status_code == 500
    await traced.grpc.until_idle()
    failed = [span for span in told(tracing, collector) if span.span.status.code == Status.STATUS_CODE_ERROR]
    assert [span.name for span in failed] == ["octavo.v1.GenerationService/Generate", "POST /v1/completions"]
    assert not any(SECRET.encode() in body for body in collector.bodies)


async def test_a_caller_that_goes_away_is_told_as_that(
    traced: Doors, scheduler: ScriptedScheduler, tracing: Tracing, collector: Collector
) -> None:
    call = traced.grpc.stream(text="x")
    scheduler.start_request(await scheduler.next(SubmitRequest))
    await call.read()
    call.cancel()
    await scheduler.next(CancelRequest)
    await traced.grpc.until_idle()
    _, generate, top = told(tracing, collector)
    assert generate.events == ["octavo.end"]
    assert generate.span.events[0].attributes[0].value.string_value == "cancelled"
    assert top.attributes["rpc.response.status_code"] == "CANCELLED"
    assert top.span.status.code == Status.STATUS_CODE_UNSET


async def test_pauses_and_replays_are_events(
    traced: Doors, scheduler: ScriptedScheduler, tracing: Tracing, collector: Collector
) -> None:
    call = traced.grpc.stream(text="x")
    before = await scheduler.next(SubmitRequest)
    scheduler.start_request(before)
    await call.read()
    scheduler.send(WorkerState(ready=False, reason="the worker is lost"))
    scheduler.send(WorkerState(ready=True))
    scheduler.emit(before, [97])
    await call.read()
    scheduler.vanish()
    scheduler.start()
    await scheduler.session_begun()
    again = await scheduler.next(SubmitRequest)
    assert again.trace == before.trace != ""
    scheduler.emit(again, [98], position=1, finish=FinishReason.LENGTH)
    while await call.read() is not EOF:
        pass
    await traced.grpc.until_idle()
    (generate,) = (span for span in told(tracing, collector) if span.name == "octavo.generate")
    lost_session = ["octavo.pause", "octavo.replay", "octavo.resume"]
    assert generate.events == ["octavo.pause", "octavo.resume", *lost_session, "octavo.first_token", "octavo.end"]


async def test_calls_of_machines_are_left_out(
    traced: Doors, scheduler: ScriptedScheduler, tracing: Tracing, collector: Collector
) -> None:
    for path in ("/health", "/ready", "/nowhere", "/v1/models"):
        await traced.http.get(path)
    await model_pb2_grpc.ModelServiceStub(traced.grpc.channel).ListModels(model_pb2.ListModelsRequest())
    names = [span.name for span in told(tracing, collector)]
    assert names == ["GET /v1/models", "octavo.v1.ModelService/ListModels"]
