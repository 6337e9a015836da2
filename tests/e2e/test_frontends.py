"""Two frontends on one pair of ports: each serves everything, and none takes the other down."""

import contextlib
import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.v1 import admin_pb2, admin_pb2_grpc
from octavo.v1 import generation_pb2_grpc as rpc
from tests.support.service import Answer, Service, free_port, request

MAX_CHANNELS = 64
LONG = 60
ENDLESS = 2000
"""Tokens that no stream is given in the time of a test, however late its process is killed."""

STREAM = "octavo.v1.GenerationService/GenerateStream"

Channels = dict[int, list[grpc.Channel]]


class Pair(Service):
    """A service with two frontends, and channels to each of them."""

    http_port = 0

    def connect(self, stack: contextlib.ExitStack, each: int) -> Channels:
        """Open channels until each frontend has so many; return so many by the frontend's process id, not those beyond."""
        channels: Channels = {pid: [] for pid in self.wait_for_frontends(2)}
        for _ in range(MAX_CHANNELS):
            if min(map(len, channels.values())) >= each:
                return {pid: of[:each] for pid, of in channels.items()}
            before = self._connections(channels)
            channel = stack.enter_context(
                grpc.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)])
            )
            grpc.channel_ready_future(channel).result(30)
            ((pid, _),) = self._connections(channels) - before
            channels[pid].append(channel)
        raise AssertionError(f"{MAX_CHANNELS} connections, and not {each} at each frontend: {channels}")

    def http(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> str:
        """Ask over a connection of its own; again if the system gave it to a process that just died."""
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.http_port}{path}", data, {"content-type": "application/json"} | (headers or {})
        )
        for _ in range(2):
            with contextlib.suppress(ConnectionError), urllib.request.urlopen(asked, timeout=60) as answer:
                return str(answer.read().decode())
        raise AssertionError(f"{path}: twice no answer")

    def scrape(self) -> dict[tuple[str, ...], float]:
        """Return all metrics by name and labels' values, but for the model's."""
        return {
            (one.name, *(value for name, value in sorted(one.labels.items()) if name != "model_name")): one.value
            for family in text_string_to_metric_families(self.http("/metrics"))
            for one in family.samples
        }

    def _connections(self, pids: Channels) -> set[tuple[int, int]]:
        port = int(self.address.rpartition(":")[2])
        return {
            (pid, connection.raddr.port)
            for pid in pids
            for connection in psutil.Process(pid).net_connections("tcp")
            if connection.laddr.port == port and connection.status == psutil.CONN_ESTABLISHED
        }


@pytest.fixture
def start(short_folder: Path, tmp_path: Path, demo_model: Path) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(*arguments: str) -> Pair:
        port = free_port()
        pair = Pair(port, short_folder / str(port), tmp_path / "service.log")
        pair.http_port = free_port()
        made.append(pair)
        ports = ("--grpc-port", str(port), "--http-port", str(pair.http_port))
        pair.start("serve", str(demo_model), "--num-frontends", "2", *ports, *arguments)
        pair.wait_until_ready().wait_for_frontends(2)
        return pair

    yield make
    for pair in made:
        assert pair.stop() == [0]


def read(
    channel: grpc.Channel, number: int, begun: Callable[[], object] = lambda: None, num_tokens: int = LONG
) -> Answer:
    """Read a stream to its end; say when its first token has come."""
    answer = Answer()
    for event in rpc.GenerationServiceStub(channel).GenerateStream(request([1 + number], num_tokens, ignore_eos=True)):
        had = bool(answer.ids)
        answer.add(event)
        if answer.ids and not had:
            begun()
    return answer


def begin(pool: ThreadPoolExecutor, channels: list[grpc.Channel], num_tokens: int = LONG) -> list[Future[Answer]]:
    """Begin a stream on each channel; return once all have tokens, or raise what ended one before it had any."""
    begun = [Event() for _ in channels]

    def run(number: int) -> Answer:
        try:
            return read(channels[number], number, begun[number].set, num_tokens)
        finally:
            begun[number].set()

    answers = [pool.submit(run, number) for number in range(len(channels))]
    for event, answer in zip(begun, answers, strict=True):
        assert event.wait(60)
        if answer.done():
            answer.result()
    return answers


def test_frontends_that_die_or_stall_take_nobody_with_them(start: Callable[..., Pair]) -> None:
    pair = start("--backend", "cpu", "--stall-timeout", "2")
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(8) as pool:
        channels = pair.connect(stack, each=3)
        first, second = channels
        # Both doors, whichever frontend.
        alone = {pid: read(of[0], 0).ids for pid, of in channels.items()}
        assert alone[first] == alone[second]
        assert len(alone[first]) == LONG
        for _ in range(8):
            body = {"prompt": [1], "max_tokens": 2, "ignore_eos": True}
            assert json.loads(pair.http("/v1/completions", body))["usage"]["completion_tokens"] == 2

        # Whichever frontend a scrape reaches, it tells of both.
        before = [pair.scrape() for _ in range(6)]
        assert {found["octavo_requests_total", "200", "http", "/v1/completions"] for found in before} == {8}
        assert {found["octavo_requests_total", "OK", "grpc", STREAM] for found in before} == {2}
        assert {found["octavo_generation_tokens_total",] for found in before} == {2 * LONG + 8 * 2}
        assert {found["octavo_processes", "frontend", "ready"] for found in before} == {2}

        # kill -9: its own streams alone.
        lost, kept = begin(pool, channels[first], ENDLESS), begin(pool, channels[second])
        os.kill(first, signal.SIGKILL)
        for answer in lost:
            with pytest.raises(grpc.RpcError) as caught:
                answer.result(60)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert json.loads(pair.http("/v1/completions", body))["usage"]["completion_tokens"] == 2
        assert [len(answer.result(60).ids) for answer in kept] == [LONG] * len(kept)
        third = next(pid for pid in pair.wait_for_frontends(2, without=[first]) if pid != second)

        # What the killed one had counted is not forgotten, so that no counter ever falls.
        assert pair.scrape()["octavo_generation_tokens_total",] >= 2 * LONG + 9 * 2 + len(kept) * LONG + len(lost)

        # A stall: noticed, killed, replaced; the other one goes on.
        kept = begin(pool, pair.connect(stack, each=1)[second])
        psutil.Process(third).suspend()
        assert [len(answer.result(60).ids) for answer in kept] == [LONG] * len(kept)
        replaced(pair, channels[second][0], third)
        assert f"(pid {third}) stalls: it has not answered for 2 s; it is killed" in pair.output
        held = admin_pb2_grpc.AdminServiceStub(channels[second][0]).GetStatus(admin_pb2.GetStatusRequest()).scheduler
        assert held.free_blocks == held.total_blocks


def replaced(pair: Pair, channel: grpc.Channel, stalled: int) -> None:
    """Wait until two frontends are ready, asking one that lives; the shared port might connect to the stalled one."""
    deadline = time.monotonic() + 60
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    while time.monotonic() < deadline:
        found = stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=10).processes
        pids = [one.pid for one in found if one.role == "frontend" and one.state == "ready"]
        if len(pids) == 2 and stalled not in pids:
            return
    raise AssertionError(f"frontends {pids}; it said:\n{pair.output}")
