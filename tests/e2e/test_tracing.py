"""One request, one trace: spans of all three processes below the caller's, whoever of them lives to tell."""

import itertools
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.v1 import generation_pb2 as pb
from tests.support.otlp_collector import Collector, Told
from tests.support.service import Answer, Service, free_port, request

CALLER_SPAN = "00f067aa0ba902b7"
FRONTEND = {"octavo.tokenize", "octavo.generate"}
SCHEDULER = {"octavo.queue", "octavo.prefill", "octavo.decode"}
WORKER = {"octavo.worker.prefill", "octavo.worker.decode"}
SECRET = "Zanzibar"


def traceparent(trace_id: str, sampled: bool = True) -> str:
    return f"00-{trace_id}-{CALLER_SPAN}-{sampled:02x}"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as one:
        yield one


@pytest.fixture(scope="module")
def http_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def traced(demo_model: Path, short_folder: Path, collector: Collector, http_port: int) -> Iterator[Service]:
    port = free_port()
    one = Service(port, short_folder / str(port), short_folder / f"traced-{port}.log")
    one.environment |= {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    try:
        one.start(
            *("serve", str(demo_model), "--grpc-port", str(port), "--http-port", str(http_port)),
            *("--otlp-traces-endpoint", collector.endpoint),
        )
        yield one.wait_until_ready()
    finally:
        codes = one.stop()
    assert codes == [0]


def stream(service: Service, trace: str, max_tokens: int = 8) -> Answer:
    answer = Answer()
    asked = request(f"Tell me about {SECRET}.", max_tokens, ignore_eos=True)
    for event in service.generation.GenerateStream(asked, timeout=60, metadata=(("traceparent", trace),)):
        answer.add(event)
    return answer


def complete(port: int, trace: str, **more: object) -> dict[str, object]:
    body = {"model": "", "prompt": f"Where is {SECRET}?", "max_tokens": 6, "temperature": 0, "ignore_eos": True} | more
    call = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "traceparent": trace, "tracestate": "vendor=1"},
    )
    with urllib.request.urlopen(call, timeout=60) as answer:
        found: dict[str, object] = json.load(answer)
    return found


def check_tree(told: list[Told], server: str) -> dict[str, Told]:
    """See that there is one tree below the caller's span, each child within its parent's time; return it by name."""
    by_name = {one.name: one for one in told}
    assert len(by_name) == len(told)
    top, generate = by_name[server].span, by_name["octavo.generate"].span
    assert top.parent_span_id.hex() == CALLER_SPAN
    for one in told:
        parent = {server: None, "octavo.tokenize": top, "octavo.generate": top}.get(one.name, generate)
        if parent is not None:
            assert one.span.parent_span_id == parent.span_id, one.name
            assert parent.start_time_unix_nano <= one.span.start_time_unix_nano <= one.span.end_time_unix_nano, one.name
        process = "frontend" if one.name in (server, *FRONTEND) else "scheduler" if one.name in SCHEDULER else "worker"
        assert one.process == process
    assert generate.end_time_unix_nano <= top.end_time_unix_nano
    phases = [by_name[name].span for name in ("octavo.queue", "octavo.prefill", "octavo.decode")]
    for before, after in itertools.pairwise(phases):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    assert phases[0].start_time_unix_nano >= by_name["octavo.tokenize"].span.end_time_unix_nano
    return by_name


def test_a_grpc_stream_is_one_trace_over_three_processes(traced: Service, collector: Collector) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    answer = stream(traced, traceparent(trace_id))
    server = "octavo.v1.GenerationService/GenerateStream"
    told = collector.wait(trace_id, {server} | FRONTEND | SCHEDULER | WORKER)
    spans = check_tree(told, server)
    top, prefill, decode = (spans[name].attributes for name in (server, "octavo.prefill", "octavo.worker.decode"))
    assert answer.finished is not None
    usage = answer.finished.usage
    assert top["rpc.response.status_code"] == "OK"
    assert top["gen_ai.operation.name"] == "chat"
    assert top["gen_ai.request.max_tokens"] == 8
    assert top["gen_ai.request.temperature"] == 0.0
    assert top["gen_ai.usage.input_tokens"] == usage.prompt_tokens
    assert top["gen_ai.usage.output_tokens"] == 8
    assert top["gen_ai.response.finish_reasons"] == ["length"]
    assert 0 < float(str(top["gen_ai.latency.time_to_first_token"])) <= float(str(top["gen_ai.latency.e2e"]))
    assert spans["octavo.generate"].events == ["octavo.first_token", "octavo.end"]
    assert prefill["octavo.num_cached_tokens"] == usage.cached_prompt_tokens
    assert spans["octavo.decode"].attributes["octavo.num_output_tokens"] == 8
    assert (
        spans["octavo.worker.prefill"].attributes["octavo.num_tokens"]
        == usage.prompt_tokens - usage.cached_prompt_tokens
    )
    assert (decode["octavo.device"], decode["octavo.batch_size.max"]) == ("cpu", 1)
    # The scheduler plans ahead: what it plans after the last token that counts is computed, and dropped.
    assert 7 <= int(str(decode["octavo.num_steps"])) <= 8
    assert int(str(decode["octavo.compute_us"])) > 0


