"""Bits of the batch-invariant GPU operations: nothing about the rest of a step may change one token's result."""

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.activations import Activation
from octavo.worker.models.decoder import Decoder

pytest.importorskip("triton")
import octavo.kernels.gpu
from octavo.kernels.gpu import invariant
from octavo.kernels.gpu.matmul import has_descriptors
from octavo.kernels.ops import get_ops
from tests.support.gpu import load_gpu, write_tiny

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# The interpreter has no products of bf16.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
HALF_TYPES = [torch.float16, *([torch.bfloat16] if CUDA else [])]
# Output and input features; tensor descriptors cannot take lines of 36 or 3.
LINEARS = [(96, 64), (33, 36), (1, 3), *([(70, 136), (192, 576)] if CUDA else [])]
# Query heads, key heads, head size; few where they are interpreted.
HEADS = [(9, 3, 64), (4, 4, 80), (8, 1, 96), (8, 2, 128)] if CUDA else [(3, 1, 64), (2, 1, 80)]


def same_bits(left: Tensor, right: Tensor) -> bool:
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[left.element_size()]
    return torch.equal(left.contiguous().view(integers), right.contiguous().view(integers))


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(DEVICE, dtype)


def test_the_variant_has_every_operation() -> None:
    assert set(invariant.__all__) == set(octavo.kernels.gpu.__all__)
    assert get_ops("triton", batch_invariant=True) is invariant
    assert get_ops("reference", batch_invariant=True) is reference
    assert get_ops("triton") is octavo.kernels.gpu
    with pytest.raises(ValueError, match="backend 'cpu' is not batch-invariant; those are reference, triton"):
        get_ops("cpu", batch_invariant=True)


def test_a_worker_takes_the_variant_that_it_is_told_to(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model")
    for is_told, ops in ((True, invariant), (False, octavo.kernels.gpu)):
        runner = load_gpu(folder, dtype="float32", batch_invariant=is_told, enforce_eager=True)
        assert runner._ops is ops
        assert isinstance(runner._model, Decoder)
        assert runner._model._ops is ops


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LINEARS, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 17, 65])
def test_a_product_is_that_of_the_formula(shape: tuple[int, int], dtype: torch.dtype, num_tokens: int) -> None:
    torch.manual_seed(0)
    x, weight = random(num_tokens, shape[1], dtype=dtype), random(*shape, dtype=dtype, scale=shape[1] ** -0.5)
    for bias in (None, random(shape[0], dtype=dtype)):
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        out = invariant.linear(x, weight, bias)
        assert out.shape == exact.shape
        torch.testing.assert_close(out.double(), exact, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LINEARS, ids=str)
