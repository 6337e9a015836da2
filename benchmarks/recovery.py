"""Scheduler and worker are killed, and the scheduler replaced, under streams: how long until these go on.

    python -m benchmarks.recovery [--backend cpu] [--events 5] [--streams 8] [--output-json FILE]

`octavo serve` with the demo model under closed loops of streams (greedy, token ids, no end of sequence). Each event comes
when every stream has run undisturbed for some seconds. Of each stream the pause is told from the event to its first token
thereafter: the end of the longest time without a token that begins at the event, since tokens that had left the dead process
still arrive. What happened meanwhile is read from the status, which is asked forty times a second: `first_plan_s` is when
the new scheduler, or the old one with the new worker, was first seen to have sent a plan, by the status or a token;
`ready_s` when the new process was seen ready, which for a worker is the time of its start. Adopted and recomputed tokens are
the scheduler's own counts, read when all streams had gone on. Exits with 1 if a bound is broken: a first plan 2 s after the
death of a scheduler, or 1 s after the new worker was ready; a worker's process that changed when it should not have, or a
stream that failed.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks._record import record
from octavo.v1 import admin_pb2
from tests.support.service import Service, free_port, request

EVENTS = ("kill_scheduler", "kill_worker", "replace_scheduler")
MAX_FIRST_PLAN_S, MAX_AFTER_READY_S = 2.0, 1.0
LOOK_INTERVAL_S, MAX_WAIT_S = 0.025, 90.0
LATE_S = 0.25
"""Tokens that had left the dead process may arrive for so long."""


class Streams:
    """Closed loops of streams, and when each of their tokens came."""

    def __init__(self, service: Service, number: int, max_tokens: int) -> None:
        self.times: list[list[float]] = [[] for _ in range(number)]
        self.errors: list[str] = []
        self._service = service
        self._max_tokens = max_tokens
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._loop, args=(n,), daemon=True) for n in range(number)]
        for thread in self._threads:
            thread.start()

    def _loop(self, number: int) -> None:
        turn = 0
        while not self._is_over.is_set():
            turn += 1
            prompt = [1000 + 37 * number + 101 * turn + place for place in range(32)]
            call = self._service.generation.GenerateStream(
                request(prompt, self._max_tokens, ignore_eos=True), timeout=300
            )
            try:
                for event in call:
                    if event.WhichOneof("event") == "delta":
                        self.times[number].append(time.monotonic())
                    if self._is_over.is_set():
                        call.cancel()
                        return
            except grpc.RpcError as error:
                self.errors.append(f"{error.code()}: {error.details()}")
                return

    def wait_for_more(self, number: int) -> None:
        """Return when each stream has got so many tokens more.

        Raises:
            TimeoutError: that takes too long.
        """
        wanted = [len(times) + number for times in self.times]
        until(lambda: bool(self.errors) or all(len(t) >= w for t, w in zip(self.times, wanted, strict=True)), "tokens")

    def pauses(self, at: float) -> list[float]:
        """Return how long after a moment each stream had its first token after its longest gap."""
        found = []
        for times in self.times:
            gaps = [(after - before, after - at) for before, after in pairwise(list(times)) if before < at + LATE_S]
            found.append(max((gap for gap in gaps if gap[1] > 0), default=(0.0, 0.0))[1])
        return found

    def end(self) -> None:
        """Give the streams up."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(MAX_WAIT_S)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something.

    Raises:
        TimeoutError: it does not come.
    """
    deadline = time.monotonic() + MAX_WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {MAX_WAIT_S:g} s")
        time.sleep(LOOK_INTERVAL_S)


@dataclass
class Seen:
    """What an event led to."""

    ready_s: float = 0.0
    first_plan_s: float = 0.0
    pauses: list[float] = field(default_factory=list)
    adopted_rows: int = 0
    adopted_tokens: int = 0
    recomputed_tokens: int = 0
    worker_stays: bool = False


def status(service: Service) -> admin_pb2.GetStatusResponse | None:
    """Return the state of the service; None while nobody can tell it."""
    try:
        found = service.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=1.0)
    except grpc.RpcError:
        return None
    return found if found.HasField("scheduler") else None


def told_status(service: Service) -> admin_pb2.GetStatusResponse:
    """Return the state of the service as soon as it is told.

    Raises:
        TimeoutError: that takes too long.
    """
    deadline = time.monotonic() + MAX_WAIT_S
    while (found := status(service)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError("the service does not tell its state")
        time.sleep(LOOK_INTERVAL_S)
    return found


def pid_of(found: admin_pb2.GetStatusResponse, role: str, state: str | None = None) -> int:
    """Return the process of a role, 0 if there is none (in that state)."""
    return next((one.pid for one in found.processes if one.role == role and state in (None, one.state)), 0)


def happen(service: Service, streams: Streams, event: str) -> Seen:
    """Let an event happen, and look until all streams have gone on."""
    before = told_status(service)
    worker, scheduler = pid_of(before, "worker"), pid_of(before, "scheduler")
    role, old = ("worker", worker) if event == "kill_worker" else ("scheduler", scheduler)
    seen, at = Seen(), time.monotonic()
    if event == "replace_scheduler":
        service.admin.ReplaceScheduler(admin_pb2.ReplaceSchedulerRequest(), timeout=5.0)
    else:
        os.kill(old, signal.SIGKILL)

    def has_begun() -> bool:
        found = status(service)
        now = time.monotonic() - at
        if found is None or pid_of(found, role, "ready") in (0, old):
            return False
        seen.ready_s = seen.ready_s or now
        seen.first_plan_s = now
        return found.scheduler.steps > 0

    until(has_begun, "plan")
    streams.wait_for_more(8)
    after = told_status(service)
    base = before.scheduler if event == "kill_worker" else admin_pb2.SchedulerStatus()  # a new scheduler counts from 0
    seen.pauses = streams.pauses(at)
    seen.first_plan_s = min(seen.first_plan_s, *seen.pauses)  # a token is a sign of a plan as well
    seen.adopted_rows = after.scheduler.adopted_rows - base.adopted_rows
    seen.adopted_tokens = after.scheduler.adopted_tokens - base.adopted_tokens
    seen.recomputed_tokens = after.scheduler.recomputed_tokens - base.recomputed_tokens
    seen.worker_stays = pid_of(after, "worker") == worker
    return seen


def figures(values: list[float]) -> dict[str, float]:
    """Return median, 99th percentile and largest."""
    return {
        "p50": round(float(np.percentile(values, 50)), 3),
        "p99": round(float(np.percentile(values, 99)), 3),
        "max": round(max(values), 3),
    }


def row_of(event: str, args: argparse.Namespace, seen: list[Seen], load: float) -> dict[str, Any]:
    """Return what is kept of events of one kind."""
    row = {
        "bench": "recovery",
        "event": event,
        "backend": args.backend,
        "streams": args.streams,
        "events": len(seen),
        "load_1m": round(load, 1),
        "first_token_s": figures([pause for one in seen for pause in one.pauses]),
        "first_plan_s": figures([one.first_plan_s for one in seen]),
        "ready_s": figures([one.ready_s for one in seen]),
        "adopted_rows": [one.adopted_rows for one in seen],
        "adopted_tokens": [one.adopted_tokens for one in seen],
        "recomputed_tokens": [one.recomputed_tokens for one in seen],
        "worker_stays": all(one.worker_stays for one in seen),
    }
    if event == "kill_worker":
        row["first_plan_after_ready_s"] = figures([one.first_plan_s - one.ready_s for one in seen])
        row["first_token_after_ready_s"] = figures([pause - one.ready_s for one in seen for pause in one.pauses])
    return row


def broken(row: dict[str, Any]) -> list[str]:
    """Return the bounds that a row breaks."""
    if row["event"] == "kill_worker":
        late = row["first_plan_after_ready_s"]["max"]
        return [f"a first plan {late} s after the worker was ready"] if late > MAX_AFTER_READY_S else []
    wrong = [] if row["worker_stays"] else ["another worker"]
    if (late := row["first_plan_s"]["max"]) > MAX_FIRST_PLAN_S:
        wrong.append(f"a first plan after {late} s")
    return wrong


def run(args: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Run all events; return the rows, and what was wrong."""
    service = Service(free_port(), folder / "run", folder / "log")
    rows, wrong = [], []
    try:
        service.serve(args.model, "--backend", args.backend, *args.serve_args.split()).wait_until_ready()
        streams = Streams(service, args.streams, args.max_tokens)
        for event in args.kinds:
            seen = []
            for _ in range(args.events):
                streams.wait_for_more(1)
                time.sleep(args.rest)
                seen.append(happen(service, streams, event))
                print(event, seen[-1], file=sys.stderr, flush=True)
            rows.append(row_of(event, args, seen, os.getloadavg()[0]))
            wrong += [f"{event}: {what}" for what in broken(rows[-1])]
        wrong += streams.errors
        streams.end()
    finally:
        service.stop()
        if args.log:
            args.log.write_text(service.output)
    return rows, wrong


def main() -> None:
    """Run, print the rows, and fail if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--kinds", nargs="+", choices=EVENTS, default=EVENTS)
    parser.add_argument("--events", type=int, default=5, help="of each kind")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--rest", type=float, default=5.0, help="seconds before each event in which all is well")
    parser.add_argument("--serve-args", default="", help="further arguments of octavo serve")
    parser.add_argument("--log", type=Path, help="file for what the service said")
    parser.add_argument("--output-json", type=Path, help="file that the rows are added to")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
        rows, wrong = run(args, Path(folder))
    for row in rows:
        print(json.dumps(row), flush=True)
    if args.output_json:
        record(args.output_json, "benchmarks/recovery.py", rows)
    for what in wrong:
        print(what, file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
