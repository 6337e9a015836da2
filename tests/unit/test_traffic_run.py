"""Simulated traffic: figures that can be worked out by hand, and the cheap worker against the strict one."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.scheduler.config import ConfigConflict
from octavo.scheduler.core import Scheduler
from octavo.scheduler.errors import InvariantViolation
from octavo.scheduler.simulate.arrivals import Arrival
from octavo.scheduler.simulate.cost import StepCost, StepLoad
from octavo.scheduler.simulate.traffic_fairness import Fairness, jain
from octavo.scheduler.simulate.traffic_policy import WatchedPolicy
from octavo.scheduler.simulate.traffic_run import Simulation, simulate
from octavo.scheduler.simulate.traffic_setup import BadPolicy, Setup, load_policy

COST = StepCost(base_ms=10.0, prefill_token_us=1000.0, decode_row_us=100.0, context_token_ns=1000.0)


LAST_COME = """
from octavo.scheduler.policy import Policy

class LastComeFirstServed(Policy):
    def place(self, sequence):
        return (-sequence.request.arrival, sequence.choice)
"""

MISTAKEN = """
from octavo.scheduler.policy import Policy

class WithArguments(Policy):
    def __init__(self, what):
        pass

class Equal(Policy):
    def place(self, sequence):
        return (sequence.request.arrival // 2, 0)

class Half(Policy):
    def place(self, sequence):
        return (sequence.request.arrival / 2, sequence.choice)

class Bare(Policy):
    def place(self, sequence):
        return sequence.request.arrival

class Moody(Policy):
    count = 0
    def place(self, sequence):
        self.count += 1
        return (sequence.request.arrival, self.count)

class Restless(Policy):
    count = 0
    def lane(self, sequence):
        self.count += 1
        return str(self.count)

class Numbered(Policy):
    def lane(self, sequence):
        return 7

class Ranked(Policy):
    def lane(self, sequence):
        return sequence.request.caller
    def rank(self, lane):
        return 0.5

class Yielding(Policy):
    def yields_first(self, sequence):
        return (0.5,)

class Unsure(Policy):
    def may_evict(self, waiting, running):
        return None
"""


@pytest.fixture(autouse=True)
def own_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that can be imported, as in the folder of who runs a simulation."""
    (tmp_path / "last_come.py").write_text(LAST_COME)
    (tmp_path / "mistaken.py").write_text(MISTAKEN)
    monkeypatch.syspath_prepend(tmp_path)


def small(
    *,
    policy: str = "fcfs",
    num_blocks: int = 41,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 32,
    pipeline_depth: int = 2,
    max_preemptions: int = 3,
    max_waiting_requests: int = 1024,
    enable_prefix_caching: bool = True,
    check: bool = False,
) -> Setup:
    return Setup(
        policy=policy,
        cost=COST,
        num_blocks=num_blocks,
        block_size=4,
        vocab_size=30_000,  # so that ids drawn at random do not happen to be equal
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=64,
        pipeline_depth=pipeline_depth,
        max_preemptions=max_preemptions,
        max_waiting_requests=max_waiting_requests,
        enable_prefix_caching=enable_prefix_caching,
        check=check,
    )


def mixed(seed: int, count: int = 60) -> list[Arrival]:
    """Return requests of all kinds, faster than they can be served."""
    rng = random.Random(seed)
    arrivals = []
    at = 0.0
    for _ in range(count):
        at += rng.choice([0.0, 0.0, 0.02, 0.1])
        num_prefix = rng.choice([0, 0, 6, 8, 16])
        output = rng.randint(1, 20)
        arrivals.append(
            Arrival(
                at,
                num_prefix + rng.randint(1, 20),
                output,
                output + rng.choice([0, 0, 5]),
                rng.choice("abc"),
                rng.randint(-1, 1),
                f"{num_prefix}" if num_prefix else "",
                num_prefix,
                rng.choice([1, 1, 1, 3]),
            )
        )
    return arrivals


def without_speed(report: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in report.items() if name not in ("wall_s", "simulated_requests_per_s")}


# One request, by hand


def test_the_times_of_one_request() -> None:
    """12 tokens of prompt, 3 of output: a step of prefill, two of decode, back to back."""
    report = simulate([Arrival(5.0, 12, 3, 3)], small())
    first = 0.010 + 0.012 + 12e-6
    second, third = 0.010 + 0.0001 + 13e-6, 0.010 + 0.0001 + 14e-6
    assert report["finished"] == 1
    assert report["queue_ms"]["max"] == 0
    assert report["ttft_ms"]["max"] == pytest.approx(1e3 * first, abs=1e-3)
    assert report["tpot_ms"]["max"] == pytest.approx(1e3 * (second + third) / 2, abs=1e-3)
    assert report["e2e_s"]["max"] == pytest.approx(first + second + third, abs=1e-3)
    assert report["steps"] == 3
    assert report["throughput"]["output_tokens_per_s"] == pytest.approx(3 / (first + second + third), rel=1e-3)
    # After the plans 12, 13 and 14 tokens are stored in 3, 4 and 4 blocks; the first two plans are sent together.
    assert report["kv_waste"] == pytest.approx((3 / 16 + 2 / 16) / 2, abs=1e-5)


def test_a_stop_id_ends_what_was_allowed_to_go_on() -> None:
    """Nobody knows in advance: the plan after the last token has been sent already."""
    allowed = simulate([Arrival(0.0, 12, 3, 9)], small())
    assert allowed["throughput"]["output_tokens_per_s"] > 0
    assert (allowed["finished"], allowed["steps"]) == (1, 4)
    assert simulate([Arrival(0.0, 12, 3, 9)], small(pipeline_depth=1))["steps"] == 3


def test_a_shared_prefix_is_found() -> None:
    arrivals = [Arrival(float(i), 12, 1, 1, prefix_group="g", num_prefix_tokens=10) for i in range(4)]
    # Of 10 shared tokens 2 full blocks of 4 are found, by all but the first.
    assert simulate(arrivals, small())["prefix_hit_rate"] == pytest.approx(3 * 8 / 48, abs=1e-5)
    assert simulate(arrivals, small(enable_prefix_caching=False))["prefix_hit_rate"] == 0


def test_ids_of_a_trace_are_found_for_what_they_are() -> None:
    ids = tuple(range(1, 13))
    arrivals = [Arrival(0.0, 12, 1, 1, prompt_ids=ids), Arrival(1.0, 12, 1, 1, prompt_ids=ids[:4] + ids[:8])]
    assert simulate(arrivals, small())["prefix_hit_rate"] == pytest.approx(4 / 24, abs=1e-5)


# The cheap worker against the strict one


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "last_come:LastComeFirstServed"])
@pytest.mark.parametrize("seed", range(4))
def test_the_fast_worker_gives_the_figures_of_the_strict_one(policy: str, seed: int) -> None:
    options: dict[str, Any] = {"policy": policy, "num_blocks": 18 + 6 * seed, "pipeline_depth": 1 + seed % 3}
    fast = without_speed(simulate(mixed(seed), small(**options)))
    assert fast == without_speed(simulate(mixed(seed), small(**options, check=True)))
    assert fast["finished"] == 60


