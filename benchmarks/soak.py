"""Rounds of mixed traffic against a whole service, with an idle gap after each: what is left, and what grows.

    python -m benchmarks.soak [--rounds 20] [--minutes M] [--requests 500] [--cancels 0.3] [--out F] [--serve-args "…"]
    python -m benchmarks.soak --cancels 1                       # every request is given up, at a random moment
    python -m benchmarks.soak --cancels 1 --cut --kinds http-whole      # … by a connection that is cut, gRPC's as well
    python -m benchmarks.soak --address 127.0.0.1:50051 --http-port 8000       # a service that runs already

Each request is of a random kind (a stream or a whole answer, over gRPC or HTTP, one choice or two, with or without stop
strings and seeds). A share of them is given up at a random moment, before, within or after the answer: by a cancel, a
deadline, or a connection that is cut. In each gap the service must hold nothing: no request, no row, every block free. Of
each process resident memory, open files and threads are read there, and the slope over the rounds is told in units for a
thousand requests, together with the 95 % interval of that slope: growth that the noise hides is not told from none. Before the
first round prompts fill the worker's cache: its memory becomes resident where it is first written.

Exits with 1 if anything was left in a gap, or an answer that was not given up came with an error.
"""

import argparse
import asyncio
import contextlib
import json
import math
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks._line import Line
from benchmarks._processes import end
from benchmarks._record import record
from benchmarks.served import free_port
from octavo.cli.bench_signals import ending_in_order, held
from octavo.v1 import admin_pb2, admin_pb2_grpc
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as rpc

OCTAVO = [sys.executable, "-m", "octavo.cli.main"]
KINDS = ("grpc-stream", "grpc-whole", "http-stream", "http-whole")
START_TIMEOUT_S, IDLE_TIMEOUT_S, REQUEST_TIMEOUT_S = 180.0, 30.0, 120.0
POLL_INTERVAL_S = 0.05
WARM_ROUNDS = 2  # caches fill, and allocators take what they keep
FILLED_SHARE, MAX_FILLERS = 0.95, 2000
WORDS = ["rain", "stone", "river", "light", "window", "paper", "garden", "mountain", "letter", "silver"]


@dataclass(frozen=True)
class Job:
    """One request, and when it is given up: so many seconds after its start, or never."""

    kind: str
    prompt: str
    max_tokens: int
    num_choices: int
    seed: int
    stop: tuple[str, ...]
    gives_up_after_s: float | None
    by_deadline: bool


