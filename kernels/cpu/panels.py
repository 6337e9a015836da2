"""Weights as the matrix product of the CPU reads them: in panels of outputs, in the fewest bits that hold them."""

import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from octavo.kernels.cpu import jit
from octavo.kernels.cpu.product_code import panel_bytes
from octavo.kernels.weights import GroupedWeight, Weight, dequantized, unpack_codes

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 17
"""Of weights that a thread takes at once, about."""

KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, eq=False)
class Panels:
    """A weight [N, K] in panels of P = 2 * vector width outputs."""

    kind: str  # of octavo.kernels.cpu.product_code
    num_outputs: int
    num_inputs: int
    memory: Tensor  # [N / P, K, P], or [N / P, K, P / 2] of two 4-bit codes each
    scales: Tensor | None = None  # [G, padded N] float32
    zeros: Tensor | None = None  # likewise
    group: int = 0  # inputs
    perm: Tensor | None = None  # [K] int64: which input of x comes where

    @property
    def at_once(self) -> int:
        """Panels that a thread takes at once."""
        size = panel_bytes(self.kind, jit.vector_width(), self.num_inputs)
        return max(1, _CHUNK_BYTES // max(1, size))


def in_panels(weight: Weight, dtype: torch.dtype) -> Panels:
    """Bring a weight into panels: integer codes stay codes, everything else becomes numbers of the dtype."""
    if isinstance(weight, GroupedWeight):
        return _of_codes(weight)
    if not isinstance(weight, Tensor):
        _say_dequantised(type(weight).__name__, str(dtype).removeprefix("torch."))
    plain = dequantized(weight, dtype)
    return Panels(KINDS[dtype], plain.shape[0], plain.shape[1], _arranged(plain))


@cache
def _say_dequantised(kind: str, dtype: str) -> None:
    """Log it once."""
    logger.info("the CPU has no kernel for %s: its numbers are %s from here on", kind, dtype)


def _of_codes(weight: GroupedWeight) -> Panels:
    codes = unpack_codes(weight.packed, weight.bits)
    more = (0, -codes.shape[0] % (2 * jit.vector_width()))
    scales = functional.pad(weight.scales.float(), more).contiguous()
    if weight.zeros is None and weight.bits == 8:
        kind, zeros, panels = "int8", None, _arranged((codes ^ 128).view(torch.int8))
    else:
        kind, zeros, panels = "uint8", torch.full_like(scales, 2.0 ** (weight.bits - 1)), _arranged(codes)
        if weight.zeros is not None:
            zeros = functional.pad(weight.zeros.float(), more).contiguous()
    if weight.bits <= 4:
        kind, (low, high) = "uint4", panels.chunk(2, -1)
        panels = low | (high << 4)
    perm = None if weight.perm is None else weight.perm.long()
    return Panels(kind, codes.shape[0], codes.shape[1], panels, scales, zeros, weight.group_size, perm)


def _arranged(matrix: Tensor) -> Tensor:
    """Return [N, K] as [N / P, K, P], the last panel filled up with zeros."""
    num_outputs, num_inputs = matrix.shape
    size = 2 * jit.vector_width()
    whole = num_outputs // size
    out = matrix.new_empty(-(-num_outputs // size), num_inputs, size)
    out[:whole] = matrix[: whole * size].reshape(whole, size, num_inputs).transpose(1, 2)
    if whole < out.shape[0]:
        rest = num_outputs - whole * size
        out[whole, :, :rest] = matrix[whole * size :].T
        out[whole, :, rest:] = 0
    return out
