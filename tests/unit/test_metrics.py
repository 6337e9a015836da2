"""Rows of numbers, the text that they become, docs/metrics.md, and a process's own server."""

import os
import re
import socket
import threading
import urllib.request
from array import array
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from octavo.frontend.metrics import Metrics
from octavo.frontend.metrics_layout import LAYOUT
from octavo.frontend.metrics_text import families, render
from octavo.frontend.metrics_vllm import CACHE_CONFIG, VLLM_NAMES
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.metrics import SchedulerMetrics, waiting_for
from octavo.scheduler.service import Service
from octavo.wire.columns import pack_ints
from octavo.wire.ids import BootId
from octavo.wire.mailbox import Mailbox
from octavo.wire.metrics import MAX_ROW_BYTES, Layout
from octavo.wire.metrics_catalogue import CAUSES, SCHEDULER, WAITING_FOR, WORKER
from octavo.wire.metrics_server import MAX_CONNECTIONS, MetricsServer
from octavo.wire.metrics_text import cells_of
from octavo.wire.plan import FAULT_GRAMMAR, StepPlan, StepResult
from octavo.wire.process_stats import sample
from octavo.wire.requests import FailureCode, MetricsRow, ProcessInfo, QueueLimits, RequestFailed, StatusReport
from octavo.worker.metrics import Held, Sizes, WorkerMetrics

DOCS = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def full_report() -> StatusReport:
    """Return a report in which every process has told."""
    processes = (
        ProcessInfo("scheduler", 7, "s", 1, "ready", sample()),
        ProcessInfo("worker", 8, "w", 1, "ready", sample()),
        ProcessInfo("frontend", 9, "f", 1, "ready"),
    )
    row = MetricsRow(SCHEDULER.digest, array("d", range(SCHEDULER.num_cells)).tobytes())
    worker_row = WorkerMetrics(Sizes(100, 200, 300, 1.5)).figures().row
    return StatusReport(
        *(1, processes, 3, 4, 64, 48, 16, 9, 2, 5, 100, 30, 6, 0, "rows"),
        limits=QueueLimits(10, 1000),
        waiting_tokens=17,
        row=row,
        worker_row=worker_row,
    )


def all_families(vllm_names: bool = False) -> list[Metric]:
    text, _ = render(Metrics().rows(), full_report(), "tiny", vllm_names=vllm_names)
    return list(parse_plain(text.decode()))


@pytest.mark.parametrize("layout", [LAYOUT, SCHEDULER, WORKER])
def test_rows_are_bounded_and_cells_do_not_overlap(layout: Layout) -> None:
    place = layout.metrics[0].first
    for metric in layout.metrics:
        assert metric.first == place
        place += metric.num_cells
    assert place == layout.num_cells
    assert layout is LAYOUT or layout.num_bytes <= MAX_ROW_BYTES


@pytest.mark.parametrize("vllm_names", [False, True])
def test_both_formats_parse_and_names_keep_to_the_rules(vllm_names: bool) -> None:
    report = full_report()
    plain, plain_type = render(Metrics().rows(), report, "tiny", vllm_names=vllm_names)
    opened, open_type = render(Metrics().rows(), report, "tiny", OPENMETRICS, vllm_names=vllm_names)
    assert plain_type.startswith("text/plain; version=")
    assert open_type.startswith("application/openmetrics-text; version=1.0.0")
    in_plain = {family.name: family for family in parse_plain(plain.decode())}
    in_opened = {family.name: family for family in parse_openmetrics(opened.decode())}  # type: ignore[no-untyped-call]
    assert set(in_plain) == set(in_opened)
    for name, family in in_plain.items():
        assert family.documentation
        assert re.fullmatch(r"octavo_[a-z0-9_]+" if name.startswith("octavo") else r"vllm:[a-z0-9_]+", name)
        if family.type == "counter":
            assert all(one.name.endswith("_total") for one in family.samples if not one.name.endswith("_created"))
    assert any(":" in name for name in in_plain) == vllm_names


