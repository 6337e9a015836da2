"""CPU time of a frontend for each token it delivers, and the delay it adds, over gRPC and over HTTP.

    python -m benchmarks.frontend_cpu [--doors grpc http] [--streams 256] [--rate 50] [--seconds 10]

A frontend as `octavo frontend` runs it, a scheduler that only paces (all streams get a token at the same moment, as from a
step of continuous batching, unless --phases spreads them), and a client that costs little, each in a process of its own.
Every token is a word of the demo model's vocabulary. The delay of a token is the time from the scheduler's send to the
client's reading it, so whatever the machine makes the three wait for is in it. Aims on 2 cores, 256 streams at 50 tokens a
second: 45 us of CPU a token over gRPC, 50 over HTTP, p99 of the delay 25 ms.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import zmq
from tokenizers import Tokenizer

from benchmarks._record import record
from octavo.cli.bench_serve_h2 import H2Connection, request_headers
from octavo.cli.bench_serve_http import HttpConnection
from octavo.cli.bench_serve_transport import connect
from octavo.cli.model_store import resolve
from octavo.v1 import generation_pb2 as pb
from octavo.wire.channel import HEARTBEAT_INTERVAL_S, RouterChannel
from octavo.wire.columns import pack_ints, unpack_ints
from octavo.wire.handshake import FrontendHello, FrontendWelcome, Goodbye, Heartbeat, ServiceFacts
from octavo.wire.ids import new_session_id
from octavo.wire.requests import ChoiceFinished, FinishReason, RequestStarted, StepOutput, SubmitRequest
from octavo.wire.session import Session

DOORS = ("grpc", "http")
HOST = "127.0.0.1"
WORD_CHARS = 5  # a space and four letters: so a client counts tokens by the length of the text
NUM_WORDS = 512
FIRST_ID = 1_000  # of prompts: stream i has the id FIRST_ID + i first
NUM_PROMPT_TOKENS = 32
READY_TIMEOUT_S = 60.0
BOOT_ID = "0c7a500000000001"


@dataclass(frozen=True)
class Load:
    """What is run."""

    address: str  # of the scheduler
    model: str  # as clients call it
    num_streams: int
    rate: float  # tokens a second and stream
    num_tokens: int  # of each stream
    phases: int
    words: tuple[int, ...]
    vocab_size: int


class Pacer:
    """The scheduler: takes requests until all have come, then sends each of them a token at fixed times."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channel = RouterChannel(self._context, load.address)
        self._session = Session(new_session_id())
        self._peer = b""
        self._groups: list[list[int]] = [[] for _ in range(load.phases)]  # handles
        self._next_heartbeat = 0.0
        self.sent = np.zeros((load.phases, load.num_tokens))  # time.monotonic() of each step

    def run(self) -> None:
        """Serve one frontend and one round of requests."""
        while sum(map(len, self._groups)) < self._load.num_streams:
            self._serve_until(time.monotonic() + 0.01)
        everybody = tuple(itertools.chain(*self._groups))
        self._send(StepOutput(started=tuple(RequestStarted(handle, 0, 0.0) for handle in everybody)))
        interval = 1 / (self._load.rate * self._load.phases)
        began = time.monotonic() + 0.1
        for step in range(self._load.num_tokens * self._load.phases):
            self._serve_until(began + step * interval)
            position, phase = divmod(step, self._load.phases)
            output = self._step(self._groups[phase], position)
            self.sent[phase, position] = time.monotonic()
            self._send(output)

    def wait_for_frontend(self) -> None:
        """Return once a frontend has come."""
        while not self._peer:
            self._serve_until(time.monotonic() + 0.01)

    def serve(self) -> None:
        """Keep the session alive until the frontend leaves."""
        while self._peer:
            self._serve_until(time.monotonic() + 0.1)
        self._channel.close()
        self._context.term()

    def _step(self, handles: list[int], position: int) -> StepOutput:
        count, words = len(handles), self._load.words
        last = position == self._load.num_tokens - 1
        end = [ChoiceFinished(handle, 0, FinishReason.LENGTH, position + 1) for handle in handles] if last else ()
        return StepOutput(
            handle=pack_ints(handles),
            choice=pack_ints([0] * count),
            position=pack_ints([position] * count),
            token=pack_ints([words[(handle + position) % len(words)] for handle in handles]),
            finished=tuple(end),
        )

    def _serve_until(self, deadline: float) -> None:
        while True:
            for identity, _, message in self._channel.receive(1000):
                self._on_message(identity, message)
            now = time.monotonic()
            if self._peer and now >= self._next_heartbeat:
                self._next_heartbeat = now + HEARTBEAT_INTERVAL_S
                self._send(Heartbeat())
            if now >= deadline:
                return
            # Whole milliseconds are all that poll knows; the rest is slept.
            left_s = deadline - time.monotonic()
            if left_s >= 0.001:
                self._channel.socket.poll(int(left_s * 1e3))
            else:
                time.sleep(max(0.0, left_s))

    def _on_message(self, identity: bytes, message: object) -> None:
        if isinstance(message, FrontendHello):
            self._peer = identity
            facts = ServiceFacts(self._load.vocab_size, 2**17, 16, self._load.num_streams, prefix_caching=True)
            self._channel.send(identity, FrontendWelcome(BOOT_ID, facts), self._session.id)
        elif isinstance(message, SubmitRequest):
            stream = unpack_ints(message.prompt_ids)[0] - FIRST_ID
            self._groups[stream % self._load.phases].append(message.handle)
        elif isinstance(message, Goodbye):
            self._peer = b""

    def _send(self, message: Any) -> None:
        self._channel.send(self._peer, message, self._session.id, self._session.next_number())


