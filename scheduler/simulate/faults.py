"""What goes wrong: faults of each kind at random times, until told to stop; and a supervisor that starts what died."""

from collections.abc import Callable
from random import Random

from octavo.scheduler.simulate.links import STRANGER, Network
from octavo.scheduler.simulate.scenario import Scenario
from octavo.scheduler.simulate.service import SimulatedService
from octavo.scheduler.simulate.worker_process import DOOMS
from octavo.scheduler.simulate.world import Process, World
from octavo.wire.codec import encode
from octavo.wire.handshake import Heartbeat
from octavo.wire.requests import CancelRequest

LONGEST_PAUSE_S = 20.0


class Troublemaker:
    """Lets each kind of fault happen, on average as often as the scenario says.

    Args:
        service: whose processes and links suffer.
    """

    def __init__(self, service: SimulatedService) -> None:
        self._service = service
        self._world: World = service.world
        self._network: Network = service.network
        self._random: Random = service.world.random
        self._is_on = True
        kinds: dict[str, Callable[[], None]] = {
            "worker_dies": self._kill_worker,
            "worker_hangs": self._hang_worker,
            "scheduler_dies": self._kill_scheduler,
            "frontend_dies": self._kill_frontend,
            "pause": self._pause,
            "clog": self._clog,
            "cut": self._cut,
            "garbage": self._throw_garbage,
        }
        for kind, mean_s in vars(service.scenario.troubles).items():
            if mean_s:
                self._arrange(kinds[kind], mean_s)

    @property
    def scenario(self) -> Scenario:
        """What the faults were drawn from."""
        return self._service.scenario

    def stop(self) -> None:
        """Let nothing go wrong any more, and heal what can be healed at once."""
        self._is_on = False
        self._network.weather.clear()
        for connection in self._network.connections:
            connection.up.clogged_until = connection.down.clogged_until = 0.0
        for process in self._processes():
            process.pause(self._world.now)
        for worker in self._service.workers:
            worker.doom = None
            worker.hang_s = 0.0

    def _arrange(self, act: Callable[[], None], mean_s: float) -> None:
        self._world.after(self._random.expovariate(1 / mean_s), self._happen, act, mean_s)

    def _happen(self, act: Callable[[], None], mean_s: float) -> None:
        if self._is_on:
            act()
            self._arrange(act, mean_s)

    def _processes(self) -> list[Process]:
        service = self._service
        found: list[Process] = [*service.frontends, *service.workers]
        return [process for process in (*found, service.scheduler) if process.is_alive]

    def _kill_worker(self) -> None:
        workers = [worker for worker in self._service.workers if worker.is_alive]
        if not workers:
            return
        worker = self._random.choice(workers)
        match self._random.randrange(6):
            case 0:
                self._world.stats["worker killed"] += 1
                worker.vanish()
            case 1:
                self._world.stats["worker left"] += 1
                worker.leave()
            case _:
                worker.doom = self._random.choice(DOOMS)

    def _hang_worker(self) -> None:
        workers = [worker for worker in self._service.workers if worker.is_alive]
        if not workers:
            return
        self._random.choice(workers).hang_s = self._random.uniform(0.5, 2.5) * self.scenario.step_timeout_s
        if self._random.random() < 0.4:
            # Whoever watches it has lost patience before the scheduler has.
            self._world.after(self._random.uniform(0.1, 10.0), self._service.start_worker)

    def _kill_scheduler(self) -> None:
        scheduler = self._service.scheduler
        if scheduler.is_alive:
            self._world.stats["scheduler died"] += 1
            (scheduler.leave if self._random.random() < 0.2 else scheduler.vanish)()

    def _kill_frontend(self) -> None:
        frontend = self._random.choice(self._service.frontends)
        if frontend.is_alive:
            self._world.stats["frontend died"] += 1
            (frontend.leave if self._random.random() < 0.2 else frontend.vanish)()

    def _pause(self) -> None:
        processes = self._processes()
        if processes:
            self._world.stats["pauses"] += 1
            process = self._random.choice(processes)
            process.pause(self._world.now + self._random.choice([0.5, 3.0, 12.0, LONGEST_PAUSE_S]))

    def _clog(self) -> None:
        connections = self._network.connections
        if connections:
            self._world.stats["clogs"] += 1
            connection = self._random.choice(connections)
            until = self._world.now + self._random.uniform(0.5, 15.0)
            if self._random.random() < 0.7:
                connection.up.clogged_until = until
            if self._random.random() < 0.7:
                connection.down.clogged_until = until

    def _cut(self) -> None:
        connections = self._network.connections
        if connections:
            self._world.stats["cuts"] += 1
            self._network.disconnect(self._random.choice(connections))

    def _throw_garbage(self) -> None:
        if (router := self._network.router) is None:
            return
        self._world.stats["garbage"] += 1
        for _ in range(self._random.choice([1, 1, 300])):
            stray = encode(CancelRequest(1), self._random.getrandbits(63), 1)
            frames = [self._network.corrupt(encode(Heartbeat(), 5, 5)), self._random.randbytes(40), b"", stray]
            router.take(STRANGER, self._random.choice(frames))