def test_a_pool_that_is_too_small_preempts() -> None:
    report = simulate(mixed(0), small(num_blocks=18))
    assert report["preemptions"] > 0
    assert report["recomputed_tokens"] > 0
    assert simulate(mixed(0), small(num_blocks=400))["preemptions"] == 0


def test_empty_slots_are_those_of_the_tables() -> None:
    """Against the core's own tables, each block counted once."""
    checked = 0

    def compare(worker: Any, _: Any) -> None:
        nonlocal checked
        planner = simulation.core._worker.planner  # type: ignore[union-attr]
        stored: dict[int, int] = {}
        for s in planner.batch:
            for index, block in enumerate(planner.tables.table(s.number)):
                stored[block] = max(stored.get(block, 0), min(4, s.num_planned - 4 * index))
        assert worker.num_empty_slots == sum(4 - count for count in stored.values())
        checked += 1

    simulation = Simulation(small(num_blocks=61, max_num_seqs=8, max_num_batched_tokens=64), compare)
    simulation.run(mixed(3))
    assert checked > 50


def test_the_cost_of_steps_adds_up() -> None:
    load = StepLoad(num_prefill_tokens=100, num_decode_rows=7, num_context_tokens=3000, num_rows=9)
    assert COST.seconds(load) == pytest.approx(0.010 + 0.1 + 0.0007 + 0.003)
    assert load.num_tokens == 107


