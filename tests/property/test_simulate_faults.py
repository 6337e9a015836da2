"""Seeded runs of the whole scheduler in a world where everything goes wrong. More of them by hand:
`python -m octavo.scheduler.simulate faults --seeds 200 --steps 50000 --jobs 2`."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from octavo.scheduler.core import Scheduler
from octavo.scheduler.policy import POLICIES
from octavo.scheduler.simulate.__main__ import main
from octavo.scheduler.simulate.planted import PLANTS
from octavo.scheduler.simulate.run import SimReport, run_seed
from octavo.scheduler.simulate.scenario import Scenario
from octavo.scheduler.simulate.service import SimulatedService
from octavo.scheduler.simulate.world import World

MUST_HAPPEN = (
    "blocks found",
    "cache resets",
    "cancels at a token",
    "clogs",
    "copies",
    "cuts",
    "epochs",
    "failures CALLER_LIMIT",
    "failures DEADLINE",
    "failures INTERNAL",
    "failures INVALID",
    "failures QUEUE_FULL",
    "failures UNAVAILABLE",
    "forks",
    "frames corrupted",
    "frames delayed",
    "frames duplicated",
    "frames lost",
    "frames reordered",
    "frontend died",
    "garbage",
    "given up",
    "hellos said twice",
    "jobs cancelled",
    "jobs finished",
    "jobs resubmitted",
    "malformed",
    "pauses",
    "preemptions",
    "readmissions",
    "recomputed tokens",
    "refused",
    "replays",
    "scheduler died",
    "status reports",
    "step timeouts",
    "stop strings",
    "strays",
    "worker died after compute",
    "worker died after receive",
    "worker died after reply",
    "worker died before receive",
    "worker died of a request",
    "worker hangs",
    "worker killed",
    "worker left",
)


def assert_kept(report: SimReport) -> None:
    assert report.violation is None, f"seed {report.seed}, step {report.step}: {report.violation}\n{report.trace}"


def test_no_promise_is_broken_and_everything_that_can_go_wrong_does() -> None:
    stats: Counter[str] = Counter()
    for seed in range(14):
        report = run_seed(seed, 3000)
        assert_kept(report)
        assert report.steps >= 3000
        stats.update(report.stats)
    assert [what for what in MUST_HAPPEN if not stats[what]] == []
    assert stats["rows"] > 1.2 * stats["plans"], "batches"
    assert stats["jobs finished"] > 0.2 * stats["jobs"]
    assert stats["given up without guilt"] <= 1, (
        "where workers are killed as well, without a pause, it is not impossible"
    )


def test_a_seed_decides_everything_in_whatever_process() -> None:
    here = run_seed(7, 1500)
    assert_kept(here)
    assert run_seed(7, 1500) == here
    assert run_seed(8, 1500).digest != here.digest
    command = [sys.executable, "-m", "octavo.scheduler.simulate", "faults", "--seed", "7", "--steps", "1500"]
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=120)
    there = json.loads(done.stdout)
    assert (there["digest"], there["steps"], there["stats"]) == (here.digest, here.steps, dict(here.stats))


def find(plant: str) -> SimReport:
    for seed in range(10):
        report = run_seed(seed, 4000, plant)
        if report.violation is not None:
            return report
    raise AssertionError(f"{plant} was not found")


@pytest.mark.parametrize("plant", sorted(PLANTS))
def test_planted_bugs_are_found_and_their_seed_replays_them(plant: str) -> None:
    report = find(plant)
    again = run_seed(report.seed, 4000, plant)
    assert (again.violation, again.rounds, again.step, again.digest) == (
        report.violation,
        report.rounds,
        report.step,
        report.digest,
    )
    assert_kept(run_seed(report.seed, 500))


@pytest.mark.parametrize("plant", sorted(PLANTS))
def test_planted_bugs_show_from_outside_as_well(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "check", lambda core: None)
    find(plant)


def test_the_command_line_names_the_seed_of_what_it_finds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "--seeds", "3", "--steps", "3000", "--plant", "refcount", "--jobs", "2"]) == 1
    out, err = capsys.readouterr()
    line = json.loads(out.splitlines()[-1])
    assert line["violation"]
    assert f"faults --seed {line['seed']} --steps 3000 --plant refcount" in err
    assert main(["faults", "--seeds", "2", "--steps", "200"]) == 0
    out, _ = capsys.readouterr()
    assert [json.loads(line)["violation"] for line in out.splitlines()] == [None, None]


OWN = """
from octavo.scheduler.policy import Policy

class LastCome(Policy):
    uses_priorities = True
    num_asked = 0
    def place(self, sequence):
        LastCome.num_asked += 1
        return (-sequence.request.arrival, sequence.choice)

class Equal(Policy):
    def place(self, sequence):
        return (0,)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with policies that Octavo does not know."""
    (tmp_path / "own_for_faults.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_for_faults"


def policies_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that will name the policy of each service that is started."""
    seen: list[str] = []
    real = SimulatedService.__init__

    def begin(service: SimulatedService, world: World, scenario: Scenario) -> None:
        seen.append(scenario.config.scheduling_policy)
        real(service, world, scenario)

    monkeypatch.setattr(SimulatedService, "__init__", begin)
    return seen


def test_all_rounds_have_the_policy_that_is_named(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = policies_of(monkeypatch)
    for policy in ("fair", f"{own}:LastCome"):
        seen.clear()
        reports = [run_seed(seed, 1500, policy=policy) for seed in range(3)]
        for report in reports:
            assert_kept(report)
        assert seen == [policy] * sum(report.rounds for report in reports)
        assert len(seen) > 3
    assert f"{own}:LastCome" not in POLICIES
    assert sys.modules[own].LastCome.num_asked > 100
    seen.clear()
    for seed in range(4):
        run_seed(seed, 1500)
    assert len(set(seen)) > 1


def test_a_wrong_policy_of_ones_own_is_found(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "--steps", "3000", "--policy", f"{own}:Equal"]) == 1
    out, err = capsys.readouterr()
    line = json.loads(out.splitlines()[-1])
    assert "violation_step" in line  # it may be 0: two requests that come together suffice
    command = f"python -m octavo.scheduler.simulate faults --seed {line['seed']} --steps 3000 --policy {own}:Equal"
    assert f"\nreplay: {command}\n" in err
    assert main(command.split()[3:]) == 1
    assert json.loads(capsys.readouterr().out) == line


def test_a_line_names_only_what_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "--seed", "1", "--steps", "300"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert set(line) == {"seed", "steps", "rounds", "virtual_s", "digest", "stats", "violation"}
    assert min(line["stats"].values()) > 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--seeds 0", "argument --seeds: 0 is below 1"),
        ("--steps 0", "argument --steps: 0 is below 1"),
        ("--steps -5", "argument --steps: -5 is below 1"),
        ("--jobs 0", "argument --jobs: 0 is below 1"),
        ("--steps x", "argument --steps: invalid integer value: 'x'"),
        ("--seed 2 --seeds 3", "leave out one of the two"),
        ("--seed 2 --first 0", "leave out one of the two"),
        ("--policy none", "policy 'none': there are fcfs, priority, fair, and module:Class"),
    ],
)
def test_what_would_check_nothing_is_an_error(arguments: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: int | str | None = main(["faults", *arguments.split()])
    except SystemExit as error:
        status = error.code
    assert status == 2
    out, err = capsys.readouterr()
    assert reason in err
    assert out == ""


def test_help_names_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["faults", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    for default in ("(default 20)", "(default 0)", "(default 10000)", "(default 1)", "(default: each round draws one)"):
        assert default in words
