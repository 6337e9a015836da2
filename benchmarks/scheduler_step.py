"""CPU time of one step of the scheduler: result in, plan encoded, outputs built.

Running decodes of several callers' requests, a plan of two always outstanding; the fake worker only answers. Each
figure is the median over steps of this thread's CPU time, and, beside it in the same run, a multiple of a fixed Python
loop over 256 rows, so that machines can be compared.
"""

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random

from benchmarks._record import record
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.core import Scheduler
from octavo.scheduler.events import RequestSubmitted, StepCompleted, WorkerReady
from octavo.scheduler.instructions import EmitOutput, Instruction, SendPlan
from octavo.wire.codec import decode_from_peer, encode
from octavo.wire.columns import pack_ints, unpack_ints
from octavo.wire.handshake import WorkerFacts
from octavo.wire.ids import BootId, SessionId
from octavo.wire.plan import FLAG_SAMPLE, RowSampling, StepPlan, StepResult
from octavo.wire.prefix import prompt_keys, root_key
from octavo.wire.requests import SubmitRequest

VOCAB, BLOCK_SIZE, EPOCH, FRONTEND = 32_000, 16, SessionId(1), SessionId(2)

FIXED_ROWS = 256
"""Of the loop that steps are compared with, however many rows a step has."""


class Row:
    """What the fixed loop touches: a handful of attributes, as any scheduler must for each row."""

    __slots__ = ("done", "ids", "limit", "planned", "stop_ids")

    def __init__(self) -> None:
        self.planned, self.done, self.limit = 100, 99, 10**9
        self.ids: list[int] = []
        self.stop_ids = frozenset((2,))


def fixed_loop(rows: list[Row], tokens: list[int]) -> None:
    """One turn of the yardstick: over FIXED_ROWS rows, the least that a scheduler in Python can do in a step.

    A pass that plans (compare, count, gather) and a pass that confirms (count, append, compare, gather).
    """
    chosen: list[Row] = []
    for row in rows:
        end = row.planned + 1
        if end <= row.limit:
            row.planned = end
            chosen.append(row)
    pack_ints([row.planned for row in chosen])
    columns: list[int] = []
    for row, token in zip(rows, tokens, strict=True):
        row.done = done = row.done + 1
        row.ids.append(token)
        if token in row.stop_ids or done > row.limit:
            row.limit = 0
        columns += (row.planned, done, len(row.ids), token)
    for i in range(4):
        pack_ints(columns[i::4])


def answer(plan: StepPlan, random: Random) -> bytes:
    """Return the encoded result of a plan: ids that end nothing."""
    rows = [row for row, flag in zip(unpack_ints(plan.row), unpack_ints(plan.flags), strict=True) if flag & FLAG_SAMPLE]
    rows += unpack_ints(plan.fork_dst)
    tokens = pack_ints([random.randrange(10, VOCAB) for _ in rows])
    return encode(StepResult(plan.epoch, plan.step, pack_ints(rows), tokens), 1, 1)