def test_the_page_lists_exactly_what_the_service_tells() -> None:
    shown = dict(re.findall(r"^\| `(octavo_\w+)` \| (\w+) \|", DOCS, re.MULTILINE))
    told = {family.name + ("_total" if family.type == "counter" else ""): family.type for family in all_families()}
    assert shown == told
    for label in ("reason", "cause", "role", "kind", "code", "door", "method", "finished_reason", "state"):
        assert f"`{label}`" in DOCS


def test_the_page_maps_to_vllm_as_the_flag_does() -> None:
    shown = re.findall(r"^\| `(vllm:\w+)` \| `(octavo_\w+)` \|", DOCS, re.MULTILINE)
    assert sorted((theirs, ours) for theirs, ours in shown if theirs != CACHE_CONFIG) == sorted(
        (theirs, ours) for ours, names in VLLM_NAMES.items() for theirs in names
    )
    told = {family.name: family for family in all_families(vllm_names=True)}
    assert {theirs for theirs, _ in shown} <= set(told)
    (running,) = told["vllm:num_requests_running"].samples
    assert running.labels == {"model_name": "tiny", "engine": "0"}
    assert running.value == 3
    (info,) = told[CACHE_CONFIG].samples
    assert (info.labels["block_size"], info.labels["num_gpu_blocks"], info.value) == ("16", "64", 1)
    names = {one.name for one in told["vllm:time_to_first_token_seconds"].samples}
    assert "vllm:time_to_first_token_seconds_bucket" in names
    assert {one.name for one in told["vllm:prompt_tokens"].samples} == {"vllm:prompt_tokens_total"}


def test_rows_of_another_build_are_left_out() -> None:
    good = MetricsRow(WORKER.digest, bytes(WORKER.num_bytes))
    assert cells_of(good, WORKER) is not None
    assert cells_of(MetricsRow("other", good.cells), WORKER) is None
    assert cells_of(MetricsRow(WORKER.digest, good.cells[:-8]), WORKER) is None
    report = StatusReport(1, (), 0, 0, 0, 0, 0, 0, 0, worker_row=MetricsRow("other", good.cells))
    assert not [f for f in families(Metrics().rows(), report, "m") if f.name.startswith("octavo_worker")]


def plan(step: int, counts: bytes, epoch: int = 1) -> StepPlan:
    rows = pack_ints(range(len(counts) // 4))
    return StepPlan(epoch, step, rows, counts, rows)


def test_the_scheduler_counts_steps_by_their_results() -> None:
    metrics = SchedulerMetrics()
    counts = pack_ints([1, 7])
    metrics.plan_sent(plan(1, counts), 300, 10.0)
    metrics.plan_sent(plan(2, counts), 100, 10.5)
    metrics.step_completed(StepResult(1, 1, b"", b""), 11.0)
    metrics.step_completed(StepResult(9, 1, b"", b""), 12.0)  # of another epoch
    metrics.step_completed(StepResult(1, 2, b"", b""), 13.0)
    metrics.plan_sent(plan(1, pack_ints([5]), epoch=2), 100, 20.0)
    metrics.step_completed(StepResult(2, 1, b"", b""), 20.25)
    cells = metrics.cells

    def sum_and_count(histogram: Any) -> tuple[float, float]:
        end = histogram.first + histogram.num_cells - 1
        return cells[end], sum(cells[histogram.first : end])

    assert sum_and_count(SCHEDULER.step_seconds) == (3.25, 3)
    assert sum_and_count(SCHEDULER.step_tokens) == (21, 3)
    assert sum_and_count(SCHEDULER.plan_bytes) == (500, 3)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("", ""),
        ("the next plan", "next_plan"),
        ("requests that may go on from the worker's rows", "adoption"),
        ("4 of 4 rows (max_num_seqs)", "rows"),
        ("3 more free blocks", "blocks"),
        ("free blocks", "blocks"),
        ("tokens of a step (max_num_batched_tokens)", "tokens"),
        ("ids of its own that are still under way", "own_ids"),
        ("room in a plan for its ids", "plan_size"),
        ("a worker", "worker"),
        ("good weather", "other"),
    ],
)
def test_reasons_to_wait_have_bounded_names(words: str, name: str) -> None:
    assert waiting_for(words) == name
    assert not name or name in WAITING_FOR


