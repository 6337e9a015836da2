"""What the weights of a model take, before any of them is allocated."""

from dataclasses import replace

import torch

from octavo.kernels.ops import get_ops
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.description import ModelConfig
from octavo.worker.models.targets import Placement, ShardSpec
from octavo.worker.quantization.config import read_quantization


def weight_bytes(config: ModelConfig, dtype: torch.dtype, shard: ShardSpec) -> int:
    """Return the bytes of a rank's weights as they are read.

    Raises:
        ModelConfigError: the model cannot be split so, or its quantisation is not supported.
    """
    return sum(target.view.nbytes for target in _without_memory(config, dtype, shard).targets().values())


def num_parameters(config: ModelConfig) -> int:
    """Return how many numbers all weights are together, however they are stored.

    Raises:
        ModelConfigError: the model cannot be built so.
    """
    plain = replace(config, quantization=None)
    return sum(target.view.numel() for target in _without_memory(plain, torch.float32, ShardSpec()).targets().values())


def _without_memory(config: ModelConfig, dtype: torch.dtype, shard: ShardSpec) -> Decoder:
    placement = Placement(dtype, torch.device("meta"))
    return Decoder(config, get_ops("reference"), placement, shard, 1, read_quantization(config.quantization))
