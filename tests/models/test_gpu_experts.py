"""Whole models with experts through the GPU runner; without a GPU Triton's interpreter runs it."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from tests.support.gpu import DEVICE, load_gpu
from tests.support.plan_driver import GREEDY, PlanDriver, tokens_of
from tests.support.tiny_models import TINY_QWEN2_MOE, load_eager, write_model

CUDA = torch.cuda.is_available()
CONFIG = TINY_QWEN2_MOE | ({"head_dim": 64} if CUDA else {"num_hidden_layers": 1})
PROMPTS = [[3, 14, 15, 92, 65, 35, 89, 79, 32], [27, 18, 28]]

STEPS = [{0: 5, 1: 3}, {0: 4, 1: 1}, {0: 1, 1: 1}, {1: 1}]


@pytest.mark.parametrize("eager", [False, True] if CUDA else [True], ids=str)
def test_a_model_draws_what_the_reference_draws(tmp_path: Path, eager: bool) -> None:
    folder = write_model(tmp_path / "model", CONFIG)
    runner, expected_by = load_gpu(folder, dtype="float32", enforce_eager=eager), load_eager(folder)
    assert runner._device.type == DEVICE.type
    drawn = []
    for each in (runner, expected_by):
        driver = PlanDriver.of(each)
        for row, prompt in enumerate(PROMPTS):
            driver.begin(row, prompt, GREEDY)
        drawn.append([tokens_of(each.execute(driver.plan(counts))) for counts in STEPS])
    assert drawn[0] == drawn[1]
