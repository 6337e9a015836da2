"""Matrix product with weights in panels; see ``octavo.kernels.cpu.product_code``."""

from functools import cache

import torch
from torch import Tensor

from octavo.kernels.cpu import jit
from octavo.kernels.cpu.panels import Panels
from octavo.kernels.cpu.product_code import most_rows, write_arrange, write_product

_ALONE = 1 << 16
"""Weights times rows below which one thread is faster than two."""


@cache
def _product(kind: str) -> jit.Kernel:
    return jit.compiled("product", write_product(kind))


@cache
def _arrange() -> jit.Kernel:
    return jit.compiled("arrange", write_arrange)


def product(x: Tensor, weight: Panels, bias: Tensor | None = None) -> Tensor:
    """x [T, K] -> x @ weight.T + bias [T, N], in x's dtype; sums in float32."""
    if weight.perm is not None:
        x = x.index_select(1, weight.perm)
    num_rows, num_inputs = x.shape
    wide = x if x.dtype is torch.float32 else x.float()
    if wide.stride(1) != 1:
        wide = wide.contiguous()
    out = torch.empty(num_rows, weight.num_outputs, dtype=torch.float32)
    if num_rows == 0:
        return out.to(x.dtype)
    tiled = _tiles(wide)
    width = jit.vector_width()
    num_panels = -(-weight.num_outputs // (2 * width))
    buffer = 0
    if num_rows > most_rows(width) and weight.kind != "float32":
        scratch = torch.empty(jit.num_threads(), num_inputs, 2 * width)
        buffer = scratch.data_ptr()
    biases = None if bias is None else _padded(bias, num_panels * 2 * width)
    at_once = weight.at_once
    chunks = -(-num_panels // at_once)
    jit.launch(
        _product(weight.kind),
        chunks,
        (
            tiled.data_ptr(),
            num_rows,
            num_inputs,
            weight.num_outputs,
            weight.memory.data_ptr(),
            0 if weight.scales is None else weight.scales.data_ptr(),
            0 if weight.zeros is None else weight.zeros.data_ptr(),
            weight.group,
            0 if biases is None else biases.data_ptr(),
            out.data_ptr(),
            buffer,
            at_once,
        ),
        alone=num_rows * num_inputs * weight.num_outputs < _ALONE,
    )
    return out if x.dtype is torch.float32 else out.to(x.dtype)


def _padded(bias: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(bias.float(), (0, size - bias.shape[0]))


def _tiles(x: Tensor) -> Tensor:
    """Return x [T, K] as tiles [rows of the tile, K] turned around; their sizes are those that the product takes."""
    num_rows, num_inputs = x.shape
    if num_rows == 1:
        return x
    number = -(-num_rows // most_rows(jit.vector_width()))
    out = torch.empty(num_rows, num_inputs)
    jit.launch(
        _arrange(),
        number,
        (x.data_ptr(), num_rows, num_inputs, x.stride(0), out.data_ptr()),
        alone=number < 4,
    )
    return out
