"""The benchmark's client against a real scheduler loop and a worker without tensors: what it measures, how it fails."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from octavo.cli.bench_client import EngineClient, Progress, RunFailed, TimeIsUp
from octavo.cli.bench_workloads import Request, Workload
from octavo.cli.errors import ConfigurationError
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.simulate.model import make_facts
from octavo.wire.channel import SEND_QUEUE_MESSAGES
from octavo.wire.columns import pack_ints
from octavo.wire.requests import (
    ChoiceFinished,
    FailureCode,
    FinishReason,
    RequestFailed,
    RequestStarted,
    StepOutput,
)
from tests.support.fake_frontend import LoopThread
from tests.support.fake_worker import FakeWorker

DIGEST = "model"


@contextmanager
def connected(folder: Path, worker: FakeWorker, **settings: int) -> Iterator[EngineClient]:
    config = SchedulerConfig(address=worker_address(folder), config_digest=DIGEST, **settings)  # type: ignore[arg-type]
    with LoopThread(config), worker:
        client = EngineClient(worker_address(folder), DIGEST, lambda: None)
        try:
            client.connect(30.0, lambda reason: None)
            yield client
        finally:
            client.close()


def worker_address(folder: Path) -> str:
    return f"ipc://{folder}/s"


def fake_worker(folder: Path, **facts: int) -> FakeWorker:
    return FakeWorker(worker_address(folder), DIGEST, make_facts(**facts))


def workload(*lengths: tuple[int, int], first: int = 1) -> Workload:
    """Return prompts that count upwards; no two share their beginning."""
    return Workload("some", [Request(list(range(first + i, first + i + n)), out) for i, (n, out) in enumerate(lengths)])


def test_a_run_measures_every_request(tmp_path: Path) -> None:
    with connected(tmp_path, fake_worker(tmp_path)) as client:
        began = time.monotonic()
        run = client.run(workload((40, 5), (3, 1), (20, 8)))
        took = time.monotonic() - began
    assert run.num_tokens.tolist() == [5, 1, 8]
    assert 0 < run.wall_s <= took
    assert (run.submitted > began).all()
    assert (run.first > run.submitted).all()
    assert (run.last >= run.first).all()
    assert run.last[1] == run.first[1]
    assert len(run.tpot_s) == 2
    assert sum(tokens for _, tokens in run.steps) == 14
    assert len(run.gaps) == 14 - 3
    assert run.gaps.sum() == pytest.approx((run.last - run.first).sum())


def test_max_tokens_cuts_the_outputs(tmp_path: Path) -> None:
    with connected(tmp_path, fake_worker(tmp_path)) as client:
        assert client.run(workload((40, 5), (3, 9)), max_tokens=1).num_tokens.tolist() == [1, 1]


def test_prompts_are_found_until_the_cache_is_reset(tmp_path: Path) -> None:
    with connected(tmp_path, fake_worker(tmp_path)) as client:
        found = [client.run(workload((40, 2))).num_cached_tokens for _ in range(2)]
        dropped = client.reset_prefix_cache()
        found.append(client.run(workload((40, 2))).num_cached_tokens)
    assert found == [0, 32, 0]
    assert dropped == 2


def test_nothing_is_found_where_caching_is_off(tmp_path: Path) -> None:
    with connected(tmp_path, fake_worker(tmp_path), enable_prefix_caching=False) as client:
        assert [client.run(workload((40, 2))).num_cached_tokens for _ in range(2)] == [0, 0]


def test_more_requests_than_a_queue_of_the_socket_holds(tmp_path: Path) -> None:
    number = 3 * SEND_QUEUE_MESSAGES
    with connected(tmp_path, fake_worker(tmp_path), max_waiting_requests=number) as client:
        run = client.run(Workload("many", [Request([1, 2], 1)] * number))
    assert run.num_tokens.sum() == number


def test_a_closed_loop_keeps_to_its_concurrency(tmp_path: Path) -> None:
    worker = fake_worker(tmp_path)
    with connected(tmp_path, worker) as client:
        run = client.run(workload(*([(5, 4)] * 12)), concurrency=3)
    assert run.num_tokens.tolist() == [4] * 12
    assert max(len(plan.row) // 4 for plan in worker.plans) <= 3
    assert sum(run.submitted < run.last.min()) == 3  # the fourth went out when one had ended


def test_a_request_that_does_not_fit_is_named(tmp_path: Path) -> None:
    with connected(tmp_path, fake_worker(tmp_path, max_model_len=64)) as client:
        with pytest.raises(
            ConfigurationError, match="some has a request of 65 tokens with its output, the engine takes at most 64"
        ):
            client.run(workload((60, 5)), max_tokens=1)  # the whole output counts
        assert client.run(workload((60, 4))).num_tokens.tolist() == [4]


def test_a_deadline_cuts_a_run_and_the_next_one_is_whole(tmp_path: Path) -> None:
    worker = fake_worker(tmp_path)
    with connected(tmp_path, worker) as client:
        worker.hold()
        with pytest.raises(TimeIsUp, match="some was cut after"):
            client.run(workload((40, 5), (3, 9)), deadline=time.monotonic())
        worker.release()
        assert client.run(workload((40, 5))).num_tokens.tolist() == [5]


def test_a_worker_that_vanishes_ends_the_run(tmp_path: Path) -> None:
    worker = fake_worker(tmp_path)
    with connected(tmp_path, worker) as client:
        worker.hold()
        worker.kill()
        with pytest.raises(RunFailed, match="the worker is gone: "):
            client.run(workload((40, 5)))


def test_a_request_that_faults_fails_the_run(tmp_path: Path) -> None:
    address = worker_address(tmp_path)
    worker = FakeWorker(address, DIGEST, make_facts(), fault_rule=lambda ids, seed, choice: len(ids) > 42)
    with connected(tmp_path, worker) as client, pytest.raises(RunFailed, match=r"request 1 failed \(INTERNAL\): "):
        client.run(workload((3, 5), (40, 5)))


def test_a_scheduler_of_another_model_is_refused(tmp_path: Path) -> None:
    with LoopThread(SchedulerConfig(address=worker_address(tmp_path), config_digest="another")):
        client = EngineClient(worker_address(tmp_path), DIGEST, lambda: None)
        with pytest.raises(RunFailed, match=r"takes this client no more: .*model"):
            client.connect(30.0, lambda reason: None)
        client.close()


def test_an_engine_that_is_not_there(tmp_path: Path) -> None:
    said: list[str] = []
    client = EngineClient(worker_address(tmp_path), DIGEST, lambda: None)
    with pytest.raises(RunFailed, match=r"not ready after 0\.05 s: the scheduler cannot be reached yet"):
        client.connect(0.05, said.append)
    with pytest.raises(RunFailed, match="there is no session"):
        client.run(workload((1, 1)))
    client.close()
    assert set(said) == {"the scheduler cannot be reached yet"}


def output(handles: list[int], positions: list[int], *finished: ChoiceFinished) -> StepOutput:
    zeros = pack_ints([0] * len(handles))
    return StepOutput((), pack_ints(handles), zeros, pack_ints(positions), zeros, finished=finished)


def ended(handle: int, num_tokens: int) -> ChoiceFinished:
    return ChoiceFinished(handle, 0, FinishReason.LENGTH, num_tokens)


def test_two_steps_in_one_message_are_two_tokens() -> None:
    progress = Progress(np.array([3, 2]), base=10)
    progress.take(output([10, 11, 10], [0, 0, 1]), 5.0)
    progress.take(output([10, 11], [2, 1], ended(10, 3), ended(11, 2)), 7.0)
    progress.check()
    assert progress.num_ended == 2
    assert progress.counts.tolist() == [3, 2]
    assert (progress.first.tolist(), progress.last.tolist()) == ([5.0, 5.0], [7.0, 7.0])
    assert sorted(progress.gaps().tolist()) == [0.0, 2.0, 2.0]


def test_what_is_left_of_an_earlier_run_is_passed_over() -> None:
    progress = Progress(np.array([2]), base=10)
    failed = RequestFailed(9, FailureCode.INTERNAL, "late")
    started = (RequestStarted(9, 64, 0.0), RequestStarted(10, 16, 0.0))
    columns = (pack_ints([9, 10]), pack_ints([0, 0]), pack_ints([7, 0]), pack_ints([0, 0]))
    progress.take(StepOutput(started, *columns, finished=(ended(9, 8),), failed=(failed,)), 1.0)
    assert (progress.num_ended, progress.num_cached_tokens) == (0, 16)
    assert progress.counts.tolist() == [1]


def test_an_end_before_the_last_token_is_an_error() -> None:
    progress = Progress(np.array([3]))
    with pytest.raises(RunFailed, match=r"request 0 ended \(LENGTH\) after 2 tokens, of which 1 came; expected 3"):
        progress.take(output([0], [0], ended(0, 2)), 1.0)


def test_a_repeated_position_is_an_error() -> None:
    progress = Progress(np.array([2]))
    progress.take(output([0], [0]), 1.0)
    progress.take(output([0], [0], ended(0, 2)), 2.0)
    with pytest.raises(RunFailed, match="not contiguous"):
        progress.check()
