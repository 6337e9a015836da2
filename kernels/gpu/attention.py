"""Paged attention on the GPU: one entry, a kernel for rows with one query each and one for all others.

``octavo.kernels.reference.paged_attention`` defines it:

    out[i, h] = sum_j softmax_j(score(q[i, h] . k[j, h // group] * scale)) v[j, h // group]

over the keys j that query i of its row sees, with ``score(x) = softcap * tanh(x / softcap)`` where softcap > 0.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.kernels.gpu.attention_decode import decode_kernel
from octavo.kernels.gpu.attention_prefill import prefill_kernel
from octavo.kernels.gpu.counters import counters
from octavo.kernels.gpu.launch import overlaps

LOG2_E = math.log2(math.e)


class Tuning(NamedTuple):
    """How a kernel is compiled and launched."""

    block_m: int  # lines of a tile
    block_n: int  # keys of a tile
    num_warps: int
    num_stages: int  # of the pipeline of loads
    programs: int = 0  # a multiprocessor; decode only
    max_registers: int | None = None  # a thread


class _Rows(NamedTuple):
    """Where the rows of a step lie."""

    block_tables: Tensor  # [R, max_blocks] int32
    query_start: Tensor  # [R + 1] int32
    seq_lens: Tensor  # [R] int32


class _Options(NamedTuple):
    """How scores are made."""

    scale: float
    window: int
    softcap: float


# By the size of q's elements and that of a head, rounded up to a power of two; smaller heads take the first entry.
# Chosen by measurement on an H200 for heads of 128 in bf16; the others are right and reasonable.
_DECODE = {
    (2, 64): Tuning(16, 64, 4, 4, 3),
    (2, 128): Tuning(16, 64, 4, 3, 2),
    (2, 256): Tuning(16, 32, 4, 3, 2),
    (4, 64): Tuning(16, 32, 4, 3, 3),
    (4, 128): Tuning(16, 32, 4, 3, 3),
    (4, 256): Tuning(16, 16, 4, 3, 2),
}
_PREFILL = {
    (2, 64): Tuning(128, 64, 8, 3, 0, 128),
    (2, 128): Tuning(128, 64, 8, 2, 0, 128),  # few registers: two programs a multiprocessor hide each other's softmax
    (2, 256): Tuning(128, 32, 8, 2),
    (4, 64): Tuning(32, 32, 4, 2),
    (4, 128): Tuning(32, 16, 4, 2),
    (4, 256): Tuning(16, 16, 4, 1),
}
_PREFILL_OF_FEW_TILES = {(2, 128): Tuning(128, 64, 8, 3)}
"""Where every tile has a multiprocessor for itself."""


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    num_decodes: int = 0,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Attend causally to keys and values in blocks; see ``octavo.kernels.reference.paged_attention``.

    q [T, nq, d] fp16, bf16 or fp32, of any strides over tokens and heads; caches [num_blocks, B, nkv, d] in q's dtype or
    float8_e4m3fn, of any strides that both share; in all of them d is contiguous. Returns [T, nq, d], contiguous.
    Decode rows of padding may own no query: their tokens then belong to later rows, or to none.
    Nothing is read back to the host, and the launches depend on shapes and ints alone: a captured graph may be replayed
    with other tables and lengths. Calls on one device share counters, so they must follow each other on one stream.

    Raises:
        ValueError: strides or scale are not as said, or there are more decode rows than tokens.
    """
    if key_cache.stride() != value_cache.stride() or key_cache.stride(3) != 1 or q.stride(2) != 1:
        raise ValueError("keys and values must have the same strides, and heads must be contiguous")
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}")
    if num_decodes > q.shape[0]:
        raise ValueError(f"{num_decodes} decode rows need as many tokens, got {q.shape[0]}")
    rows = _Rows(block_tables, query_start, seq_lens)
    options = _Options(scale, window, softcap)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_decodes > 0:
        _launch_decode(q, key_cache, value_cache, rows, num_decodes, options, out)
    if q.shape[0] > num_decodes or seq_lens.shape[0] > num_decodes:
        _launch_prefill(q, key_cache, value_cache, rows, num_decodes, options, out)
    return out


