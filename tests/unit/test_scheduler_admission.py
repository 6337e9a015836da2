"""Configuration and admission: what is refused, with which numbers."""

from typing import Any

import msgspec
import pytest

from octavo.scheduler import admission
from octavo.scheduler.config import ConfigConflict, SchedulerConfig, resolve_limits
from octavo.scheduler.deadlines import Deadlines
from octavo.scheduler.draft import new_rows, num_new_ids
from octavo.scheduler.events import RequestCancelled, RequestSubmitted
from octavo.scheduler.instructions import EmitOutput
from octavo.scheduler.intake import Intake
from octavo.scheduler.policy import POLICIES
from octavo.scheduler.policy.priority import ByPriority
from octavo.scheduler.sequence import Request
from octavo.scheduler.simulate.model import make_facts
from octavo.wire.columns import pack_floats, pack_ints
from octavo.wire.errors import MalformedMessage
from octavo.wire.handshake import ServiceFacts, WorkerFacts
from octavo.wire.ids import Handle, Row, SessionId
from octavo.wire.plan import NewRow, RowSampling, StepPlan
from octavo.wire.requests import CancelRequest, FailureCode, RequestFailed, SubmitRequest
from tests.support.core_driver import FRONTEND, CoreDriver, make_config
from tests.support.fake_frontend import make_submit


def refuse(message: SubmitRequest, facts: WorkerFacts | None = None) -> RequestFailed:
    """Return the refusal of a message by an idle scheduler."""
    driver = CoreDriver(facts or make_facts())
    driver.worker_ready()
    (output,) = driver.core.on_event(RequestSubmitted(FRONTEND, message), driver.now)
    assert isinstance(output, EmitOutput)
    driver.core.check()
    assert driver.core.figures.num_requests == 0
    (failed,) = output.output.failed
    return failed


# Lengths


def test_the_longest_possible_request_is_taken() -> None:
    driver = CoreDriver(make_facts())
    driver.worker_ready()
    for prompt, max_tokens in ((511, 1), (1, 511)):
        client = driver.submit([1] * prompt, max_tokens)
        driver.drain()
        assert len(driver.tokens(client)) == max_tokens


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (
            512,
            1,
            "prompt of 512 tokens leaves no room for output: the limit is 512 tokens of prompt and output together",
        ),
        (
            5000,
            1,
            "prompt of 5000 tokens leaves no room for output: the limit is 512 tokens of prompt and output together",
        ),
        (
            500,
            13,
            "prompt of 500 tokens and max_tokens 13 make 513: the limit is 512 tokens of prompt and output together",
        ),
        (
            1,
            2**31 - 1,
            "prompt of 1 tokens and max_tokens 2147483647 make 2147483648: the limit is 512 tokens of prompt and output"
            " together",
        ),
    ],
)
def test_what_is_too_long_is_refused_with_all_numbers(prompt: int, max_tokens: int, message: str) -> None:
    assert refuse(make_submit(1, [1] * prompt, max_tokens)) == RequestFailed(1, FailureCode.INVALID, message)


def test_the_pool_is_named_where_it_is_the_limit() -> None:
    failed = refuse(make_submit(1, [1] * 1000, 1), make_facts(num_blocks=11))
    assert failed.message == (
        "prompt of 1000 tokens leaves no room for output: "
        "the limit is 160 tokens of prompt and output together (all 10 blocks of 16 tokens)"
    )


def test_after_refusals_the_next_request_is_served() -> None:
    driver = CoreDriver(make_facts(num_blocks=51, max_model_len=2000))
    driver.worker_ready()
    for _ in range(5):
        assert driver.failure(driver.submit([1] * 1000, 1)).code is FailureCode.INVALID
    client = driver.submit([1], 3)
    driver.drain()
    assert driver.tokens(client) == client.expected[0]


# Ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": pack_ints([1, -1])}, "prompt: id -1 at index 1 is outside [0, 1000)"),
        ({"prompt_ids": pack_ints([1000])}, "prompt: id 1000 at index 0 is outside [0, 1000)"),
        ({"stop_token_ids": pack_ints([0, 1000])}, "stop_token_ids: id 1000 at index 1 is outside [0, 1000)"),
        (
            {"sampling": RowSampling(seed=0, stop_token_ids=pack_ints([2**31 - 1]))},
            "stop_token_ids: id 2147483647 at index 0 is outside [0, 1000)",
        ),
        (
            {"sampling": RowSampling(seed=0, logit_bias_ids=pack_ints([1005]), logit_bias_values=pack_floats([1.0]))},
            "logit_bias: id 1005 at index 0 is outside [0, 1000)",
        ),
        (
            {"sampling": RowSampling(seed=0, allowed_token_ids=pack_ints([-5]))},
            "allowed_token_ids: id -5 at index 0 is outside [0, 1000)",
        ),
        (
            {"output_ids": (pack_ints([4, 1000]),)},
            "output of choice 0: id 1000 at index 1 is outside [0, 1000)",
        ),
        ({"output_ids": (pack_ints([4] * 6),)}, "choice 0 replays 6 tokens, max_tokens is 5"),
        ({"finished_choices": pack_ints([1])}, "finished_choices: id 1 at index 0 is outside [0, 1)"),
    ],
)
def test_ids_out_of_range_are_refused_by_place_and_range(change: dict[str, object], message: str) -> None:
    submit = msgspec.structs.replace(make_submit(1, [1, 2], 5), **change)
    assert refuse(submit) == RequestFailed(1, FailureCode.INVALID, message)


