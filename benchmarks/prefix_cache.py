"""What the prefix cache and sharing save, through a whole service with the demo model.

- Time to the first token of a 512-token prompt that was never seen, and of the same prompt again: prompts of random ids,
  a fresh one for each repetition, nothing else running. The same without prefix caching.
- Blocks that are in use at most for four continuations of one prompt: as one request with n = 4, and as four requests.
"""

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks._record import record
from benchmarks.streams import blocks_in_use
from octavo.v1 import admin_pb2, admin_pb2_grpc
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as rpc

NUM_PROMPT_TOKENS = 512
NUM_SHARED_TOKENS = 520
"""Of the prompt with four continuations: its last block is half full, so that it has to be copied."""

NUM_CHOICES = 4
NUM_OUTPUT_TOKENS = 32
TARGET = 0.2
"""Time to first token of a known prompt, as a share of an unknown one's."""


@dataclass
class Service:
    """A running service."""

    channel: grpc.Channel
    trace: Path
    total_blocks: int

    def first_token(self, ids: list[int]) -> tuple[float, int]:
        """Return seconds to the first token, and the tokens of the prompt that were found."""
        began = time.perf_counter()
        num_cached = -1
        for event in rpc.GenerationServiceStub(self.channel).GenerateStream(_stream(ids, 1, 1), timeout=600):
            if event.WhichOneof("event") == "started":
                num_cached = event.started.cached_prompt_tokens
            elif event.WhichOneof("event") == "delta":
                return time.perf_counter() - began, num_cached
        raise RuntimeError("a stream ended without a token")

    def run(self, requests: list[pb.GenerateStreamRequest]) -> None:
        """Run some requests at once, to their ends."""
        stub = rpc.GenerationServiceStub(self.channel)
        threads = [threading.Thread(target=list, args=(stub.GenerateStream(r, timeout=600),)) for r in requests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def most_blocks(self, requests: list[pb.GenerateStreamRequest]) -> int:
        """Run some requests at once; return the most blocks that were in use after a plan."""
        if blocks_in_use(self.channel) != 0:
            raise RuntimeError("blocks are in use although nothing runs")
        offset = self.trace.stat().st_size
        self.run(requests)
        blocks_in_use(self.channel)  # waits
        with self.trace.open(encoding="utf-8") as file:
            file.seek(offset)
            lines = [json.loads(line) for line in file]
        return self.total_blocks - min(int(line["free_blocks"]) for line in lines if "plan" in line)


def _stream(ids: list[int], max_tokens: int, num_choices: int) -> pb.GenerateStreamRequest:
    return pb.GenerateStreamRequest(
        input=pb.GenerationInput(
            token_ids=pb.TokenIds(ids=ids),
            sampling=pb.SamplingParams(temperature=1.0, seed=1, n=num_choices),
            stopping=pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
            output=pb.OutputOptions(token_ids=True),
        )
    )


@contextmanager
def serving(*flags: str) -> Iterator[Service]:
    """Serve the demo model, which must have been fetched, until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{probe.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "plans.jsonl"
        command = [sys.executable, "-m", "octavo.cli.main", "serve", "demo", "--grpc-port", target.split(":")[1]]
        command += ["--http-port", "0"]
        command += ["--log-level", "warning", "--trace-plans", str(trace), *flags]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        options = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 100)]
        try:
            with grpc.insecure_channel(target, options=options) as channel:
                watch = health_pb2_grpc.HealthStub(channel).Watch(
                    health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=300
                )
                next(answer for answer in watch if answer.status == health_pb2.HealthCheckResponse.SERVING)
                watch.cancel()
                status = admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=10)
                yield Service(channel, trace, status.scheduler.total_blocks)
        finally:
            process.terminate()
            process.wait(60)


def measure(backend: str, repetitions: int) -> Iterator[dict[str, Any]]:
    """Return the figures one by one."""
    rng = random.Random(0)
    for caching in (True, False):
        flag = "--enable-prefix-caching" if caching else "--no-enable-prefix-caching"
        with serving("--backend", backend, flag) as service:
            common = {"prefix_caching": caching, "backend": backend}
            service.first_token(_ids(rng, NUM_PROMPT_TOKENS))  # warms up
            yield from _times_to_first_token(service, rng, repetitions, common)
            yield from _blocks(service, rng, common)


def _times_to_first_token(
    service: Service, rng: random.Random, repetitions: int, common: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    firsts, seconds = [], []
    num_cached = 0
    for _ in range(repetitions):
        ids = _ids(rng, NUM_PROMPT_TOKENS)
        firsts.append(service.first_token(ids)[0])
        second, num_cached = service.first_token(ids)
        seconds.append(second)
    common = common | {"prompt_tokens": NUM_PROMPT_TOKENS, "repetitions": repetitions}
    first, second = statistics.median(firsts), statistics.median(seconds)
    yield {"metric": "ttft_first", "value": round(1e3 * first, 2), "unit": "ms", **common}
    yield {"metric": "ttft_again", "value": round(1e3 * second, 2), "unit": "ms", **common, "cached": num_cached}
    ratio = {"metric": "ttft_again_to_first", "value": round(second / first, 4), "unit": "ratio", **common}
    yield ratio | ({"target": TARGET} if common["prefix_caching"] else {})


def _blocks(service: Service, rng: random.Random, common: dict[str, Any]) -> Iterator[dict[str, Any]]:
    common = common | {"prompt_tokens": NUM_SHARED_TOKENS, "output_tokens": NUM_OUTPUT_TOKENS}
    together = [_stream(_ids(rng, NUM_SHARED_TOKENS), NUM_OUTPUT_TOKENS, NUM_CHOICES)]
    apart = [_stream(_ids(rng, NUM_SHARED_TOKENS), NUM_OUTPUT_TOKENS, 1)] * NUM_CHOICES
    for requests, num_choices in ((together, NUM_CHOICES), (apart, 1)):
        yield {
            "metric": "most_blocks_in_use",
            "value": service.most_blocks(requests),
            "unit": "blocks",
            **common,
            "requests": len(requests),
            "n": num_choices,
        }


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(count)]


def main() -> None:
    """Measure, print, and append to a file where one is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--out", type=Path, help="file that the lines are appended to")
    arguments = parser.parse_args()
    for line in measure(arguments.backend, arguments.repetitions):
        print(json.dumps(line), flush=True)
        if arguments.out is not None:
            record(arguments.out, "benchmarks/prefix_cache.py", [line])


if __name__ == "__main__":
    main()
