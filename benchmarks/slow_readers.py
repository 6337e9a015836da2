"""What streams notice of others that are not read: the time between their tokens, beside none and beside some of those.

    python -m benchmarks.slow_readers [--doors http grpc] [--streams 64] [--slow 8] [--repeats 3] [--out rows.jsonl]

A frontend as `octavo frontend` runs it, a scheduler that paces (see benchmarks.frontend_cpu), and clients. Runs in which all
streams are read and runs in which some are not alternate; the figures are those of the streams that are read. When these have
ended the others are read at last: fewer messages than tokens show that the frontend kept their tokens meanwhile. Aim: the
time between tokens within 10 % of what it is when all are read.
"""

import argparse
import asyncio
import json
import multiprocessing
import signal
import socket
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks._record import record
from benchmarks.frontend_cpu import (
    DOORS,
    HOST,
    READY_TIMEOUT_S,
    Load,
    Reader,
    free_ports,
    frontend,
    pace,
    prompt_of,
    read_grpc,
    read_http,
    receive,
    wait_until_ready,
    words_of,
)
from octavo.cli.model_store import resolve
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as rpc

NUM_CONNECTIONS = 8
RECEIVE_BUFFER_BYTES, SEGMENT_BYTES, WINDOW_BYTES = 4096, 536, 4096
"""Of a client that does not read: the kernel, or grpc, would take hundreds of kilobytes for it. Buffers at the other end
follow the size of its segments."""


class StalledHttp:
    """A stream over HTTP that is not read."""

    def __init__(self, load: Load, port: int, stream: int) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
        self._socket.connect((HOST, port))
        fields = {"model": load.model, "prompt": prompt_of(stream), "max_tokens": load.num_tokens}
        body = json.dumps(fields | {"ignore_eos": True, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        self._socket.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    async def num_messages(self) -> int:
        """Read all; return how many messages there were."""
        reader, writer = await asyncio.open_connection(sock=self._socket)
        data = await asyncio.wait_for(reader.read(-1), READY_TIMEOUT_S)
        writer.close()
        return data.count(b'"text":"') - data.count(b'"text":""')


class StalledGrpc:
    """A stream over gRPC that is not read."""

    def __init__(self, load: Load, port: int, stream: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.lookahead_bytes", WINDOW_BYTES)]
        options += [("grpc.http2.bdp_probe", 0)]
        self._channel = grpc.aio.insecure_channel(f"{HOST}:{port}", options)
        asked = pb.GenerationInput(
            token_ids=pb.TokenIds(ids=prompt_of(stream)),
            stopping=pb.StoppingParams(max_tokens=load.num_tokens, ignore_eos=True),
        )
        stub = rpc.GenerationServiceStub(self._channel)
        self._call: Any = stub.GenerateStream(pb.GenerateStreamRequest(input=asked))

    async def num_messages(self) -> int:
        """Read all; return how many messages there were."""
        count = 0
        async with asyncio.timeout(READY_TIMEOUT_S):
            async for event in self._call:
                count += bool(event.delta.text)
        await self._channel.close(None)
        return count


async def run_streams(load: Load, door: str, port: int, num_slow: int) -> tuple[list[Reader], float]:
    """Run all streams; return what was read in time, and tokens a message of those that were read at last."""
    stalled = StalledGrpc if door == "grpc" else StalledHttp
    slow = [stalled(load, port, load.num_streams - 1 - number) for number in range(num_slow)]
    readers = [Reader() for _ in range(load.num_streams - num_slow)]
    if door == "grpc":
        await read_grpc(load, port, NUM_CONNECTIONS, readers)
    else:
        await read_http(load, port, readers)
    counts = [await one.num_messages() for one in slow]
    return readers, load.num_tokens * num_slow / sum(counts) if counts else 1.0


def read(load: Load, door: str, port: int, num_slow: int, pipe: Connection) -> None:
    """Run the clients' process; send times and sizes of what came on each stream, or what went wrong."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        readers, tokens_a_message = asyncio.run(run_streams(load, door, port, num_slow))
    except Exception as error:  # noqa: BLE001 (told to the parent, which fails)
        pipe.send(f"{type(error).__name__}: {error}")
    else:
        pipe.send(([np.array(reader.news) for reader in readers], tokens_a_message))


def measure(arguments: argparse.Namespace, door: str, num_slow: int) -> tuple[np.ndarray[Any, Any], float]:
    """Return the times between tokens of the streams that are read, in ms, and the tokens a message of the others."""
    context = multiprocessing.get_context("spawn")
    model = resolve(arguments.model)
    words, vocab_size = words_of(model.folder)
    num_tokens = int(arguments.rate * arguments.seconds)
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/scheduler"
        load = Load(address, model.names[0], arguments.streams, arguments.rate, num_tokens, 1, words, vocab_size)
        ports = free_ports()
        ours, theirs = context.Pipe()
        scheduler = context.Process(target=pace, args=(load, theirs), name="scheduler", daemon=True)
        scheduler.start()
        with frontend(arguments, load, ports) as served:
            wait_until_ready(ports["http"], served)
            client_end, client_pipe = context.Pipe()
            client = context.Process(
                target=read, args=(load, door, ports[door], num_slow, client_pipe), name="client", daemon=True
            )
            client.start()
            limit_s = arguments.seconds + READY_TIMEOUT_S
            receive(ours, scheduler, limit_s)
            news, tokens_a_message = receive(client_end, client, limit_s)
            client.join(30)
        scheduler.join(30)
    # Tokens that came in one message have nothing between them: what a reader waits for is the next message.
    gaps = [np.diff(pieces[:, 0]) for pieces in news]
    return np.concatenate(gaps) * 1e3, tokens_a_message


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--doors", nargs="+", choices=DOORS, default=DOORS)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--slow", type=int, default=8)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second and stream")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind")
    parser.add_argument("--out", type=Path, help="file that gets the rows as JSON lines")
    arguments = parser.parse_args()
    arguments.profile = None
    for door in arguments.doors:
        gaps: dict[int, list[np.ndarray[Any, Any]]] = {0: [], arguments.slow: []}
        held = 1.0
        for _ in range(arguments.repeats):
            for num_slow, found in gaps.items():
                times, tokens_a_message = measure(arguments, door, num_slow)
                found.append(times)
                held = max(held, tokens_a_message)
        row = {"metric": "slow_readers", "door": door, "streams": arguments.streams, "slow": arguments.slow}
        row |= {"tok_s_each": arguments.rate, "seconds": arguments.seconds, "repeats": arguments.repeats}
        for name, key in (("all_read", 0), ("some_not_read", arguments.slow)):
            times = np.concatenate(gaps[key])
            row[f"itl_ms_mean_{name}"] = round(float(times.mean()), 2)
            row |= {f"itl_ms_p{p}_{name}": round(float(np.percentile(times, p)), 2) for p in (50, 95, 99)}
        row["tokens_a_message_of_the_slow"] = round(held, 1)
        print(json.dumps(row), flush=True)
        if arguments.out:
            record(arguments.out, "slow_readers", [row])


if __name__ == "__main__":
    main()
