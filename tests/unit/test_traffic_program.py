"""`python -m octavo.scheduler.simulate traffic`, and the examples that docs/scheduling.md gives."""

import argparse
import inspect
import json
import re
import sys
import types
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from octavo.cli.serve import serve
from octavo.scheduler.policy import Policy
from octavo.scheduler.sequence import Request, Sequence
from octavo.scheduler.simulate import traffic
from octavo.scheduler.simulate.__main__ import _line
from octavo.scheduler.simulate.arrivals import Arrival, Distribution, Lengths, _Line
from octavo.scheduler.simulate.cost import BadCost, StepCost, read_cost
from octavo.scheduler.simulate.model import make_facts
from octavo.scheduler.simulate.run import SimReport
from octavo.scheduler.simulate.traffic_run import Simulation, simulate
from octavo.scheduler.simulate.traffic_setup import Setup
from octavo.wire.columns import unpack_ints
from octavo.wire.plan import FLAG_SAMPLE, StepPlan
from octavo.worker.backends import step_limits
from octavo.worker.config import WorkerConfig
from tests.support.core_driver import CoreDriver, make_config

DOCUMENT = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text()


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    traffic.add_parser(parser.add_subparsers(required=True))
    parsed = parser.parse_args(["traffic", *arguments])
    status: int = parsed.run(parsed)
    return status


def example(mark: str) -> str:
    """Return the block of Python in the document that has a mark in it."""
    (found,) = [code for code in re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL) if mark in code]
    assert isinstance(found, str)
    return found


