"""octavo bench serve, as it is typed, against a frontend of ours and against a plain server of OpenAI's API."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.cli.bench_serve_job import Dataset, Job, Target
from octavo.cli.bench_workloads import Workload
from octavo.wire.handshake import ServiceFacts
from octavo.wire.requests import FailureCode, FinishReason, SubmitRequest
from tests.support.http_client import Doors
from tests.support.scripted_scheduler import ScriptedScheduler

FACTS = ServiceFacts(vocab_size=2000, max_model_len=2048, block_size=16, max_num_seqs=8)
TIMEOUT_S = 60.0
LENGTHS = ("--random-input-len", "4", "--random-output-len", "6")
RANDOM_12 = Dataset("random", 2000, 12, 4, 6)


@dataclass
class Done:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str


async def bench_serve(*words: str) -> Done:
    command = (sys.executable, "-P", "-m", "octavo.cli.main", "bench", "serve", *words)
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Done(process.returncode, out.decode(), err.decode())


def row_of(path: Path) -> dict[str, Any]:
    (line,) = path.read_text().splitlines()
    row: dict[str, Any] = json.loads(line)
    return row


@pytest.fixture
async def scheduler(address: str) -> AsyncIterator[ScriptedScheduler]:
    with ScriptedScheduler(address, FACTS) as running:
        yield running


@asynccontextmanager
async def answering(scheduler: ScriptedScheduler, fail_every: int = 0, batch: int = 1) -> AsyncIterator[list[int]]:
    """Answer whole batches of requests; yield a list of how many were under way at each answer."""
    under_way: list[int] = []

    async def answer() -> None:
        number = 0
        while True:
            waiting = [await scheduler.next(SubmitRequest) for _ in range(batch)]
            under_way.append(len(waiting))
            assert batch == 1 or scheduler.nothing_came(), "no more than a batch is under way"
            for request in waiting:
                number += 1
                if fail_every and number % fail_every == 0:
                    scheduler.fail(request, FailureCode.QUEUE_FULL, "the queue is full", 1.0)
                else:
                    scheduler.answer(request, [[*b"token", 33]], FinishReason.LENGTH)

    task = asyncio.create_task(answer())
    yield under_way
    assert not task.done(), task
    task.cancel()


async def test_a_closed_loop_over_grpc(doors: Doors, scheduler: ScriptedScheduler, tmp_path: Path) -> None:
    out = tmp_path / "row.jsonl"
    async with answering(scheduler, batch=3) as under_way:
        done = await bench_serve(
            *("--address", f"127.0.0.1:{doors.grpc.frontend.port}", "--num-prompts", "12", "--max-concurrency", "3"),
            *("--num-clients", "2", "--output-json", str(out), "--label", "x", *LENGTHS),
        )
    assert done.code == 0, done.stderr
    assert under_way == [3] * 4
    row = row_of(out)
    assert (row["bench"], row["dataset"], row["concurrency"], row["num_clients"]) == ("grpc", "random", 3, 2)
    assert (row["model"], row["label"], row["request_rate"]) == ("tiny", "x", None)
    assert (row["n"], row["errors"], row["n_in"], row["n_out"]) == (12, 0, 48, 72)
    assert row["sha"] == RANDOM_12.load().digest
    for name in ("ttft", "e2e"):
        assert 0 < row[f"{name}_ms_p50"] <= row[f"{name}_ms_p90"] <= row[f"{name}_ms_p99"]
    assert row["tpot_ms_p50"] >= 0  # all tokens of an answer may share a message
    assert row["ttft_ms_mean"] < row["e2e_ms_mean"]
    assert row["client_cpu_us_per_token"] > 0
    assert "tpot" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert f"written to {out}" in done.stderr


async def test_arrivals_over_http_and_a_comparison(doors: Doors, scheduler: ScriptedScheduler, tmp_path: Path) -> None:
    peers = tmp_path / "peers.jsonl"
    sha = RANDOM_12.load().digest
    peer = {"engine": "other", "version": "1", "device": "a pocket", "model": "tiny", "bench": "http", "sha": sha}
    peers.write_text(json.dumps(peer | {"out_tok_s": 1.0}) + "\n")
    async with answering(scheduler):
        done = await bench_serve(
            *("--base-url", f"http://127.0.0.1:{doors.port}", "--model", "tiny", "--vocab-size", "2000"),
            *(
                "--num-prompts",
                "12",
                "--request-rate",
                "200",
                "--num-clients",
                "2",
                "--seed",
                "0",
                "--peers",
                str(peers),
            ),
            *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "row.json", "--num-warmups", "1"),
            *LENGTHS,
        )
    assert done.code == 0, done.stderr
    row = row_of(tmp_path / "row.json")
    assert (row["bench"], row["n"], row["n_out"], row["request_rate"], row["sha"]) == ("http", 12, 72, 200.0, sha)
    assert row["late_ms_p99"] >= 0
    assert "other 1 (a pocket)" in done.stdout


@pytest.mark.parametrize("door", ["grpc", "http"])
async def test_failed_requests_are_counted_and_end_with_1(
    doors: Doors, scheduler: ScriptedScheduler, tmp_path: Path, door: str
) -> None:
    out = tmp_path / "row.jsonl"
    where = ("--address", f"127.0.0.1:{doors.grpc.frontend.port}")
    if door == "http":
        where = ("--base-url", f"http://127.0.0.1:{doors.port}")
    async with answering(scheduler, fail_every=4):
        done = await bench_serve(
            *(*where, "--model", "tiny", "--vocab-size", "2000", "--num-prompts", "12", "--max-concurrency", "1"),
            *("--output-json", str(out), *LENGTHS),
        )
    kind = {"grpc": "RESOURCE_EXHAUSTED", "http": "HTTP 429"}[door]
    assert done.code == 1, done.stderr
    assert f"3 requests failed: 3 x {kind}: the queue is full" in done.stderr
    row = row_of(out)
    assert (row["n"], row["errors"], row["error_kinds"]) == (9, 3, {kind: 3})


class PlainServer:
    """Streams completions as servers of OpenAI's API do; knows no field but OpenAI's own."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:-2])
            self.keys.add(fields["authorization"])
            self.bodies.append(json.loads(await reader.readexactly(int(fields["content-length"]))))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            choice = {"index": 0, "logprobs": None, "finish_reason": None, "stop_reason": None}
            for index in range(3):
                text = {"text": "" if index == 1 else " word"}
                end = {"finish_reason": "stop"} if index == 2 else {}
                self._event(writer, {"id": "1", "object": "text_completion", "choices": [choice | text | end]})
            usage = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
            self._event(writer, {"id": "1", "choices": [], "usage": usage})
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            await writer.drain()

    def _event(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        for part in (data[:9], data[9:]):  # events need not come in one piece
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")


async def test_a_server_that_knows_only_openais_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PlainServer()
    monkeypatch.setenv("OCTAVO_API_KEY", "a-key")
    out = tmp_path / "row.jsonl"
    async with await asyncio.start_server(plain.serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        done = await bench_serve(
            *(
                "--base-url",
                f"http://127.0.0.1:{port}/",
                "--model",
                "other",
                "--vocab-size",
                "2000",
                "--num-prompts",
                "3",
            ),
            *("--max-concurrency", "1", "--no-ignore-eos", "--output-json", str(out), *LENGTHS),
        )
        server.close()
    assert done.code == 0, done.stderr
    row = row_of(out)
    assert (row["n"], row["n_out"], row["n_in"], row["tokens_per_message"]) == (3, 9, 12, 1.0)
    known = {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
    assert {name for body in plain.bodies for name in body} == known
    assert plain.keys == {"Bearer a-key"}
    assert "a-key" not in out.read_text() + done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--dataset-name", "none"), "'none' is unknown; there are random, sharegpt_like"),
        (("--dataset-name", "serving"), "--dataset-name serving needs --max-concurrency"),
        (("--request-rate", "0"), "--request-rate 0 must be above 0"),
        (("--base-url", "ftp://x"), "ftp://x is no address"),
        (("--vocab-size", "10"), "a vocabulary of 10"),
    ],
)
async def test_what_makes_no_sense_is_refused(words: tuple[str, ...], expected: str) -> None:
    done = await bench_serve("--base-url", "http://127.0.0.1:1", "--model", "x", "--vocab-size", "2000", *words)
    assert done.code == 2
    assert expected in done.stderr


async def test_a_server_that_is_not_there(unused_tcp_port: int) -> None:
    done = await bench_serve(
        "--base-url", f"http://127.0.0.1:{unused_tcp_port}", "--model", "x", "--vocab-size", "2000"
    )
    assert done.code == 1
    assert f"127.0.0.1:{unused_tcp_port}" in done.stderr
    assert "Traceback" not in done.stderr


def job(client: int = 0, **changes: Any) -> Job:
    target = Target("http", "127.0.0.1", 1, "/", "x")
    defaults: dict[str, Any] = {
        "max_concurrency": None, "request_rate": None, "num_connections": 1, "timeout_s": 1.0, "ignore_eos": True,
        "temperature": 0.0, "seed": 0, "num_warmups": 0, "num_clients": 3, "parent_pid": 1,
    }  # fmt: skip
    return Job(target, RANDOM_12, client, **(defaults | changes))


def test_clients_share_what_is_under_way() -> None:
    assert [job(client, max_concurrency=8).own_concurrency for client in range(3)] == [3, 3, 2]
    assert job().own_concurrency is None
    assert [job(client, max_concurrency=2).own_requests(6) for client in range(2)] == [[0, 2, 4], [1, 3, 5]]
    assert [job(client, max_concurrency=5).own_requests(7) for client in range(3)] == [[0, 3, 5], [1, 4, 6], [2]]
    assert [job(client).own_requests(7) for client in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]


def test_arrivals_are_a_poisson_process_and_the_same_in_every_client() -> None:
    arrivals = job(request_rate=50.0).arrivals_s(20_000)
    assert np.array_equal(arrivals, job(2, request_rate=50.0).arrivals_s(20_000))
    assert not np.array_equal(arrivals, job(request_rate=50.0, seed=1).arrivals_s(20_000))
    gaps = np.diff(arrivals)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
    assert not job().arrivals_s(3).any()


def test_datasets_are_the_workloads_of_the_engines_benchmarks() -> None:
    def load(name: str, **sizes: Any) -> Workload:
        return Dataset(name, 128_256, **sizes).load()

    assert load("sharegpt_like").digest == "24a292df85ac2a18"
    assert load("serving", max_concurrency=64).digest == "04e43df1a6c770a8"
    assert load("random", num_prompts=2).requests != load("random", num_prompts=2, seed=1).requests
