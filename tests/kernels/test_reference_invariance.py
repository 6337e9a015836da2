"""Bits of the reference backend: nothing about the rest of a step may change one token's result."""

from collections.abc import Callable, Iterator
from typing import get_args

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference, sampling
from octavo.kernels.activations import Activation

# Output and input features: the demo model's projections, fused or not, its head, and odd ones.
LINEARS = [(576, 576), (192, 576), (960, 576), (1536, 576), (3072, 576), (576, 1536), (33, 40), (1, 3)]
HEAD = (49152, 576)
DTYPES = [torch.float32, torch.bfloat16]
HEADS = [(9, 3, 64), (4, 4, 80), (8, 1, 96), (8, 2, 128)]  # query heads, key heads, head size


@pytest.fixture(autouse=True, params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def same_bits(left: Tensor, right: Tensor) -> bool:
    integers = {4: torch.int32, 2: torch.int16}[left.element_size()]
    return torch.equal(left.contiguous().view(integers), right.contiguous().view(integers))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*LINEARS, HEAD], ids=str)
def test_a_product_is_the_same_at_every_place_beside_all_neighbours(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    row = torch.randn(shape[1]).to(dtype)
    alone = reference.linear(row[None], weight, bias)[0]
    for place in range(reference.LINEAR_TILE_ROWS):
        x = torch.randn(reference.LINEAR_TILE_ROWS, shape[1]).to(dtype) * 5
        x[place] = row
        assert same_bits(reference.linear(x, weight, bias)[place], alone), place


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(576, 576), (960, 576), (576, 1536), (33, 40)], ids=str)
def test_a_product_is_the_same_among_any_number_of_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    weight, x = torch.randn(shape).to(dtype), torch.randn(40, shape[1]).to(dtype)
    expected = torch.cat([reference.linear(row[None], weight) for row in x])
    for count in range(1, 41):
        assert same_bits(reference.linear(x[:count], weight), expected[:count]), count
        assert same_bits(reference.linear(x[40 - count :], weight), expected[40 - count :]), count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1536, 64, 33, 2048, 8192])
def test_norm_and_gate_are_the_same_among_any_number_of_rows(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, weight = (torch.randn(48, 2 * width) * 3).to(dtype), torch.randn(2 * width).to(dtype)
    operations: list[Callable[[Tensor], Tensor]] = [
        lambda rows: reference.rms_norm(rows, weight, 1e-5, rows)[0],
        lambda rows: reference.layer_norm(rows, weight, weight, 1e-5, rows)[0],
        reference.act_and_mul,
    ]
    for operation in operations:
        expected = operation(x)
        for count in (1, 2, 3, 7, 16, 17, 31, 47):
            for start in range(0, 48 - count, 5):
                rows = x[start : start + count].clone()
                assert same_bits(operation(rows), expected[start : start + count]), (count, start)


@pytest.mark.parametrize("activation", get_args(Activation))
def test_activations_agree_in_vectors_and_their_remainders(activation: Activation) -> None:
    torch.manual_seed(6)
    x = torch.randn(4000, 2 * 17) * 3  # 17 is a vector and one more
    gated, plain = reference.act_and_mul(x, activation), reference.act(x[:, :17], activation)
    for row in range(0, 4000, 16):
        line = slice(row, row + 1)
        assert same_bits(reference.act_and_mul(x[line], activation), gated[line]), row
        assert same_bits(reference.act(x[line, :17].clone(), activation), plain[line]), row


class Sequence:
    """One sequence of queries, keys and values, to be computed in any pieces, in any blocks."""

    def __init__(self, heads: tuple[int, int, int], length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.heads = heads
        self.q = torch.randn(length, heads[0], heads[2], generator=generator) * 2
        self.k, self.v = torch.randn(2, length, heads[1], heads[2], generator=generator)


def attend(pieces: list[tuple[Sequence, int, int]], block_size: int, seed: int) -> list[Tensor]:
    """Compute queries [begin, end) of each sequence in one step; blocks are shuffled, free slots hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-end // block_size) for _, _, end in pieces]
    order = (torch.randperm(sum(counts), generator=generator) + 1).int()
    tables = torch.full((len(pieces), max(counts) + 1), -1, dtype=torch.int32)  # -1: must never be followed
    num_kv_heads, head_size = pieces[0][0].heads[1:]
    keys, values = torch.full((2, sum(counts) + 1, block_size, num_kv_heads, head_size), float("nan"))
    for row, (part, (sequence, _, end)) in enumerate(zip(torch.split(order, counts), pieces, strict=True)):
        tables[row, : len(part)] = part
        place = torch.arange(end)
        blocks = part.long()[place // block_size]
        keys[blocks, place % block_size] = sequence.k[:end]
        values[blocks, place % block_size] = sequence.v[:end]
    sizes = [end - begin for _, begin, end in pieces]
    out = reference.paged_attention(
        torch.cat([sequence.q[begin:end] for sequence, begin, end in pieces]),
        keys,
        values,
        tables,
        torch.tensor([0, *sizes]).cumsum(0).int(),
        torch.tensor([end for _, _, end in pieces]).int(),
        head_size**-0.5,
    )
    return list(torch.split(out, sizes))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_is_the_same_in_chunks_of_any_size(heads: tuple[int, int, int]) -> None:
    length = 80
    sequence = Sequence(heads, length, seed=4)
    (whole,) = attend([(sequence, 0, length)], 16, seed=0)
    for chunks in ([1] * length, [7] * 11 + [3], [64, 16], [1, 79], [17, 50, 13]):
        done = 0
        for step, chunk in enumerate(chunks):
            (part,) = attend([(sequence, done, done + chunk)], 16, seed=step)
            assert same_bits(part, whole[done : done + chunk]), (chunk, done)
            done += chunk


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_is_the_same_in_any_company_and_any_blocks(heads: tuple[int, int, int]) -> None:
    sequences = [Sequence(heads, length, seed=length) for length in (1, 200, 65, 70, 17, 129)]
    pieces = [
        (s, max(0, s.q.shape[0] - n), s.q.shape[0]) for s, n in zip(sequences, (1, 1, 33, 70, 1, 40), strict=True)
    ]
    alone = [attend([piece], 16, seed=1)[0] for piece in pieces]
    for seed, block_size in ((2, 16), (3, 1), (4, 5)):
        order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed)).tolist()
        together = attend([pieces[i] for i in order], block_size, seed)
        for i, part in zip(order, together, strict=True):
            assert same_bits(part, alone[i]), (i, block_size)


def test_log_probabilities_are_the_same_among_any_number_of_rows() -> None:
    torch.manual_seed(5)
    logits = torch.randn(9, 49152) * 4
    ids = torch.arange(9) * 5000
    together = sampling.logprobs(logits, ids, 5)
    for row in range(9):
        alone = sampling.logprobs(logits[row : row + 1].clone(), ids[row : row + 1], 5)
        assert same_bits(alone[0], together[0][row : row + 1])
        assert same_bits(alone[3], together[3][row : row + 1])
        assert alone[1].tolist() == [together[1][row].item()]
        assert torch.equal(alone[2], together[2][row : row + 1])
