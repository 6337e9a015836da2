"""Traffic on a virtual clock: the scheduler's core, one frontend, and a worker that costs time and computes nothing."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from octavo.scheduler.config import resolve_limits
from octavo.scheduler.core import Scheduler
from octavo.scheduler.errors import InvariantViolation
from octavo.scheduler.events import Event, RequestSubmitted, StepCompleted, WorkerReady
from octavo.scheduler.figures import Figures
from octavo.scheduler.instructions import EmitOutput, SendPlan
from octavo.scheduler.simulate.arrivals import Arrival
from octavo.scheduler.simulate.model import FakeModel, Rule, hash_rule
from octavo.scheduler.simulate.traffic_figures import TrafficFigures
from octavo.scheduler.simulate.traffic_policy import WatchedPolicy
from octavo.scheduler.simulate.traffic_prompts import STOP_ID, Prompts
from octavo.scheduler.simulate.traffic_setup import Setup, load_policy
from octavo.scheduler.simulate.traffic_worker import FastWorker, Live
from octavo.wire.ids import BootId, SessionId
from octavo.wire.plan import StepPlan, StepResult
from octavo.wire.requests import StepOutput

FRONTEND, EPOCH = SessionId(1), SessionId(1)


class Stuck(RuntimeError):
    """Requests are left, but the core plans nothing for them and nothing else will happen."""


Observer = Callable[[FastWorker, Figures], None]
"""Called after each plan with the rows as the plan leaves them and the core's figures."""


class Simulation:
    """One core, one frontend, one worker, one clock.

    Args:
        setup: of the service.
        observer: see `Observer`.

    Raises:
        BadPolicy, ConfigConflict: the setup cannot be.
    """

    def __init__(self, setup: Setup, observer: Observer | None = None) -> None:
        self.figures = TrafficFigures()
        policy = load_policy(setup.policy)
        config = setup.config(policy)
        resolve_limits(config, setup.facts)
        self.core = Scheduler(config, WatchedPolicy(policy))
        self._setup = setup
        self._uses_priorities = policy.uses_priorities
        self._observer = observer
        self._prompts = Prompts(setup.vocab_size, setup.block_size, exact=setup.check)
        self._live: dict[int, Live] = {}
        self._worker = FastWorker(setup.facts, self._live)
        self._model = FakeModel(setup.facts, self._checked_rule()) if setup.check else None
        self._results: deque[tuple[float, StepResult]] = deque()
        self._worker_free_at = 0.0
        self._next_handle = 0

    def run(self, arrivals: Iterable[Arrival]) -> dict[str, Any]:
        """Let all requests come and end; return what `TrafficFigures.report` says, and how fast this was.

        Raises:
            BadTraffic: the arrivals cannot be read.
            BadPolicy: the policy answers what no policy may.
            Stuck: the core has stopped although requests are left.
            InvariantViolation: with `check`, the core is not as it must be.
        """
        began = time.perf_counter()
        self._tell((WorkerReady(EPOCH, self._setup.facts, BootId("simulated")),), 0.0)
        coming = iter(arrivals)
        arrival = next(coming, None)
        while arrival is not None or self._results:
            if self._results and (arrival is None or self._results[0][0] <= arrival.at_s):
                now, result = self._results.popleft()
                self._tell((StepCompleted(result),), now)
            elif arrival is not None:
                now = arrival.at_s
                events: list[Event] = []
                while arrival is not None and arrival.at_s <= now:
                    events.append(self._submit(arrival))
                    arrival = next(coming, None)
                self._tell(tuple(events), now)
        if self._live:
            raise Stuck(f"{len(self._live)} requests are left and nothing is planned for them: {self.core.figures}")
        seconds = time.perf_counter() - began
        return self.figures.report(self.core.figures) | {
            "wall_s": round(seconds, 3),
            "simulated_requests_per_s": round(self.figures.num_requests / seconds, 1),
        }

    def _submit(self, arrival: Arrival) -> RequestSubmitted:
        self._next_handle += 1
        handle = self._next_handle
        live = Live(arrival, self.figures.fairness.number_of(arrival.caller), arrival.num_choices)
        self._live[handle] = live
        self.figures.on_submitted(arrival.at_s, live)
        priority = arrival.priority if self._uses_priorities else 0
        return RequestSubmitted(FRONTEND, self._prompts.message(handle, arrival, priority))

    def _tell(self, events: tuple[Event, ...], now: float) -> None:
        is_planned = False
        for instruction in self.core.on_events(events, now):
            match instruction:
                case SendPlan(plan):
                    self._execute(plan, now)
                    is_planned = True
                case EmitOutput(_, output):
                    self._take_output(output, now)
                case _:
                    raise Stuck(f"the core gave up a peer: {instruction}")
        if self._setup.check:
            self._check()
        if is_planned:
            figures = self.core.figures
            self.figures.on_blocks(self._worker, figures)
            if self._observer is not None:
                self._observer(self._worker, figures)

    def _check(self) -> None:
        try:
            self.core.check()
        except InvariantViolation as error:
            raise InvariantViolation(f"under the policy {self._setup.policy}: {error}") from error

    def _execute(self, plan: StepPlan, now: float) -> None:
        fairness = self.figures.fairness
        result, load, service = self._worker.execute(plan, max(1, fairness.num_callers))
        if self._model is not None:
            rows = result.row
            result = self._model.execute(plan)
            if result.row != rows:
                raise Stuck(f"plan {plan.step}: the fast worker answers other rows than the model")
        seconds = self._setup.cost.seconds(load)
        self._worker_free_at = max(now, self._worker_free_at) + seconds
        self._results.append((self._worker_free_at, result))
        self.figures.on_planned(load, seconds)
        fairness.serve(now, service)

    def _take_output(self, output: StepOutput, now: float) -> None:
        for started in output.started:
            self.figures.on_started(self._live[started.handle], started.queue_s)
        for finished in output.finished:
            live = self._live[finished.handle]
            self.figures.on_finished(live, finished.num_tokens, finished.prefill_s, finished.decode_s, finished.choice)
            live.num_left -= 1
            if live.num_left == 0:
                self.figures.on_ended(now, self._live.pop(finished.handle))
        for failed in output.failed:
            self.figures.on_refused(self._live.pop(failed.handle), failed.code, failed.message)

    def _checked_rule(self) -> Rule:
        """Return a rule for the model that draws each choice's stop id in its place."""
        draw = hash_rule(self._setup.vocab_size - 1)

        def rule(ids: Sequence[int], seed: int, choice: int) -> int:
            live = self._live.get(seed)
            if live is not None and len(ids) == live.arrival.num_prompt_tokens + live.arrival.num_output_tokens - 1:
                return STOP_ID
            return 1 + draw(ids, seed, choice)

        return rule


def simulate(arrivals: Iterable[Arrival], setup: Setup, observer: Observer | None = None) -> dict[str, Any]:
    """Simulate some traffic.

    Args:
        arrivals: in the order of their times.
        setup: the service.
        observer: see `Observer`.

    Returns:
        What docs/scheduling.md lists under "the figures".

    Raises:
        BadPolicy: there is no such policy, or it answers what no policy may.
        ConfigConflict: the setup cannot be.
        BadTraffic: the arrivals cannot be read.
        Stuck: the core has stopped although requests are left; a bug of the core or of the policy.
    """
    return {"policy": setup.policy} | Simulation(setup, observer).run(arrivals)
