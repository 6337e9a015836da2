"""Processes that are killed or stopped at random moments under 16 streams through both doors of two frontends."""

import asyncio
import signal
from pathlib import Path

import grpc
import psutil
import pytest

from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as rpc
from tests.chaos.conftest import PATIENCE, running
from tests.support.history import CANCELLED, OK, UNAVAILABLE, Ask, History
from tests.support.service import assert_gone


async def test_workers_and_schedulers_killed_at_random(folder: Path, seed: int) -> None:
    """F36, F40, I11, I12, I16: every stream ends complete and identical, and no process or block is left.

    The worker dies twice: at a third death that names it again a request may end INTERNAL.
    """
    async with running(folder, seed, num_frontends=2) as chaos:
        load = chaos.load(cancel_share=0.1)
        load.start()
        for role in chaos.draw.sample(("worker", "worker", "scheduler", "scheduler", "scheduler"), 5):
            await chaos.until_tokens(chaos.draw.randrange(1, 400))
            await asyncio.to_thread(chaos.cluster.kill, role)
        await load.stop()
        await chaos.judge()
        assert chaos.cluster.odd_ends() == []
        assert chaos.cluster.orphans() == []


async def test_a_killed_scheduler_leaves_the_worker_as_it_is(folder: Path, seed: int) -> None:
    """F40: the worker is not started again, so that its weights stay loaded."""
    async with running(folder, seed) as chaos:
        worker = chaos.cluster.pid("worker")
        load = chaos.load()
        load.start()
        await chaos.until_tokens(200)
        await asyncio.to_thread(chaos.cluster.kill, "scheduler")
        await load.stop()
        await chaos.judge()
        assert chaos.cluster.pid("worker") == worker


async def test_a_killed_frontend_takes_its_own_streams_alone(folder: Path, seed: int) -> None:
    """F41: they end UNAVAILABLE, those of others are complete, and all blocks come back."""
    async with running(folder, seed, num_frontends=2) as chaos:
        load = chaos.load()
        load.start()
        await chaos.until_tokens(300)
        await asyncio.to_thread(chaos.cluster.kill, "frontend-1")
        await asyncio.to_thread(chaos.cluster.wait_until_whole)
        await load.stop()

        def excused(history: History) -> set[str]:
            return {UNAVAILABLE, "TRUNCATED"} if history.frontend == 1 else set()

        histories = await chaos.judge(excused)
        statuses = {(one.frontend, one.status.code) for one in histories if one.status is not None}
        assert (1, UNAVAILABLE) in statuses
        assert {code for frontend, code in statuses if frontend == 0} <= {OK, CANCELLED}


async def test_a_killed_frontend_leaves_no_compiler_of_grammars(folder: Path, seed: int) -> None:
    """F44: the process that it had started for constraints ends with it, also after kill -9."""
    async with running(folder, seed) as chaos:
        cluster = chaos.cluster
        constrained = pb.GenerationInput(
            token_ids=pb.TokenIds(ids=[65]),
            stopping=pb.StoppingParams(max_tokens=4),
            constraint=pb.OutputConstraint(regex="[a-z]+"),
        )
        with grpc.insecure_channel(f"127.0.0.1:{cluster.targets[0].grpc_port}") as channel:
            stub = rpc.GenerationServiceStub(channel)
            await asyncio.to_thread(stub.Generate, pb.GenerateRequest(input=constrained), timeout=60)
        children = psutil.Process(cluster.pid("frontend-0")).children(recursive=True)
        assert children, "constraints are compiled by a process of its own"
        await asyncio.to_thread(cluster.kill, "frontend-0")
        await asyncio.to_thread(assert_gone, children)
        await asyncio.to_thread(cluster.wait_until_whole)
        await chaos.load().once()
        await chaos.judge()


@pytest.mark.parametrize("role", ["worker", "scheduler"])
async def test_killed_while_it_begins(folder: Path, seed: int, role: str) -> None:
    """A second death before the service is whole again costs a longer pause, no more."""
    async with running(folder, seed) as chaos:
        load = chaos.load()
        load.start()
        for _ in range(2):
            await asyncio.to_thread(chaos.cluster.kill, role)
            await asyncio.sleep(chaos.draw.uniform(0, 0.3))
        await load.stop()
        await chaos.judge()


async def test_a_frontend_that_slept_through_its_lease_begins_anew(folder: Path, seed: int) -> None:
    """The lease: a frontend stopped for longer than HEARTBEAT_TIMEOUT_S loses its session, and the scheduler cancels its
    requests and frees their blocks; when it is continued it gets UnknownSession, submits its journals, and its streams
    complete. Nothing of the time before reaches them twice.
    """
    async with running(folder, seed, num_frontends=2) as chaos:
        cluster, pid = chaos.cluster, chaos.cluster.pid("frontend-1")
        long = [Ask("long", (3, index), 220, seed=index) for index in range(8)]
        chaos.asks += long
        await chaos.prepare()
        streams = [asyncio.create_task(chaos.client.ask(ask, "grpc-stream", 1)) for ask in long]
        await chaos.until_tokens(40)
        cluster.signal("frontend-1", signal.SIGSTOP)

        def is_missed() -> bool:
            status = cluster.status(0)
            return pid not in {one.pid for one in status.processes} and status.scheduler.running_requests == 0

        await asyncio.to_thread(cluster.poll, is_missed, "the lease did not expire")
        assert cluster.status(0).scheduler.free_blocks == cluster.status(0).scheduler.total_blocks
        cluster.signal("frontend-1", signal.SIGCONT)
        histories = await asyncio.gather(*streams)
        assert {one.status.code for one in histories if one.status} == {OK}
        assert cluster.pid("frontend-1") == pid
        await chaos.judge()


async def test_a_wall_clock_that_jumps_changes_nothing(folder: Path, seed: int) -> None:
    """F51, I24: every look at the wall clock of every process is a day wrong to either side, also across restarts.

    Without deadlines: grpc itself reads those against the wall clock, once, in the moment in which a call begins.
    """
    options = (*PATIENCE, "--clock-jumps", str(seed))
    async with running(folder, seed, call_timeout_s=None, options=options) as chaos:
        pids = {name: chaos.cluster.pid(name) for name in chaos.cluster.names}
        await chaos.load().once(2)
        await chaos.judge()
        assert {name: chaos.cluster.pid(name) for name in chaos.cluster.names} == pids
        assert "ended:" not in chaos.cluster.log_of("scheduler"), "no session timed out"
        load = chaos.load()
        load.start()
        await asyncio.to_thread(chaos.cluster.kill, "scheduler")
        await load.stop()
        await chaos.judge()


async def test_a_worker_of_another_version_is_refused_by_name(folder: Path, seed: int) -> None:
    """F50: it says both versions and ends with the exit code of a configuration error; others are not disturbed."""
    async with running(folder, seed) as chaos:
        cluster = chaos.cluster
        load = chaos.load()
        load.start()
        old = await asyncio.to_thread(cluster.begin_anew, "worker", arguments=("--protocol-version", "3"))
        assert (await asyncio.to_thread(cluster.wait_for_end, old)).code == 2
        assert "the peer speaks protocol version 4, this process speaks 3" in cluster.log_of("worker")
        await load.stop()
        await chaos.judge()