def test_an_http_completion_is_one_trace_over_three_processes(
    traced: Service, collector: Collector, http_port: int
) -> None:
    trace_id = "5bf92f3577b34da6a3ce929d0e0e4736"
    complete(http_port, traceparent(trace_id))
    server = "POST /v1/completions"
    spans = check_tree(collector.wait(trace_id, {server} | FRONTEND | SCHEDULER | WORKER), server)
    top = spans[server]
    assert top.span.trace_state == "vendor=1"
    assert top.attributes["http.response.status_code"] == 200
    assert top.attributes["http.route"] == "/v1/completions"
    assert top.attributes["gen_ai.operation.name"] == "text_completion"
    assert top.attributes["gen_ai.usage.output_tokens"] == 6


def test_choices_share_their_requests_spans_and_have_rows_of_their_own(
    traced: Service, collector: Collector, http_port: int
) -> None:
    trace_id = "6bf92f3577b34da6a3ce929d0e0e4736"
    complete(http_port, traceparent(trace_id), n=2, temperature=1, seed=1)
    collector.until(lambda: [told.name for told in collector.of(trace_id)].count("octavo.worker.decode") == 2)
    told = collector.wait(trace_id, {"POST /v1/completions"} | FRONTEND | SCHEDULER | WORKER)
    rows = {one.attributes["octavo.choice"] for one in told if one.name == "octavo.worker.decode"}
    assert rows == {0, 1}
    (decode,) = (one for one in told if one.name == "octavo.decode")
    assert decode.attributes["octavo.num_output_tokens"] == 12


def test_what_is_not_sampled_and_what_is_no_trace_of_ours(traced: Service, collector: Collector) -> None:
    quiet, malformed = "7bf92f3577b34da6a3ce929d0e0e4736", "8bf92f3577b34da6a3ce929d0e0e4736"
    stream(traced, traceparent(quiet, sampled=False), 1)
    stream(traced, f"00-{malformed}-{CALLER_SPAN}", 1)
    wanted = "9bf92f3577b34da6a3ce929d0e0e4736"
    stream(traced, traceparent(wanted), 1)
    collector.wait(wanted, FRONTEND | {"octavo.queue"} | {"octavo.worker.prefill"})
    assert collector.of(quiet) == collector.of(malformed) == []


def test_no_span_holds_text(traced: Service, collector: Collector, http_port: int) -> None:
    trace_id = "abf92f3577b34da6a3ce929d0e0e4736"
    with pytest.raises(urllib.error.HTTPError):
        complete(http_port, traceparent(trace_id), stop=[SECRET] * 100)
    (refused,) = (one for one in collector.wait(trace_id, {"POST /v1/completions"}) if one.name.startswith("POST"))
    assert refused.attributes["error.type"] == "400"
    assert collector.paths == {"/v1/traces"}
    assert not any(SECRET.encode() in body for body in collector.bodies)


def test_a_killed_scheduler_leaves_the_trace_whole(traced: Service, collector: Collector) -> None:
    """What the dead scheduler knew is lost; the frontend tells of pause and replay, the next scheduler of the rest."""
    trace_id = "bbf92f3577b34da6a3ce929d0e0e4736"
    answer, killed = Answer(), False
    asked = request("Count.", 48, ignore_eos=True)
    pid = traced.pid_of("scheduler")
    for event in traced.generation.GenerateStream(
        asked, timeout=60, metadata=(("traceparent", traceparent(trace_id)),)
    ):
        answer.add(event)
        if len(answer.ids) >= 4 and not killed:
            killed = True
            os.kill(pid, signal.SIGKILL)
    assert len(answer.ids) == 48
    told = collector.wait(trace_id, FRONTEND | SCHEDULER | WORKER)
    (generate,) = (t for t in told if t.name == "octavo.generate")
    assert generate.events[:3] == ["octavo.pause", "octavo.replay", "octavo.resume"]
    (queue,) = (t for t in told if t.name == "octavo.queue")
    assert int(str(queue.attributes["octavo.num_replayed_tokens"])) >= 4
    assert {t.span.parent_span_id for t in told if t.name in SCHEDULER | WORKER} == {generate.span.span_id}


def test_the_collectors_death_changes_nothing_for_clients(traced: Service, collector: Collector) -> None:
    """Last in this file: from here on nobody listens."""
    before = stream(traced, traceparent("cbf92f3577b34da6a3ce929d0e0e4736"), 16)
    collector.die()
    for _ in range(3):
        after = stream(traced, traceparent("dbf92f3577b34da6a3ce929d0e0e4736"), 16)
        assert after.ids == before.ids
    assert isinstance(after.finished, pb.Finished)
