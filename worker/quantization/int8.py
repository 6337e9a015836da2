"""Plain weights as 8-bit integers, each group of inputs of an output with a scale of its own."""

import torch
from torch import Tensor
from torch.nn import functional

from octavo.kernels.weights import GroupedWeight, pack_codes
from octavo.worker.errors import ModelConfigError

GROUP_SIZE = 128
"""Inputs that share a scale."""

_CODES_A_WORD = 4
_LEAST_SCALE = 1e-30
"""Of a group of zeros."""


def quantized_int8(weight: Tensor) -> GroupedWeight:
    """Quantise a plain weight [N, K] symmetrically: the greatest number of each group becomes 127.

    Raises:
        ModelConfigError: K is no multiple of 4.
    """
    outputs, inputs = weight.shape
    if inputs % _CODES_A_WORD:
        raise ModelConfigError(
            f"--quantization int8: a layer has {inputs} inputs, expected a multiple of {_CODES_A_WORD}"
        )
    packed = weight.new_empty(outputs, inputs // _CODES_A_WORD, dtype=torch.int32)
    scales = weight.new_empty(-(-inputs // GROUP_SIZE), outputs, dtype=torch.float32)
    step = max(1, 2**22 // inputs)  # bounds the memory that is needed beside the result
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        groups = functional.pad(weight[rows].float(), (0, -inputs % GROUP_SIZE)).unflatten(1, (-1, GROUP_SIZE))
        scale = (groups.abs().amax(-1) / 127.0).clamp_min(_LEAST_SCALE)
        codes = (groups / scale[..., None]).round_().flatten(1)[:, :inputs] + 128.0
        packed[rows] = pack_codes(codes.to(torch.uint8), 8)
        scales[:, rows] = scale.T
    return GroupedWeight(packed, 8, scales, None, GROUP_SIZE)