class Bench:
    """A core with as many running decodes as asked for.

    Args:
        num_rows: running sequences.
        num_prompt: tokens of each prompt.
        num_cached: blocks of ended requests that can be found in the prefix cache.
        policy: scheduling policy.
    """

    def __init__(self, num_rows: int, num_prompt: int = 100, num_cached: int = 0, policy: str = "fcfs") -> None:
        self.random = Random(0)
        self.outstanding: deque[StepPlan] = deque()
        self.plan_bytes: list[int] = []
        self._handle = 0
        num_blocks = 1 + num_cached + num_rows * (num_prompt + 6016) // BLOCK_SIZE
        facts = WorkerFacts(num_blocks, BLOCK_SIZE, VOCAB, 65536, 2048, 65536, "none", "none", "none")
        config = SchedulerConfig(
            address="ipc:///unused",
            config_digest="none",
            scheduling_policy=policy,
            max_waiting_requests=2**20,
            max_waiting_tokens=2**31,
        )
        self.core = Scheduler(config)
        self.tell([WorkerReady(EPOCH, facts, BootId("w"))])
        while self.core.figures.num_cached_blocks < num_cached:
            self.submit(min(num_cached * BLOCK_SIZE, 32768), 1)
            self.step()
        while self.core.figures.num_requests:
            self.step()
        for row in range(num_rows):
            self.submit(num_prompt + row % BLOCK_SIZE, 6000)  # so that each step fills blocks of some
        while self.core.figures.num_waiting or any(plan.new_rows for plan in self.outstanding):
            self.step()

    def submit(self, num_prompt: int, max_tokens: int) -> None:
        """Submit a request of random ids."""
        self._handle += 1
        ids = pack_ints([self.random.randrange(10, VOCAB) for _ in range(num_prompt)])
        root = root_key("none")
        message = SubmitRequest(
            handle=self._handle,
            prompt_ids=ids,
            num_choices=1,
            max_tokens=max_tokens,
            sampling=RowSampling(seed=self._handle, stop_token_ids=pack_ints([2])),
            stop_token_ids=pack_ints([2]),
            caller=f"caller {self._handle % 8}",
            prefix_root=root,
            prefix_keys=prompt_keys(root, ids, BLOCK_SIZE),
        )
        self.tell([RequestSubmitted(FRONTEND, message)])

    def tell(self, events: list[RequestSubmitted | WorkerReady | StepCompleted]) -> list[Instruction]:
        """Tell the core, encode what it says, keep its plans."""
        instructions = self.core.on_events(events, 1.0)
        for instruction in instructions:
            match instruction:
                case SendPlan(plan):
                    self.plan_bytes.append(len(encode(plan, 1, 1)))
                    self.outstanding.append(plan)
                case EmitOutput(_, output):
                    encode(output, 1, 1)
        return instructions

    def step(self) -> int:
        """Take one result in; return the CPU time until its plan and outputs are encoded, in ns."""
        result = answer(self.outstanding.popleft(), self.random)
        begin = time.thread_time_ns()
        _, message = decode_from_peer(result)
        if not isinstance(message, StepResult):
            raise TypeError(message)
        self.tell([StepCompleted(message)])
        return time.thread_time_ns() - begin


def timed(call: Callable[[], object]) -> int:
    """Return the CPU time of a call in ns."""
    begin = time.thread_time_ns()
    call()
    return time.thread_time_ns() - begin


def measure(name: str, num_rows: int, num_steps: int, **more: int | str) -> dict[str, object]:
    """Measure one setting, with turns of the fixed loop between the steps."""
    bench = Bench(num_rows, **more)  # type: ignore[arg-type]
    rows = [Row() for _ in range(FIXED_ROWS)]
    tokens = [bench.random.randrange(10, VOCAB) for _ in rows]
    bench.plan_bytes.clear()
    steps: list[int] = []
    loops: list[int] = []
    for _ in range(num_steps):
        steps.append(bench.step())
        loops.append(timed(lambda: fixed_loop(rows, tokens)))
    bench.core.check()
    step, loop = statistics.median(steps) / 1000, statistics.median(loops) / 1000
    return {
        "metric": name,
        "value": round(step, 1),
        "unit": "us",
        "of_fixed_loop": round(step / loop, 2),
        "fixed_loop_us": round(loop, 1),
        "p99_us": round(statistics.quantiles(steps, n=100)[98] / 1000, 1),
        "largest_plan_bytes": max(bench.plan_bytes),
        "rows": num_rows,
        "steps": num_steps,
        **more,
    }


def main() -> None:
    """Print a JSON line for each setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="file that the lines are appended to, with date, commit and device")
    parser.add_argument("--quick", action="store_true", help="only 256 and 1024 decodes")
    options = parser.parse_args()
    settings: list[tuple[str, int, dict[str, int | str]]] = [
        ("step_256_decodes", 256, {}),
        ("step_1024_decodes", 1024, {}),
    ]
    if not options.quick:
        settings += [
            ("step_256_decodes_long_prompts", 256, {"num_prompt": 8000}),
            ("step_256_decodes_100_cached_blocks", 256, {"num_cached": 100}),
            ("step_256_decodes_100000_cached_blocks", 256, {"num_cached": 100_000}),
            ("step_256_decodes_fair", 256, {"policy": "fair"}),
            ("step_16_decodes", 16, {}),
        ]
    for name, num_rows, more in settings:
        line = measure(name, num_rows, options.steps, **more)
        print(json.dumps(line), flush=True)
        if options.out is not None:
            record(options.out, "benchmarks/scheduler_step.py", [line])


if __name__ == "__main__":
    main()
