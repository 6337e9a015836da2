"""Norm, gate, rotary embedding and the write to the cache; ``octavo.kernels.cpu.pointwise_code`` is what runs."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cpu import jit
from octavo.kernels.cpu.pointwise_code import TOKENS_AT_ONCE, write_norm, write_rotary, write_silu_and_mul

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

_ALONE = 1 << 15
"""Elements below which one thread is faster than two."""


@cache
def _kernel(name: str, write: Callable[[str], Callable[[Any, int], None]], dtype: torch.dtype) -> jit.Kernel:
    return jit.compiled(name, write(_DTYPES[dtype]))


def _launch(kernel: jit.Kernel, num_rows: int, num_elements: int, arguments: tuple[int, ...]) -> None:
    jit.launch(kernel, -(-num_rows // TOKENS_AT_ONCE), arguments, alone=num_elements < _ALONE)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Add the residual, then normalise; see ``octavo.kernels.reference.rms_norm``."""
    if x.dtype not in _DTYPES:
        return reference.rms_norm(x, weight, eps, residual, unit_offset=unit_offset)
    size = x.shape[-1]
    rows = _as_rows(x)
    out = torch.empty(x.shape, dtype=x.dtype)
    summed = x if residual is None else torch.empty(x.shape, dtype=x.dtype)
    added = None if residual is None else _as_rows(residual)
    num_rows = rows.shape[0]
    _launch(
        _kernel("norm", write_norm, x.dtype),
        num_rows,
        x.numel(),
        (
            rows.data_ptr(),
            0 if added is None else added.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            summed.data_ptr(),
            num_rows,
            size,
            rows.stride(0),
            0 if added is None else added.stride(0),
            jit.real(eps),
            jit.real(1.0 if unit_offset else 0.0),
        ),
    )
    return out, summed


def silu_and_mul(x: Tensor) -> Tensor:
    """Gate x [T, 2I] -> [T, I]; see ``octavo.kernels.reference.act_and_mul``."""
    num_rows, half = x.shape[0], x.shape[1] // 2
    x = _as_rows(x)
    out = torch.empty(num_rows, half, dtype=x.dtype)
    arguments = (x.data_ptr(), out.data_ptr(), num_rows, half, x.stride(0))
    _launch(_kernel("gate", write_silu_and_mul, x.dtype), num_rows, x.numel(), arguments)
    return out


def rotary_and_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    *,
    unit_offset: bool = False,
) -> Tensor:
    """Normalise and rotate, write to the cache; see ``octavo.kernels.reference.rotary_and_write_kv``.

    A cache of another dtype than q, or whose heads have gaps or keys and values lie differently, is left to the reference.
    """
    is_alike = key_cache.stride() == value_cache.stride() and key_cache.stride(3) == 1
    if q.dtype not in _DTYPES or key_cache.dtype != q.dtype or not is_alike:
        return reference.rotary_and_write_kv(
            *(q, k, v, positions, cos_sin, key_cache, value_cache, slot_mapping, q_norm, k_norm, eps),
            unit_offset=unit_offset,
        )
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps, unit_offset=unit_offset)[0]
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps, unit_offset=unit_offset)[0]
    q, k, v = (_dense_heads(part) for part in (q, k, v))
    places, slots = positions.long().contiguous(), slot_mapping.long().contiguous()
    num_tokens, heads, size = q.shape
    out = torch.empty(num_tokens, heads, size, dtype=q.dtype)
    _launch(
        _kernel("rotary", write_rotary, q.dtype),
        num_tokens,
        q.numel(),
        (
            *(tensor.data_ptr() for tensor in (q, k, v, out, places, cos_sin, slots, key_cache, value_cache)),
            *(num_tokens, heads, k.shape[1], size, cos_sin.shape[-1] // 2, key_cache.shape[1]),
            *(step for part in (q, k, v) for step in part.stride()[:2]),
            *key_cache.stride()[:3],
        ),
    )
    return out


def _as_rows(x: Tensor) -> Tensor:
    """Return [..., H] as [rows, H] whose rows are dense."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _dense_heads(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()
