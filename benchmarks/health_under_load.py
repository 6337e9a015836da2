"""How long health takes to answer while large requests are read, checked and tokenised, through both doors.

    python -m benchmarks.health_under_load [--seconds 5] [--probes 20] [--cases prompt ...]

A frontend as `octavo frontend` runs it, a scheduler that only keeps the session, a client that sends one large request
after the other, and this process, which asks gRPC's health and GET /health in turn, `--probes` times a second each. The
cases are a prompt of 5 MB, which is tokenised whole (the context is 131,072 tokens, and it is refused only then), and
requests of 16 MB made of what costs most to read. Aim: 100 ms at most.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks._record import record
from benchmarks.frontend_cpu import HOST, Load, Pacer, free_ports, frontend, wait_until_ready, words_of
from octavo.cli.model_store import resolve

MB = 10**6
LARGEST = 16 * 2**20 - 1024
TIMEOUT_S = 120.0

_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes((*found, value))


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _list(item: str, num_bytes: int) -> bytes:
    return b'{"prompt": [' + (item + ",").encode() * (num_bytes // (len(item) + 1)) + b"[1]]}"


def _text(num_bytes: int) -> str:
    words = "The quick brown fox, 12 lazy dogs and a half-read letter. "
    return (words * (num_bytes // len(words) + 1))[:num_bytes]


def bodies() -> dict[str, tuple[bytes, bytes]]:
    """Return the JSON and the protobuf of each case."""
    prompt = _text(5 * MB)
    found = {"prompt": (json.dumps({"prompt": prompt}).encode(), _field(1, _field(2, prompt.encode())))}
    found["values"] = (_list("[]", LARGEST), _field(1, _field(4, b"\x0a\x00" * (LARGEST // 2))))
    found["ids"] = (_list("1", LARGEST)[:-5] + b"1]}", _field(1, _field(3, _field(1, b"\x01" * LARGEST))))
    found["unknown"] = (
        b'{"prompt": "x",' + b'"n": 1,' * (LARGEST // 7) + b'"n": 1}',
        _field(1, b"\xa0\x06\x01" * (LARGEST // 3)),
    )
    return found


def keep_session(load: Load) -> None:
    """Run the scheduler's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pacer = Pacer(load)
    pacer.wait_for_frontend()
    pacer.serve()


def send(door: str, port: int, data: bytes) -> None:
    """Send a request again and again; a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if door == "grpc":
        with grpc.insecure_channel(f"{HOST}:{port}", _OPTIONS) as channel:
            generate = channel.unary_unary("/octavo.v1.GenerationService/Generate")
            while True:
                try:
                    generate(data, timeout=2)
                except grpc.RpcError:
                    continue
    while True:
        connection = http.client.HTTPConnection(HOST, port, timeout=2)
        try:
            connection.request("POST", "/v1/completions", data, {"content-type": "application/json"})
            connection.getresponse().read()
        except OSError:
            continue
        finally:
            connection.close()


def probe(ports: dict[str, int], seconds: float, per_second: int) -> dict[str, list[float]]:
    """Ask both doors for their health; return milliseconds of each answer."""
    times: dict[str, list[float]] = {"grpc": [], "http": []}
    with grpc.insecure_channel(f"{HOST}:{ports['grpc']}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        connection = http.client.HTTPConnection(HOST, ports["http"], timeout=TIMEOUT_S)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def ask_http() -> None:
            connection.request("GET", "/health")
            connection.getresponse().read()

        asks: dict[str, Callable[[], Any]] = {
            "grpc": partial(stub.Check, health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S),
            "http": ask_http,
        }
        for ask in asks.values():
            ask()  # connects
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for door, ask in asks.items():
                began = time.monotonic()
                ask()
                times[door].append((time.monotonic() - began) * 1e3)
            time.sleep(1 / per_second)
        connection.close()
    return times


def measure(arguments: argparse.Namespace, case: str, door: str) -> dict[str, Any]:
    """Run one case against one door; return its row."""
    context = multiprocessing.get_context("spawn")
    model = resolve(arguments.model)
    words, vocab_size = words_of(model.folder)
    data = bodies()[case][door == "grpc"]
    with tempfile.TemporaryDirectory() as folder:
        load = Load(f"ipc://{folder}/scheduler", model.names[0], 1, 1.0, 1, 1, words, vocab_size)
        ports = free_ports()
        scheduler = context.Process(target=keep_session, args=(load,), name="scheduler", daemon=True)
        scheduler.start()
        with frontend(arguments, load, ports) as served:
            wait_until_ready(ports["http"], served)
            before = served.memory_info().rss
            clients = [context.Process(target=send, args=(door, ports[door], data), daemon=True) for _ in range(2)]
            for client in clients[: arguments.clients]:
                client.start()
            time.sleep(1.0)
            times = probe(ports, arguments.seconds, arguments.probes)
            peak = peak_bytes(served.pid)
            for client in clients[: arguments.clients]:
                client.terminate()
                client.join()
        scheduler.join(30)
    row: dict[str, Any] = {"bench": "health_under_load", "case": case, "through": door, "bytes": len(data)}
    for asked, found in times.items():
        row[f"{asked}_health_ms_p50"] = round(float(np.percentile(found, 50)), 1)
        row[f"{asked}_health_ms_max"] = round(max(found), 1)
        row[f"{asked}_n"] = len(found)
    row["memory_mb_before"], row["memory_mb_peak"] = round(before / 2**20), round(peak / 2**20)
    return row


def peak_bytes(pid: int) -> int:
    """Return the most memory that a process has had resident."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = tuple(bodies())
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases)
    parser.add_argument("--doors", nargs="+", choices=("grpc", "http"), default=("grpc", "http"))
    parser.add_argument("--model", default="demo", help="whose tokenizer is used")
    parser.add_argument("--clients", type=int, choices=(1, 2), default=1, help="that send large requests")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--probes", type=int, default=20, help="a second")
    parser.add_argument("--nice", type=int, default=0, help="niceness of all processes, below 0 for root alone")
    parser.add_argument("--output-json", type=Path, help="file that the rows are added to")
    parser.set_defaults(profile=None)
    arguments = parser.parse_args()
    os.nice(arguments.nice)
    worst = 0.0
    for case in arguments.cases:
        for door in arguments.doors:
            row = measure(arguments, case, door)
            print(json.dumps(row), flush=True)
            worst = max(worst, row["grpc_health_ms_max"], row["http_health_ms_max"])
            if arguments.output_json:
                record(arguments.output_json, "benchmarks/health_under_load.py", [row])
    print(f"worst: {worst:.1f} ms", file=sys.stderr)


if __name__ == "__main__":
    main()
