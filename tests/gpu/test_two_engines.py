"""Two worker processes on one GPU, each with its share: both come up at the same time, and both answer."""

import json
from pathlib import Path

import pytest
import torch
import zmq

from octavo.wire.plan import StepResult
from octavo.worker import memory
from tests.support.gpu import ON_GPU
from tests.support.plan_driver import PlanDriver, tokens_of
from tests.support.tiny_models import TINY_LLAMA
from tests.support.worker_process import WorkerProcess

pytestmark = ON_GPU

SHARE = 0.3
BLOCK_SIZE = 16
MODEL = TINY_LLAMA | {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
BLOCK_BYTES = 2 * 2 * BLOCK_SIZE * 12 * 4 * 128


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def answers(worker: WorkerProcess, num_blocks: int) -> list[int]:
    worker.scheduler.welcome(1)  # not earlier: a session without a heartbeat does not last
    driver = PlanDriver(BLOCK_SIZE, num_blocks)
    driver.begin(0, range(100, 200))
    ids: list[int] = []
    for step in range(8):
        worker.scheduler.send(driver.plan({0: 1 if step else 100}))
        ids += tokens_of(worker.scheduler.hear(StepResult)).values()
    return ids


def test_both_come_up_and_answer(tmp_path: Path, model: Path) -> None:
    arguments = ("--device", "cuda", "--load-format", "dummy", "--gpu-memory-utilization", str(SHARE))
    small = ("--max-num-seqs", "16", "--max-num-batched-tokens", "512")
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    total = memory.free_and_total(torch.device("cuda"))[1]
    with (
        zmq.Context() as context,
        WorkerProcess(context, folders[0], model, *arguments, *small) as one,
        WorkerProcess(context, folders[1], model, *arguments, *small) as other,
    ):
        facts = [worker.ready() for worker in (one, other)]
        for each in facts:  # most of the share, whatever the other one takes
            assert 0.8 * SHARE * total - 4 * 2**30 < each.num_blocks * BLOCK_BYTES < SHARE * total
        first, second = (answers(*pair) for pair in zip((one, other), (f.num_blocks for f in facts), strict=True))
        assert first == second  # random weights of one seed
        assert len(first) == 8