# Policies, callers, refusals


def test_a_policy_of_ones_own_is_asked() -> None:
    arrivals = [Arrival(0.0, 12, 5, 5, caller=str(i)) for i in range(6)]
    report = simulate(arrivals, small(policy="last_come:LastComeFirstServed", max_num_seqs=1))
    queues = report["queue_ms_by_caller"]
    assert queues["5"]["max"] == 0
    assert queues["0"]["max"] == report["queue_ms"]["max"] > 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none", "there are fcfs, priority, fair"),
        ("no.such.module:X", "No module named"),
        ("json:X", "has no attribute"),
        ("json:JSONDecoder", "no subclass"),
        ("mistaken:WithArguments", "made without arguments"),
    ],
)
def test_a_policy_that_is_none_is_refused(name: str, reason: str) -> None:
    with pytest.raises(BadPolicy, match=reason):
        load_policy(name)


def test_a_setup_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigConflict, match="num_blocks is 1: it must be at least 2"):
        simulate([], small(num_blocks=1))
    with pytest.raises(ConfigConflict, match=r"num_blocks is 2 and block_size 1: .* the pool holds 1 token"):
        Setup(num_blocks=2, block_size=1)


def test_priorities_count_only_where_they_are_used() -> None:
    arrivals = [Arrival(0.0, 12, 5, 5, priority=i % 2) for i in range(20)]
    queues = simulate(arrivals, small(policy="priority", max_num_seqs=1))["queue_ms_by_priority"]
    assert queues["0"]["max"] < queues["1"]["p50"]
    queues = simulate(arrivals, small(max_num_seqs=1))["queue_ms_by_priority"]
    assert queues["0"]["mean"] == pytest.approx(queues["1"]["mean"], rel=0.2)


def test_refused_requests_are_counted() -> None:
    report = simulate([Arrival(0.0, 12, 5, 5)] * 30 + [Arrival(0.1, 60, 30, 30)], small(max_waiting_requests=8))
    assert report["refused"] == {"queue_full": 22, "invalid": 1}
    assert (report["requests"], report["finished"]) == (31, 8)
    assert set(report["first_refusals"]) == {"queue_full", "invalid"}
    assert "64" in report["first_refusals"]["invalid"]


def test_a_flood_is_held_back_by_fairness_only() -> None:
    arrivals = [Arrival(0.0, 8, 8, 8, caller="flood")] * 400
    arrivals += [Arrival(0.1, 8, 8, 8, caller="drop")] * 400
    fcfs, fair = (simulate(arrivals, small(policy=policy)) for policy in ("fcfs", "fair"))
    first = {name: report["queue_ms_by_caller"]["drop"]["p50"] for name, report in (("fcfs", fcfs), ("fair", fair))}
    assert first["fair"] == pytest.approx(fair["queue_ms_by_caller"]["flood"]["p50"], rel=0.1)
    assert first["fcfs"] > 2 * fcfs["queue_ms_by_caller"]["flood"]["p50"]
    assert fair["fairness"]["jain"] > 0.99
    assert fair["fairness"]["largest_gap"] < 200
    assert fcfs["fairness"]["jain"] < 0.8
    assert fcfs["fairness"]["largest_gap"] > 2000
    # Whatever the order, each prompt token counts 1 and each output token 2.
    for report in (fcfs, fair):
        assert report["fairness"]["service_by_caller"] == {"flood": 400 * 24, "drop": 400 * 24}


