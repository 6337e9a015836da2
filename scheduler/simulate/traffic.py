"""Traffic on a virtual clock: the scheduler's core, a worker that costs time and computes nothing, policies side by side.

As a library: `simulate(arrivals, setup)`. As a program: python -m octavo.scheduler.simulate traffic --help.
"""

import argparse
import importlib
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from octavo.scheduler.config import ConfigConflict, SchedulerConfig, resolve_limits
from octavo.scheduler.core import Figures, Scheduler
from octavo.scheduler.events import Event, RequestSubmitted, StepCompleted, WorkerReady
from octavo.scheduler.instructions import EmitOutput, SendPlan
from octavo.scheduler.policy import POLICIES, Policy
from octavo.scheduler.simulate.arrivals import Arrival, BadTraffic, Distribution, Lengths, parse_shares, read_trace
from octavo.scheduler.simulate.cost import BadCost, StepCost, read_cost
from octavo.scheduler.simulate.model import FakeModel, hash_rule
from octavo.scheduler.simulate.traffic_figures import TrafficFigures
from octavo.scheduler.simulate.traffic_prompts import STOP_ID, Prompts
from octavo.scheduler.simulate.traffic_worker import FastWorker, Live
from octavo.wire.handshake import WorkerFacts
from octavo.wire.ids import SessionId
from octavo.wire.plan import StepPlan, StepResult
from octavo.wire.requests import StepOutput

FRONTEND, EPOCH = SessionId(1), SessionId(1)


class BadPolicy(ValueError):
    """A policy's name means nothing, or what it names is no policy."""


class Stuck(RuntimeError):
    """Requests are left, but the core plans nothing for them and nothing else will happen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The service that is simulated. The worker's defaults are an H200's with an 8B model in bfloat16."""

    policy: str = "fcfs"
    """A name among `octavo.scheduler.policy.POLICIES`, or module:Class."""
    cost: StepCost = field(default_factory=StepCost)
    num_blocks: int = 50_001
    """The null block included: 50,000 blocks of 16 tokens of 128 KiB are 98 GiB."""
    block_size: int = 16
    vocab_size: int = 32_000
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 8192
    long_prefill_token_threshold: int = 0
    pipeline_depth: int = 2
    max_preemptions: int = 3
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 4 * 2**20
    max_requests_per_caller: int = 0
    max_waiting_tokens_per_caller: int = 0
    enable_prefix_caching: bool = True
    check: bool = False
    """Make real ids, read them through the block tables, and prove the core's invariants after each event: slow."""

    @property
    def facts(self) -> WorkerFacts:
        """What the worker would say of itself."""
        return WorkerFacts(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            backend="simulated",
            device="none",
            dtype="none",
        )

    def config(self, policy: Policy) -> SchedulerConfig:
        """Return the scheduler's settings.

        Raises:
            ConfigConflict: one is out of range.
        """
        # A policy of one's own runs under a name that tells admission whether requests may have priorities.
        own = "priority" if policy.uses_priorities else "fcfs"
        return SchedulerConfig(
            address="ipc:///unused",
            config_digest="simulated",
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            pipeline_depth=self.pipeline_depth,
            max_preemptions=self.max_preemptions,
            max_waiting_requests=self.max_waiting_requests,
            max_waiting_tokens=self.max_waiting_tokens,
            max_requests_per_caller=self.max_requests_per_caller,
            max_waiting_tokens_per_caller=self.max_waiting_tokens_per_caller,
            enable_prefix_caching=self.enable_prefix_caching,
            scheduling_policy=self.policy if self.policy in POLICIES else own,
        )


