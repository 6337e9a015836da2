"""What tracing costs: two services, one of which tells a collector of every request, take the same streams in turn.

    python -m benchmarks.tracing_cost [--model demo] [--rounds 8] [--streams 16] [--tokens 32] [--output-json FILE]

Each round asks one service for all streams at once, then the other one; which comes first changes from round to round. The
figures are medians: of CPU time for each token by process (whatever else the machine does, this is what the services
themselves take), of throughput, and of the ratios of the two services in each round. The collector is a process of its own,
takes all spans, and is not counted. A first row says what a span takes, made and sent. The demo model must have been
fetched. Aim: 2 % at most.

`--model small` has next to nothing to compute: what tracing adds to a request stands out there, also on a busy machine.
"""

import argparse
import contextlib
import json
import multiprocessing
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks._processes import end
from benchmarks._record import record
from octavo.cli.model_store import resolve
from octavo.v1 import admin_pb2, admin_pb2_grpc
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as rpc
from octavo.wire.tracing import start_tracing

HOST = "127.0.0.1"
ROLES = ("frontend", "scheduler", "worker")
MAX_WAIT_S = 600.0
SPANS_PER_REQUEST = 8
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


class Collector(BaseHTTPRequestHandler):
    """Takes every message."""

    def do_POST(self) -> None:
        """Read it, and say that it was taken."""
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def collect(port: int) -> None:
    """Run the collector."""
    ThreadingHTTPServer((HOST, port), Collector).serve_forever()


@contextlib.contextmanager
def collector() -> Iterator[str]:
    """Run the collector; yield its address when it listens."""
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(target=collect, args=(port,), daemon=True)
    process.start()
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection((HOST, port)):
                break
            time.sleep(0.1)
        yield f"http://{HOST}:{port}"
    finally:
        process.terminate()
        process.join()


