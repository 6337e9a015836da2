"""`python -m octavo.scheduler.simulate`: run the simulations by hand."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from octavo.scheduler.simulate import traffic
from octavo.scheduler.simulate.planted import PLANTS
from octavo.scheduler.simulate.run import SimReport, run_seed


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m octavo.scheduler.simulate", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_faults(commands.add_parser("faults", help="seeded runs in which everything goes wrong"))
    traffic.add_parser(commands)
    args = parser.parse_args(arguments)
    run = args.run
    return int(run(args))


def _add_faults(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=20, help="how many seeds, from --first on")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=10_000, help="plans that each seed's workers execute")
    parser.add_argument("--seed", type=int, help="only this seed: replays it exactly")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--plant", choices=sorted(PLANTS), help="plant a bug, which must be found")
    parser.set_defaults(run=run_faults)


def run_faults(args: argparse.Namespace) -> int:
    """Run seeds; a JSON line for each on stdout, progress on stderr; stop at the first broken promise."""
    seeds = range(args.first, args.first + args.seeds) if args.seed is None else [args.seed]
    run = partial(run_seed, steps=args.steps, plant=args.plant)
    begin, steps = time.monotonic(), 0
    for done, report in enumerate(_reports(run, list(seeds), args.jobs), 1):
        steps += report.steps
        elapsed = time.monotonic() - begin
        line = dict(vars(report))
        trace = line.pop("trace")
        print(json.dumps(line, sort_keys=True), flush=True)  # noqa: T201
        _tell(f"{done}/{len(seeds)} seeds, {steps} steps, {elapsed:.0f} s, {steps / elapsed:.0f} steps/s")
        if report.violation is not None:
            _tell(f"{trace}seed {report.seed}, round {report.rounds}, step {report.step}: {report.violation}")
            _tell(f"replay: faults --seed {report.seed} --steps {args.steps}{_plant(args.plant)}")
            return 1
    return 0


def _plant(name: str | None) -> str:
    return f" --plant {name}" if name else ""


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
