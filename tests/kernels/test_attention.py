"""Paged attention: the reference against the formula in float64, the CPU backend against the reference."""

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cpu import attention as cpu_attention

SHAPES = [(1, 1, 64), (9, 3, 64), (8, 1, 80), (6, 6, 96), (8, 2, 128)]  # query heads, KV heads, head size
ROWS = [(1, 1), (1, 17), (5, 5), (3, 40), (16, 16), (1, 64), (33, 65), (0, 9), (70, 70), (1, 130)]  # new tokens, keys


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


def test_tokens_of_no_row_give_zeros_and_an_empty_step_nothing() -> None:
    batch = Batch([(2, 2), (1, 5)], (4, 2, 64), 16)
    batch.q = torch.cat((batch.q, torch.randn(3, 4, 64)))
    for implementation in (reference.paged_attention, cpu_attention.paged_attention):
        out = implementation(*batch.arguments())
        assert torch.equal(out[3:], torch.zeros(3, 4, 64))
        q, keys, values, tables, query_start, seq_lens, scale = batch.arguments()
        nothing = implementation(q[:0], keys, values, tables[:0], query_start[:1], seq_lens[:0], scale)
        assert nothing.shape == (0, 4, 64)


@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 1, 40)])
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (20, 0.0), (0, 3.0), (33, 5.0)])
def test_cpu_windows_and_soft_caps_are_those_of_the_reference(
    heads: tuple[int, int, int], window: int, softcap: float
) -> None:
    batch = Batch(ROWS, heads, 16)
    expected = reference.paged_attention(*batch.arguments(), window=window, softcap=softcap)
    out = cpu_attention.paged_attention(*batch.arguments(), window=window, softcap=softcap)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_cpu_attention_reads_caches_that_lie_head_by_head_and_queries_with_gaps() -> None:
    batch = Batch(ROWS, (9, 3, 64), 16)
    expected = batch.formula()
    batch.caches = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in batch.caches]
    batch.q = torch.cat((batch.q, batch.q), 1)[:, :9]
    torch.testing.assert_close(cpu_attention.paged_attention(*batch.arguments()), expected, rtol=1e-4, atol=1e-5)


def test_cpu_attention_with_large_scores_stays_finite() -> None:
    batch = Batch([(1, 50), (40, 40)], (4, 2, 64), 16)
    batch.q *= 1e4
    torch.testing.assert_close(cpu_attention.paged_attention(*batch.arguments()), batch.formula(), rtol=1e-3, atol=1e-3)


def test_cpu_backend_serves_16_bit_floats_and_calls_in_and_out_of_inference_mode() -> None:
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)):
        batch = Batch([(1, 40), (9, 9), (1, 70)], (9, 3, 64), 16)
        expected = batch.formula()
        batch.q, batch.caches = batch.q.to(dtype), [cache.to(dtype) for cache in batch.caches]
        with torch.inference_mode():
            first = cpu_attention.paged_attention(*batch.arguments())
        second = cpu_attention.paged_attention(*batch.arguments())
        torch.testing.assert_close(first.float(), expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(first, second)
