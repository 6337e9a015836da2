"""python -m octavo.scheduler.simulate traffic: policies side by side under the same traffic.

As a library: `simulate(arrivals, setup)` of octavo.scheduler.simulate.traffic_run.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from octavo.scheduler.config import ConfigConflict
from octavo.scheduler.policy import POLICIES
from octavo.scheduler.simulate.arrivals import (
    PROCESSES,
    Arrival,
    BadTraffic,
    Distribution,
    Lengths,
    parse_shares,
    read_trace,
)
from octavo.scheduler.simulate.cost import BadCost, StepCost, read_cost
from octavo.scheduler.simulate.traffic_run import simulate
from octavo.scheduler.simulate.traffic_setup import BadPolicy, Setup

T = TypeVar("T")


LENGTHS = "N, uniform:LO,HI, or lognormal:MEAN,SIGMA[,LO,HI] with SIGMA of the logarithm, cut to LO..HI"
"""What an option of lengths takes."""

_DRAWN: dict[str, Any] = {
    "rate": 20.0,
    "arrivals": "poisson",
    "burstiness": 2.0,
    "prompt_tokens": "lognormal:234,1.0,4,1024",
    "output_tokens": "lognormal:195,0.9,4,1024",
    "max_tokens": 0,
    "callers": "1",
    "priorities": "0=1",
    "prefix_share": 0.0,
    "prefix_groups": 8,
    "prefix_tokens": 512,
    "seed": 0,
}
"""Defaults of the options that draw requests. The parser leaves None, so that an option without effect is noticed."""

NUM_DRAWN = 1000
"""Requests that are drawn where nobody says how many."""

_SERVICE = {
    "num_blocks": "blocks of the KV cache, the null block included",
    "block_size": "tokens in a block",
    "vocab_size": "ids that exist",
    "max_num_seqs": "most sequences that run at once",
    "max_num_batched_tokens": "most tokens of a step",
    "max_model_len": "most tokens of prompt and output of one sequence",
    "long_prefill_token_threshold": "most tokens of one sequence in a step; 0: no cap",
    "pipeline_depth": "plans that may be outstanding at the worker",
    "max_preemptions": "times that a sequence may lose its blocks; then it comes back with all that it can need",
    "max_waiting_requests": "bound of the queue, in requests; what comes above it is refused",
    "max_waiting_tokens": "bound of the queue, in prompt tokens times choices",
    "max_requests_per_caller": "requests that one caller may have at once; 0: no limit",
    "max_waiting_tokens_per_caller": "prompt tokens times choices that one caller may have waiting; 0: no limit",
}

_COST = {
    "base_ms": "of each step",
    "prefill_token_us": "of each token of a row that computes more than one",
    "decode_row_us": "of each row that computes one token",
    "context_token_ns": "of each token whose keys and values are read",
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Add the command `traffic`."""
    parser = subparsers.add_parser(
        "traffic",
        help="run traffic under one or more policies on a virtual clock",
        description="Run traffic under one or more policies on a virtual clock. Prints one JSON line a policy, and a "
        "table on stderr.",
    )
    _add_traffic(parser.add_argument_group("traffic"))
    _add_service(
        parser.add_argument_group(
            "service",
            "The worker is an H200 with an 8B model unless you say otherwise: what `octavo serve` takes on a CPU by "
            "default is smaller, --max-num-seqs 64 and --max-num-batched-tokens 512, and its status names its blocks.",
        )
    )
    _add_cost(parser.add_argument_group("cost of a step"))
    parser.set_defaults(run=main)
    return parser