# Mistakes of a policy


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Equal", r"place\(\) returned \(\d+, 0\): 1-\d+/0 and 1-\d+/0 wait in lane '' with equal places"),
        ("Half", r"place\(\) returned \(\d+\.\d, 0\): expected a tuple of integers"),
        ("Bare", r"place\(\) returned \d+: expected a tuple of integers"),
        ("Moody", r"place\(\) returned \(\d+, \d+\): it was \(\d+, \d+\) for the same sequence, which still waits"),
        ("Restless", r"lane\(\) returned '2': it was '1' for the same sequence"),
        ("Numbered", r"lane\(\) returned 7: expected a string"),
        ("Ranked", r"rank\(\) returned 0.5: expected a tuple of integers"),
        ("Yielding", r"yields_first\(\) returned \(0.5,\): expected a tuple of integers"),
        ("Unsure", r"may_evict\(\) returned None: expected True or False"),
    ],
)
def test_a_mistake_of_a_policy_is_named_at_once(name: str, reason: str, check: bool) -> None:
    with pytest.raises(BadPolicy, match=rf"^policy {name}: {reason}"):
        simulate(mixed(0), small(policy=f"mistaken:{name}", num_blocks=18, check=check))


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_what_watches_a_policy_forgets_what_has_ended(policy: str) -> None:
    simulation = Simulation(small(policy=policy, num_blocks=18))
    assert simulation.run(mixed(2))["preemptions"] > 0
    watched: Any = simulation.core._policy
    assert isinstance(watched, WatchedPolicy)
    assert (watched._lanes, watched._places, watched._owners) == ({}, {}, {})


def test_a_broken_invariant_names_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(_: Scheduler) -> None:
        raise InvariantViolation("the queue is out of order")

    monkeypatch.setattr(Scheduler, "check", check)
    with pytest.raises(InvariantViolation, match="under the policy last_come:LastComeFirstServed: the queue is out"):
        simulate(mixed(0), small(policy="last_come:LastComeFirstServed", check=True))


# Fairness, by hand


def test_jains_index() -> None:
    assert jain(np.array([3, 3, 3])) == pytest.approx(1)
    assert jain(np.array([9, 0, 0])) == pytest.approx(1 / 3)
    assert jain(np.array([1, 3])) == pytest.approx(0.8)
    assert jain(np.array([0, 0])) == 1


def serve(fairness: Fairness, now: float, *service: int) -> None:
    given = np.zeros(8, np.int64)
    given[: len(service)] = service
    fairness.serve(now, given)


def test_only_callers_that_are_backlogged_throughout_are_compared() -> None:
    fairness = Fairness()
    a, b, c = (fairness.number_of(name) for name in "abc")
    fairness.change_waiting(a, 1)
    fairness.change_waiting(b, 1)
    serve(fairness, 5.0, 7, 1, 0)  # the first window had nobody from its begin on
    assert fairness.indices == []
    serve(fairness, 7.0, 10, 30, 500)  # c has nothing that waits
    fairness.change_waiting(c, 1)
    serve(fairness, 10.0, 0, 0, 500)
    assert fairness.indices == [pytest.approx(0.8)]
    fairness.change_waiting(b, -1)
    serve(fairness, 12.0, 20, 0, 20)
    fairness.change_waiting(b, 1)
    serve(fairness, 15.0, 0, 0, 0)  # b had a break
    assert fairness.indices[1:] == [pytest.approx(1.0)]


def test_the_gap_begins_anew_when_a_caller_stops_waiting() -> None:
    fairness = Fairness()
    a, b = (fairness.number_of(name) for name in "ab")
    fairness.change_waiting(a, 1)
    serve(fairness, 0.0, 1000, 0)  # b does not wait
    fairness.change_waiting(b, 1)
    serve(fairness, 0.2, 1000, 0)  # since now both do
    serve(fairness, 0.4, 5, 20)
    serve(fairness, 0.6, 0, 30)
    assert fairness.largest_gap == 45
    fairness.change_waiting(b, -1)
    serve(fairness, 0.8, 1000, 0)
    fairness.change_waiting(b, 1)
    serve(fairness, 1.0, 1000, 0)
    serve(fairness, 1.2, 10, 0)
    assert fairness.largest_gap == 45


def test_many_callers_fit() -> None:
    fairness = Fairness()
    for number in range(300):
        assert fairness.number_of(str(number)) == number
        fairness.change_waiting(number, 1)
    fairness.serve(0.0, np.ones(512, np.int64))
    assert fairness.names == [str(number) for number in range(300)]
    assert fairness.service.tolist() == [1] * 300


def test_a_report_is_json() -> None:
    report = simulate(mixed(1), small(policy="fair"))
    assert json.loads(json.dumps(report)) == report