def free_port() -> int:
    """Return a port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port


class Running:
    """A service that is ready."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._generation = rpc.GenerationServiceStub(channel)
        status = admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=10)
        self._processes = {one.role: psutil.Process(one.pid) for one in status.processes if one.role in ROLES}

    def measure(self, num_streams: int, num_tokens: int, seed: int) -> dict[str, float]:
        """Run streams together; return tokens a second, and microseconds of CPU time a token by process."""
        before, began = self._cpu_seconds(), time.perf_counter()
        threads = [threading.Thread(target=self._stream, args=(seed + i, num_tokens)) for i in range(num_streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took, after = time.perf_counter() - began, self._cpu_seconds()
        total = num_streams * num_tokens
        figures = {f"{role}_cpu_us": (after[role] - before[role]) / total * 1e6 for role in ROLES}
        return {"tok_s": total / took, "cpu_us": sum(figures.values()), **figures}

    def _cpu_seconds(self) -> dict[str, float]:
        times = {role: process.cpu_times() for role, process in self._processes.items()}
        return {role: one.user + one.system for role, one in times.items()}

    def _stream(self, seed: int, num_tokens: int) -> None:
        request = pb.GenerateStreamRequest(
            input=pb.GenerationInput(
                text=f"The river, seen on day {seed}, began in the mountains, where the snow lay until June.",
                sampling=pb.SamplingParams(temperature=0.8, seed=seed),
                stopping=pb.StoppingParams(max_tokens=num_tokens, ignore_eos=True),
            )
        )
        for _ in self._generation.GenerateStream(request, timeout=MAX_WAIT_S):
            pass


def small_model(folder: Path) -> Path:
    """Write a model that has the demo model's words and next to nothing to compute, with random weights."""
    demo = resolve("demo").folder
    for path in demo.iterdir():
        if path.suffix in (".json", ".jinja", ".txt") and not path.name.startswith("model.safetensors"):
            shutil.copy(path, folder)
    config = json.loads((demo / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | SMALL))
    return folder


@contextlib.contextmanager
def service(model: str, *flags: str) -> Iterator[Running]:
    """Run a model; yield it when it is ready."""
    port = free_port()
    command = [sys.executable, "-m", "octavo.cli.main", "serve", model, "--grpc-port", str(port), "--http-port", "0"]
    command += ["--log-level", "warning", "--kv-cache-memory-bytes", str(2**28), "--num-threads", "1", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        options = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 100)]
        with grpc.insecure_channel(f"{HOST}:{port}", options=options) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            next(one for one in watch if one.status == health_pb2.HealthCheckResponse.SERVING)
            watch.cancel()
            yield Running(channel)
    finally:
        end(process)


def measure(arguments: argparse.Namespace, endpoint: str) -> dict[str, Any]:
    """Return the row of all rounds."""
    names = ("off", "on")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        model, flags = "demo", list[str]()
        if arguments.model == "small":
            model = str(small_model(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
            flags = ["--load-format", "dummy"]
        off = stack.enter_context(service(model, *flags))
        on = stack.enter_context(service(model, *flags, "--otlp-traces-endpoint", endpoint))
        services = {"off": off, "on": on}
        for running in services.values():
            running.measure(arguments.streams, arguments.tokens, 0)  # warms
        for number in range(arguments.rounds):
            for name in names if number % 2 else reversed(names):
                figures = services[name].measure(arguments.streams, arguments.tokens, 1000 * (number + 1))
                found[name].append(figures)
                print(name, {key: round(value, 1) for key, value in figures.items()}, file=sys.stderr, flush=True)
    row: dict[str, Any] = {"bench": "tracing_cost", "model": arguments.model, "rounds": arguments.rounds}
    row |= {"streams": arguments.streams, "tokens_each": arguments.tokens}
    for figure in found["off"][0]:
        for name in names:
            row[f"{figure}_{name}"] = round(statistics.median(one[figure] for one in found[name]), 1)
        if figure in ("tok_s", "cpu_us"):
            pairs = zip(found["on"], found["off"], strict=True)
            row[f"{figure}_on_of_off"] = round(statistics.median(a[figure] / b[figure] for a, b in pairs), 4)
    added = statistics.median(a["cpu_us"] - b["cpu_us"] for a, b in zip(found["on"], found["off"], strict=True))
    row["added_cpu_us_per_request"] = round(added * arguments.tokens)
    return row


def measure_spans(endpoint: str, num_spans: int = 4000) -> dict[str, Any]:
    """Return what a span takes from its making until the collector has it: CPU time of the whole process."""
    tracing = start_tracing("worker", endpoint, "benchmark")
    if tracing is None:
        sys.exit("OTEL_SDK_DISABLED is set: nothing to measure")
    parent = tracing.remote(f"00-{'a' * 32}-{'b' * 16}-01")
    attributes = {f"octavo.attribute_{i}": i for i in range(9)}
    began = time.process_time()
    for number in range(num_spans):
        tracing.record("octavo.worker.decode", parent, number, number + 1, attributes, [("octavo.end", number, {})])
        if number % 100 == 0:
            time.sleep(0.05)  # about as fast as a busy service makes them: the exporter keeps up
    tracing.close()
    cpu_us = (time.process_time() - began) / num_spans * 1e6
    row = {"bench": "tracing_cost", "metric": "span", "cpu_us": round(cpu_us, 1), "lost": tracing.num_lost}
    return row | {"spans": num_spans, "attributes": len(attributes), "spans_per_request": SPANS_PER_REQUEST}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("demo", "small"), default="demo")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--streams", type=int, default=16, help="at one time")
    parser.add_argument("--tokens", type=int, default=32, help="of each stream")
    parser.add_argument("--output-json", type=Path, help="file that the row is added to")
    arguments = parser.parse_args()
    with collector() as endpoint:
        rows = [measure_spans(endpoint), measure(arguments, endpoint)]
    for row in rows:
        print(json.dumps(row))
    if arguments.output_json:
        record(arguments.output_json, "benchmarks/tracing_cost.py", rows)


if __name__ == "__main__":
    main()