@dataclass
class Gap:
    """What was seen between two rounds: of each process resident bytes, open files and threads."""

    num_requests: int
    figures: dict[str, dict[str, int]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def draw_job(rng: random.Random, options: argparse.Namespace) -> Job:
    """Return a request; `--mean-life` is how long those that are given up live on average."""
    kind = rng.choice(options.kinds)
    gives_up = rng.random() < options.cancels
    life_s = rng.expovariate(1 / options.mean_life) if gives_up else None
    return Job(
        kind,
        " ".join(rng.choices(WORDS, k=rng.randint(1, 60))),
        rng.randint(1, options.max_tokens),
        rng.choice((1, 1, 1, 2)),
        rng.getrandbits(32),
        ("zq", "river stone") if rng.random() < 0.2 else (),
        life_s,
        gives_up and kind.startswith("grpc") and rng.random() < 0.3,
    )


class Client:
    """Runs jobs at both doors."""

    def __init__(self, address: str, http_port: int, cuts: bool) -> None:
        self._address = address
        self._http_port = http_port
        self._cuts = cuts
        self._channel = grpc.aio.insecure_channel(address)
        self._stub: Any = rpc.GenerationServiceStub(self._channel)
        self._admin: Any = admin_pb2_grpc.AdminServiceStub(self._channel)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close(None)

    async def run(self, job: Job) -> str:
        """Run a job; return how it ended: answered, given up, or an error's name."""
        try:
            limit = None if job.by_deadline else job.gives_up_after_s
            async with asyncio.timeout(limit if limit is not None else REQUEST_TIMEOUT_S):
                await (self._grpc(job) if job.kind.startswith("grpc") else self._http(job))
        except TimeoutError:
            return "given up" if job.gives_up_after_s is not None else "error: no answer in time"
        except grpc.aio.AioRpcError as error:
            if job.by_deadline and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return "given up"
            return f"error: {error.code().name}: {error.details()}"
        except (OSError, EOFError, ValueError) as error:
            return f"error: {error!r}"
        return "answered"

    async def _grpc(self, job: Job) -> None:
        asked = pb.GenerationInput(
            text=job.prompt,
            sampling=pb.SamplingParams(seed=job.seed, n=job.num_choices),
            stopping=pb.StoppingParams(max_tokens=job.max_tokens, stop_strings=job.stop),
        )
        limit_s = max(job.gives_up_after_s or 0, 0.001) if job.by_deadline else REQUEST_TIMEOUT_S
        if not self._cuts or job.gives_up_after_s is None:
            await self._call(self._stub, job.kind, asked, limit_s)
            return
        line = await Line.open(self._address)
        try:
            async with grpc.aio.insecure_channel(line.address) as channel:
                stub: Any = rpc.GenerationServiceStub(channel)
                asking = asyncio.ensure_future(self._call(stub, job.kind, asked, limit_s))
                try:
                    await asyncio.shield(asking)
                finally:
                    line.cut()  # before the call is cancelled: the service hears nothing but that
                    await asyncio.wait([asking])
                    _ = asking.cancelled() or asking.exception()  # known, if it ended by itself
        finally:
            line.cut()

    async def _call(self, stub: Any, kind: str, asked: pb.GenerationInput, limit_s: float) -> None:
        if kind == "grpc-whole":
            await stub.Generate(pb.GenerateRequest(input=asked), timeout=limit_s)
            return
        call = stub.GenerateStream(pb.GenerateStreamRequest(input=asked), timeout=limit_s)
        try:
            async for _ in call:
                pass
        finally:
            call.cancel()  # nothing, if it has ended

    async def fill(self, rng: random.Random) -> None:
        """Write every block of the worker's cache once."""
        for _ in range(MAX_FILLERS):
            of = (await self._admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=10)).scheduler
            if of.cached_blocks >= FILLED_SHARE * of.total_blocks:
                return
            text = " ".join(str(rng.getrandbits(32)) for _ in range(40))
            await self._call(self._stub, "grpc-whole", _filler(text), REQUEST_TIMEOUT_S)

    async def _http(self, job: Job) -> None:
        is_stream = job.kind == "http-stream"
        fields = {"prompt": job.prompt, "max_tokens": job.max_tokens, "n": job.num_choices, "seed": job.seed}
        body = json.dumps(fields | {"stream": is_stream, "stop": list(job.stop) or None}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self._http_port)
        try:
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            answer = await reader.read(-1)
        finally:
            writer.transport.abort()
        if not answer.startswith(b"HTTP/1.1 200") or (is_stream and b"data: [DONE]" not in answer):
            raise ValueError(answer[:300].decode("utf-8", "replace"))

    async def gap(self, processes: dict[str, psutil.Process], num_requests: int) -> Gap:
        """Wait until nothing runs, and look."""
        gap = Gap(num_requests)
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while True:
            status = await self._admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=10)
            of = status.scheduler
            left = {"running": of.running_requests, "waiting": of.waiting_requests}
            left["blocks"] = of.total_blocks - of.free_blocks
            if not any(left.values()) or time.monotonic() > deadline:
                break
            await asyncio.sleep(POLL_INTERVAL_S)
        gap.left = [f"{number} {what}" for what, number in left.items() if number]
        for name, process in processes.items():
            with process.oneshot():
                gap.figures[name] = {
                    "rss": process.memory_info().rss,
                    "files": process.num_fds(),
                    "threads": process.num_threads(),
                }
        return gap


def _filler(text: str) -> pb.GenerationInput:
    return pb.GenerationInput(text=text, stopping=pb.StoppingParams(max_tokens=1))


@contextmanager
def service(options: argparse.Namespace) -> Iterator[tuple[str, int, psutil.Process]]:
    """Serve the model, unless there is a service; yield gRPC address, HTTP port and the process above all others."""
    if options.address:
        yield options.address, options.http_port, psutil.Process(options.pid)
        return
    grpc_port, http_port = free_port(), free_port()
    command = [*OCTAVO, "serve", options.model, "--grpc-port", str(grpc_port), "--http-port", str(http_port)]
    process = subprocess.Popen([*command, "--log-level", "error", *options.serve_args.split()])
    try:
        _wait_ready(process, http_port)
        yield f"127.0.0.1:{grpc_port}", http_port, psutil.Process(process.pid)
    finally:
        with held():
            end(process)


def _wait_ready(process: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer,
        ):
            if answer.status == 200:
                return
        time.sleep(POLL_INTERVAL_S)
    raise RuntimeError(f"the service is not ready (status {process.poll()})")


def processes_of(top: psutil.Process) -> dict[str, psutil.Process]:
    """Return the processes of a service by role; compilers of grammars and the like are left out."""
    found = {"serve": top}
    for child in top.children():
        role = next((word for word in child.cmdline() if word in ("frontend", "scheduler", "worker")), None)
        if role is not None:
            found[role if role not in found else f"{role}-{child.pid}"] = child
    return found


