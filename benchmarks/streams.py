"""A whole service on this machine: start, health, 16 concurrent streams with cancels, idle CPU.

Starts `octavo serve demo` on a free port, measures, prints JSON lines, stops it. The demo model must have been fetched.
"""

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.v1 import admin_pb2, admin_pb2_grpc
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as rpc

NUM_STREAMS = 16
TEXT = "The river began in the mountains, where the snow lay until June, and ran through forests and fields. "


@dataclass
class Outcome:
    """What one stream saw."""

    started: float
    times: list[float] = field(default_factory=list)  # of each token
    num_tokens: int = 0
    contiguous: bool = True
    cancelled: bool = False


def report(metric: str, value: float, unit: str, **more: object) -> None:
    """Print one figure."""
    print(json.dumps({"metric": metric, "value": round(value, 3), "unit": unit, **more}), flush=True)


def stream(stub: rpc.GenerationServiceStub, number: int, outcomes: list[Outcome]) -> None:
    """Run one stream of a length of its own; every fourth is cancelled on its way."""
    rng = random.Random(number)
    prompt = TEXT * rng.randint(1, 8)
    length = rng.randint(16, 128)
    stop_after = length // 2 if number % 4 == 3 else None
    request = pb.GenerateStreamRequest(
        input=pb.GenerationInput(
            text=prompt,
            sampling=pb.SamplingParams(temperature=0.8, seed=number),
            stopping=pb.StoppingParams(max_tokens=length, ignore_eos=True),
            output=pb.OutputOptions(token_ids=True),
        )
    )
    outcome = Outcome(time.perf_counter())
    call = stub.GenerateStream(request, timeout=600)
    try:
        for event in call:
            if event.WhichOneof("event") != "delta":
                continue
            outcome.contiguous &= event.delta.first_token == outcome.num_tokens
            outcome.num_tokens += len(event.delta.token_ids)
            outcome.times += [time.perf_counter()] * len(event.delta.token_ids)
            if stop_after is not None and outcome.num_tokens >= stop_after:
                call.cancel()
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.CANCELLED:
            raise
        outcome.cancelled = True
    outcomes.append(outcome)


def measure_streams(channel: grpc.Channel, backend: str) -> None:
    """Run the streams together."""
    stub = rpc.GenerationServiceStub(channel)
    outcomes: list[Outcome] = []
    began = time.perf_counter()
    threads = [threading.Thread(target=stream, args=(stub, i, outcomes)) for i in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    report("streams_complete", sum(not o.cancelled for o in outcomes), "streams", backend=backend)
    report("streams_cancelled", sum(o.cancelled for o in outcomes), "streams", backend=backend)
    report("streams_with_contiguous_positions", sum(o.contiguous for o in outcomes), "streams", backend=backend)
    report("throughput", sum(o.num_tokens for o in outcomes) / seconds, "tok/s", backend=backend)
    report("ttft_median", statistics.median(o.times[0] - o.started for o in outcomes) * 1e3, "ms", backend=backend)
    gaps = [(o.times[-1] - o.times[0]) / (len(o.times) - 1) for o in outcomes if len(o.times) > 1]
    report("tpot_median", statistics.median(gaps) * 1e3, "ms", backend=backend)


def blocks_in_use(channel: grpc.Channel) -> int:
    """Wait until nothing runs; return the blocks that are held."""
    admin = admin_pb2_grpc.AdminServiceStub(channel)
    for _ in range(100):
        held = admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=10).scheduler
        if held.running_requests == 0 and held.waiting_requests == 0:
            break
        time.sleep(0.05)
    return held.total_blocks - held.free_blocks


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time of a process and its children."""
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def main() -> None:
    """Start, measure, stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--idle-seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{probe.getsockname()[1]}"
    began = time.perf_counter()
    command = [sys.executable, "-m", "octavo.cli.main", "serve", "demo", "--grpc-port", target.split(":")[1]]
    command += ["--http-port", "0"]
    service = subprocess.Popen(
        [*command, "--backend", arguments.backend, "--log-level", "warning"], stderr=subprocess.DEVNULL
    )
    try:
        options = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 100)]
        with grpc.insecure_channel(target, options=options) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            for number, answer in enumerate(watch):
                if number == 0:
                    report("health_answers_after", time.perf_counter() - began, "s")
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    report("ready_after", time.perf_counter() - began, "s", backend=arguments.backend)
                    break
            watch.cancel()
            measure_streams(channel, arguments.backend)
            report("blocks_in_use_afterwards", blocks_in_use(channel), "blocks", backend=arguments.backend)
        process = psutil.Process(service.pid)
        before = cpu_seconds(process)
        time.sleep(arguments.idle_seconds)
        used = cpu_seconds(process) - before
        report("idle_cpu", 100 * used / arguments.idle_seconds, "% of a core", seconds=arguments.idle_seconds)
    finally:
        service.terminate()
        service.wait(60)


if __name__ == "__main__":
    main()