@pytest.fixture
def shortest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The policy that the document shows, in a folder from which it can be imported."""
    (tmp_path / "shortest_first.py").write_text(example("class ShortestFirst"))
    monkeypatch.syspath_prepend(tmp_path)
    return "shortest_first:ShortestFirst"


# The program


def test_policies_side_by_side(capsys: pytest.CaptureFixture[str], shortest_first: str) -> None:
    names = ["fcfs", "priority", "fair", shortest_first]
    arguments = ["--requests", "200", "--rate", "60", "--max-num-seqs", "16", "--callers", "a=4,b=1"]
    assert run(*arguments, "--priorities", "0=1,3=1", "--prefix-share", "0.5", "--policy", ",".join(names)) == 0
    out, err = capsys.readouterr()
    reports = [json.loads(line) for line in out.splitlines()]
    assert [report["policy"] for report in reports] == names
    for report in reports:
        assert report["finished"] == 200
        assert report["prefix_hit_rate"] > 0.2
        assert set(report["queue_ms_by_priority"]) == {"0", "3"}
        assert set(report["fairness"]["service_by_caller"]) == {"a", "b"}
        assert report["throughput"] != reports[0]["throughput"] or report["policy"] == "fcfs"
    assert err.splitlines()[0].split() == names
    assert any(line.startswith("TTFT p99 ms") for line in err.splitlines())


def test_a_trace_gives_the_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 1, "prompt_tokens": 20, "output_tokens": 3}\n' * 5)
    assert run("--trace", str(path), "--requests", "4", "--check") == 0
    assert json.loads(capsys.readouterr().out)["finished"] == 4


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--policy", "fcfs,none"], "policy 'none'"),
        (["--trace", "/nonexistent"], "/nonexistent: No such file"),
        (["--prompt-tokens", "x"], "prompt-tokens: lengths 'x'"),
        (["--priorities", "a=1"], "expected PRIORITY=SHARE"),
        (["--base-ms", "0"], "base_ms is 0"),
        (["--max-num-batched-tokens", "0"], "max_num_batched_tokens"),
        (["--pipeline-depth", "0"], "pipeline_depth is 0"),
        (["--num-blocks", "1"], "num_blocks is 1: it must be at least 2"),
        (["--requests", "0"], "requests is 0: it must be at least 1"),
        (["--rate", "-1"], "rate is -1.0: it must be above 0"),
        (["--prefix-share", "2"], "prefix-share is 2.0: it must be from 0 to 1"),
        (["--callers", "0"], "callers: '0'"),
        (["--cost", "/nonexistent"], "error: /nonexistent: No such file or directory\n"),
        (["--burstiness", "3"], "--burstiness without --arrivals gamma"),
        (["--prefix-groups", "3", "--prefix-tokens", "9"], "--prefix-groups, --prefix-tokens without --prefix-share"),
        (["--trace", "x", "--callers", "2", "--rate", "20"], "--rate, --callers with --trace"),
        (["--trace", "x", "--seed", "0"], "--seed with --trace"),
        (["--vocab-size", "1"], "vocab_size is 1"),
    ],
)
def test_what_cannot_be_is_an_error(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--requests", "3", *arguments) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert reason in err
    assert err.count("\n") == 1
    assert "fcfs,none" in arguments or out == ""


def test_costs_come_from_a_file_and_from_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cost.json"
    path.write_text('{"base_ms": 100, "context_token_ns": 0, "decode_row_us": 0}')
    assert read_cost(path) == StepCost(base_ms=100, context_token_ns=0, decode_row_us=0)
    one = ["--requests", "1", "--prompt-tokens", "10", "--output-tokens", "5"]
    assert run(*one, "--cost", str(path), "--base-ms", "200", "--decode-row-us", "1000") == 0
    assert json.loads(capsys.readouterr().out)["tpot_ms"]["mean"] == pytest.approx(201)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "expected a JSON object"),
        ("{", "truncated"),
        ('{"base": 3}', "'base' is no part"),
        ('{"base_ms": "3"}', "must be a number"),
        ('{"base_ms": true}', "must be a number"),
        ('{"base_ms": -1}', "at least 0"),
    ],
)
def test_a_bad_cost_file_is_named(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(BadCost, match=rf"cost.json: .*{reason}"):
        read_cost(path)


def test_a_trace_is_read_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 1, "prompt_tokens": 20, "output_tokens": 1}\n' * 1200)
    assert run("--trace", str(path), "--max-waiting-requests", "2000") == 0
    assert json.loads(capsys.readouterr().out)["finished"] == 1200
    assert run("--trace", str(path), "--requests", "0") == 2
    path.write_text("")
    assert run("--trace", str(path)) == 2


def test_refusals_stand_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    crowd = ["--rate", "inf", "--max-waiting-requests", "30", "--max-num-seqs", "4", "--max-model-len", "400"]
    assert run("--requests", "100", *crowd, "--policy", "fcfs,fair") == 0
    out, err = capsys.readouterr()
    reports = [json.loads(line) for line in out.splitlines()]
    rows = {line[:20].strip(): line.split()[-2:] for line in err.splitlines()}
    assert set(reports[0]["refused"]) == {"queue_full", "invalid"}
    assert rows["requests"] == ["100", "100"]
    assert rows["refused"] == [str(sum(report["refused"].values())) for report in reports]
    for reason in ("queue_full", "invalid"):
        assert rows[reason] == [str(report["refused"][reason]) for report in reports]
        assert f"fcfs: the first request that was refused as {reason}: {reports[0]['first_refusals'][reason]}" in err
    assert {"queue mean ms", "queue p50 ms", "queue p90 ms", "queue p99 ms", "queue max ms"} <= set(rows)


def test_no_row_of_a_reason_where_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--requests", "3") == 0
    assert "queue_full" not in capsys.readouterr().err


def help_of_options(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    with pytest.raises(SystemExit):
        run("--help")
    text = capsys.readouterr().out.partition("traffic:\n")[2]
    found = re.findall(r"^  (--[\w-]+)(.*?)(?=^  --|^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    return {flag: " ".join(words.split()) for flag, words in found}


def test_help_says_what_each_option_is_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    options = help_of_options(capsys)
    assert len(options) == 35
    for flag, words in options.items():
        assert len(words.split()) > 4, flag
        assert "(default" in words or flag in ("--trace", "--cost", "--check"), flag
    assert "uniform:LO,HI" in options["--prompt-tokens"]
    assert "lognormal:MEAN,SIGMA[,LO,HI]" in options["--prompt-tokens"]
    assert "(default 256)" in options["--max-num-seqs"]
    assert "--no-enable-prefix-caching" in options["--enable-prefix-caching"]


def test_help_names_what_the_service_takes_where_it_differs(capsys: pytest.CaptureFixture[str]) -> None:
    """The scheduler cannot import the command line, so the words are compared with it here."""
    with pytest.raises(SystemExit):
        run("--help")
    told = " ".join(capsys.readouterr().out.split()).replace("- ", "-")
    served = {name: p.default for name, p in inspect.signature(serve).parameters.items()}
    simulated = {item.name: item.default for item in fields(Setup)}
    # Where nothing is said the worker decides, by its device.
    config = WorkerConfig(model_path=Path(), address="ipc:///nowhere")
    on_cpu = dict(
        zip(("max_num_seqs", "max_num_batched_tokens"), step_limits(config, torch.device("cpu")), strict=True)
    )
    for name in served.keys() & simulated.keys() - {"max_model_len"}:
        default = on_cpu[name] if served[name] is None else served[name]
        if default != simulated[name]:
            assert f"--{name.replace('_', '-')} {default}" in told


def test_no_prefix_caching(capsys: pytest.CaptureFixture[str]) -> None:
    """The flag is spelled as the service's."""
    for flags, is_found in ([], True), (["--no-enable-prefix-caching"], False), (["--enable-prefix-caching"], True):
        assert run("--requests", "20", "--prefix-share", "1", *flags) == 0
        assert (json.loads(capsys.readouterr().out)["prefix_hit_rate"] > 0) == is_found


