"""The engine on the workloads that other engines have figures of: rows as JSON lines, and a table against theirs.

    python benchmarks/engine.py --model llama-3.1-8b --all --out benchmarks/results/DATE-h200-engine.jsonl

makes a folder with the model's config alone, starts scheduler and worker once as `octavo serve` would (random weights, no
frontend), warms them up, runs every workload of the model's published figures and writes each row when it is there.
`--time-limit` bounds the whole: what no longer fits is skipped, and a row says so.
"""

import argparse
import contextlib
import sys
import time
from pathlib import Path
from typing import Any

from octavo.cli import bench_engine, bench_models, bench_suite
from octavo.cli.bench_client import Run
from octavo.cli.bench_measure import Bench
from octavo.cli.bench_report import RowWriter, describe, print_table, read_rows
from octavo.cli.bench_signals import ending_in_order
from octavo.cli.errors import CommandError

PEERS = Path(__file__).resolve().parent / "peers" / "vllm_0.26_h200.jsonl"
QUICK = ("decode_b1", "decode_b8")
SWITCHES = ("enable-prefix-caching", "enforce-eager", "batch-invariant")
OWN = ("trace-plans", *SWITCHES)
SIZES = {
    "num-prompts": "requests of each workload",
    "input-len": "tokens of a prompt",
    "output-len": "tokens of output",
    "repeat": "runs of each workload, the best of which counts",
}


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help=f"{', '.join(bench_models.CONFIGS)}, or a model folder")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--all", action="store_true", help="every workload of the model's published figures")
    chosen.add_argument("--rows", help="workloads, with commas between them: decode_b8,prefill,serving_c64,...")
    parser.add_argument("--out", type=Path, help="file that gets the rows as they come; made anew")
    parser.add_argument("--time-limit", type=float, help="seconds for the whole, the start included")
    for flag, what in SIZES.items():
        of = ", ".join(bench_suite.TAKEN_BY[flag])
        parser.add_argument(f"--{flag}", type=int, help=f"{what}, instead of the usual ones; of {of}")
    parser.add_argument("--peers", type=Path, nargs="*", help=f"rows to compare with; default: {PEERS.name}")
    parser.add_argument("--trace", type=Path, help="folder for the scheduler's plans and the client's messages; slower")
    parser.add_argument("--commit", help="of Octavo, where there is no git to ask")
    parser.add_argument("--worker-arg", action="append", default=[], help="given to the worker as it is")
    defaults = {"max-num-seqs": "256", "max-num-batched-tokens": "8192"}
    for flag in bench_engine.FLAGS:
        if flag in SWITCHES:
            parser.add_argument(f"--{flag}", action=argparse.BooleanOptionalAction)
        elif flag not in OWN:
            parser.add_argument(f"--{flag}", default=defaults.get(flag), help="as of octavo worker or scheduler")
    return parser.parse_args(words)


def main() -> None:
    began = time.monotonic()
    chosen = arguments()
    try:
        with ending_in_order():
            run(chosen, began)
    except CommandError as error:
        sys.stderr.write(f"engine: {error}\n")
        sys.exit(error.exit_code)


def run(chosen: argparse.Namespace, began: float) -> None:
    names = bench_suite.suite_of(chosen.model) if chosen.all else tuple((chosen.rows or ",".join(QUICK)).split(","))
    bench_suite.check_names(names)
    sizes = bench_suite.Sizes(chosen.num_prompts, chosen.input_len, chosen.output_len, chosen.repeat)
    bench_suite.check_flags(sizes.flags, names)
    peers = read_rows([PEERS] if chosen.peers is None else chosen.peers)
    flags: dict[str, Any] = {flag: getattr(chosen, flag.replace("-", "_"), None) for flag in bench_engine.FLAGS}
    flags["max-num-batched-tokens"] = int(flags["max-num-batched-tokens"])
    trace = None
    if chosen.trace is not None:
        chosen.trace.mkdir(parents=True, exist_ok=True)
        flags["trace-plans"] = chosen.trace.resolve() / "plans.jsonl"
        flags["trace-plans"].unlink(missing_ok=True)  # the scheduler appends
        trace = bench_suite.ClientTrace(chosen.trace / "client.jsonl")
    deadline = None if chosen.time_limit is None else began + chosen.time_limit
    limits = {} if deadline is None else {"start_timeout_s": max(1.0, deadline - time.monotonic())}
    writer = RowWriter(chosen.out)
    try:
        with contextlib.ExitStack() as stack:
            settings = stack.enter_context(
                bench_engine.settings_for(chosen.model, flags, tuple(chosen.worker_arg), **limits)
            )
            bench_suite.check_lengths(names, sizes, bench_engine.known_max_model_len(settings))
            engine = stack.enter_context(bench_engine.running_engine(settings))
            writer.common = describe(chosen.model, settings, engine, chosen.commit)
            writer.write({"bench": "engine"})
            bench = Bench(engine.client, deadline, trace or ignore)
            estimates = bench_suite.estimate(peers, chosen.model)
            bench_suite.run_suite(bench, engine.facts.vocab_size, names, sizes, writer, estimates)
            writer.write({"bench": "end", "total_s": round(time.monotonic() - began, 1)})
    finally:
        writer.close()
        if trace is not None:
            trace.close()
        if writer.rows:
            print_table(writer.rows, peers, chosen.peers or ())


def ignore(_name: str, _run: Run) -> None:
    pass


if __name__ == "__main__":
    main()
