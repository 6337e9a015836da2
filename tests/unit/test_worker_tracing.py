"""What a worker tells of rows: the steps that computed them, beside which others."""

from msgspec.structs import replace

from octavo.wire.handshake import WorkerFacts
from octavo.wire.plan import StepPlan, StepResult
from octavo.worker.tracing import IDLE_S, RowTraces
from tests.support.fake_tracing import FakeTracing
from tests.support.plan_driver import PlanDriver

FACTS = WorkerFacts(64, 16, 100, 64, 8, 64, "cpu", "cpu:0", "float32")


class Watched:
    """Plans that are launched and completed at once, each 10 ms of computing and 20 ms after the one before."""

    def __init__(self) -> None:
        self.now = 100.0
        self.tracing = FakeTracing()
        self.traces = RowTraces(self.tracing.real, FACTS, lambda: self.now)
        self.driver = PlanDriver(16, 64)

    def step(self, counts: dict[int, int], traced: dict[int, str] | None = None) -> None:
        plan = self.launch(counts, traced)
        self.now += 0.02
        self.traces.completed(StepResult(plan.epoch, plan.step, b"", b"", compute_us=10_000))

    def launch(self, counts: dict[int, int], traced: dict[int, str] | None = None) -> StepPlan:
        plan = self.driver.plan(counts)
        new_rows = tuple(replace(new, trace=(traced or {}).get(new.row, "")) for new in plan.new_rows)
        plan = replace(plan, new_rows=new_rows)
        self.traces.launched(plan)
        return plan


def test_a_row_is_told_of_when_it_is_freed() -> None:
    watched = Watched()
    watched.driver.begin(0, range(30))
    watched.driver.begin(1, range(4))
    watched.step({0: 20, 1: 4}, {0: "a"})
    watched.step({0: 10, 1: 1})
    for _ in range(3):
        watched.step({0: 1})
    watched.driver.end(0)
    watched.step({1: 1})
    spans = watched.tracing.of("a")
    assert list(spans) == ["octavo.worker.prefill", "octavo.worker.decode"]
    prefill, decode = (span.attributes for span in spans.values())
    assert prefill == {
        "octavo.device": "cpu:0",
        "octavo.backend": "cpu",
        "octavo.choice": 0,
        "octavo.first_step": 1,
        "octavo.last_step": 2,
        "octavo.num_steps": 2,
        "octavo.num_tokens": 30,
        "octavo.compute_us": 20_000,
        "octavo.batch_size.min": 2,
        "octavo.batch_size.max": 2,
    }
    assert (decode["octavo.first_step"], decode["octavo.last_step"], decode["octavo.num_tokens"]) == (3, 5, 3)
    assert (decode["octavo.batch_size.min"], decode["octavo.batch_size.max"]) == (1, 1)
    begin, end = spans["octavo.worker.prefill"].begin_ns, spans["octavo.worker.prefill"].end_ns
    assert abs(end - begin - 30_000_000) < 1000  # the first step began 10 ms before its result
    assert len(watched.traces) == 0


def test_untraced_rows_are_not_looked_at() -> None:
    watched = Watched()
    watched.driver.begin(0, range(4))
    watched.step({0: 4})
    watched.driver.end(0)
    watched.driver.begin(1, range(4))
    watched.step({1: 4})
    assert (len(watched.traces), len(watched.traces._launched), watched.tracing.spans) == (0, 0, [])


def test_a_row_that_computes_nothing_more_is_told_of_without_another_plan() -> None:
    watched = Watched()
    watched.driver.begin(0, range(4))
    watched.step({0: 4}, {0: "a"})
    watched.traces.rest()
    assert not watched.tracing.spans
    watched.now += IDLE_S
    watched.traces.rest()
    watched.traces.rest()
    assert list(watched.tracing.of("a")) == ["octavo.worker.prefill"]
    watched.step({0: 1})
    watched.driver.end(0)
    watched.driver.begin(1, range(4))
    watched.step({1: 4})
    assert list(watched.tracing.of("a")) == ["octavo.worker.prefill", "octavo.worker.decode"]


def test_forked_rows_belong_to_the_same_request() -> None:
    watched = Watched()
    watched.driver.begin(0, range(4))
    watched.driver.fork(0, 3, 1)
    watched.step({0: 4}, {0: "a"})
    watched.step({0: 1, 3: 1})
    watched.traces.forget()
    names = [(span.name, span.attributes["octavo.choice"]) for span in watched.tracing.spans]
    assert names == [("octavo.worker.prefill", 0), ("octavo.worker.decode", 0), ("octavo.worker.decode", 1)]


def test_beams_belong_to_the_same_request() -> None:
    watched = Watched()
    watched.driver.begin(0, range(4))
    watched.step({0: 4}, {0: "a"})
    watched.driver.go_on(0, 0, 7)
    watched.driver.go_on(2, 0, 8)
    watched.step({0: 1, 2: 1})
    watched.traces.forget()
    assert [span.trace for span in watched.tracing.spans] == ["a", "a", "a"]


def test_a_lost_session_tells_what_there_was() -> None:
    watched = Watched()
    watched.driver.begin(0, range(4))
    watched.step({0: 4}, {0: "a"})
    watched.launch({0: 1})
    watched.traces.forget()
    assert list(watched.tracing.of("a")) == ["octavo.worker.prefill"]
    assert len(watched.traces) == 0


def test_plans_that_differ_in_nothing_count_like_others() -> None:
    """Row 0 is alone, then beside another one, then alone again; a pause in between tells of it early."""
    watched = Watched()
    watched.driver.begin(0, range(1))
    watched.step({0: 1}, {0: "a"})
    for _ in range(5):
        watched.step({0: 1})
    watched.driver.begin(1, range(2))
    watched.step({0: 1, 1: 2})
    for _ in range(3):
        watched.step({0: 1, 1: 1})
    watched.now += IDLE_S
    watched.traces.rest()
    for _ in range(2):
        watched.step({0: 1, 1: 1})
    watched.traces.forget()
    told = [(span.name.rpartition(".")[2], span.attributes) for span in watched.tracing.spans]
    keys = ("first_step", "last_step", "num_steps", "num_tokens", "compute_us", "batch_size.min", "batch_size.max")
    assert [(name, *(found[f"octavo.{key}"] for key in keys)) for name, found in told] == [
        ("prefill", 1, 1, 1, 1, 10_000, 1, 1),
        ("decode", 2, 10, 9, 9, 90_000, 1, 2),
        ("decode", 11, 12, 2, 2, 20_000, 2, 2),
    ]


def test_plans_ahead_of_their_results_count_in_order() -> None:
    watched = Watched()
    watched.driver.begin(0, range(4))
    plans = [watched.launch({0: 4}, {0: "a"}), watched.launch({0: 1}), watched.launch({0: 1})]
    watched.driver.end(0)
    watched.driver.begin(1, range(4))
    plans.append(watched.launch({1: 4}))
    for plan in plans:
        watched.now += 0.01
        watched.traces.completed(StepResult(plan.epoch, plan.step, b"", b"", compute_us=5))
    spans = watched.tracing.of("a")
    assert spans["octavo.worker.prefill"].attributes["octavo.compute_us"] == 5
    assert spans["octavo.worker.decode"].attributes["octavo.compute_us"] == 10
    assert spans["octavo.worker.decode"].attributes["octavo.last_step"] == 3
