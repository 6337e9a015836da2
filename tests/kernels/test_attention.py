"""Paged attention: the reference against the formula in float64, the CPU backend against the reference."""

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cpu import attention as cpu_attention

SHAPES = [(1, 1, 64), (9, 3, 64), (8, 1, 80), (6, 6, 96), (16, 4, 128)]  # query heads, KV heads, head size
ROWS = [(1, 1), (1, 17), (5, 5), (3, 40), (16, 16), (1, 64), (33, 65), (70, 70), (1, 130)]  # new tokens, keys


class Batch:
    """Ragged rows over shuffled blocks; every slot that no row owns holds a NaN."""

    def __init__(
        self, rows: list[tuple[int, int]], heads: tuple[int, int, int], block_size: int, seed: int = 0
    ) -> None:
        torch.manual_seed(seed)
        num_heads, num_kv_heads, head_size = heads
        blocks = [-(-keys // block_size) for _, keys in rows]
        order = (torch.randperm(sum(blocks)) + 1).tolist()
        self.tables = torch.zeros(len(rows), max(blocks) + 2, dtype=torch.int32)
        self.caches = [torch.full((sum(blocks) + 1, block_size, num_kv_heads, head_size), float("nan")) for _ in "kv"]
        self.keys, self.values = ([torch.randn(n, num_kv_heads, head_size) for _, n in rows] for _ in "kv")
        for row, count in enumerate(blocks):
            table = [order.pop() for _ in range(count)]
            self.tables[row, :count] = torch.tensor(table)
            for i in range(rows[row][1]):
                self.caches[0][table[i // block_size], i % block_size] = self.keys[row][i]
                self.caches[1][table[i // block_size], i % block_size] = self.values[row][i]
        self.q = torch.randn(sum(n for n, _ in rows), num_heads, head_size)
        self.query_start = torch.tensor([0, *(n for n, _ in rows)]).cumsum(0).int()
        self.seq_lens = torch.tensor([n for _, n in rows]).int()
        self.scale = head_size**-0.5

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float]:
        return self.q, *self.caches, self.tables, self.query_start, self.seq_lens, self.scale

    def formula(self) -> Tensor:
        out = []
        for row, length in enumerate(self.seq_lens.tolist()):
            q = self.q[self.query_start[row] : self.query_start[row + 1]].double()
            group = q.shape[1] // self.keys[row].shape[1]
            k = self.keys[row].double().repeat_interleave(group, 1)
            v = self.values[row].double().repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
            hidden = torch.arange(length)[None] > torch.arange(length - len(q), length)[:, None]
            out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v))
        return torch.cat(out).float()


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("heads", SHAPES)
def test_both_backends_compute_the_formula(heads: tuple[int, int, int], block_size: int) -> None:
    batch = Batch(ROWS, heads, block_size)
    expected = batch.formula()
    torch.testing.assert_close(reference.paged_attention(*batch.arguments()), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cpu_attention.paged_attention(*batch.arguments()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", [reference.paged_attention, cpu_attention.paged_attention])
def test_an_empty_row_gives_zeros(implementation: object) -> None:
    batch = Batch([(2, 2), (1, 1), (3, 20)], (4, 2, 64), 16)
    batch.seq_lens[1] = 0
    out = implementation(*batch.arguments())  # type: ignore[operator]
    assert torch.equal(out[2], torch.zeros(4, 64))
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("heads", SHAPES)
def test_the_bits_depend_on_nothing_but_the_sequence(heads: tuple[int, int, int]) -> None:
    whole = Batch([(150, 150)], heads, 16)
    expected = reference.paged_attention(*whole.arguments())
    for chunks in ([1] * 150, [7] * 21 + [3], [64, 64, 22], [16, 100, 34]):
        done = 0
        for chunk in chunks:
            q, keys, values, tables, _, _, scale = whole.arguments()
            done += chunk
            part = reference.paged_attention(
                q[done - chunk : done],
                keys,
                values,
                tables,
                torch.tensor([0, chunk], dtype=torch.int32),
                torch.tensor([done], dtype=torch.int32),
                scale,
            )
            assert torch.equal(part, expected[done - chunk : done]), (chunks, done)
    # Company: the same rows among others, in blocks of another size and order.
    alone = Batch([(33, 65)], heads, 16, seed=3)
    crowd = Batch([(33, 65), (1, 200), (70, 70)], heads, 4, seed=4)
    crowd.q[:33] = alone.q
    for cache, rows in zip(crowd.caches, (alone.keys, alone.values), strict=True):
        for i in range(65):
            cache[crowd.tables[0, i // 4], i % 4] = rows[0][i]
    assert torch.equal(
        reference.paged_attention(*crowd.arguments())[:33], reference.paged_attention(*alone.arguments())
    )