def load_policy(name: str) -> Policy:
    """Return a new policy.

    Raises:
        BadPolicy: there is none of that name, or module:Class cannot be imported or is no policy.
    """
    if name in POLICIES:
        return POLICIES[name]()
    module, colon, attribute = name.partition(":")
    if not colon:
        raise BadPolicy(f"policy {name!r}: there are {', '.join(POLICIES)}, and module:Class")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BadPolicy(f"policy {name!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise BadPolicy(f"policy {name!r}: it is no subclass of octavo.scheduler.policy.Policy")
    return found()


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
        self.core = Scheduler(config, policy)
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
            Stuck: the core has stopped although requests are left.
        """
        began = time.perf_counter()
        self._tell((WorkerReady(EPOCH, self._setup.facts),), 0.0)
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
            self.core.check()
        if is_planned:
            figures = self.core.figures
            self.figures.on_blocks(self._worker, figures)
            if self._observer is not None:
                self._observer(self._worker, figures)

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
            self.figures.on_refused(self._live.pop(failed.handle), failed.code)

    def _checked_rule(self) -> Callable[..., int]:
        """Return a rule for the model that draws each choice's stop id in its place."""
        draw = hash_rule(self._setup.vocab_size - 1)

        def rule(ids: "list[int]", seed: int, choice: int) -> int:
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
        BadPolicy, ConfigConflict: the setup cannot be.
        BadTraffic: the arrivals cannot be read.
        Stuck: the core has stopped although requests are left; a bug of the core or of the policy.
    """
    return {"policy": setup.policy} | Simulation(setup, observer).run(arrivals)


# The program


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Add the command `traffic`."""
    parser = subparsers.add_parser(
        "traffic",
        help="run traffic under one or more policies on a virtual clock",
        description="Run traffic under one or more policies on a virtual clock. Prints one JSON line a policy, and a "
        "table on stderr.",
    )
    _add_traffic(parser.add_argument_group("traffic"))
    _add_service(parser.add_argument_group("service"))
    _add_cost(parser.add_argument_group("cost of a step"))
    parser.set_defaults(run=main)
    return parser


def _add_traffic(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--trace", type=Path, metavar="FILE", help="JSON lines to read the requests from, instead of drawing them")
    add("--requests", type=int, default=1000, metavar="N", help="how many to draw, or to read at most")
    add("--rate", type=float, default=20.0, help="requests a second in the mean; inf: all at once")
    add("--arrivals", choices=["poisson", "gamma", "uniform"], default="poisson", help="how they come")
    add("--burstiness", type=float, default=2.0, help="for gamma: coefficient of variation of the gaps")
    add("--prompt-tokens", default="lognormal:234,1.0,4,1024", metavar="LENGTHS")
    add("--output-tokens", default="lognormal:195,0.9,4,1024", metavar="LENGTHS")
    add("--max-tokens", type=int, default=0, metavar="N", help="that callers allow; 0: exactly the output")
    add("--callers", default="1", metavar="N|NAME=SHARE,...", help="who sends them")
    add("--priorities", default="0=1", metavar="PRIORITY=SHARE,...", help="under policies that use them")
    add("--prefix-share", type=float, default=0.0, help="share of the requests with a shared prefix")
    add("--prefix-groups", type=int, default=8, metavar="N", help="different shared prefixes")
    add("--prefix-tokens", type=int, default=512, metavar="N", help="length of each")
    add("--seed", type=int, default=0, help="of everything that is drawn")


def _add_service(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--policy", default="fcfs", metavar="NAME,...", help=f"{', '.join(POLICIES)} or module:Class")
    for item in fields(Setup):
        if item.type in (int, "int"):
            add("--" + item.name.replace("_", "-"), type=int, default=item.default, metavar="N")
    add("--no-prefix-caching", dest="enable_prefix_caching", action="store_false", help="share no blocks")
    add("--check", action="store_true", help="read tokens through block tables and prove invariants: slow")


def _add_cost(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--cost", type=Path, metavar="FILE", help="JSON object with the numbers below")
    for item in fields(StepCost):
        add("--" + item.name.replace("_", "-"), type=float, default=None, metavar="X", help=f"default {item.default:g}")


def main(arguments: argparse.Namespace) -> int:
    """Run the command; return the exit status."""
    try:
        cost = _cost(arguments)
        chosen = {item.name: getattr(arguments, item.name) for item in fields(Setup) if hasattr(arguments, item.name)}
        setups = [Setup(**chosen | {"cost": cost, "policy": name}) for name in arguments.policy.split(",")]
        reports = []
        for setup in setups:
            reports.append(simulate(_arrivals(arguments), setup))
            print(json.dumps(reports[-1]), flush=True)  # noqa: T201
    except (BadTraffic, BadCost, BadPolicy, ConfigConflict) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    print(_table(reports), file=sys.stderr)  # noqa: T201
    return 0


def _cost(arguments: argparse.Namespace) -> StepCost:
    cost = read_cost(arguments.cost) if arguments.cost else StepCost()
    given = {item.name: getattr(arguments, item.name) for item in fields(StepCost)}
    return cost.with_changes({name: value for name, value in given.items() if value is not None})


def _arrivals(arguments: argparse.Namespace) -> Iterator[Arrival]:
    if arguments.trace:
        yield from (arrival for _, arrival in zip(range(arguments.requests), read_trace(arguments.trace)))
        return
    priorities = parse_shares(arguments.priorities, "")
    try:
        by_number = {int(name): share for name, share in priorities.items()}
    except ValueError:
        raise BadTraffic(f"priorities {arguments.priorities!r}: expected PRIORITY=SHARE,...") from None
    drawn = Distribution(
        num_requests=arguments.requests,
        rate=arguments.rate,
        process=arguments.arrivals,
        burstiness=arguments.burstiness,
        prompt=Lengths.parse(arguments.prompt_tokens),
        output=Lengths.parse(arguments.output_tokens),
        callers=parse_shares(arguments.callers, "caller-"),
        priorities=by_number,
        prefix_share=arguments.prefix_share,
        num_prefix_groups=arguments.prefix_groups,
        num_prefix_tokens=arguments.prefix_tokens,
        max_tokens=arguments.max_tokens,
        seed=arguments.seed,
    )
    yield from drawn.arrivals()


_ROWS: tuple[tuple[str, str], ...] = (
    ("finished", "finished"),
    ("TTFT p50 ms", "ttft_ms.p50"),
    ("TTFT p99 ms", "ttft_ms.p99"),
    ("TPOT p50 ms", "tpot_ms.p50"),
    ("TPOT p99 ms", "tpot_ms.p99"),
    ("end to end p50 s", "e2e_s.p50"),
    ("end to end p99 s", "e2e_s.p99"),
    ("queue p99 ms", "queue_ms.p99"),
    ("output tokens/s", "throughput.output_tokens_per_s"),
    ("KV waste", "kv_waste"),
    ("blocks in use", "blocks_in_use.mean"),
    ("prefix hit rate", "prefix_hit_rate"),
    ("Jain's index", "fairness.jain"),
    ("largest gap", "fairness.largest_gap"),
    ("preemptions", "preemptions"),
    ("recomputed tokens", "recomputed_tokens"),
    ("rows a step", "rows_per_step.mean"),
    ("steps", "steps"),
    ("simulated requests/s", "simulated_requests_per_s"),
)


def _table(reports: list[dict[str, Any]]) -> str:
    columns = [[title for title, _ in _ROWS]]
    for report in reports:
        columns.append([_cell(report, path) for _, path in _ROWS])
    heads = ["", *(report["policy"] for report in reports)]
    widths = [max(map(len, [head, *column])) for head, column in zip(heads, columns, strict=True)]
    lines = [heads, *zip(*columns, strict=True)]
    return "\n".join("  ".join(_pad(cell, width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _pad(cell: str, width: int) -> str:
    return cell.rjust(width) if cell[:1].isdigit() or cell == "-" else cell.ljust(width)


def _cell(report: dict[str, Any], path: str) -> str:
    value: Any = report
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if value is None:
        return "-"
    return f"{value:,.4g}" if isinstance(value, float) and math.isfinite(value) and value < 1e4 else f"{value:,.0f}"


if __name__ == "__main__":
    program = argparse.ArgumentParser(prog="python -m octavo.scheduler.simulate.traffic")
    given = add_parser(program.add_subparsers(required=True)).parse_args(sys.argv[1:])
    sys.exit(main(given))
