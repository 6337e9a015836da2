"""Allowed ids and biases, as pairs (row, id), and masks of bits, applied to logits without a host synchronisation."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_PAIRS = 128  # that are looked through at a time
_PAIRS_A_PROGRAM = 16
_OTHERS = tl.constexpr(_PAIRS)


@triton.jit(do_not_specialize_on_alignment=["rows"], do_not_specialize=["num_pairs"])
def _forbid_rows_kernel(logits, rows, logits_stride, vocabulary, num_pairs, BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    """Set the program's chunk of its row to -inf if any pair names the row."""
    row = tl.program_id(0)
    is_named = row * 0
    first = row * 0
    while first < num_pairs:
        pairs = first + tl.arange(0, PAIRS)
        named = tl.load(rows + pairs, mask=pairs < num_pairs, other=-1)
        is_named += tl.sum((named == row).to(tl.int32), axis=0)
        first = tl.where(is_named > 0, num_pairs, first + PAIRS)
    if is_named > 0:
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        place = logits + row.to(tl.int64) * logits_stride + ids
        tl.store(place, tl.full([BLOCK], float("-inf"), tl.float32), mask=ids < vocabulary)


@triton.jit(do_not_specialize_on_alignment=["rows", "ids", "values"], do_not_specialize=["num_pairs"])
def _bias_kernel(logits, rows, ids, values, logits_stride, num_pairs, PAIRS: tl.constexpr):
    """Add, at each place that the program's pairs are the first to name, the sum of all its values."""
    mine = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = mine < num_pairs
    my_row, my_id = tl.load(rows + mine, mask=inside, other=-1), tl.load(ids + mine, mask=inside, other=-1)
    total = tl.zeros([PAIRS], tl.float32)
    num_before = tl.zeros([PAIRS], tl.int32)
    first = tl.program_id(0) * 0
    while first < num_pairs:
        other = first + tl.arange(0, _OTHERS)
        exists = other < num_pairs
        other_row, other_id = tl.load(rows + other, mask=exists, other=-2), tl.load(ids + other, mask=exists, other=-2)
        value = tl.load(values + other, mask=exists, other=0.0)
        is_same = (my_row[:, None] == other_row[None, :]) & (my_id[:, None] == other_id[None, :])
        total += tl.sum(tl.where(is_same, value[None, :], 0.0), axis=1)
        num_before += tl.sum((is_same & (other[None, :] < mine[:, None])).to(tl.int32), axis=1)
        first += _OTHERS
    is_first = inside & (num_before == 0)
    place = logits + my_row.to(tl.int64) * logits_stride + my_id
    tl.store(place, tl.load(place, mask=is_first, other=0.0) + total, mask=is_first)


@triton.jit(do_not_specialize_on_alignment=["rows", "words"])
def _mask_kernel(logits, rows, words, logits_stride, vocabulary, num_words, BLOCK: tl.constexpr):
    """Set to -inf, in the program's chunk of the row that its line of words is for, the ids without a bit."""
    line = tl.program_id(0)
    row = tl.load(rows + line)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + line.to(tl.int64) * num_words + ids // 32, mask=ids // 32 < num_words, other=0)
    is_forbidden = ((word >> (ids % 32)) & 1) == 0
    place = logits + row * logits_stride + ids
    tl.store(place, tl.full([BLOCK], float("-inf"), tl.float32), mask=is_forbidden & (ids < vocabulary))


def _check(logits: Tensor) -> None:
    if logits.dtype != torch.float32 or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise ValueError("masks and biases take fp32 logits with contiguous rows")


def apply_allowed(logits: Tensor, rows: Tensor, ids: Tensor) -> None:
    """In the rows named by the pairs (rows [n], ids [n]) int64, set to -inf every id that no pair names. In place.

    Raises:
        ValueError: logits are not fp32, or a row is not contiguous.
    """
    _check(logits)
    num_pairs, vocabulary = rows.numel(), logits.shape[1]
    if num_pairs == 0:
        return
    kept = logits[rows, ids]
    grid = (logits.shape[0], triton.cdiv(vocabulary, _BLOCK))
    _forbid_rows_kernel[grid](
        logits, rows, logits.stride(0), vocabulary, num_pairs, BLOCK=_BLOCK, PAIRS=_PAIRS, num_warps=4
    )
    logits.index_put_((rows, ids), kept)


def apply_token_mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Set to -inf, in the rows [G] int64 (each once) of logits [S, V], the ids without a bit in words [G, W]. In place.

    Bit i of words[g, j], int32, stands for id 32 j + i; ids beyond the words have no bit.

    Raises:
        ValueError: logits are not fp32, a row is not contiguous, or the words are no contiguous int32.
    """
    _check(logits)
    if words.dtype != torch.int32 or not words.is_contiguous():
        raise ValueError("masks are contiguous int32")
    vocabulary, (num_lines, num_words) = logits.shape[1], words.shape
    if num_lines == 0:
        return
    grid = (num_lines, triton.cdiv(vocabulary, _BLOCK))
    _mask_kernel[grid](logits, rows, words, logits.stride(0), vocabulary, num_words, BLOCK=_BLOCK, num_warps=4)


def apply_logit_bias(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add values [n] fp32 (finite, or -inf to forbid) at (rows [n], ids [n]) int64 of logits [S, V]. In place.

    Values of one place are added up first, in an order that depends on nothing but the pairs.

    Raises:
        ValueError: logits are not fp32, or a row is not contiguous.
    """
    _check(logits)
    num_pairs = rows.numel()
    if num_pairs == 0:
        return
    _bias_kernel[(triton.cdiv(num_pairs, _PAIRS_A_PROGRAM),)](
        logits, rows, ids, values, logits.stride(0), num_pairs, PAIRS=_PAIRS_A_PROGRAM, num_warps=4
    )