async def soak(options: argparse.Namespace, address: str, http_port: int, top: psutil.Process) -> list[dict[str, Any]]:
    """Run all rounds; return the rows."""
    rng = random.Random(options.seed)
    client = Client(address, http_port, options.cut)
    await client.fill(rng)
    processes = processes_of(top)
    ends: Counter[str] = Counter()
    gaps: list[Gap] = []
    began = time.monotonic()
    for number in range(options.rounds):
        if time.monotonic() - began > options.minutes * 60:
            break
        jobs = iter([draw_job(rng, options) for _ in range(options.requests)])

        async def work(jobs: Iterator[Job] = jobs) -> None:
            for job in jobs:
                ends[await client.run(job)] += 1

        await asyncio.gather(*(work() for _ in range(options.concurrency)))
        gaps.append(await client.gap(processes, options.requests * (number + 1)))
        rss = {name: f"{of['rss'] / 2**20:.1f}" for name, of in gaps[-1].figures.items()}
        left = ", ".join(gaps[-1].left) or "nothing"
        print(f"round {number + 1}: {dict(ends)}; left: {left}; MiB: {rss}", flush=True)
    await client.close()
    return _rows(options, gaps, ends, time.monotonic() - began)


def _rows(options: argparse.Namespace, gaps: list[Gap], ends: Counter[str], seconds: float) -> list[dict[str, Any]]:
    errors = {how: count for how, count in ends.items() if how.startswith("error")}
    what = {"requests": gaps[-1].num_requests, "cancel_share": options.cancels, "concurrency": options.concurrency}
    what |= {"by": "cuts" if options.cut else "cancels, deadlines, cuts", "seed": options.seed}
    what |= {
        "mean_life_s": options.mean_life,
        "max_tokens": options.max_tokens,
        "rounds": len(gaps),
        "kinds": options.kinds,
    }
    rows: list[dict[str, Any]] = [
        what
        | {"metric": "soak_endings", "answered": ends["answered"], "given_up": ends["given up"]}
        | {"errors": sum(errors.values()), "error_texts": list(errors)[:5], "seconds": round(seconds, 1)}
        | {"gaps_with_leftovers": sum(bool(gap.left) for gap in gaps)}
    ]
    steady = gaps[WARM_ROUNDS:]
    if len(steady) < 3:
        return rows
    for name in gaps[-1].figures:
        row: dict[str, Any] = what | {"metric": "soak_growth", "process": name}
        for figure in ("rss", "files", "threads"):
            values = [gap.figures[name][figure] for gap in steady]
            slope, interval = slope_of([gap.num_requests / 1000 for gap in steady], values)
            row |= {f"{figure}_last": values[-1], f"{figure}_per_1000": round(slope, 3)}
            row[f"{figure}_per_1000_ci95"] = None if math.isnan(interval) else round(interval, 3)
        rows.append(row)
    return rows


def slope_of(x: list[float], y: list[int]) -> tuple[float, float]:
    """Return the slope of a line through points, and half the width of its 95 % interval (NaN for two points or less)."""
    if len(x) < 3:
        return 0.0, math.nan
    slope, intercept = statistics.linear_regression(x, y)
    mean = statistics.fmean(x)
    residual = sum((b - slope * a - intercept) ** 2 for a, b in zip(x, y, strict=True)) / (len(x) - 2)
    return slope, 1.96 * math.sqrt(residual / sum((a - mean) ** 2 for a in x))


def main() -> None:
    """Serve, run the rounds, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--address", help="of a service that runs already, host:port")
    parser.add_argument("--http-port", type=int, help="of that service")
    parser.add_argument("--pid", type=int, help="of its `octavo serve`")
    parser.add_argument("--serve-args", default="", help="further flags of octavo serve, in one word")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=math.inf, help="after these no further round begins")
    parser.add_argument("--requests", type=int, default=500, help="of a round")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--cancels", type=float, default=0.3, help="share of the requests that are given up")
    parser.add_argument("--mean-life", type=float, default=0.3, help="seconds that those live on average")
    parser.add_argument("--cut", action="store_true", help="give gRPC calls up by cutting a connection of their own")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file that gets the rows as JSON lines")
    options = parser.parse_args()
    with ending_in_order(), service(options) as (address, http_port, top):
        rows = asyncio.run(soak(options, address, http_port, top))
    for row in rows:
        print(json.dumps(row))
    if options.out:
        record(options.out, "soak", rows)
    if rows[0]["errors"] or rows[0]["gaps_with_leftovers"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
