"""Whether there is tracing, and what happens to spans that nobody takes."""

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from octavo.cli.errors import ConfigurationError
from octavo.cli.options import _traces_endpoint
from octavo.wire import tracing, tracing_export
from octavo.wire.tracing import SpanClock, TracingError, start_tracing, traces_url
from octavo.wire.tracing_export import Tracing
from tests.support.otlp_collector import Collector

SAMPLED = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as one:
        yield one


def record(made: Tracing, count: int = 1, parent: str = SAMPLED) -> None:
    clock = SpanClock()
    for number in range(count):
        made.record("step", made.remote(parent), clock.at(1.0), clock.at(2.0), {"number": number})


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
        ("https://[::1]:4318/v1/traces", "https://[::1]:4318/v1/traces"),
        ("http://collector/otel/traces?key=1", "http://collector/otel/traces?key=1"),
    ],
)
def test_an_endpoint_without_a_path_gets_the_usual_one(endpoint: str, url: str) -> None:
    assert traces_url(endpoint, {}) == url


@pytest.mark.parametrize(
    "endpoint", ["", "localhost:4318", "grpc://localhost:4317", "http://", "http://a:b", "http://a:0"]
)
def test_what_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(TracingError, match="no address of a collector"):
        traces_url(endpoint, {})


def test_other_protocols_are_refused() -> None:
    with pytest.raises(TracingError, match="asks for 'grpc'"):
        traces_url("http://a:4317", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"})
    with pytest.raises(TracingError, match="asks for 'http/json'"):
        traces_url("http://a:4317", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})
    both = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    assert traces_url("http://a:4318", both)


def test_a_missing_library_is_an_error_of_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_MODULES", ("opentelemetry.nowhere.at_all",))
    with pytest.raises(ConfigurationError, match="needs opentelemetry-sdk and") as error:
        _traces_endpoint("http://a:4318")
    assert error.value.exit_code == 2
    assert _traces_endpoint(None) is None


def test_without_an_endpoint_nothing_is_loaded() -> None:
    """Neither by what the processes import, nor by their start."""
    program = (
        "import sys, octavo.cli.serve, octavo.cli.roles, octavo.frontend.main, octavo.scheduler.main, octavo.worker.main\n"
        "from octavo.wire.tracing import start_tracing\n"
        "assert start_tracing('worker', None, 'x') is None\n"
        "print([name for name in sys.modules if name.partition('.')[0] == 'opentelemetry'])"
    )
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"


def test_the_scheduler_traces_without_grpc() -> None:
    program = (
        "import sys, octavo.scheduler.main\n"
        "from octavo.wire.tracing import start_tracing\n"
        "start_tracing('scheduler', 'http://127.0.0.1:1', 'x').close()\n"
        "print([name for name in ('grpc', 'torch', 'transformers') if name in sys.modules])"
    )
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"


def test_otels_own_switch_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert start_tracing("worker", "http://a:4318", "x") is None


@pytest.mark.parametrize("value", ["many", "0", "-1", "1e3"])
def test_bounds_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", value)
    with pytest.raises(TracingError, match="OTEL_BSP_MAX_QUEUE_SIZE"):
        start_tracing("worker", "http://127.0.0.1:1", "x")


def test_a_batch_larger_than_the_queue_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    with pytest.raises(TracingError, match="max_export_batch_size"):
        start_tracing("worker", "http://127.0.0.1:1", "x")


def test_spans_reach_the_collector_before_the_process_ends(collector: Collector) -> None:
    made = start_tracing("worker", collector.endpoint, "life-1")
    assert made is not None
    record(made, 3)
    made.close()
    assert [told.attributes["number"] for told in collector.spans] == [0, 1, 2]
    assert {told.span.parent_span_id.hex() for told in collector.spans} == {"b" * 16}
    assert collector.paths == {"/v1/traces"}
    assert made.num_lost == 0


@pytest.mark.parametrize("service", [None, "mine"])
def test_processes_are_services_unless_the_environment_names_one(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, service: str | None
) -> None:
    if service is not None:
        monkeypatch.setenv("OTEL_SERVICE_NAME", service)
    made = start_tracing("worker", collector.endpoint, "life-1")
    assert made is not None
    record(made)
    made.close()
    assert (service or "octavo-worker").encode() in collector.bodies[0]
    assert (b"octavo-worker" in collector.bodies[0]) is (service is None)


@pytest.mark.parametrize(
    "parent",
    ["", "nonsense", SAMPLED.replace("-01", "-00"), SAMPLED.replace("a", "0").replace("-01", "-00"), SAMPLED.upper()],
)
def test_what_is_not_sampled_is_not_told(collector: Collector, parent: str) -> None:
    made = start_tracing("worker", collector.endpoint, "x")
    assert made is not None
    record(made, parent=parent)
    record(made)
    made.close()
    in_trace = [told for told in collector.spans if told.span.trace_id.hex() == "a" * 32]
    assert len(in_trace) == 1
    assert all(not told.span.parent_span_id for told in collector.spans if told not in in_trace)


def test_spans_that_find_no_room_are_lost_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A collector that takes a connection and never answers holds up nobody, neither now nor at the end."""
    asked, answer = threading.Event(), threading.Event()

    class Stuck:
        def __init__(self, endpoint: str) -> None:
            pass

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            asked.set()
            answer.wait(60)
            return SpanExportResult.SUCCESS

        def shutdown(self) -> None:
            pass

    monkeypatch.setattr(tracing_export, "OTLPSpanExporter", Stuck)
    monkeypatch.setattr(tracing_export, "CLOSE_S", 0.2)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    made = Tracing("worker", "http://unused", "x")
    record(made, 2)
    assert asked.wait(60)
    record(made, 20)
    assert made.num_lost == 14
    assert made._processor._num_ended - made._processor._exporter.num_done == 8
    made.close()
    answer.set()
    assert [record.message for record in caplog.records if "spans" in record.message] == [
        "spans that the collector did not take: 1; no room",
        "spans that the collector did not take: 21; no room",
    ]


@pytest.mark.parametrize("status", [400, 404, 500])
def test_spans_that_the_collector_refuses_are_lost_and_counted(
    status: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    with Collector(status) as collector:
        made = start_tracing("worker", collector.endpoint, "x")
        assert made is not None
        record(made, 3)
        made.close()
    assert made.num_lost == 3
    (line,) = [record.message for record in caplog.records if "spans" in record.message]
    assert line.startswith("spans that the collector did not take: 3; ")
    assert str(status) in line


def test_a_collector_that_is_not_there_loses_spans_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with Collector() as collector:
        endpoint = collector.endpoint
    made = start_tracing("worker", endpoint, "x")
    assert made is not None
    record(made, 3)
    made.close()
    assert [record.levelname for record in caplog.records if "spans" in record.message] == ["WARNING"]
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]
