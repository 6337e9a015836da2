"""Checkpoints of one model under the names that different versions of its files have: the same logits."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.architectures import logits_of
from tests.support.gpt_architectures import config_of
from tests.support.tiny_models import load_eager, random_tensors, write_model

Tensors = dict[str, Tensor]


def without(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def beside(*names: str) -> Callable[[Tensors], Tensors]:
    masks = {
        name: torch.ones(1, 1, 4, 4, dtype=torch.bool if name.endswith(".bias") else torch.float32) for name in names
    }
    return lambda tensors: tensors | masks


def logits(folder: Path) -> Tensor:
    runner = load_eager(folder)
    return logits_of(runner._model, runner._caches, list(range(20)), [13, 7], runner.rows.limits.block_size)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("gpt2", without("transformer.")),
        ("gpt2", beside("transformer.h.1.attn.bias", "transformer.h.0.attn.masked_bias")),
        ("gpt2", lambda tensors: beside("h.1.attn.bias")(without("transformer.")(tensors))),
        ("gpt2", lambda tensors: tensors | {"lm_head.weight": tensors["transformer.wte.weight"].clone()}),
        ("gpt_neox", lambda tensors: {name.replace("embed_out.", "lm_head."): t for name, t in tensors.items()}),
        ("gpt_neo", beside("transformer.h.0.attn.attention.bias", "transformer.h.0.attn.attention.masked_bias")),
        ("gpt_neox", without("gpt_neox.")),
        (
            "gpt_neox",
            beside(*(f"gpt_neox.layers.1.attention.{name}" for name in ("bias", "masked_bias", "rotary_emb.inv_freq"))),
        ),
        ("opt", without("model.")),
        ("falcon", without("transformer.")),
        ("falcon", beside("transformer.h.0.self_attention.rotary_emb.inv_freq")),
    ],
)
def test_older_names_are_read(tmp_path: Path, kind: str, change: Callable[[Tensors], Tensors]) -> None:
    config = config_of(kind)
    tensors = random_tensors(config)
    expected = logits(write_model(tmp_path / "new", config, tensors))
    assert torch.equal(logits(write_model(tmp_path / "old", config, change(tensors))), expected)