def test_a_worker_counts_faults_by_kind() -> None:
    metrics = WorkerMetrics(held=lambda: Held(4, 2, 1, 10, 20), dropped=lambda: (3, 5))
    metrics.step_done(StepResult(1, 1, pack_ints([0]), pack_ints([7]), pack_ints([1]), pack_ints([FAULT_GRAMMAR])))
    metrics.plan_refused()
    cells = cells_of(metrics.figures().row, WORKER)
    assert cells is not None
    assert cells[WORKER.faults.cell("grammar")] == cells[WORKER.refused.first] == cells[WORKER.sampled.first] == 1
    assert [cells[m.first] for m in (WORKER.rows, WORKER.grammar_rows, WORKER.dropped, WORKER.malformed)] == [
        4,
        2,
        3,
        5,
    ]


def test_failures_and_causes_all_have_cells() -> None:
    metrics = SchedulerMetrics()
    metrics.failed([RequestFailed(1, code, "") for code in FailureCode])
    for cause in CAUSES:
        metrics.session_ended("worker", cause)
    assert sum(metrics.cells) == len(FailureCode) + len(CAUSES)


def test_a_process_is_looked_at() -> None:
    own = sample()
    assert own is not None
    assert own == sample(os.getpid()) or abs(own.started_at - cast(Any, sample(os.getpid())).started_at) < 0.1
    assert own.resident_bytes > 2**20
    assert own.threads >= 1
    assert own.open_fds > 2
    assert sample(2**22 + 1) is None


class NoChannel:
    num_malformed = num_refused = 0

    def receive(self, limit: int) -> Any:
        return iter(())


def test_a_report_without_metrics_looks_at_no_process() -> None:
    config = SchedulerConfig(address="ipc:///unused", config_digest="digest", max_requests_per_caller=5)
    service = Service(cast(Any, NoChannel()), config, BootId("s"), 1)
    bare = service.report(1.0, with_metrics=False)
    assert bare.row is None
    assert bare.processes[0].sample is None
    assert bare.limits == QueueLimits(1024, 4 * 2**20, 5, 0)
    full = service.report(1.0)
    assert cells_of(full.row, SCHEDULER) is not None
    assert full.processes[0].sample is not None


def get(port: int, path: str = "/metrics", accept: str = "*/*") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"accept": accept})
    with urllib.request.urlopen(request, timeout=30) as response:
        body: bytes = response.read()
    return body.decode()


def test_a_process_answers_for_itself_until_it_is_closed() -> None:
    server = MetricsServer("127.0.0.1", 0, lambda: [GaugeMetricFamily("octavo_x", "A number.", value=3)])
    try:
        assert "octavo_x 3.0" in get(server.port)
        assert get(server.port, accept=OPENMETRICS).endswith("# EOF\n")
        with pytest.raises(OSError, match="in use"):
            MetricsServer("127.0.0.1", server.port, list)
    finally:
        server.close()
    with pytest.raises(OSError, match="refused"):
        get(server.port)


def test_clients_that_say_nothing_keep_nobody_from_a_scrape(capfd: pytest.CaptureFixture[str]) -> None:
    server = MetricsServer("127.0.0.1", 0, lambda: [GaugeMetricFamily("octavo_x", "A number.", value=3)])
    try:
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(MAX_CONNECTIONS - 1)]
        assert "octavo_x 3.0" in get(server.port)
        silent[0].sendall(b"GET /met")
        silent.append(socket.create_connection(("127.0.0.1", server.port)))
        # Those beyond the bound are closed; of these one is, whichever comes first.
        beyond = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
        beyond[1].settimeout(30)
        assert beyond[1].recv(1) == b""
        for connection in silent + beyond:
            connection.close()
    finally:
        server.close()
    assert "Traceback" not in capfd.readouterr().err


def test_one_thread_asks_and_the_owner_answers() -> None:
    woken = threading.Event()
    box: Mailbox[int] = Mailbox(woken.set)
    answers: list[int | None] = []
    asker = threading.Thread(target=lambda: answers.append(box.ask()))
    asker.start()
    assert woken.wait(30)
    assert box.is_asked
    box.answer(7)
    asker.join(30)
    assert answers == [7]
    assert not box.is_asked