def test_the_first_and_the_last_id_are_taken() -> None:
    driver = CoreDriver(make_facts())
    driver.worker_ready()
    client = driver.submit([0, 999], 2, stop_ids=[0, 999])
    driver.drain()
    assert driver.tokens(client) == client.expected[0]


# The queue


def crowded(**settings: Any) -> CoreDriver:
    """Return a driver whose only row is taken."""
    driver = CoreDriver(make_facts(), make_config(max_num_seqs=1, **settings))
    driver.worker_ready()
    driver.submit([1], 30)
    return driver


def test_a_full_queue_refuses_until_a_request_has_started() -> None:
    driver = crowded(max_waiting_requests=2)
    waiting = [driver.submit([1], 2), driver.submit([1], 2)]
    refused = driver.submit([1], 2)
    assert driver.failure(refused) == RequestFailed(
        refused.handle, FailureCode.QUEUE_FULL, "2 requests wait, the limit is 2", retry_after_s=1.0
    )
    driver.cancel(waiting[0])
    assert driver.submit([1], 2).is_live
    driver.drain()


def test_the_queue_is_bounded_in_tokens_times_choices() -> None:
    driver = crowded(max_waiting_tokens=10)
    driver.submit([1] * 4, 2)
    refused = driver.submit([1] * 4, 2, num_choices=2)
    assert driver.failure(refused) == RequestFailed(
        refused.handle,
        FailureCode.QUEUE_FULL,
        "4 tokens wait, 8 more would exceed the limit of 10",
        retry_after_s=1.0,
    )
    assert driver.submit([1] * 3, 2, num_choices=2).is_live
    driver.drain()


def test_a_request_larger_than_the_token_bound_is_taken_when_none_waits() -> None:
    driver = crowded(max_waiting_tokens=10)
    assert driver.submit([1] * 40, 2).is_live
    assert not driver.submit([1], 2).is_live
    driver.drain()


def test_replays_are_not_turned_away_for_a_full_queue() -> None:
    driver = crowded(max_waiting_requests=2)
    driver.submit([1], 2)
    driver.submit([1], 2)

    def replay(handle: int) -> int:
        message = make_submit(handle, [1], 2, output_ids=[[]])
        return len(driver.core.on_event(RequestSubmitted(SessionId(8), message), driver.now))

    assert [replay(n) for n in range(4)] == [0, 0, 0, 0]
    driver.core.check()


# Configuration


def resolve(facts: WorkerFacts, **settings: Any) -> ServiceFacts:
    return resolve_limits(make_config(**settings), facts).service_facts


def test_unset_limits_are_the_workers_or_the_pools() -> None:
    assert resolve(make_facts()) == ServiceFacts(
        1000, max_model_len=512, block_size=16, max_num_seqs=16, scheduling_policy="fcfs", prefix_caching=True
    )
    assert resolve(make_facts(num_blocks=11)).max_model_len == 160
    assert resolve(make_facts(), max_model_len=100, max_num_seqs=2) == ServiceFacts(
        1000, 100, 16, 2, prefix_caching=True
    )


def test_frontends_are_told_whether_the_policy_takes_priorities(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, policy in POLICIES.items():
        assert resolve(make_facts(), scheduling_policy=name).takes_priorities is policy.uses_priorities
    monkeypatch.setitem(POLICIES, "one's own", ByPriority)
    facts = resolve(make_facts(), scheduling_policy="one's own")
    assert (facts.scheduling_policy, facts.takes_priorities) == ("one's own", True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 513}, "max_model_len 513 exceeds the worker's 512"),
        (
            {"max_model_len": 161},
            "max_model_len 161 needs 11 blocks of 16 tokens, the pool has 10: it holds 160 tokens; "
            "lower --max-model-len or raise --kv-cache-memory-bytes",
        ),
        ({"max_num_seqs": 17}, "max_num_seqs 17 exceeds the worker's 16"),
        ({"max_num_batched_tokens": 257}, "max_num_batched_tokens 257 exceeds the worker's 256"),
    ],
)
def test_explicit_limits_beyond_the_worker_are_conflicts(settings: dict[str, int], message: str) -> None:
    facts = make_facts(num_blocks=11 if "pool" in message else 65)
    with pytest.raises(ConfigConflict) as caught:
        resolve(facts, **settings)
    assert str(caught.value) == message


def test_a_pool_of_one_token_serves_nobody() -> None:
    with pytest.raises(ConfigConflict, match="the pool holds 1 tokens: too few"):
        resolve(make_facts(num_blocks=2, block_size=1))