# The document


def test_the_example_of_a_policy_can_stand_in_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it is imported while octavo.scheduler.policy is, which has no names yet."""
    monkeypatch.setitem(sys.modules, "octavo.scheduler.policy", types.ModuleType("octavo.scheduler.policy"))
    exec(example("class ShortestFirst"), {})


def test_what_a_policy_may_read_is_there() -> None:
    section = DOCUMENT.partition("What a policy may read")[2].partition("This one runs")[0]
    of_sequence, _, of_request = section.partition("| of a `Request` | |")
    for table, owner in ((of_sequence, Sequence), (of_request, Request)):
        names = [name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)]
        assert len(names) >= 8
        assert {name for name in names if name not in owner.__slots__} == set()


def test_the_methods_of_a_policy_are_the_documents() -> None:
    table = DOCUMENT.partition("| method | says |")[2].partition("What a policy may read")[0]
    found = dict(re.findall(r"`(\w+)\(([\w, ]*)\)`", table))
    methods = {name: value for name, value in vars(Policy).items() if inspect.isfunction(value)}
    assert found == {n: ", ".join(list(inspect.signature(m).parameters)[1:]) for n, m in methods.items()}


def test_the_fields_of_a_line_of_faults_are_the_documents() -> None:
    table = DOCUMENT.partition("## Simulated faults")[2].partition("## Simulated traffic")[0]
    names = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    broken = SimReport(0, violation="x")
    assert names == set(_line(broken)) > set(_line(SimReport(0)))


def test_the_fields_of_a_trace_are_the_documents() -> None:
    table = DOCUMENT.partition("one JSON object a line:")[2].partition("As a library")[0]
    names = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert names == {item.name for item in msgspec.structs.fields(_Line)}


def test_the_library_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(example("report = simulate"), {})
    assert len(capsys.readouterr().out.split()) == 2


def test_the_figures_of_the_document_are_those_of_a_report() -> None:
    report = simulate([Arrival(0.0, 20, 3, 3)], Setup())
    fields = DOCUMENT.partition("### The figures")[2]
    for name in report:
        assert name == "policy" or f"`{name}`" in fields or name.startswith("queue_ms_by_")


def chats(num_requests: int) -> Distribution:
    return Distribution(
        num_requests=num_requests,
        rate=60.0,
        prompt=Lengths.parse("lognormal:234,1.0,4,1024"),
        output=Lengths.parse("lognormal:195,0.9,4,1024"),
    )


def test_shortest_first_keeps_its_bound(shortest_first: str) -> None:
    """The bound that the document states, where it bites: overload, and lengths that differ a lot."""
    arrivals = [a._replace(caller=str(i), at_s=i / 60) for i, a in enumerate(chats(1500).arrivals())]
    simulation = Simulation(Setup(policy=shortest_first, max_num_seqs=16, max_waiting_requests=2000))
    assert simulation.run(arrivals)["finished"] == len(arrivals)
    started = [int(name) for name in simulation.figures.started]
    overtakes = [sum(later > index for later in started[:turn]) for turn, index in enumerate(started)]
    assert 128 < max(overtakes) < 256


def test_short_jobs_wait_less_and_the_longest_more(shortest_first: str) -> None:
    reports: dict[str, dict[str, Any]] = {}
    for policy in ("fcfs", shortest_first):
        named = [a._replace(caller=_kind(a)) for a in chats(1500).arrivals()]
        reports[policy] = simulate(named, Setup(policy=policy, max_num_seqs=64))["queue_ms_by_caller"]
    assert reports[shortest_first]["short"]["mean"] < 0.8 * reports["fcfs"]["short"]["mean"]
    assert reports[shortest_first]["long"]["mean"] > reports["fcfs"]["long"]["mean"]


def _kind(arrival: Arrival) -> str:
    return "short" if arrival.max_tokens < 100 else "long" if arrival.max_tokens > 400 else "middle"


def driver() -> CoreDriver:
    facts = make_facts(num_blocks=13, block_size=4, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=32)
    driver = CoreDriver(facts, make_config(pipeline_depth=2))
    driver.worker_ready()
    return driver


def pairs(*columns: bytes) -> list[tuple[int, ...]]:
    return list(zip(*map(unpack_ints, columns), strict=True))


def outline(plan: StepPlan) -> tuple[Any, ...]:
    """Return what the document tells of a plan: rows that find tokens, blocks appended, and tokens with S where it samples."""
    found = [(new.row, new.num_computed_tokens) for new in plan.new_rows]
    tokens = pairs(plan.row, plan.num_tokens, plan.flags)
    return found, pairs(plan.append_row, plan.append_block), [(r, n, bool(f & FLAG_SAMPLE)) for r, n, f in tokens]


def test_the_first_example_is_what_is_planned() -> None:
    core = driver()
    core.submit(range(1, 11), 3)
    assert len(core.plans) == 2
    core.submit([*range(1, 9), 50], 2)
    core.drain()
    assert [outline(plan) for plan in core.plans] == [
        ([(0, 0)], [(0, 1), (0, 2)], [(0, 8, False)]),
        ([], [(0, 3)], [(0, 2, True)]),
        ([(1, 8)], [(1, 1), (1, 2), (1, 4)], [(0, 1, True), (1, 1, True)]),
        ([], [], [(0, 1, True), (1, 1, True)]),
    ]


def test_the_example_of_a_fork_is_what_is_planned() -> None:
    core = driver()
    core.submit(range(1, 7), 2, num_choices=2)
    core.drain()
    first, second = core.plans
    assert outline(first) == ([(0, 0)], [(0, 1), (0, 2)], [(0, 6, True)])
    assert pairs(first.fork_src, first.fork_dst) == [(0, 1)]
    assert outline(second) == ([], [], [(0, 1, True), (1, 1, True)])
    assert pairs(second.copy_row, second.copy_src, second.copy_dst) == [(0, 2, 3)]
