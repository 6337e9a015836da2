"""What the weights of a model take, before any of them is allocated."""

import re
from dataclasses import replace

import torch

from octavo.kernels.kept import is_kept
from octavo.kernels.ops import get_ops
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.description import ModelConfig
from octavo.worker.models.targets import Placement, ShardSpec, Target
from octavo.worker.quantization.config import read_quantization
from octavo.worker.quantization.scheme import Quantization
from octavo.worker.quantization.stored import Tensors


def weight_bytes(
    config: ModelConfig, dtype: torch.dtype, shard: ShardSpec, backend: str, tensors: Tensors | None = None
) -> int:
    """Return the bytes of a rank's weights once they are loaded.

    Quantised ones that a backend does not multiply by as they are count as the plain numbers that they become.

    Args:
        config: of the model.
        dtype: of plain weights.
        shard: of the rank.
        backend: its name.
        tensors: of the checkpoint; None: as tools write it.

    Raises:
        ModelConfigError: the model cannot be split so, or its quantisation is not supported.
    """
    quantization = read_quantization(config.quantization, tensors=tensors)
    stored = _targets(config, dtype, shard, quantization)
    if config.quantization is None:
        return sum(target.view.nbytes for target in stored.values())
    plain = _targets(replace(config, quantization=None), dtype, shard, read_quantization(None))
    counted: dict[str, int] = {}
    for name, target in stored.items():
        prefix = name.rpartition(".")[0]
        weight = f"{prefix}.weight"
        is_stored_plain = name in plain and target.view.dtype == plain[name].view.dtype
        if not is_stored_plain and weight in plain and not _stays(config, prefix, quantization, backend, dtype):
            counted[weight] = plain[weight].view.nbytes
        else:
            counted[name] = target.view.nbytes
    return sum(counted.values())


def _stays(config: ModelConfig, prefix: str, quantization: Quantization, backend: str, dtype: torch.dtype) -> bool:
    """Say whether the weight of a layer stays in the form that it is read in."""
    expert = re.escape(config.names.expert).replace(r"\{\}", r"\d+")
    of_experts = re.search(rf"\.{expert}\.", f".{prefix}.") is not None
    return is_kept(quantization.scheme_of(prefix).form, backend, dtype, of_experts=of_experts)


def num_parameters(config: ModelConfig) -> int:
    """Return how many numbers all weights are together, however they are stored.

    Raises:
        ModelConfigError: the model cannot be built so.
    """
    plain = replace(config, quantization=None)
    targets = _targets(plain, torch.float32, ShardSpec(), read_quantization(None))
    return sum(target.view.numel() for target in targets.values())


def _targets(
    config: ModelConfig, dtype: torch.dtype, shard: ShardSpec, quantization: Quantization
) -> dict[str, Target]:
    """Return those of a model without memory."""
    placement = Placement(dtype, torch.device("meta"))
    return Decoder(config, get_ops("reference"), placement, shard, 1, quantization).targets()
