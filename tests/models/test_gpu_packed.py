"""A model whose weights stay packed, on the GPU backend."""

from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.wire.plan import RowSampling
from tests.models.test_quantized import CHECKPOINTS
from tests.support.plan_driver import PlanDriver
from tests.support.quantized import WIDE_LLAMA, quantized_model
from tests.support.tiny_models import load_worker, write_model

CUDA = torch.cuda.is_available()
SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "dtype": "float16"}


def test_packed_weights_give_about_the_numbers_of_the_reference(tmp_path: Path) -> None:
    """In half precision, where weights stay packed."""
    config, draw = CHECKPOINTS["gptq desc_act"]
    shape = WIDE_LLAMA | {"num_hidden_layers": 1, "head_dim": 64 if CUDA else 8}
    stored, _ = quantized_model(shape, draw)
    write_model(tmp_path, shape | {"quantization_config": config}, stored)
    theirs = load_worker(tmp_path, **SMALL).runner
    ours = load_worker(tmp_path, backend="triton", device="cuda" if CUDA else "cpu", enforce_eager=True, **SMALL).runner
    driver = PlanDriver.of(ours)
    driver.begin(0, list(range(1, 9)), RowSampling(seed=0, temperature=0.0, logprobs=3))
    first, last = driver.plan({0: 5}), driver.plan({0: 3})
    ours.execute(first)
    theirs.execute(first)
    (mine,), (wanted,) = ours.execute(last).logprobs, theirs.execute(last).logprobs
    numbers = [np.frombuffer(found.top_logprobs, "<f4") for found in (mine, wanted)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.1)  # the interpreter cuts off where it should round
