"""Tables of the rotary embedding."""

import math

import torch
from torch import Tensor

from octavo.kernels.ops import Ops
from octavo.worker.models.rope_config import RopeConfig
from octavo.worker.models.targets import Placement


def rotary_table(
    ops: Ops, config: RopeConfig | None, head_size: int, max_positions: int, placement: Placement
) -> Tensor:
    """Return cosines and sines [max_positions, rotated dimensions] float32.

    Args:
        ops: the backend's operations.
        config: None: nothing is rotated; the table then turns one pair by nothing.
        head_size: dimensions of a head.
        max_positions: lines.
        placement: the device.
    """
    if config is None:
        table = torch.tensor([[1.0, 0.0]]).repeat(max_positions, 1)
    else:
        rotated = int(head_size * config.rotated_share)
        table = ops.rotary_cos_sin(inverse_frequencies(config, rotated), max_positions)
    return table.to(placement.device)


def inverse_frequencies(config: RopeConfig, head_size: int) -> Tensor:
    """Return [head_size / 2] float32, scaled as `config.kind` says.

    linear divides by the factor (arXiv:2306.15595); llama3 divides frequencies of long waves, keeps those of short ones
    and interpolates between (the Llama 3.1 release).
    """
    plain = 1.0 / config.theta ** (torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size)
    if config.kind == "default":
        return plain
    if config.kind == "linear":
        return plain / config.factor
    wavelength = 2 * math.pi / plain
    share = (config.original_max_positions / wavelength - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    mixed = (1 - share) * plain / config.factor + share * plain
    longest = config.original_max_positions / config.low_freq_factor
    shortest = config.original_max_positions / config.high_freq_factor
    return torch.where(wavelength > longest, plain / config.factor, torch.where(wavelength < shortest, plain, mixed))
