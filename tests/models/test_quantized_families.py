"""Quantised checkpoints of every kind of decoder: fused, interleaved and transposed matrices, names of their own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from octavo.worker.models.config import read_config_values
from tests.support import quantized
from tests.support.architectures import CONFIGS, logits_of, write_with_transformers
from tests.support.quantized import Draw, quantized_tensors
from tests.support.tiny_models import load_eager, write_model

FORMATS: dict[str, tuple[dict[str, Any], Draw]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
        quantized.gptq(desc_act=True),
    ),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [16, 32]}, quantized.fp8("block", name="weight_scale_inv")),
}
KINDS = [
    "llama-biases",
    "qwen3",
    "gemma2",
    "gemma3-of-images",
    "phi3",
    "falcon",
    "opt",
    "phi-groups",
    "starcoder2",
]
IDS = torch.randint(96, (24,), generator=torch.Generator().manual_seed(1)).tolist()


def logits(folder: Path) -> torch.Tensor:
    runner = load_eager(folder)
    return logits_of(runner._model, runner._caches, IDS, [17, *([1] * 7)], runner.rows.limits.block_size)


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_model_is_the_plain_one_of_its_numbers(tmp_path: Path, kind: str) -> None:
    write_with_transformers(tmp_path, *CONFIGS[kind])
    config, tensors = read_config_values(tmp_path), load_file(tmp_path / "model.safetensors")
    for name, (quantization, draw) in FORMATS.items():
        stored, plain = quantized_tensors(config, tensors, draw)
        write_model(tmp_path / name, config | {"quantization_config": quantization}, stored)
        write_model(tmp_path / "plain", config, plain)
        assert torch.equal(logits(tmp_path / name), logits(tmp_path / "plain")), name