def test_a_step_has_a_token_for_each_running_sequence() -> None:
    limits = resolve_limits(make_config(max_num_batched_tokens=5), make_facts())
    assert (limits.max_num_seqs, limits.max_chunk_tokens) == (5, 5)


@pytest.mark.parametrize(
    ("name", "value", "lowest"),
    [
        ("max_num_seqs", 0, "1"),
        ("max_model_len", 1, "2"),
        ("pipeline_depth", 0, "1"),
        ("long_prefill_token_threshold", -1, "0"),
        ("max_waiting_requests", 0, "1"),
        ("step_timeout_s", float("nan"), "0.001"),
        ("recovery_timeout_s", -1.0, "0"),
    ],
)
def test_settings_out_of_range_are_named(name: str, value: float, lowest: str) -> None:
    with pytest.raises(ConfigConflict, match=f"^{name} is {value}: it must be at least {lowest}"):
        SchedulerConfig(address="ipc:///x", config_digest="d", **{name: value})  # type: ignore[arg-type]


# Deadlines


def make_request(arrival: int, deadline: float) -> Request:
    return Request(
        SessionId(1), Handle(arrival), arrival, b"", 1, 1, RowSampling(seed=0), frozenset(), 0.0, deadline, False
    )


def test_deadlines_expire_in_order_and_once() -> None:
    deadlines = Deadlines()
    requests = [make_request(n, deadline) for n, deadline in enumerate([3.0, 1.0, float("inf"), 2.0])]
    for request in requests:
        deadlines.add(request)
    assert deadlines.next == 1.0
    deadlines.remove(requests[1])
    assert deadlines.expired(0.5) == []
    assert deadlines.expired(3.0) == [requests[3], requests[0]]
    assert deadlines.expired(9.0) == []
    assert len(deadlines) == 0


def test_deadlines_of_ended_requests_do_not_pile_up() -> None:
    deadlines = Deadlines()
    for n in range(10_000):
        request = make_request(n, 1e6 + n)
        deadlines.add(request)
        deadlines.remove(request)
    assert len(deadlines._heap) <= 65


# Grammars


def with_grammar(handle: int, grammar: bytes, num_choices: int = 1) -> SubmitRequest:
    message = make_submit(handle, [1, 2, handle], 40, num_choices=num_choices)
    return msgspec.structs.replace(message, grammar=grammar)


def test_a_grammar_travels_once_a_plan() -> None:
    bodies = [b"one" * 100, b"two" * 100, b"one" * 100, b""]
    intake = Intake(enable_prefix_caching=False)
    requests = [intake.make_request(FRONTEND, with_grammar(n, body), 0.0) for n, body in enumerate(bodies)]
    sequences = [request.sequences[0] for request in requests]
    for number, sequence in enumerate(sequences):
        sequence.take_row(Row(number), residency=1)
    rows, grammars = new_rows(sequences)
    assert grammars == (bodies[0], bodies[1])
    assert [row.grammar for row in rows] == [1, 2, 1, 0]
    assert num_new_ids(sequences[0]) == num_new_ids(sequences[3]) + 75


def test_a_plan_names_no_grammar_that_it_does_not_bring() -> None:
    row = NewRow(0, "r", 0, 1, 0, pack_ints([1]), RowSampling(0), grammar=2)
    with pytest.raises(MalformedMessage, match="not among the plan's 1"):
        StepPlan(1, 1, b"", b"", b"", new_rows=(row,), grammars=(b"x",))


def test_requests_with_the_same_grammar_share_it() -> None:
    driver = CoreDriver(make_facts())
    driver.worker_ready()
    for handle in (1, 2):
        message = with_grammar(handle, bytes(bytearray(b"a" * 200)))
        driver.core.on_event(RequestSubmitted(FRONTEND, message), driver.now)
    held = [driver.core._requests.find(FRONTEND, handle) for handle in (1, 2)]
    assert len({id(request.grammar) for request in held if request}) == 1
    assert driver.core._requests.num_grammar_bytes == 200
    driver.core.check()


def test_all_different_grammars_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_GRAMMAR_BYTES", 250)
    driver = CoreDriver(make_facts())
    driver.worker_ready()

    def submit(handle: int, body: bytes) -> list[RequestFailed]:
        answers = driver.core.on_event(RequestSubmitted(FRONTEND, with_grammar(handle, body)), driver.now)
        return [failed for one in answers if isinstance(one, EmitOutput) for failed in one.output.failed]

    assert not submit(1, b"a" * 200)
    assert not submit(2, b"a" * 200)  # the same one takes nothing
    (refused,) = submit(3, b"b" * 100)
    assert (refused.code, "the limit is 250" in refused.message) == (FailureCode.QUEUE_FULL, True)
    for handle in (1, 2):
        driver.core.on_event(RequestCancelled(FRONTEND, CancelRequest(handle)), driver.now)
    assert driver.core._requests.num_grammar_bytes == 0
    assert not submit(4, b"b" * 100)
