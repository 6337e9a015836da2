"""One seed's run: rounds of faults and recovery, each with its own configuration."""

import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

from octavo.scheduler.policy import POLICIES
from octavo.scheduler.simulate.clocks import forbidden_clocks
from octavo.scheduler.simulate.faults import Troublemaker
from octavo.scheduler.simulate.planted import PLANTS
from octavo.scheduler.simulate.scenario import draw_scenario
from octavo.scheduler.simulate.service import SimulatedService
from octavo.scheduler.simulate.traffic_setup import load_policy
from octavo.scheduler.simulate.workload import Choice, Job, Oracle
from octavo.scheduler.simulate.world import Violation, World
from octavo.wire.columns import pack_ints
from octavo.wire.plan import RowSampling

ROUND_STEPS = (150, 500, 2000, 4000)
"""Steps of one round with faults."""

_log = logging.getLogger(__name__)


@dataclass
class SimReport:
    """What came of a seed.

    Attributes:
        steps: plans that workers executed.
        rounds: services that were started, the broken one included; `step` counts its plans when it broke, else 0.
        digest: equal for equal runs, in whatever process.
        stats: how often what has happened.
        violation: which promise was broken, None if all held.
    """

    seed: int
    steps: int = 0
    rounds: int = 0
    step: int = 0
    digest: str = ""
    virtual_s: float = 0.0
    stats: Counter[str] = field(default_factory=Counter)
    violation: str | None = None
    trace: str = ""


def run_seed(seed: int, steps: int, plant: str | None = None, policy: str | None = None) -> SimReport:
    """Run rounds until workers have executed `steps` plans, or a promise is broken.

    Args:
        seed: of everything.
        steps: plans to execute.
        plant: name of a bug to plant (planted.PLANTS).
        policy: of all rounds, a name among POLICIES or module:Class; None: each round draws one of Octavo's own.

    Raises:
        BadPolicy: there is no such policy.
    """
    report = SimReport(seed)
    digest = 0
    with _registered(policy), forbidden_clocks(), PLANTS[plant]() if plant else nullcontext():
        while report.steps < steps and report.violation is None:
            world = World(f"{seed}/{report.rounds}")
            try:
                _Round(world, steps - report.steps, policy).run()
            except Exception as error:  # noqa: BLE001  whatever is raised in there is a broken promise
                report.violation = f"{type(error).__name__}: {error}"
                report.trace = traceback.format_exc()
                report.step = world.num_steps
            report.rounds += 1
            report.steps += world.num_steps
            report.virtual_s += world.now
            report.stats.update(world.stats)
            world.note(repr((digest, world.now, sorted(world.stats.items()), report.violation)).encode())
            digest = world.digest
    report.digest = f"{digest:08x}"
    report.stats = +report.stats  # what never happened is not named
    return report


@contextmanager
def _registered(policy: str | None) -> Iterator[None]:
    """Let module:Class be a name among POLICIES."""
    if policy is None or policy in POLICIES:
        yield
        return
    POLICIES[policy] = type(load_policy(policy))
    try:
        yield
    finally:
        del POLICIES[policy]


