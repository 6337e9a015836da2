"""Every row of the published figures of one GPU, by one command: engine, steps, attention.

    python -m benchmarks.h200 --out FOLDER [--time-limit S]

runs these programs one after another, each for as long as the time limit leaves, and writes one file of rows for each.
Their tables and last lines go to the terminal. Exits with 1 if a program failed or ran out of time, with 2 where there is
no CUDA device.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks._processes import end
from octavo.cli.bench_signals import ending_in_order, held

ENGINE = "benchmarks/engine.py"
ROOT = Path(__file__).resolve().parent.parent


def programs(out: Path, commit: list[str]) -> list[tuple[str, list[str]]]:
    """Return what is run, in this order: names of the files of rows, and arguments of Python."""
    return [
        ("engine-llama-3.1-8b", [ENGINE, "--model", "llama-3.1-8b", "--all", *commit]),
        ("engine-qwen3-0.6b", [ENGINE, "--model", "qwen3-0.6b", "--all", *commit]),
        ("steps", ["-m", "benchmarks.gpu_steps", "--batches", "64", "--quick", "--profile", "--steps", "30", *commit]),
        ("attention", ["-m", "benchmarks.gpu_attention", "--only", "decode,prefill", *commit]),
    ]


def main() -> None:
    """Run them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder that gets a file of rows for each program")
    parser.add_argument("--time-limit", type=float, default=900.0, help="seconds for all of them together")
    parser.add_argument("--commit", help="of Octavo, where there is no git to ask")
    parser.add_argument("--skip", nargs="*", default=[], help="names of programs that are not run")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write(f"h200: torch {torch.__version__} finds no CUDA device\n")
        sys.exit(2)
    options.out.mkdir(parents=True, exist_ok=True)
    with ending_in_order():
        failed = run_all(options)
    if failed:
        sys.exit(f"not measured whole: {', '.join(failed)}")


def run_all(options: argparse.Namespace) -> list[str]:
    """Run one program after the other; return the names of those that did not end well."""
    ends = time.monotonic() + options.time_limit
    failed: list[str] = []
    for name, arguments in programs(options.out, ["--commit", options.commit] if options.commit else []):
        if name in options.skip:
            continue
        left = ends - time.monotonic()
        limit = ["--time-limit", str(int(left))] if arguments[0] == ENGINE else []
        command = [sys.executable, *arguments, *limit, "--out", str(options.out / f"{name}.jsonl")]
        print(f"# {name}: {' '.join(command[1:])}", flush=True)
        try:
            run(command, max(1.0, left))
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"# {name} did not end well: {error}", flush=True)
            failed.append(name)
    return failed


def run(command: list[str], timeout_s: float) -> None:
    """Run a program to its end; whatever comes between, it is told to end, and has a while to tidy up.

    Raises:
        subprocess.CalledProcessError: it failed.
        subprocess.TimeoutExpired: it ran out of time.
    """
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        code = process.wait(timeout_s)
    finally:
        with held():
            end(process)
    if code:
        raise subprocess.CalledProcessError(code, command)


if __name__ == "__main__":
    main()
