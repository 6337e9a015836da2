"""What is counted, kept in files that several frontends share, and told in Prometheus' text format."""

from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from octavo.frontend import metrics_layout as layout
from octavo.frontend.choice import ChoiceEnd
from octavo.frontend.errors import DeadlineExceeded, InternalError, QueueFull, ServiceError, SlowReader, Unavailable
from octavo.frontend.metrics import NUM_BYTES, Metrics, MetricsError, StreamMeter
from octavo.frontend.metrics_text import render
from octavo.frontend.openai.app import make_app
from octavo.frontend.streams import Timings
from octavo.wire.requests import FinishReason, ProcessInfo, StatusReport

REPORT = StatusReport(
    1,
    (ProcessInfo("frontend", 7, "b", 1, "ready"),) * 2,
    3,
    4,
    64,
    48,
    16,
    9,
    2,
    5,
    100,
    30,
    recomputed_tokens=6,
    adopted_rows=2,
    adopted_tokens=57,
)


def samples(metrics: Metrics, report: StatusReport | None = None) -> dict[tuple[str, ...], float]:
    """Return all values by name and labels' values, but for the model's name."""
    found = {}
    for family in text_string_to_metric_families(render(metrics.rows(), report, "tiny")[0].decode()):
        assert family.documentation
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name", "tiny") == "tiny"
            key = (sample.name, *(labels[name] for name in sorted(labels)))
            assert key not in found
            found[key] = sample.value
    return found


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeStream:
    """As much of a stream as is counted; its request came at 99.0 and its first token at 100.0."""

    def __init__(self, num_choices: int = 1) -> None:
        self.journal = SimpleNamespace(
            outputs=[array("i") for _ in range(num_choices)], finished=set(), call=SimpleNamespace(prompt_ids=bytes(40))
        )
        self.num_cached_tokens = 4
        self.first_token_at: float | None = 100.0
        self.started, self.ended = True, False
        self.error: ServiceError | None = None
        self.timings = Timings(0.25, 0.75, 2.0)
        self.choices: list[Any] = [SimpleNamespace(end=None) for _ in range(num_choices)]

    def end(self, choice: int, reason: FinishReason) -> None:
        self.choices[choice].end = ChoiceEnd(reason, len(self.journal.outputs[choice]))
        self.journal.finished.add(choice)


def meter(metrics: Metrics, stream: FakeStream, clock: Clock) -> StreamMeter:
    return metrics.meter(cast(Any, stream), 99.0, clock)


def test_cells_do_not_overlap_and_fill_the_row() -> None:
    places = [2]
    for metric in layout.LAYOUT.metrics:
        assert metric.first == places[-1]
        places.append(metric.first + metric.num_cells)
    assert places[-1] == layout.LAYOUT.num_cells == NUM_BYTES // 8
    names = [metric.name for metric in layout.LAYOUT.metrics]
    assert len(set(names)) == len(names)


def test_every_route_has_a_name_to_be_counted_under() -> None:
    calls: Any = SimpleNamespace(metrics=Metrics(), config=None)
    paths = {
        route.path.replace(":path", "") for route in make_app(calls, cast(Any, None)).routes if isinstance(route, Route)
    }
    assert paths | {layout.OTHER} == set(layout.HTTP_ROUTES)


def test_a_stream_is_counted_as_it_is_sent() -> None:
    metrics, clock, stream = Metrics(), Clock(), FakeStream()
    counting = meter(metrics, stream, clock)
    counting.flush()  # its Started: nothing has come
    assert samples(metrics)["octavo_generation_tokens_total",] == 0
    stream.journal.outputs[0].append(1)
    counting.flush()
    clock.now += 0.004
    stream.journal.outputs[0].extend([2, 3, 4, 5])
    counting.flush()
    counting.flush()
    found = samples(metrics)
    assert found["octavo_generation_tokens_total",] == 5
    assert found["octavo_prompt_tokens_total",] == 10
    assert found["octavo_prompt_tokens_cached_total",] == 4
    assert (found["octavo_time_to_first_token_seconds_sum",], found["octavo_time_to_first_token_seconds_count",]) == (
        1,
        1,
    )
    # Four tokens in 4 ms: a millisecond each.
    assert found["octavo_inter_token_latency_seconds_count",] == 4
    assert found["octavo_inter_token_latency_seconds_sum",] == pytest.approx(0.004)
    assert found["octavo_inter_token_latency_seconds_bucket", "0.0025"] == 4
    assert found["octavo_e2e_request_latency_seconds_count",] == 0
    clock.now += 1.0
    stream.end(0, FinishReason.STOP)
    stream.ended = True
    counting.end()
    found = samples(metrics)
    assert found["octavo_request_success_total", "stop"] == 1
    assert found["octavo_e2e_request_latency_seconds_sum",] == pytest.approx(2.004)
    assert found["octavo_request_queue_time_seconds_sum",] == 0.25
    assert found["octavo_request_prefill_time_seconds_sum",] == 0.75
    assert found["octavo_request_decode_time_seconds_sum",] == 2.0
    assert found["octavo_request_time_per_output_token_seconds_sum",] == 0.5
    assert found["octavo_generation_tokens_total",] == 5
    assert sum(found["octavo_stream_aborts_total", reason] for reason in layout.ABORTS) == 0


