"""The numbers as text: of all frontends that share the ports, of the scheduler, and of the worker."""

from array import array
from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics

from octavo.frontend.metrics_layout import LAYOUT
from octavo.frontend.metrics_vllm import alias_families
from octavo.wire.metrics_text import (
    Families,
    layout_families,
    process_families,
    scheduler_families,
    worker_families,
)
from octavo.wire.process_stats import ProcessSample, sample
from octavo.wire.requests import StatusReport

PLAIN = "text/plain"
OPENMETRICS = "application/openmetrics-text"
OPENMETRICS_TYPE = f"{OPENMETRICS}; version=1.0.0; charset=utf-8"


def render(
    rows: "dict[str, array[float]]",
    report: StatusReport | None,
    model: str,
    accept: str = PLAIN,
    vllm_names: bool = False,
) -> tuple[bytes, str]:
    """Return all metrics as text, and its content type; takes a few milliseconds.

    Args:
        rows: the cells of each frontend, by its name.
        report: of the scheduler, with metrics; None if it did not answer, and then its metrics are absent.
        model: what the label `model_name` says.
        accept: what the scraper reads: OpenMetrics, if it says so, else Prometheus' text format.
        vllm_names: whether metrics that vLLM has too are told under its names as well.
    """
    found = list(families(rows, report, model))
    if vllm_names:
        found += alias_families(found, report, model)
    if OPENMETRICS in accept:
        # As it is: all names are of the old kind, but the library would write those with a colon in two ways.
        body: bytes = openmetrics.generate_latest(Families(found), openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return body, OPENMETRICS_TYPE
    return generate_latest(Families(found)), CONTENT_TYPE_LATEST


def families(rows: "dict[str, array[float]]", report: StatusReport | None, model: str) -> Iterator[Metric]:
    """Yield all metrics under our names; arguments as of `render`."""
    total = [sum(cells) for cells in zip(*rows.values(), strict=True)]
    yield from layout_families(LAYOUT, total, model)
    yield GaugeMetricFamily("octavo_scheduler_up", "Whether the scheduler answered.", value=float(report is not None))
    samples: dict[tuple[str, str], ProcessSample] = {}
    for name, cells in rows.items():
        if (taken := sample(int(cells[LAYOUT.PID]))) is not None:
            samples["frontend", name] = taken
    if report is not None:
        yield from scheduler_families(report, model)
        yield from worker_families(report.worker_row, model)
        for process in report.processes:
            if process.sample is not None:
                samples[process.role, process.role] = process.sample
    yield from process_families(samples)