def test_a_product_is_the_same_among_any_number_of_tokens(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight, bias, x = random(*shape, dtype=dtype), random(shape[0], dtype=dtype), random(40, shape[1], dtype=dtype)
    expected = torch.cat([invariant.linear(row[None], weight, bias) for row in x])
    for count in range(1, 41, 1 if CUDA else 6):
        assert same_bits(invariant.linear(x[:count], weight, bias), expected[:count]), count
        assert same_bits(invariant.linear(x[40 - count :], weight, bias), expected[40 - count :]), count


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_a_product_is_the_same_at_every_place_beside_all_neighbours(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    weight, row = random(96, 64, dtype=dtype), random(64, dtype=dtype)
    alone = invariant.linear(row[None], weight)[0]
    for count in (2, 33, 64, 130):
        for place in {0, 1, 7, 8, 15, count // 2, count - 1} & set(range(count)):
            x = random(count, 64, dtype=dtype, scale=100.0)
            x[place - 1] = float("nan")
            x[place] = row
            assert same_bits(invariant.linear(x, weight)[place], alone), (count, place)


@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("shape", [(4096, 4096), (1024, 3072), (6144, 1000), (5000, 14336)], ids=str)
def test_a_large_product_is_the_same_among_any_number_of_tokens(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    weight = torch.randn(shape, device=DEVICE, dtype=dtype)
    # Sums of which much cancels out, so that their order shows.
    x = (
        torch.randn(8192, shape[1], device=DEVICE, dtype=dtype)
        * torch.rand(shape[1], device=DEVICE, dtype=dtype).exp2()
    )
    assert has_descriptors(weight)
    whole = invariant.linear(x, weight)
    counts = (1, 2, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 129, 256, 511, 512, 513, 1000, 1024, 1025, 4097)
    for count in counts:
        for start in (0, 77, 8192 - count):
            part = x[start : start + count]
            assert same_bits(invariant.linear(part, weight), whole[start : start + count]), (count, start)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 36, 1000])
def test_norm_and_gate_are_the_same_among_any_number_of_tokens(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, weight = random(48, 2 * width, dtype=dtype, scale=3.0), random(2 * width, dtype=dtype)
    operations: list[Callable[[Tensor], Tensor]] = [
        lambda rows: invariant.rms_norm(rows, weight, 1e-5, rows)[0],
        lambda rows: invariant.layer_norm(rows, weight, weight, 1e-5, rows)[0],
        invariant.act_and_mul,
    ]
    for operation in operations:
        expected = operation(x)
        for count, start in ((1, 0), (1, 5), (2, 11), (3, 40), (7, 1), (16, 16), (17, 31), (47, 1)):
            rows = x[start : start + count].clone()
            assert same_bits(operation(rows), expected[start : start + count]), (count, start)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_activations_are_the_same_among_any_number_of_tokens(activation: Activation, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x = random(17, 37, dtype=dtype, scale=3.0)
    expected = invariant.act(x, activation)
    for count, start in ((1, 0), (1, 16), (2, 11), (7, 1)):
        rows = x[start : start + count].clone()
        assert same_bits(invariant.act(rows, activation), expected[start : start + count]), (count, start)


def rotate(fused: Tensor, positions: Tensor, heads: tuple[int, int, int], norm: Tensor) -> tuple[Tensor, Tensor]:
    """Return the queries of fused projections [T, ...], and the cache with token t in slot t."""
    num_heads, num_kv_heads, head_size = heads
    q, k, v = (
        part.unflatten(1, (-1, head_size))
        for part in fused.split([n * head_size for n in (num_heads, num_kv_heads, num_kv_heads)], dim=1)
    )
    table = invariant.rotary_cos_sin(1e4 ** -(torch.arange(0, head_size, 2) / head_size), 128).to(DEVICE)
    caches = torch.zeros(2, 12, num_kv_heads, 4, head_size, dtype=fused.dtype, device=DEVICE).transpose(2, 3)
    slots = torch.arange(len(fused), device=DEVICE)
    out = invariant.rotary_and_write_kv(q, k, v, positions, table, caches[0], caches[1], slots, norm, norm, 1e-6)
    return out, caches[0].flatten(0, 1)[: len(fused)]


@pytest.mark.parametrize("heads", HEADS[:2], ids=str)
def test_rotated_heads_are_the_same_among_any_number_of_tokens(heads: tuple[int, int, int]) -> None:
    torch.manual_seed(4)
    fused = random(40, (heads[0] + 2 * heads[1]) * heads[2], dtype=HALF_TYPES[-1])
    positions, norm = torch.arange(40, device=DEVICE, dtype=torch.int32) * 3, random(heads[2], dtype=HALF_TYPES[-1])
    expected = rotate(fused, positions, heads, norm)
    for count, start in ((1, 0), (1, 37), (2, 11), (7, 1), (16, 16), (39, 1)):
        part = slice(start, start + count)
        for ours, whole in zip(rotate(fused[part].clone(), positions[part], heads, norm), expected, strict=True):
            assert same_bits(ours, whole[part]), (count, start)


class Sequence:
    """One sequence of queries, keys and values, to be computed in any pieces, in any blocks."""

    def __init__(self, heads: tuple[int, int, int], length: int, seed: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.heads, self.dtype = heads, dtype
        self.q = torch.randn(length, heads[0], heads[2], generator=generator) * 2
        self.k, self.v = torch.randn(2, length, heads[1], heads[2], generator=generator)


Piece = tuple[Sequence, int, int]


def attend(
    pieces: list[Piece], block_size: int = 16, seed: int = 0, extra_tokens: int = 0, window: int = 0
) -> list[Tensor]:
    """Compute queries [begin, end) of each sequence in one step; blocks are shuffled, free slots hold NaN.

    As the worker does, the number of rows with one query that come first is told.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-end // block_size) for _, _, end in pieces]
    order = (torch.randperm(sum(counts), generator=generator) + 1).int()
    tables = torch.full((len(pieces), max(counts) + 1), 1 << 30, dtype=torch.int32)  # must never be followed
    sequence = pieces[0][0]
    num_kv_heads, head_size = sequence.heads[1:]
    keys, values = torch.full((2, sum(counts) + 1, block_size, num_kv_heads, head_size), float("nan"))
    for row, (part, (owner, _, end)) in enumerate(zip(torch.split(order, counts), pieces, strict=True)):
        tables[row, : len(part)] = part
        place = torch.arange(end)
        blocks = part.long()[place // block_size]
        keys[blocks, place % block_size] = owner.k[:end]
        values[blocks, place % block_size] = owner.v[:end]
    sizes = [end - begin for _, begin, end in pieces]
    num_decodes = next((i for i, size in enumerate(sizes) if size != 1), len(sizes))
    queries = [owner.q[begin:end] for owner, begin, end in pieces]
    queries.append(torch.full((extra_tokens, *queries[0].shape[1:]), float("nan")))
    key_cache, value_cache = (
        cache.to(DEVICE, sequence.dtype).transpose(1, 2).contiguous().transpose(1, 2) for cache in (keys, values)
    )
    out = invariant.paged_attention(
        torch.cat(queries).to(DEVICE, sequence.dtype),
        key_cache,
        value_cache,
        tables.to(DEVICE),
        torch.tensor([0, *sizes]).cumsum(0).int().to(DEVICE),
        torch.tensor([end for _, _, end in pieces]).int().to(DEVICE),
        head_size**-0.5,
        num_decodes=num_decodes,
        window=window,
    )
    assert not out[sum(sizes) :].any()
    return list(torch.split(out[: sum(sizes)], sizes))


@pytest.mark.parametrize("dtype", DTYPES if CUDA else [torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "window"), [(HEADS[0], 21), *((heads, 0) for heads in HEADS)], ids=str)
def test_attention_is_the_same_in_chunks_of_any_size(
    heads: tuple[int, int, int], dtype: torch.dtype, window: int
) -> None:
    length = 300 if CUDA else 75
    sequence = Sequence(heads, length, 4, dtype)
    (whole,) = attend([(sequence, 0, length)], window=window)
    every = [[1] * length, [7] * 99, [64] * 9, [1, 999], [33, 1, 1, 30, 1, 999], [33] * 99]
    for chunks in every if CUDA else every[2:5]:
        done = 0
        for step, chunk in enumerate(chunks):
            end = min(length, done + chunk)
            if end > done:
                (part,) = attend([(sequence, done, end)], seed=step, window=window)
                assert same_bits(part, whole[done:end]), (chunk, done)
            done = end
        assert done == length


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_is_the_same_in_any_company_and_any_blocks(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    longer = 9 if CUDA else 1
    lengths = (1, 70 * longer, 65 * longer, 40 * longer, 17, 69 * longer)
    sequences = [Sequence(heads, length, length, dtype) for length in lengths]
    pieces = [
        (s, max(0, len(s.q) - n), len(s.q)) for s, n in zip(sequences, (1, 1, 33, 40 * longer, 1, 20), strict=True)
    ]
    alone = [attend([piece], 16, seed=1)[0] for piece in pieces]
    for seed, block_size in ((2, 16), (3, 1), (4, 8)) if CUDA else ((3, 1), (4, 8)):
        order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed)).tolist()
        order.sort(key=lambda i: pieces[i][2] - pieces[i][1] != 1)
        together = attend([pieces[i] for i in order], block_size, seed, extra_tokens=5)
        for i, part in zip(order, together, strict=True):
            assert same_bits(part, alone[i]), (i, block_size)


@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("num_rows", [30, 60, 300])
def test_attention_is_the_same_beside_many_rows(num_rows: int, dtype: torch.dtype) -> None:
    sequences = [Sequence((8, 2, 128), 50 + 7 * row, row, dtype) for row in range(num_rows)]
    pieces = [(s, len(s.q) - (1 if row < 25 else 40), len(s.q)) for row, s in enumerate(sequences)]
    together = attend(pieces)
    for row in (0, 3, 24, 25, num_rows - 1):
        assert same_bits(together[row], attend([pieces[row]], seed=row)[0]), row
        sequence, begin, end = pieces[row]
        assert same_bits(together[row][-1:], attend([(sequence, end - 1, end)], seed=row)[0]), row
        assert begin < end


def test_what_logits_give_is_the_same_among_any_number_of_lines() -> None:
    torch.manual_seed(5)
    vocabulary = 128256 if CUDA else 600
    logits = random(9, vocabulary, scale=4.0)
    ids = torch.arange(9, device=DEVICE) * 100
    half, k = torch.full((9,), 0.9, device=DEVICE), torch.full((9,), 40, device=DEVICE)

    def results(part: slice) -> list[Tensor]:
        lines = logits[part].clone()
        logprob, rank, top_ids, top_logprobs = invariant.logprobs(lines, ids[part], 5)
        invariant.filter_logits(lines, half[part], half[part] * 0.01, k[part], half[part])
        drawn = invariant.sample(lines, half[part], ids[part], ids[part], ids[part])
        return [logprob, rank, top_ids, top_logprobs, lines, drawn]

    together = results(slice(0, 9))
    for begin, end in [*((row, row + 1) for row in range(9)), (0, 4), (3, 8)] if CUDA else [(2, 3), (3, 8)]:
        for ours, whole in zip(results(slice(begin, end)), together, strict=True):
            assert same_bits(ours, whole[begin:end]), (begin, end)
