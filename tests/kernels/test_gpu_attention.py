"""Triton's paged attention, compiled or interpreted, and the reference's window and soft cap, against the formula."""

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.cpu import attention as cpu_attention
from octavo.kernels.gpu import attention
from octavo.kernels.gpu.counters import counters

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if ON_GPU else [torch.float32, torch.float16]
LONG = 20 if ON_GPU else 1
"""By how much rows are longer where they are not interpreted."""

SHAPES = [(4, 4, 64), (9, 3, 80), (8, 2, 96), (8, 1, 128), (6, 2, 160), (4, 1, 256)]
"""Query heads, KV heads, head size."""

MIXED = [(1, 37), (1, 0), (1, 130), (1, 1), (5, 70), (0, 9), (1, 20), (33, 33), (40, 91)]
"""New tokens and keys of rows; the first four are decode rows, the second of them padding."""

FOREIGN = 1 << 30
"""A block that does not exist: must never be followed."""


class Step:
    """Rows over shuffled blocks: every slot that no row owns holds NaN, tables hold foreign blocks behind their ends."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        heads: tuple[int, int, int] = (8, 2, 64),
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        heads_first: bool = True,
        seed: int = 0,
        extra_tokens: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads, head_size = heads
        counts = [-(-keys // block_size) for _, keys in rows]
        order = (torch.randperm(sum(counts), generator=generator) + 1).int()
        self.rows = rows
        self.tables = torch.full((len(rows), max(counts) + 2), FOREIGN, dtype=torch.int32)
        shape = (sum(counts) + 1, block_size, num_kv_heads, head_size)
        self.caches = []
        self.contents: list[list[Tensor]] = []
        for _ in "kv":
            cache = torch.full(shape, float("nan"))
            contents = []
            for row, table in enumerate(torch.split(order, counts)):
                self.tables[row, : len(table)] = table
                place = torch.arange(rows[row][1])
                content = torch.randn(rows[row][1], num_kv_heads, head_size, generator=generator)
                content = content.to(cache_dtype or dtype).to(dtype)
                cache[table.long()[place // block_size], place % block_size] = content.float()
                contents.append(content.double())
            cache = cache.to(dtype).to(cache_dtype or dtype).to(DEVICE)
            self.caches.append(cache.transpose(1, 2).contiguous().transpose(1, 2) if heads_first else cache)
            self.contents.append(contents)
        num_tokens = sum(n for n, _ in rows) + extra_tokens
        # Queries are a view of the projection's output, as the models hand them over.
        fused = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_size, generator=generator)
        fused = fused.to(dtype).to(DEVICE)
        self.q = fused[:, : num_heads * head_size].unflatten(1, (num_heads, head_size))
        self.tables = self.tables.to(DEVICE)
        self.query_start = torch.tensor([0, *(n for n, _ in rows)]).cumsum(0).int().to(DEVICE)
        self.seq_lens = torch.tensor([n for _, n in rows]).int().to(DEVICE)
        self.scale = head_size**-0.5

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float]:
        return self.q, *self.caches, self.tables, self.query_start, self.seq_lens, self.scale

    def formula(self, window: int = 0, softcap: float = 0.0) -> Tensor:
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        start = 0
        for row, (count, length) in enumerate(self.rows):
            q = self.q[start : start + count].cpu().double()
            if count and length:
                k, v = (c[row].repeat_interleave(q.shape[1] // c[row].shape[1], 1) for c in self.contents)
                scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
                if softcap > 0:
                    scores = softcap * torch.tanh(scores / softcap)
                key, last = torch.arange(length), torch.arange(length - count, length)[:, None]
                hidden = (key > last) | (key <= last - window if window > 0 else False)
                weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
                out[start : start + count] = torch.einsum("hqk,khd->qhd", weights, v)
            start += count
        return out


def check(step: Step, num_decodes: int, window: int = 0, softcap: float = 0.0) -> Tensor:
    out = attention.paged_attention(*step.arguments(), num_decodes=num_decodes, window=window, softcap=softcap)
    tolerance = TOLERANCE[step.q.dtype]
    torch.testing.assert_close(out.cpu().double(), step.formula(window, softcap), rtol=tolerance, atol=tolerance)
    assert not counters(step.q.device, 1).any()
    return out


def longer(rows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(new, keys + keys // 2 * LONG) if keys > 60 else (new, keys) for new, keys in rows]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_mixed_rows(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(Step(longer(MIXED), heads, dtype=dtype), num_decodes=4)


@pytest.mark.parametrize("heads_first", [False, True], ids=["slots first", "heads first"])
@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_block_sizes_and_layouts(block_size: int, heads_first: bool) -> None:
    check(Step(longer(MIXED), (8, 2, 64), block_size, heads_first=heads_first, dtype=DTYPES[-1]), num_decodes=4)


@pytest.mark.parametrize("num_decodes", [0, 2, 4])
def test_the_hint_changes_no_result(num_decodes: int) -> None:
    check(Step(MIXED, (4, 2, 64)), num_decodes)


@pytest.mark.parametrize("others", [[(5, 70)], [(1, 20), (40, 91)], []])
def test_decode_rows_of_padding_without_a_query(others: list[tuple[int, int]]) -> None:
    """As in captured steps that hold fewer decode rows than they have room for: later rows own their tokens."""
    step = Step([(1, 37), (0, 0), (0, 0), *others], (4, 2, 64), extra_tokens=0 if others else 2)
    check(step, num_decodes=3)


@pytest.mark.parametrize("window", [1, 16, 50])
def test_window(window: int) -> None:
    check(Step(longer(MIXED), (4, 2, 64)), 4, window=window)


def test_soft_cap() -> None:
    step = Step(MIXED, (4, 2, 64))
    step.scale = 3.0
    out = check(step, 4, window=60, softcap=5.0)
    assert not torch.allclose(out.double().cpu(), step.formula(window=60), atol=1e-2)


@pytest.mark.parametrize("implementation", [reference.paged_attention, cpu_attention.paged_attention])
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (40, 0.0), (0, 4.0), (70, 30.0)])
def test_window_and_soft_cap_of_the_reference(implementation: object, window: int, softcap: float) -> None:
    step = Step(MIXED, (4, 2, 64), heads_first=False)
    step.scale = 1.5
    arguments = [x.cpu() if isinstance(x, Tensor) else x for x in step.arguments()]
    options = {"window": window, "softcap": softcap, "num_decodes": 4}
    out = implementation(*arguments, **options)  # type: ignore[operator]
    # Products added up in another order than the reference's are some 1e-5 off where one score outweighs all others.
    bound = 1e-5 if implementation is reference.paged_attention else 2e-5
    torch.testing.assert_close(out.double(), step.formula(window, softcap), rtol=1e-5, atol=bound)


@pytest.mark.parametrize("implementation", [reference.paged_attention, cpu_attention.paged_attention])
def test_float8_caches_of_the_reference(implementation: object) -> None:
    step = Step(MIXED, (4, 2, 64), cache_dtype=torch.float8_e4m3fn)
    out = implementation(*(x.cpu() if isinstance(x, Tensor) else x for x in step.arguments()))  # type: ignore[operator]
    torch.testing.assert_close(out.double(), step.formula(), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter knows no float8")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(8, 2, 128), (4, 4, 80)], ids=str)
def test_float8_caches(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(Step(longer(MIXED), heads, dtype=dtype, cache_dtype=torch.float8_e4m3fn), num_decodes=4)


def test_tokens_behind_the_rows_and_empty_steps_give_zeros() -> None:
    for rows, num_decodes in (([(1, 5), (1, 0)], 2), (MIXED, 4), ([(0, 0)], 0), ([(1, 0)], 0)):
        out = check(Step(rows, (4, 2, 64), extra_tokens=70), num_decodes)
        assert not out[sum(n for n, _ in rows) :].any()
    step = Step([(0, 5)], (4, 2, 64))
    assert attention.paged_attention(*step.arguments()).shape == (0, 4, 64)


@pytest.mark.parametrize("lens", [[900 * LONG], [1, 0, 700 * LONG, 0, 0, 3], [0, 0], [16, 17, 300, 64, 65, 128, 1]])
def test_decode_rows_of_very_different_lengths(lens: list[int]) -> None:
    step = Step([(1, n) for n in lens], (4, 2, 64), dtype=DTYPES[-1])
    first = check(step, len(lens))
    assert torch.equal(first, check(step, len(lens)))


def test_more_pieces_than_are_combined_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_num_multiprocessors", lambda device: 50)
    check(Step([(1, 2500), (1, 70)], (4, 1, 256)), 2)


def test_nothing_is_written_around_the_output() -> None:
    step = Step([(1, 37), (1, 0), (7, 70), (1, 20)], (9, 3, 80))
    rows = attention._Rows(step.tables, step.query_start, step.seq_lens)
    options = attention._Options(step.scale, 0, 0.0)
    keys, values = step.caches
    for canary in (float("nan"), 7.0):
        buffer = torch.full((30, 9, 80), canary, device=DEVICE)
        out = buffer[10:20]
        attention._launch_decode(step.q, keys, values, rows, 2, options, out)
        assert buffer[12:].isnan().all() if canary != canary else (buffer[12:] == canary).all()
        attention._launch_prefill(step.q, keys, values, rows, 2, options, out)
        torch.testing.assert_close(out.double().cpu(), step.formula(), rtol=2e-5, atol=2e-5)
        rest = torch.cat((buffer[:10], buffer[20:]))
        assert rest.isnan().all() if canary != canary else (rest == canary).all()


def test_what_the_kernels_cannot_do_is_refused() -> None:
    step = Step([(1, 5)], (4, 2, 64))
    q, keys, values, *rest = step.arguments()
    with pytest.raises(ValueError, match="same strides"):
        attention.paged_attention(q, keys, values.contiguous(), *rest)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scale"):
        attention.paged_attention(*step.arguments()[:-1], -1.0)
    with pytest.raises(ValueError, match="2 decode rows"):
        attention.paged_attention(*step.arguments(), num_decodes=2)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64)], ids=str)
def test_a_captured_graph_serves_other_lengths(heads: tuple[int, int, int]) -> None:
    steps = [
        Step([(1, n) for n in lens], heads, dtype=torch.bfloat16, seed=seed)
        for seed, lens in enumerate(([3000, 5, 5, 0], [1, 1, 700, 2999], [16, 0, 0, 0], [2000, 2100, 1900, 3000]))
    ]
    width = max(step.tables.shape[1] for step in steps)
    blocks = max(step.caches[0].shape[0] for step in steps)
    shape = (blocks, *steps[0].caches[0].transpose(1, 2).shape[1:])
    keys, values = (torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE).transpose(1, 2) for _ in "kv")
    tables = torch.zeros(4, width, dtype=torch.int32, device=DEVICE)
    q = torch.empty_like(steps[0].q)
    start = torch.arange(5, dtype=torch.int32, device=DEVICE)
    lens = torch.zeros(4, dtype=torch.int32, device=DEVICE)

    def run() -> Tensor:
        return attention.paged_attention(q, keys, values, tables, start, lens, steps[0].scale, num_decodes=4)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for step in steps + steps[::-1]:
        q.copy_(step.q)
        keys[: len(step.caches[0])] = step.caches[0]
        values[: len(step.caches[1])] = step.caches[1]
        tables[:, : step.tables.shape[1]] = step.tables
        lens.copy_(step.seq_lens)
        out.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(out.cpu().double(), step.formula(), rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_cache_of_more_than_two_to_the_31_elements() -> None:
    num_blocks = (1 << 31) // (16 * 128) + 1000
    small = Step([(1, 90), (1, 40), (50, 70)], (4, 1, 128), dtype=torch.bfloat16)
    own = small.caches[0].shape[0]
    for i, cache in enumerate(small.caches):
        large = torch.empty(num_blocks, 16, 1, 128, dtype=torch.bfloat16, device=DEVICE)
        large[-own:] = cache
        small.caches[i] = large
    small.tables = torch.where(small.tables == FOREIGN, FOREIGN, small.tables + num_blocks - own)
    check(small, 2)