def _launch_decode(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: _Rows,
    num_rows: int,
    options: _Options,
    out: Tensor,
    tuning: Tuning | None = None,
) -> None:
    """Attend the first ``num_rows`` rows, whose queries are the first tokens; a row of length 0 gives zeros.

    The number of programs depends on shapes alone; how many of them find work, and how much, on the lengths.
    """
    _, num_heads, head_size = q.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    group = num_heads // num_kv_heads
    tuning = tuning or _choose(_DECODE, head_size, q.element_size())
    most_tiles = num_rows * num_kv_heads * (rows.block_tables.shape[1] * block_size // tuning.block_n + 1)
    programs = min(_num_multiprocessors(q.device) * tuning.programs, most_tiles)
    partials = torch.empty(programs * 2 * group * (head_size + 1), dtype=torch.float32, device=q.device)
    arguments = (
        q,
        key_cache,
        value_cache,
        rows.block_tables,
        rows.seq_lens,
        out,
        partials,
        counters(q.device, num_rows * num_kv_heads),
        num_rows,
        programs * 2,
        q.stride(0),
        q.stride(1),
        rows.block_tables.stride(0),
        options.scale if options.softcap > 0 else options.scale * LOG2_E,
    )
    constants = {
        "STRIDES": key_cache.stride()[:3],
        "SHAPE": (num_kv_heads, group, head_size, block_size),
        "WINDOW": options.window,
        "SOFTCAP": options.softcap,
        "BLOCK_N": tuning.block_n,
        "ROWS": _padded_rows(num_rows),
        "OVERLAP": overlaps(q),
    }
    _run(decode_kernel, (programs, 1, 1), arguments, constants, tuning)


def _launch_prefill(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: _Rows,
    num_decodes: int,
    options: _Options,
    out: Tensor,
    tuning: Tuning | None = None,
) -> None:
    """Attend the rows behind the first ``num_decodes``, and give the tokens behind all rows zeros."""
    num_tokens, num_heads, head_size = q.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    group = num_heads // num_kv_heads
    num_rows = rows.seq_lens.shape[0]
    if tuning is None:
        tuning = _choose(_PREFILL, head_size, q.element_size())
        tiles = -(-(num_tokens - num_decodes) * num_heads // tuning.block_m)
        if tiles <= _num_multiprocessors(q.device):
            tuning = _PREFILL_OF_FEW_TILES.get((q.element_size(), _power_of_two(head_size)), tuning)
    block_m = max(tuning.block_m, _power_of_two(group))
    # A row's tiles begin at (tokens before it) // queries + (rows before it): one tile a row is enough to round up.
    # Decode rows without a query (padding) leave their token to a row behind them, so all tokens count here.
    num_tiles = num_tokens // (block_m // group) + num_rows - num_decodes + 1
    arguments = (
        q,
        key_cache,
        value_cache,
        rows.block_tables,
        rows.query_start,
        rows.seq_lens,
        out,
        num_tokens,
        num_rows,
        num_decodes,
        q.stride(0),
        q.stride(1),
        rows.block_tables.stride(0),
        options.scale if options.softcap > 0 else options.scale * LOG2_E,
    )
    constants = {
        "STRIDES": key_cache.stride()[:3],
        "SHAPE": (num_kv_heads, group, head_size, block_size),
        "WINDOW": options.window,
        "SOFTCAP": options.softcap,
        "BLOCK_M": block_m,
        "BLOCK_N": tuning.block_n,
        "ROWS": _padded_rows(num_rows - num_decodes + 1),
        "OVERLAP": overlaps(q),
    }
    _run(prefill_kernel, (num_kv_heads, num_tiles, 1), arguments, constants, tuning)


_compiled: dict[tuple[Any, ...], Any] = {}


def _run(
    kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: dict[str, Any], tuning: Tuning
) -> None:
    """Launch a kernel, past Triton's own look-up of what it compiled, which takes longer than all the rest.

    What a kernel was compiled for is in the key: the constants, and of the arguments dtypes, alignment and q's strides.
    """
    q, key_cache, value_cache = arguments[:3]
    key = (
        kernel,
        tuning,
        *constants.values(),
        q.dtype,
        key_cache.dtype,
        q.device,
        q.stride(),
        (q.data_ptr() | key_cache.data_ptr() | value_cache.data_ptr()) % 16,
    )
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[grid](*arguments, *constants.values())
        return
    compiled = kernel[grid](
        *arguments,
        **constants,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        maxnreg=tuning.max_registers,
        launch_pdl=constants["OVERLAP"],
    )
    if compiled is not None:  # the interpreter returns nothing
        _compiled[key] = compiled


def _choose(table: dict[tuple[int, int], Tuning], head_size: int, element_size: int) -> Tuning:
    return table[element_size, max(64, _power_of_two(head_size))]


def _padded_rows(num_rows: int) -> int:
    """Round up coarsely: each value is a kernel of its own to compile."""
    return next((rows for rows in (32, 256) if num_rows <= rows), _power_of_two(num_rows))


def _power_of_two(number: int) -> int:
    """Round up to a power of two; Triton's own function takes microseconds."""
    return 1 << (number - 1).bit_length()


@cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter: few, so that rows are split and joined
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
