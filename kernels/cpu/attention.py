"""Paged attention on the CPU; ``octavo.kernels.cpu.attention_code`` is what runs."""

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cpu import jit
from octavo.kernels.cpu.attention_code import MANY, write_attention

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@cache
def _attention(dtype: str, head_size: int) -> jit.Kernel:
    return jit.compiled("attention", write_attention(dtype, head_size))


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

    A cache of another dtype than q, or whose heads have gaps or keys and values lie differently, is left to the reference.
    """
    is_alike = key_cache.stride() == value_cache.stride() and key_cache.stride(3) == 1
    if key_cache.dtype != q.dtype or q.dtype not in _DTYPES or not is_alike:
        return reference.paged_attention(
            q, key_cache, value_cache, block_tables, query_start, seq_lens, scale, window=window, softcap=softcap
        )
    q = q if q.stride(2) == 1 else q.contiguous()
    block_tables = block_tables.int() if block_tables.stride(1) == 1 else block_tables.int().contiguous()
    query_start, seq_lens = query_start.int().contiguous(), seq_lens.int().contiguous()
    num_tokens, num_heads, head_size = q.shape
    _, block_size, key_heads, _ = key_cache.shape
    group, num_rows = num_heads // key_heads, seq_lens.shape[0]
    out = torch.empty(num_tokens, num_heads, head_size, dtype=q.dtype)
    if num_tokens == 0:
        return out
    starts = query_start.tolist()
    if starts[-1] < num_tokens:
        out[starts[-1] :] = 0  # tokens of no row
    chunks = key_heads * sum(-(-(end - start) * group // MANY) for start, end in pairwise(starts))
    jit.launch(
        _attention(_DTYPES[q.dtype], head_size),
        chunks,
        (
            q.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            block_tables.data_ptr(),
            query_start.data_ptr(),
            seq_lens.data_ptr(),
            out.data_ptr(),
            num_rows,
            key_heads,
            group,
            block_size,
            q.stride(0),
            q.stride(1),
            key_cache.stride(0),
            key_cache.stride(1),
            key_cache.stride(2),
            block_tables.stride(0),
            jit.real(scale),
            window,
            jit.real(softcap),
        ),
    )
    return out
