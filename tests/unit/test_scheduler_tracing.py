"""What the scheduler tells of requests: where they waited, what was found, what was lost."""

from typing import Any

from octavo.scheduler.simulate.model import make_facts
from octavo.wire.ids import SessionId
from tests.support.core_driver import make_config
from tests.support.fake_tracing import TracedDriver


def make_driver(num_blocks: int = 64, **settings: Any) -> TracedDriver:
    driver = TracedDriver(make_facts(num_blocks=num_blocks, block_size=4, max_model_len=24), make_config(**settings))
    driver.worker_ready()
    return driver


def walk(driver: TracedDriver) -> None:
    """Go on to the end, a tenth of a second a step."""
    while driver.core.has_outstanding_plans:
        driver.now += 0.1
        driver.step()


def test_the_phases_of_a_request_follow_each_other() -> None:
    driver = make_driver(max_num_batched_tokens=4)
    client = driver.submit(range(8), 5)
    walk(driver)
    spans = driver.tracing.of(driver.trace_of(client))
    assert list(spans) == ["octavo.queue", "octavo.prefill", "octavo.decode"]
    queue, prefill, decode = spans.values()
    assert (queue.end_ns, prefill.end_ns) == (prefill.begin_ns, decode.begin_ns)
    assert queue.attributes == {"octavo.num_prompt_tokens": 8, "octavo.num_replayed_tokens": 0}
    assert prefill.events == ["octavo.scheduled"]
    # The plan after the two of the prompt is under way when the first token comes.
    assert prefill.attributes == {"octavo.num_cached_tokens": 0, "octavo.num_steps": 3}
    assert decode.attributes["octavo.num_output_tokens"] == 5
    assert decode.attributes["octavo.outcome"] == "finished"
    assert len(driver.traces) == 0


def test_what_was_found_in_the_prefix_cache_is_told() -> None:
    driver = make_driver()
    driver.submit(range(9), 1)
    walk(driver)
    client = driver.submit(range(9), 1)
    walk(driver)
    assert driver.tracing.of(driver.trace_of(client))["octavo.prefill"].attributes["octavo.num_cached_tokens"] == 8


def test_requests_without_a_trace_are_not_told_of() -> None:
    driver = make_driver()
    for _ in range(3):
        client = driver.submit(range(4), 2)
    assert driver.trace_of(client) == ""
    walk(driver)
    assert "" not in {span.trace for span in driver.tracing.spans}


def test_preemptions_and_recomputation_are_events() -> None:
    driver = make_driver(num_blocks=7)
    clients = [driver.submit(range(8), 16, seed=n) for n in range(2)]
    walk(driver)
    assert driver.core.figures.num_preemptions > 0
    spans = driver.tracing.of(driver.trace_of(clients[1]))
    events = [event for span in spans.values() for event in span.events]
    assert events[:3] == ["octavo.scheduled", "octavo.preempted", "octavo.recompute"]
    assert spans["octavo.decode"].attributes["octavo.num_preemptions"] == driver.core.figures.num_preemptions


def test_a_lost_worker_is_an_event_and_what_is_computed_again_as_well() -> None:
    driver = make_driver()
    client = driver.submit(range(4), 8)
    for _ in range(2):
        driver.now += 0.1
        driver.step()
    driver.now += 0.1
    driver.lose_worker()
    driver.now += 5
    driver.worker_ready()
    walk(driver)
    decode = driver.tracing.of(driver.trace_of(client))["octavo.decode"]
    assert decode.events == ["octavo.worker_lost", "octavo.recompute"]
    assert decode.attributes["octavo.num_preemptions"] == 0


def test_a_replay_says_what_it_brought() -> None:
    driver = make_driver()
    client = driver.submit(range(4), 8)
    for _ in range(4):
        driver.step()
    num_brought = len(driver.tokens(client))
    driver.replay(client.frontend, SessionId(8))
    (again,) = (one for one in driver.clients.values() if one.frontend == 8)
    walk(driver)
    assert driver.tracing.of(driver.trace_of(client))["octavo.decode"].attributes["octavo.outcome"] == "cancelled"
    spans = driver.tracing.of(driver.trace_of(again))
    assert spans["octavo.queue"].attributes["octavo.num_replayed_tokens"] == num_brought > 0
    assert spans["octavo.prefill"].events == ["octavo.replay"]


def test_a_request_that_ends_in_the_queue_has_only_waited() -> None:
    driver = make_driver(max_num_seqs=1)
    driver.submit(range(8), 8)
    client = driver.submit(range(8), 8)
    driver.now += 1
    driver.cancel(client)
    spans = driver.tracing.of(driver.trace_of(client))
    assert list(spans) == ["octavo.queue"]
    assert spans["octavo.queue"].attributes["octavo.outcome"] == "cancelled"
    assert spans["octavo.queue"].end_ns - spans["octavo.queue"].begin_ns == 10**9


def test_a_refused_request_is_told_as_failed() -> None:
    driver = make_driver()
    client = driver.submit(range(30), 8)
    assert driver.tracing.of(driver.trace_of(client))["octavo.queue"].attributes["octavo.outcome"] == "failed"


def test_events_are_bounded() -> None:
    driver = make_driver()
    client = driver.submit(range(4), 8)
    driver.step()
    for _ in range(100):
        driver.lose_worker()
        driver.worker_ready(is_same=True)
    walk(driver)
    spans = driver.tracing.of(driver.trace_of(client))
    assert sum(len(span.events) for span in spans.values()) == 64