def _add_traffic(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines to read the requests from; draws nothing")
    group.add_argument(
        "--requests", type=int, metavar="N", help=f"how many to draw (default {NUM_DRAWN}), or to read at most"
    )

    def add(flag: str, words: str, **more: Any) -> None:
        default = _DRAWN[flag.removeprefix("--").replace("-", "_")]
        more.setdefault("type", type(default))
        group.add_argument(flag, help=f"{words} (default {default})", **more)

    add("--rate", "requests a second in the mean; inf: all at once", metavar="X")
    add("--arrivals", "how the gaps between them are distributed", choices=PROCESSES)
    add("--burstiness", "for gamma: coefficient of variation of the gaps; 1 is poisson", metavar="X")
    add("--prompt-tokens", LENGTHS, metavar="LENGTHS")
    add("--output-tokens", "the same for the tokens that each choice will have", metavar="LENGTHS")
    add("--max-tokens", "that callers allow, if it is more than the output; 0: exactly the output", metavar="N")
    add("--callers", "who sends them: N equal ones, or names with shares", metavar="N|NAME=SHARE,...")
    add("--priorities", "shares of priorities, under policies that use them", metavar="PRIORITY=SHARE,...")
    add("--prefix-share", "share of the requests that begin with a shared prefix, 0 to 1", metavar="X")
    add("--prefix-groups", "different shared prefixes", metavar="N")
    add("--prefix-tokens", "length of each, which is added to the prompt's", metavar="N")
    add("--seed", "of everything that is drawn", metavar="N")


def _add_service(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    names = f"{', '.join(POLICIES)} or module:Class"
    add("--policy", default="fcfs", metavar="NAME,...", help=f"one after the other: {names} (default %(default)s)")
    for item in fields(Setup):
        if item.name in _SERVICE:
            words = f"{_SERVICE[item.name]} (default %(default)s)"
            add("--" + item.name.replace("_", "-"), type=int, default=item.default, metavar="N", help=words)
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="share and find again blocks with equal prefixes (default: yes)",
    )
    add(
        "--check",
        action="store_true",
        help="read tokens through block tables and prove all invariants after each event: about 100 times slower",
    )


def _add_cost(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--cost", type=Path, metavar="FILE", help="JSON object with the numbers below; flags win over it")
    for item in fields(StepCost):
        words = f"{_COST[item.name]} (default {item.default:g})"
        add("--" + item.name.replace("_", "-"), type=float, default=None, metavar="X", help=words)


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


def _check_effects(arguments: argparse.Namespace) -> None:
    """Refuse options that would do nothing.

    Raises:
        BadTraffic: there is one.
    """
    given = [name for name in _DRAWN if getattr(arguments, name) is not None]
    if arguments.trace and given:
        raise BadTraffic(f"{_flags(given)} with --trace: a trace says everything of its requests, nothing is drawn")
    if "burstiness" in given and arguments.arrivals != "gamma":
        raise BadTraffic("--burstiness without --arrivals gamma: only gamma has it")
    of_prefixes = [name for name in given if name in ("prefix_groups", "prefix_tokens")]
    if of_prefixes and not arguments.prefix_share:
        raise BadTraffic(f"{_flags(of_prefixes)} without --prefix-share: no request has a shared prefix")


def _flags(names: list[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)


def _arrivals(arguments: argparse.Namespace) -> Iterator[Arrival]:
    """Return the requests, the same ones each time.

    Raises:
        BadTraffic: an option of theirs is wrong; and while they are read, a line of the trace is.
    """
    _check_effects(arguments)
    if arguments.trace:
        if arguments.requests is not None and arguments.requests < 1:
            raise BadTraffic(f"requests is {arguments.requests}: it must be at least 1")
        return islice(read_trace(arguments.trace), arguments.requests)
    chosen = {name: getattr(arguments, name) for name in _DRAWN}
    chosen = {name: _DRAWN[name] if value is None else value for name, value in chosen.items()}
    return Distribution(
        num_requests=NUM_DRAWN if arguments.requests is None else arguments.requests,
        rate=chosen["rate"],
        process=chosen["arrivals"],
        burstiness=chosen["burstiness"],
        prompt=_named("prompt-tokens", lambda: Lengths.parse(chosen["prompt_tokens"])),
        output=_named("output-tokens", lambda: Lengths.parse(chosen["output_tokens"])),
        callers=_named("callers", lambda: parse_shares(chosen["callers"], "caller-")),
        priorities=_named("priorities", lambda: _parse_priorities(chosen["priorities"])),
        prefix_share=chosen["prefix_share"],
        num_prefix_groups=chosen["prefix_groups"],
        num_prefix_tokens=chosen["prefix_tokens"],
        max_tokens=chosen["max_tokens"],
        seed=chosen["seed"],
    ).arrivals()


def _named(option: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except BadTraffic as error:
        raise BadTraffic(f"{option}: {error}") from error


def _parse_priorities(text: str) -> dict[int, float]:
    shares = parse_shares(text, "")
    try:
        return {int(name): share for name, share in shares.items()}
    except ValueError:
        raise BadTraffic(f"{text!r}: expected PRIORITY=SHARE,... with priorities that are integers") from None


_ROWS: tuple[tuple[str, str], ...] = (
    ("requests", "requests"),
    ("finished", "finished"),
    ("refused", "refused"),
    ("TTFT p50 ms", "ttft_ms.p50"),
    ("TTFT p99 ms", "ttft_ms.p99"),
    ("TPOT p50 ms", "tpot_ms.p50"),
    ("TPOT p99 ms", "tpot_ms.p99"),
    ("end to end p50 s", "e2e_s.p50"),
    ("end to end p99 s", "e2e_s.p99"),
    ("queue mean ms", "queue_ms.mean"),
    ("queue p50 ms", "queue_ms.p50"),
    ("queue p90 ms", "queue_ms.p90"),
    ("queue p99 ms", "queue_ms.p99"),
    ("queue max ms", "queue_ms.max"),
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
    rows = [["", *(report["policy"] for report in reports)]]
    for title, path in _ROWS:
        rows.append([title, *(_cell(_find(report, path)) for report in reports)])
        if path == "refused":
            for reason in sorted({reason for report in reports for reason in report["refused"]}):
                rows.append([f"  {reason}", *(_cell(report["refused"].get(reason, 0)) for report in reports)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    for report in reports:
        for reason, message in report["first_refusals"].items():
            lines.append(f"{report['policy']}: the first request that was refused as {reason}: {message}")
    return "\n".join(lines)


def _find(report: dict[str, Any], path: str) -> float | None:
    value: Any = report
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if isinstance(value, dict):
        return sum(value.values())
    return value if isinstance(value, int | float) else None


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.4g}" if isinstance(value, float) and math.isfinite(value) and value < 1e4 else f"{value:,.0f}"


if __name__ == "__main__":
    program = argparse.ArgumentParser(prog="python -m octavo.scheduler.simulate.traffic")
    given = add_parser(program.add_subparsers(required=True)).parse_args(sys.argv[1:])
    sys.exit(main(given))
