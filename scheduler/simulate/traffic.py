"""python -m octavo.scheduler.simulate traffic: policies side by side under the same traffic.

As a library: `simulate(arrivals, setup)` of octavo.scheduler.simulate.traffic_run.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

from octavo.scheduler.config import ConfigConflict
from octavo.scheduler.policy import POLICIES
from octavo.scheduler.simulate.arrivals import Arrival, BadTraffic, Distribution, Lengths, parse_shares, read_trace
from octavo.scheduler.simulate.cost import BadCost, StepCost, read_cost
from octavo.scheduler.simulate.traffic_run import simulate
from octavo.scheduler.simulate.traffic_setup import BadPolicy, Setup


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
        yield from islice(read_trace(arguments.trace), arguments.requests)
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
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(zip(line, widths))
        )
        for line in lines
    )


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