def test_an_answer_that_is_sent_whole_is_counted_at_its_end() -> None:
    metrics, stream = Metrics(), FakeStream(num_choices=2)
    counting = meter(metrics, stream, Clock())
    for choice, ids in enumerate(stream.journal.outputs):
        ids.extend(range(3 + choice))
        stream.end(choice, FinishReason.LENGTH)
    stream.ended = True
    counting.end()
    found = samples(metrics)
    assert found["octavo_generation_tokens_total",] == 7
    assert found["octavo_prompt_tokens_total",] == 10
    assert found["octavo_time_to_first_token_seconds_count",] == 1
    assert found["octavo_inter_token_latency_seconds_count",] == 0
    assert found["octavo_request_success_total", "length"] == 2
    assert found["octavo_request_time_per_output_token_seconds_sum",] == pytest.approx(2 / 3)


def test_the_choices_of_a_request_do_not_share_their_time() -> None:
    """Two choices that bring a token each in 20 ms take 20 ms a token, not 10."""
    metrics, clock, stream = Metrics(), Clock(), FakeStream(num_choices=2)
    counting = meter(metrics, stream, clock)
    for _ in range(2):
        for ids in stream.journal.outputs:
            ids.append(1)
        counting.flush()
        clock.now += 0.02
    found = samples(metrics)
    assert found["octavo_inter_token_latency_seconds_sum",] == pytest.approx(0.04)
    assert found["octavo_inter_token_latency_seconds_count",] == 2


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, "cancelled"),
        (DeadlineExceeded("late"), "deadline"),
        (SlowReader("slow"), "slow_reader"),
        (Unavailable("gone"), "unavailable"),
        (InternalError("bad"), "failed"),
        (QueueFull("full"), ""),
    ],
)
def test_requests_that_did_not_end_well(error: ServiceError | None, reason: str) -> None:
    metrics, stream = Metrics(), FakeStream()
    stream.error, stream.ended, stream.started = error, error is not None, False
    meter(metrics, stream, Clock()).end()
    found = samples(metrics)
    assert {one: found["octavo_stream_aborts_total", one] for one in layout.ABORTS} == {
        one: float(one == reason) for one in layout.ABORTS
    }
    assert found["octavo_e2e_request_latency_seconds_count",] == 0


def test_calls_that_are_not_known_count_as_others() -> None:
    metrics = Metrics()
    for code in ("200", "200", "418"):
        metrics.count_call("http", "/health", code)
    metrics.count_call("http", "/etc/passwd", "404")
    metrics.count_call("http", "/etc/passwd", "777")
    metrics.count_call("grpc", "octavo.v1.GenerationService/Generate", "OK")
    found = {key[1:]: value for key, value in samples(metrics).items() if key[0] == "octavo_requests_total"}
    assert found == {
        ("200", "http", "/health"): 2,
        ("other", "http", "/health"): 1,
        ("404", "http", "other"): 1,
        ("other", "http", "other"): 1,
        ("OK", "grpc", "octavo.v1.GenerationService/Generate"): 1,
    }


def test_frontends_are_added_up_and_go_on_after_a_restart(tmp_path: Path) -> None:
    first, second = (Metrics(tmp_path / f"frontend-{index}.metrics") for index in range(2))
    for metrics, count in ((first, 2), (second, 3)):
        for _ in range(count):
            metrics.count_call("http", "/health", "200")
    (tmp_path / "frontend-2.metrics").write_bytes(b"of another version")
    (tmp_path / "unrelated").write_bytes(bytes(NUM_BYTES))
    key = ("octavo_requests_total", "200", "http", "/health")
    assert samples(first)[key] == samples(second)[key] == 5
    del first  # as kill -9 does: nothing is written in the end
    again = Metrics(tmp_path / "frontend-0.metrics")
    again.count_call("http", "/health", "200")
    found = samples(second)
    assert found[key] == 6
    named = [key[1] for key in found if key[0] == "octavo_process_start_time_seconds"]
    assert named == ["frontend-0", "frontend-1"]


def test_a_file_of_another_size_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "frontend-0.metrics"
    path.write_bytes(b"\xff" * (NUM_BYTES + 8))
    assert samples(Metrics(path))["octavo_generation_tokens_total",] == 0
    assert path.stat().st_size == NUM_BYTES


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "link.metrics").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "absent" / "a.metrics", tmp_path / "link.metrics"):
        with pytest.raises(MetricsError, match=str(path)):
            Metrics(path)


def test_the_scheduler_is_told_of_as_it_reports() -> None:
    found = samples(Metrics(), REPORT)
    assert found["octavo_scheduler_up",] == 1
    assert (found["octavo_num_requests_running",], found["octavo_num_requests_waiting",]) == (3, 4)
    assert (found["octavo_kv_cache_blocks",], found["octavo_kv_cache_free_blocks",]) == (64, 48)
    assert found["octavo_kv_cache_usage_perc",] == 0.25
    assert (found["octavo_prefix_cache_queries_total",], found["octavo_prefix_cache_hits_total",]) == (100, 30)
    assert (found["octavo_scheduler_steps_total",], found["octavo_num_preemptions_total",]) == (9, 2)
    assert found["octavo_recomputed_tokens_total",] == 6
    assert (found["octavo_adopted_rows_total",], found["octavo_adopted_tokens_total",]) == (2, 57)
    assert found["octavo_processes", "frontend", "ready"] == 2
    without = samples(Metrics())
    assert without["octavo_scheduler_up",] == 0
    assert ("octavo_num_requests_running",) not in without