class _Round:
    """A fresh service: first safety while things go wrong, then liveness when they do not any more."""

    def __init__(self, world: World, most_steps: int, policy: str | None) -> None:
        scenario = draw_scenario(world.random)
        if policy is not None:
            scenario.config = replace(scenario.config, scheduling_policy=policy)
        self._world = world
        self._scenario = scenario
        self._num_steps = min(world.random.choice(ROUND_STEPS), most_steps)
        self._service = SimulatedService(world, scenario)
        self._troublemaker = Troublemaker(self._service)

    def run(self) -> None:
        """Run both phases.

        Raises:
            Violation: a promise was broken. InvariantViolation, PlanError and whatever else is raised are, too.
        """
        world = self._world
        longest_s = world.now + 100.0 + self._num_steps * 0.5
        while world.num_steps < self._num_steps and world.now < longest_s:
            world.advance()
        self._heal()
        self._finish_work()
        self._probe()
        self._check_all_free()

    def _heal(self) -> None:
        service = self._service
        self._troublemaker.stop()
        service.is_quick = True
        for frontend in service.frontends:
            frontend.is_open = False

    def _finish_work(self) -> None:
        """Everything that lives must end in bounded time, and with bounded work."""
        world, service = self._world, self._service
        work = service.work
        most_steps = world.num_steps + 20 * work + 200
        # Broken sessions are found by silence, hanging workers by the step timeout.
        limit_s = 120.0 + 6 * self._scenario.step_timeout_s + 20 * work * self._scenario.compute_s
        self._until(lambda: service.num_jobs == 0 or world.num_steps > most_steps, limit_s, "jobs do not end")
        if service.num_jobs:
            raise Violation(f"{service.num_jobs} jobs need more than {most_steps} steps")

    def _probe(self) -> None:
        """Every frontend is served; and the worker is told which rows are free, which nobody had reason to tell it."""
        world, service = self._world, self._service
        self._pause(3.0)
        self._until(lambda: all(f.peer.session_id for f in service.frontends), 60.0, "frontends get no session")
        self._until(self._has_worker, 60.0 + self._scenario.step_timeout_s * 4, "the worker gets no session")
        for frontend in service.frontends:
            job = _make_probe()
            frontend.submit(job)
            self._until(lambda: job.outcome is not None, 120.0, "a probe does not end")  # noqa: B023  called here
            if job.outcome != "finished":
                raise Violation(f"a probe {job.outcome}")
        world.stats["rounds"] += 1

    def _has_worker(self) -> bool:
        """Whether one worker serves, and the second one that came while it hung has been sent away."""
        return self._service.scheduler.service.sessions.peers.worker is not None and len(self._service.workers) == 1

    def _check_all_free(self) -> None:
        """Nothing is held for what has ended: not in the scheduler, the worker, the frontends, the network."""
        self._pause(15.0)
        service = self._service
        scheduler = service.scheduler.service
        figures = scheduler.core.figures
        if (figures.num_requests, figures.num_running, figures.num_waiting, scheduler.auditor.num_live) != (0,) * 4:
            raise Violation(f"idle, but {figures}")
        if figures.num_free_blocks != figures.num_blocks or not figures.num_blocks:
            raise Violation(f"idle, but {figures.num_free_blocks} of {figures.num_blocks} blocks are free")
        if (timer := scheduler.core.next_timer) is not None:
            raise Violation(f"idle, but a timer is due at {timer}")
        if len(scheduler.sessions.peers) != len(service.frontends) + 1:
            raise Violation(
                f"{len(scheduler.sessions.peers)} sessions for {len(service.frontends)} frontends and a worker"
            )
        models = [worker.model for worker in service.workers if worker.model is not None]
        if len(models) != 1 or len(models[0].rows) > 1:
            raise Violation(f"idle, but workers hold {[list(model.rows.values()) for model in models]}")
        if any(c.up.num_queued + c.down.num_queued > 4 for c in service.network.connections):
            raise Violation("idle, but messages wait")
        if len(service.network.dealers) != len(service.frontends) + len(service.workers):
            raise Violation(f"{len(service.network.dealers)} connections")
        service.scheduler.leave()

    def _pause(self, seconds: float) -> None:
        end = self._world.now + seconds
        while self._world.now < end:
            self._world.advance()

    def _until(self, condition: Callable[[], bool], limit_s: float, complaint: str) -> None:
        end = self._world.now + limit_s
        while not condition():
            self._world.advance()
            if self._world.now > end:
                raise Violation(f"{complaint} in {limit_s:g} s")


def _make_probe() -> Job:
    prompt_ids = pack_ints([1])
    return Job(
        prompt=[1],
        prompt_ids=prompt_ids,
        num_choices=1,
        max_tokens=1,
        sampling=RowSampling(seed=1),
        stop_ids=(),
        caller="probe",
        priority=0,
        root=b"",
        deadline_s=None,
        cancel_at=None,
        cancel_after_s=None,
        sick=None,
        is_wrong=False,
        choices=[Choice(Oracle(prompt_ids, 1, 0, (), 0))],
    )
