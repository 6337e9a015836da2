"""Checkpoints with an output head beside an embedding that is said to be tied."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.worker.errors import WeightsError
from octavo.worker.inspection import inspect
from tests.support.architectures import logits_of
from tests.support.tiny_models import TINY_LLAMA, load_eager, random_tensors, write_model

TIED = TINY_LLAMA | {"tie_word_embeddings": True}
UNTIED = TINY_LLAMA | {"tie_word_embeddings": False}
IDS = list(range(12))


def logits(folder: Path, **settings: Any) -> Tensor:
    runner = load_eager(folder, backend="reference", **settings)
    return logits_of(runner._model, runner._caches, IDS, [12], runner.rows.limits.block_size)


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}], ids=["plain", "int8"])
def test_a_head_with_other_numbers_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any]
) -> None:
    tensors = random_tensors(UNTIED)
    write_model(tmp_path / "untied", UNTIED, tensors)
    write_model(tmp_path / "stale", TIED, tensors)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits(tmp_path / "stale", **settings), logits(tmp_path / "untied", **settings))
    assert "lm_head.weight and model.embed_tokens.weight differ" in caplog.text
    assert inspect(tmp_path / "stale", None)["problem"] is None


def test_a_head_with_the_same_numbers_is_the_embedding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = random_tensors(TIED)
    write_model(tmp_path / "tied", TIED, tensors)
    write_model(tmp_path / "twice", TIED, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits(tmp_path / "twice"), logits(tmp_path / "tied"))
    assert "differ" not in caplog.text


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(UNTIED)
    write_model(tmp_path, TIED, tensors | {"lm_head.weight": tensors["lm_head.weight"][:-1].clone()})
    with pytest.raises(WeightsError, match=r"lm_head\.weight.*expected"):
        logits(tmp_path)
    assert "lm_head.weight" in str(inspect(tmp_path, None)["problem"])
