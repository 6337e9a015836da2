"""`python -m octavo.scheduler.simulate`: run the simulations by hand."""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from octavo.scheduler.policy import POLICIES
from octavo.scheduler.simulate import traffic
from octavo.scheduler.simulate.planted import PLANTS
from octavo.scheduler.simulate.run import SimReport, run_seed
from octavo.scheduler.simulate.traffic_setup import BadPolicy, load_policy

PROGRAM = "python -m octavo.scheduler.simulate"
NUM_SEEDS = 20


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_faults(commands.add_parser("faults", help="seeded runs in which everything goes wrong"))
    traffic.add_parser(commands)
    args = parser.parse_args(arguments)
    run = args.run
    return int(run(args))


def _add_faults(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run the scheduler with simulated frontends, worker and network, all of which fail, on a virtual clock. "
        "Prints one JSON line a seed, and progress on stderr; stops with status 1 at the first broken promise."
    )
    add = parser.add_argument
    add("--seeds", type=_at_least(1), metavar="N", help=f"how many seeds, from --first on (default {NUM_SEEDS})")
    add("--first", type=int, metavar="N", help="the first seed (default 0)")
    add("--seed", type=int, metavar="N", help="only this seed: replays it exactly")
    words = "plans that each seed's workers execute (default %(default)s)"
    add("--steps", type=_at_least(1), default=10_000, metavar="N", help=words)
    add("--jobs", type=_at_least(1), default=1, metavar="N", help="processes (default %(default)s)")
    words = f"of all rounds: {', '.join(POLICIES)} or module:Class (default: each round draws one)"
    add("--policy", metavar="NAME", help=words)
    add("--plant", choices=sorted(PLANTS), help="plant a bug, which must be found")
    parser.set_defaults(run=run_faults)


def _at_least(least: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return integer


def run_faults(args: argparse.Namespace) -> int:
    """Run seeds; a JSON line for each on stdout, progress on stderr; stop at the first broken promise."""
    if args.seed is not None and (args.seeds, args.first) != (None, None):
        _tell("error: --seed is one seed, --seeds and --first are several: leave out one of the two")
        return 2
    try:
        if args.policy is not None:
            load_policy(args.policy)
    except BadPolicy as error:
        _tell(f"error: {error}")
        return 2
    first, num_seeds = (args.first or 0, args.seeds or NUM_SEEDS) if args.seed is None else (args.seed, 1)
    run = partial(run_seed, steps=args.steps, plant=args.plant, policy=args.policy)
    begin, steps = time.monotonic(), 0
    for done, report in enumerate(_reports(run, list(range(first, first + num_seeds)), args.jobs), 1):
        steps += report.steps
        elapsed = time.monotonic() - begin
        print(json.dumps(_line(report), sort_keys=True), flush=True)  # noqa: T201
        _tell(f"{done}/{num_seeds} seeds, {steps} steps, {elapsed:.0f} s, {steps / elapsed:.0f} steps/s")
        if report.violation is not None:
            _tell(f"{report.trace}seed {report.seed}, round {report.rounds}, step {report.step}: {report.violation}")
            _tell(f"replay: {_replay(report.seed, args)}")
            return 1
    return 0


def _line(report: SimReport) -> dict[str, object]:
    """Return what is printed: the step only where something broke at it."""
    line: dict[str, object] = dict(vars(report))
    step = line.pop("step")
    del line["trace"]
    return line if report.violation is None else line | {"violation_step": step}


def _replay(seed: int, args: argparse.Namespace) -> str:
    """Return the command that runs a seed again."""
    words = ["faults", "--seed", str(seed), "--steps", str(args.steps)]
    for flag, value in (("--policy", args.policy), ("--plant", args.plant)):
        words += [flag, value] if value else []
    return f"{PROGRAM} {shlex.join(words)}"


def _reports(run: partial[SimReport], seeds: list[int], jobs: int) -> Iterator[SimReport]:
    if jobs <= 1 or len(seeds) == 1:
        yield from map(run, seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        futures = [pool.submit(run, seed) for seed in seeds]
        try:
            for future in futures:
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
