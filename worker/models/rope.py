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
        max_positions: lines: the longest sequence that is served.
        placement: the device.
    """
    if config is None:
        table = torch.tensor([[1.0, 0.0]]).repeat(max_positions, 1)
    elif config.kind == "dynamic":
        table = _growing_table(ops, config, config.num_rotated(head_size), max_positions)
    else:
        frequencies = inverse_frequencies(config, config.num_rotated(head_size), max_positions)
        table = ops.rotary_cos_sin(frequencies, max_positions, config.attention_factor)
    return table.to(placement.device)


def inverse_frequencies(config: RopeConfig, rotated: int, max_positions: int) -> Tensor:
    """Return [rotated / 2] float32, scaled as `config.kind` says; those of dynamic are the ones of short sequences.

    linear divides by the factor (arXiv:2306.15595); llama3 divides frequencies of long waves, keeps those of short ones
    and interpolates between (the Llama 3.1 release); yarn does so by the turns that a dimension makes in the original
    length (arXiv:2309.00071); longrope divides each by a factor of its own (arXiv:2402.13753): the long ones where
    longer sequences than the original length are served, for all positions of all sequences, else the short ones.
    """
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
    plain = 1.0 / config.theta**exponents
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "llama3":
        return _llama3(config, plain)
    if config.kind == "yarn":
        kept = _yarn_kept(config, rotated)
        return plain / config.factor * (1 - kept) + plain * kept
    if config.kind == "longrope":
        is_long = max_positions > config.original_max_positions
        return plain / torch.tensor(config.long_factors if is_long else config.short_factors)
    return plain


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    wavelength = 2 * math.pi / plain
    share = (config.original_max_positions / wavelength - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    mixed = (1 - share) * plain / config.factor + share * plain
    longest = config.original_max_positions / config.low_freq_factor
    shortest = config.original_max_positions / config.high_freq_factor
    return torch.where(wavelength > longest, plain / config.factor, torch.where(wavelength < shortest, plain, mixed))


def _yarn_kept(config: RopeConfig, rotated: int) -> Tensor:
    """Return how much of each plain frequency is kept: [rotated / 2] from 0 to 1."""

    def dimension(turns: float) -> float:
        """Return which dimension turns so often in the original length."""
        waves = config.original_max_positions / (turns * 2 * math.pi)
        return rotated * math.log(waves) / (2 * math.log(config.theta))

    first, last = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncates:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    width = 0.001 if first == last else last - first
    ramp = (torch.arange((rotated + 1) // 2, dtype=torch.float32) - first) / width
    return 1 - ramp.clamp(0, 1)


def _growing_table(ops: Ops, config: RopeConfig, rotated: int, max_positions: int) -> Tensor:
    """Return a table whose line p has the base of a sequence of p + 1 tokens.

    That is how transformers turns the tokens of a sequence that is generated one by one, and does not depend on how it is
    cut into chunks. Up to the original length the base is the plain one.
    """
    original = config.original_max_positions
    frequencies = inverse_frequencies(config, rotated, max_positions)
    table = ops.rotary_cos_sin(frequencies, min(max_positions, original))
    if max_positions <= original:
        return table
    positions = torch.arange(original, max_positions, dtype=torch.float32)
    growth = config.factor * (positions + 1) / original - (config.factor - 1)
    bases = config.theta * growth ** (rotated / (rotated - 2))
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
    angles = positions[:, None] * (1.0 / bases[:, None] ** exponents)
    return torch.cat((table, torch.cat((angles.cos(), angles.sin()), dim=-1)))
