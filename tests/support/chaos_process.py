"""A role of `octavo`, or the worker without torch, as a process whose patience and clock a test has chosen.

    python -m tests.support.chaos_process [--silence 2.0] [--clock-jumps SEED] ROLE ARGUMENTS

`--silence` replaces HEARTBEAT_TIMEOUT_S, and a tenth of it HEARTBEAT_INTERVAL_S, so that a stopped process is missed after
seconds. With `--clock-jumps` each look at the wall clock sees another day: yesterday, today or tomorrow (F51).
"""

import argparse
import os
import random
import sys
import time

import octavo.wire.channel


def set_patience(silence_s: float) -> None:
    """Let peers be missed after so many seconds; before anything else reads the old number."""
    octavo.wire.channel.HEARTBEAT_TIMEOUT_S = silence_s
    octavo.wire.channel.HEARTBEAT_INTERVAL_S = silence_s / 10


def let_the_clock_jump(seed: int) -> None:
    """Let the wall clock be wrong by a day to either side, differently at each look."""
    draw, real, real_ns = random.Random(seed), time.time, time.time_ns
    day_s = 86400

    def jumping() -> float:
        return real() + draw.choice((-day_s, 0, day_s))

    def jumping_ns() -> int:
        return real_ns() + draw.choice((-day_s, 0, day_s)) * 10**9

    time.time, time.time_ns = jumping, jumping_ns


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--silence", type=float)
    parser.add_argument("--clock-jumps", type=int)
    parser.add_argument("role")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if args.silence is not None:
        set_patience(args.silence)
    if args.clock_jumps is not None:
        let_the_clock_jump(args.clock_jumps)
    if args.role == "fake-worker":
        from octavo.cli import logs
        from octavo.wire import failpoints
        from tests.support import fake_runner

        logs.configure("worker", "info")
        failpoints.arm(os.environ.get(failpoints.VARIABLE, ""))
        sys.exit(fake_runner.main(args.arguments))
    from octavo.cli.main import main as octavo_main

    sys.argv = ["octavo", args.role, *args.arguments]
    octavo_main()


if __name__ == "__main__":
    main()
