"""All processes of one simulated service, and the supervisor that starts again what has died."""

from octavo.scheduler.config import resolve_limits
from octavo.scheduler.policy import POLICIES
from octavo.scheduler.simulate.frontend_process import SimFrontend
from octavo.scheduler.simulate.links import Network
from octavo.scheduler.simulate.scenario import Scenario
from octavo.scheduler.simulate.scheduler_process import SimScheduler
from octavo.scheduler.simulate.worker_process import SimWorker
from octavo.scheduler.simulate.workload import Workload
from octavo.scheduler.simulate.world import Violation, World
from octavo.wire.ids import BootId

WATCH_INTERVAL_S = 0.25
"""How often the supervisor looks."""

RIGHT_REFUSALS = ("serves already: one worker is supported", "the peer speaks protocol version")
"""Why a process may be refused in a service of one model and version: it is one too many, or a frame was corrupted."""


class SimulatedService:
    """One scheduler, one worker (two, while one hangs), a few frontends.

    Attributes:
        is_quick: whether what has died is started again at once; else after a while.
    """

    def __init__(self, world: World, scenario: Scenario) -> None:
        self.world = world
        self.scenario = scenario
        self.is_quick = False
        self.network = Network(world, scenario.queue_limit)
        self.network.weather = scenario.weather
        self._num_started = 0
        self._workload = Workload(
            world.random, scenario.traffic, POLICIES[scenario.config.scheduling_policy].uses_priorities
        )
        self._limits = [resolve_limits(scenario.config, facts) for facts in (scenario.facts, scenario.small_facts)]
        self.scheduler = self._start_scheduler()
        self.frontends = [self._start_frontend() for _ in range(scenario.num_frontends)]
        self.workers: list[SimWorker] = []
        self.start_worker()
        self._watch()

    @property
    def num_jobs(self) -> int:
        """Jobs that live."""
        return sum(len(frontend.jobs) for frontend in self.frontends)

    @property
    def work(self) -> int:
        """Most tokens that the living jobs can still need."""
        jobs = [job for frontend in self.frontends for job in frontend.jobs.values()]
        return sum((len(job.prompt) + job.max_tokens) * job.num_sequences for job in jobs)

    def start_worker(self) -> None:
        """Start a worker, whether there is one or not."""
        random, scenario = self.world.random, self.scenario
        facts = random.choice([scenario.facts, scenario.small_facts])
        load_s = 0.0 if self.is_quick else random.choice([0.0, 0.5, 3.0])
        self.workers.append(SimWorker(self.world, self.network, self._boot_id("w"), facts, scenario.compute_s, load_s))

    def _start_scheduler(self) -> SimScheduler:
        return SimScheduler(self.world, self.network, self._boot_id("s"), self.scenario.config)

    def _start_frontend(self) -> SimFrontend:
        scenario = self.scenario
        return SimFrontend(
            self.world,
            self.network,
            self._boot_id("f"),
            scenario.config,
            scenario.traffic,
            self._workload,
            self._limits,
            scenario.troubles.are_deadly or scenario.weather.delay > 0,
        )

    def _boot_id(self, role: str) -> BootId:
        self._num_started += 1
        return BootId(f"{role}{self._num_started}")

    def _watch(self) -> None:
        """Start what is missing: at once or, on average, a second later."""
        self.world.after(WATCH_INTERVAL_S, self._watch)
        for worker in self.workers:
            self._check_refusal(worker.refused)
        self.workers = [worker for worker in self.workers if worker.is_alive]
        if not self.workers and self._is_time():
            self.start_worker()
        if not self.scheduler.is_alive and self._is_time():
            self.scheduler = self._start_scheduler()
        for index, frontend in enumerate(self.frontends):
            if not frontend.is_alive and self._is_time():
                self._check_refusal(frontend.refused)
                self.frontends[index] = self._start_frontend()
                self.frontends[index].is_open = frontend.is_open

    def _is_time(self) -> bool:
        return self.is_quick or self.world.chance(WATCH_INTERVAL_S)

    def _check_refusal(self, reason: str | None) -> None:
        if reason is None:
            return
        self.world.stats["refused"] += 1
        if not any(right in reason for right in RIGHT_REFUSALS):
            raise Violation(f"a process was refused: {reason}")