def pace(load: Load, pipe: Connection) -> None:
    """Run the scheduler's process; send the times of its steps when all are over."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pacer = Pacer(load)
    pacer.run()
    pipe.send(pacer.sent)
    pacer.serve()


class Reader:
    """What came on one stream: when, and how many tokens."""

    def __init__(self) -> None:
        self.news: list[tuple[float, int]] = []

    def grpc(self, message: bytes) -> None:
        """Take an event."""
        self._add(pb.GenerateStreamResponse.FromString(message).delta.text)

    def http(self, data: bytes) -> None:
        """Take an event's data."""
        self._add("".join(choice.text for choice in _decode(data).choices))

    def _add(self, text: str) -> None:
        if text:
            self.news.append((time.monotonic(), len(text) // WORD_CHARS))


class _Choice(msgspec.Struct):
    text: str


class _Event(msgspec.Struct):
    choices: list[_Choice]


_decode = msgspec.json.Decoder(_Event).decode


def prompt_of(stream: int) -> list[int]:
    """Return ids of which the first tells the stream."""
    return [FIRST_ID + stream, *range(FIRST_ID, FIRST_ID + NUM_PROMPT_TOKENS - 1)]


async def read_grpc(load: Load, port: int, num_connections: int, readers: list[Reader]) -> None:
    """Run all streams over gRPC."""
    connections = [await connect(H2Connection, HOST, port, None) for _ in range(num_connections)]
    path = "/octavo.v1.GenerationService/GenerateStream"
    headers = request_headers(f"{HOST}:{port}", path, is_tls=False)

    async def one(stream: int, reader: Reader) -> None:
        request = pb.GenerateStreamRequest(
            input=pb.GenerationInput(
                token_ids=pb.TokenIds(ids=prompt_of(stream)),
                stopping=pb.StoppingParams(max_tokens=load.num_tokens, ignore_eos=True),
            )
        )
        connection = connections[stream % num_connections]
        await connection.call(headers, request.SerializeToString(), reader.grpc)

    await asyncio.gather(*(one(*item) for item in enumerate(readers)))
    for connection in connections:
        await connection.close()


async def read_http(load: Load, port: int, readers: list[Reader]) -> None:
    """Run all streams over HTTP, one connection each."""

    async def one(stream: int, reader: Reader) -> None:
        connection = await connect(HttpConnection, HOST, port, None)
        body = {"model": load.model, "prompt": prompt_of(stream), "max_tokens": load.num_tokens}
        body |= {"ignore_eos": True, "stream": True}
        await connection.post(f"{HOST}:{port}", "/v1/completions", (), json.dumps(body).encode(), reader.http)
        await connection.close()

    await asyncio.gather(*(one(*item) for item in enumerate(readers)))


def read(load: Load, door: str, port: int, num_connections: int, pipe: Connection) -> None:
    """Run the client's process; send what came on each stream, or what went wrong."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    readers = [Reader() for _ in range(load.num_streams)]
    try:
        asyncio.run(
            read_grpc(load, port, num_connections, readers) if door == "grpc" else read_http(load, port, readers)
        )
    except Exception as error:  # noqa: BLE001 (told to the parent, which fails)
        pipe.send(f"{type(error).__name__}: {error}")
    else:
        pipe.send([np.array(reader.news) for reader in readers])


@contextmanager
def frontend(arguments: argparse.Namespace, load: Load, ports: dict[str, int]) -> Any:
    """Run the frontend; yield its process."""
    command = [sys.executable]
    if arguments.profile:
        command += ["-m", "cProfile", "-o", str(arguments.profile)]
    command += ["-m", "octavo.cli.main", "frontend", arguments.model, "--scheduler-address", load.address]
    command += ["--grpc-port", str(ports["grpc"]), "--http-port", str(ports["http"]), "--log-level", "warning"]
    process = subprocess.Popen(command)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def words_of(folder: Path) -> tuple[tuple[int, ...], int]:
    """Return ids of words with four letters and a space before, and the size of the vocabulary."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = [
        token_id
        for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        if len(token) == WORD_CHARS and token[0] == "Ġ" and token[1:].isascii() and token[1:].isalpha()
    ]
    if len(found) < NUM_WORDS:
        sys.exit(f"{folder} has {len(found)} words of four letters in a byte-level vocabulary, {NUM_WORDS} are needed")
    return tuple(found[:NUM_WORDS]), json.loads((folder / "config.json").read_text())["vocab_size"]


def receive(pipe: Connection, process: SpawnProcess, timeout_s: float) -> Any:
    """Return what a process sends."""
    if not pipe.poll(timeout_s):
        sys.exit(f"{process.name} said nothing for {timeout_s:.0f} s")
    answer = pipe.recv()
    if isinstance(answer, str):
        sys.exit(f"{process.name}: {answer}")
    return answer


def measure(arguments: argparse.Namespace, door: str) -> dict[str, Any]:
    """Run one door's load; return its row."""
    context = multiprocessing.get_context("spawn")
    model = resolve(arguments.model)
    words, vocab_size = words_of(model.folder)
    num_tokens = int(arguments.rate * (arguments.warmup + arguments.seconds + 1))
    with tempfile.TemporaryDirectory() as folder:
        load = Load(
            f"ipc://{folder}/scheduler",
            model.names[0],
            arguments.streams,
            arguments.rate,
            num_tokens,
            arguments.phases,
            words,
            vocab_size,
        )
        ports = free_ports()
        ours, theirs = context.Pipe()
        scheduler = context.Process(target=pace, args=(load, theirs), name="scheduler", daemon=True)
        scheduler.start()
        with frontend(arguments, load, ports) as served:
            wait_until_ready(ports["http"], served)
            client_end, client_pipe = context.Pipe()
            client_arguments = (load, door, ports[door], arguments.connections, client_pipe)
            client = context.Process(target=read, args=client_arguments, name="client", daemon=True)
            client.start()
            family = {
                "frontend": served,
                "client": psutil.Process(client.pid),
                "scheduler": psutil.Process(scheduler.pid),
            }
            # The scheduler's times come when all is sent; until then this process looks at CPU times every 0.1 s.
            looks = []
            while not ours.poll(0.1):
                looks.append((time.monotonic(), {name: cpu_s(process) for name, process in family.items()}))
                if client_end.poll():
                    break
            if client_end.poll() and not ours.poll():
                receive(client_end, client, 1)
                sys.exit("the client ended before the scheduler had sent everything")
            sent = receive(ours, scheduler, 1)
            news = receive(client_end, client, READY_TIMEOUT_S)
            client.join(30)
        scheduler.join(30)
    return row_of(arguments, door, load, sent, news, looks)


def row_of(
    arguments: argparse.Namespace,
    door: str,
    load: Load,
    sent: np.ndarray[Any, Any],
    news: list[np.ndarray[Any, Any]],
    looks: list[tuple[float, dict[str, float]]],
) -> dict[str, Any]:
    """Return the figures of the window between warm-up and the last second."""
    start = sent[0, 0] + arguments.warmup
    inside = [look for look in looks if start <= look[0] <= start + arguments.seconds]
    if len(inside) < 2:
        sys.exit("the machine is too busy: this program could not look at the CPU times twice")
    (begin, before), (end, after) = inside[0], inside[-1]
    arrived, delays = [], []
    for stream, pieces in enumerate(news):
        counts = pieces[:, 1].astype(int)
        if counts.sum() != load.num_tokens:
            sys.exit(f"stream {stream} got {counts.sum()} tokens of {load.num_tokens}")
        times = np.repeat(pieces[:, 0], counts)
        arrived.append(times)
        delays.append(times - sent[stream % load.phases])
    times, delay_ms = np.concatenate(arrived), np.concatenate(delays) * 1e3
    chosen = (times >= begin) & (times < end)
    num_tokens = int(chosen.sum())
    messages = np.concatenate([pieces[:, 0] for pieces in news])
    num_messages = int(((messages >= begin) & (messages < end)).sum())
    us = {name: (after[name] - before[name]) / num_tokens * 1e6 for name in before}
    return {
        "bench": "frontend_cpu",
        "door": door,
        "streams": load.num_streams,
        "tok_s_each": load.rate,
        "phases": load.phases,
        "connections": arguments.connections if door == "grpc" else load.num_streams,
        "seconds": round(end - begin, 2),
        "n_out": num_tokens,
        "out_tok_s": round(num_tokens / (end - begin), 1),
        "frontend_cpu_us_per_token": round(us["frontend"], 1),
        "frontend_cpu_us_per_message": round(us["frontend"] * num_tokens / num_messages, 1),
        "frontend_cpu_percent": round(100 * (after["frontend"] - before["frontend"]) / (end - begin), 1),
        "added_delay_ms_p50": round(float(np.percentile(delay_ms[chosen], 50)), 2),
        "added_delay_ms_p99": round(float(np.percentile(delay_ms[chosen], 99)), 2),
        "added_delay_ms_max": round(float(delay_ms[chosen].max()), 2),
        "tokens_per_message": round(num_tokens / num_messages, 2),
        "client_cpu_us_per_token": round(us["client"], 1),
        "scheduler_cpu_us_per_token": round(us["scheduler"], 1),
    }


def cpu_s(process: psutil.Process) -> float:
    """Return CPU seconds of a process, with all its threads."""
    times = process.cpu_times()
    return float(times.user + times.system)


def free_ports() -> dict[str, int]:
    """Return a port for each door that nobody listened on a moment ago."""
    probes = {door: socket.socket() for door in DOORS}
    for probe in probes.values():
        probe.bind((HOST, 0))
    ports = {door: int(probe.getsockname()[1]) for door, probe in probes.items()}
    for probe in probes.values():
        probe.close()
    return ports


def wait_until_ready(port: int, process: psutil.Process) -> None:
    """Wait until the frontend says on its HTTP port that it serves."""
    end = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < end and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{port}/ready", timeout=1):
                return
        except OSError:  # nobody listens yet, or 503
            time.sleep(0.05)
    sys.exit("the frontend did not become ready")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--doors", nargs="+", choices=DOORS, default=DOORS)
    parser.add_argument("--model", default="demo", help="whose tokenizer is used")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=50.0, help="tokens a second of each stream")
    parser.add_argument("--phases", type=int, default=1, help="moments in an interval at which tokens are sent")
    parser.add_argument("--connections", type=int, default=4, help="of the gRPC client")
    parser.add_argument("--warmup", type=float, default=2.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--nice", type=int, default=0, help="niceness of all processes, below 0 for root alone")
    parser.add_argument("--profile", type=Path, help="file for cProfile's figures of the frontend (slows it down)")
    parser.add_argument("--output-json", type=Path, help="file that the rows are added to")
    arguments = parser.parse_args()
    os.nice(arguments.nice)
    for door in arguments.doors:
        row = measure(arguments, door)
        print(json.dumps(row), flush=True)
        if arguments.output_json:
            record(arguments.output_json, "benchmarks/frontend_cpu.py", [row])


if __name__ == "__main__":
    main()
