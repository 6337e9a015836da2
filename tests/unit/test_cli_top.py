"""octavo top: what two looks at the metrics tell, and how it is shown."""

import io
import json
import math
import re

import pytest
from rich.console import Console

from octavo.cli.top import view
from octavo.cli.top_figures import Figures, Snapshot, figures, quantile


def moment(time_s: float, *, tokens: int, bucket_counts: tuple[int, int, int], cpu_s: float = 1.0) -> Snapshot:
    name = "octavo_time_to_first_token_seconds"
    bounds = zip(("0.1", "0.5", "+Inf"), bucket_counts, strict=True)
    lines = [
        "octavo_scheduler_up 1.0",
        'octavo_num_requests_running{model_name="m"} 3',
        'octavo_num_requests_waiting{model_name="m"} 2',
        'octavo_scheduler_waiting_for{model_name="m",reason="blocks"} 1',
        'octavo_scheduler_waiting_for{model_name="m",reason="rows"} 0',
        f'octavo_generation_tokens_total{{model_name="m"}} {tokens}',
        *(f'{name}_bucket{{model_name="m",le="{bound}"}} {count}' for bound, count in bounds),
        'octavo_process_resident_memory_bytes{process="worker",role="worker"} 1048576',
        f'octavo_process_cpu_seconds_total{{process="worker",role="worker"}} {cpu_s}',
        'octavo_scheduler_sessions_begun_total{model_name="m",role="worker"} 4',
        'octavo_scheduler_sessions_begun_total{model_name="m",role="frontend"} 9',
    ]
    return Snapshot.read("\n".join(lines) + "\n", time_s)


def test_rates_and_quantiles_are_of_the_time_between() -> None:
    before = moment(10.0, tokens=100, bucket_counts=(50, 50, 50))
    look = figures(before, moment(14.0, tokens=300, bucket_counts=(50, 60, 60), cpu_s=3.0))
    assert look.output_tokens_per_s == 50.0
    assert look.ttft_p50_s == pytest.approx(0.3)  # ten came, all between 0.1 and 0.5
    assert (look.running, look.waiting, look.waiting_for, look.worker_epochs) == (3, 2, "blocks", 4)
    assert [(one.name, one.cpu_percent, one.files) for one in look.processes] == [("worker", 50.0, None)]


def test_a_counter_that_began_anew_has_no_rate() -> None:
    look = figures(
        moment(10.0, tokens=100, bucket_counts=(1, 1, 1), cpu_s=9.0), moment(11.0, tokens=5, bucket_counts=(1, 1, 1))
    )
    assert look.output_tokens_per_s is None
    assert look.ttft_p50_s is None  # nothing came
    assert look.processes[0].cpu_percent is None


def test_quantiles() -> None:
    after = ((1.0, 2.0), (2.0, 6.0), (math.inf, 8.0))
    assert quantile((), after, 0.25) == 1.0
    assert quantile((), after, 0.5) == 1.5
    assert quantile((), after, 0.99) == 2.0  # beyond the largest bound
    assert quantile(after, after, 0.5) is None
    assert quantile((), (), 0.5) is None


@pytest.mark.parametrize("full", [True, False])
def test_a_look_fits_80_columns_whatever_is_known(full: bool) -> None:
    before = moment(10.0, tokens=100, bucket_counts=(50, 50, 50)) if full else Snapshot(0.0, {})
    look = figures(before, moment(14.0, tokens=10**9, bucket_counts=(50, 60, 60)) if full else Snapshot(1.0, {}))
    out = io.StringIO()
    Console(file=out, width=80).print(view("127.0.0.1:50051", look))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert ("the scheduler does not answer" in text) is not full
    assert re.search(r"requests +(3 running, 2 waiting for blocks|- running, - waiting)", text)
    assert isinstance(look, Figures)
    json.dumps(look.as_dict())
