"""Times of the GPU's paged attention, one JSON line each: decode in GB/s of keys and values, prefill in TFLOP/s.

    python -m benchmarks.gpu_attention [--only decode,prefill,launch] [--out results.jsonl]

Each figure is the median over replays of a graph that runs the operation once on each of several layers' caches, which
together are larger than the L2 cache. Blocks are shuffled over the pool, data are random. ``layout`` says how a block
lies in memory: "heads" [nkv, B, d] or "slots" [B, nkv, d]. ``fraction`` is of the copy bandwidth of an H200.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks._cuda import require_cuda
from benchmarks._record import record
from octavo.kernels.gpu import attention

COPY_GB_PER_S = 4210
BLOCK_SIZE = 16
MODELS = {"Llama-3.1-8B": (32, 8, 128), "Llama-2-7B": (32, 32, 128), "Qwen3-0.6B": (16, 8, 128)}
ROTATED_BYTES = 1 << 28
MIXED_ROWS = [30, 900, 64, 411, 777, 120, 333, 512, 45, 888, 256, 100, 640, 222, 511, 75]


class Case:
    """Rows of (new tokens, keys) over the caches of several layers."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        heads: tuple[int, int, int],
        layout: str,
        num_decodes: int,
        layers: int = 0,
        cache_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        num_heads, num_kv_heads, head_size = heads
        counts = [-(-keys // BLOCK_SIZE) for _, keys in rows]
        self.rows, self.heads, self.num_decodes = rows, heads, num_decodes
        self.bytes = sum(keys for _, keys in rows) * num_kv_heads * head_size * 2 * cache_dtype.itemsize
        layers = layers or max(2, -(-ROTATED_BYTES // self.bytes))
        inner = (num_kv_heads, BLOCK_SIZE) if layout == "heads" else (BLOCK_SIZE, num_kv_heads)
        pools = [
            torch.randn(sum(counts) + 1, *inner, head_size, device="cuda", dtype=torch.bfloat16).to(cache_dtype)
            for _ in range(2 * layers)
        ]
        if layout == "heads":
            pools = [pool.transpose(1, 2) for pool in pools]
        self.layers = list(zip(pools[::2], pools[1::2], strict=True))
        tables = torch.zeros(len(rows), max(counts), dtype=torch.int32)
        order = (torch.randperm(sum(counts)) + 1).int()
        for row, table in enumerate(torch.split(order, counts)):
            tables[row, : len(table)] = table
        starts = torch.tensor([0, *(new for new, _ in rows)]).cumsum(0).int()
        lens = torch.tensor([keys for _, keys in rows]).int()
        self.step = attention._Rows(tables.cuda(), starts.cuda(), lens.cuda())
        self.q = torch.randn(int(starts[-1]), num_heads, head_size, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.q)
        self.options = attention._Options(head_size**-0.5, 0, 0.0)

    def attend(self, keys: Tensor, values: Tensor) -> Tensor:
        return attention.paged_attention(
            self.q, keys, values, *self.step, self.options.scale, num_decodes=self.num_decodes
        )

    def attend_tuned(self, keys: Tensor, values: Tensor, tuning: attention.Tuning) -> None:
        launch = attention._launch_decode if self.num_decodes else attention._launch_prefill
        launch(self.q, keys, values, self.step, self.num_decodes, self.options, self.out, tuning)

    def flops(self) -> int:
        """Of the two products, for the keys that each query sees."""
        num_heads, _, head_size = self.heads
        return sum(4 * num_heads * head_size * (new * keys - new * (new - 1) // 2) for new, keys in self.rows)

    def microseconds(self, run: Callable[[Tensor, Tensor], object], replays: int = 11) -> float:
        run(*self.layers[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in self.layers:
                run(*layer)
        graph.replay()
        times = []
        for _ in range(replays):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return median(times) * 1e3 / len(self.layers)


def decode_case(model: str, batch: int, keys: int | list[int], layout: str) -> Case:
    lens = keys if isinstance(keys, list) else [keys] * batch
    return Case([(1, n) for n in lens], MODELS[model], layout, batch)


def decode_row(name: str, case: Case, us: float, **more: Any) -> dict[str, Any]:
    rate = case.bytes / us / 1e3
    figures = {"us": round(us, 2), "gb_per_s": round(rate), "fraction": round(rate / COPY_GB_PER_S, 3)}
    return {"metric": "decode", "name": name, "batch": len(case.rows)} | more | figures


def prefill_row(name: str, case: Case, us: float, **more: Any) -> dict[str, Any]:
    return (
        {"metric": "prefill", "name": name} | more | {"us": round(us, 2), "tflop_per_s": round(case.flops() / us / 1e6)}
    )


def various(batch: int) -> list[int]:
    """Lengths with a long tail, as in a mixed workload: mean about 600."""
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(batch, generator=generator).pow(3) * 2200 + 40).int().tolist()


def decode() -> Iterator[dict[str, Any]]:
    for model in MODELS:
        for keys in (576, 4096):
            for batch in (1, 8, 32, 64, 128, 256):
                if (keys == 4096 and batch > 128) or (model == "Llama-2-7B" and keys * batch > 150_000):
                    continue
                for layout in ("heads", "slots") if model == "Llama-3.1-8B" else ("heads",):
                    case = decode_case(model, batch, keys, layout)
                    yield decode_row(model, case, case.microseconds(case.attend), keys=keys, layout=layout)
    for batch in (32, 256):
        case = decode_case("Llama-3.1-8B", batch, various(batch), "heads")
        yield decode_row("Llama-3.1-8B", case, case.microseconds(case.attend), keys="40..2240", layout="heads")

    for batch in (1, 64, 256):
        heads = MODELS["Llama-3.1-8B"]
        case = Case([(1, 576)] * batch, heads, "heads", batch, cache_dtype=torch.float8_e4m3fn)
        us = case.microseconds(case.attend)
        yield decode_row("Llama-3.1-8B", case, us, keys=576, layout="heads", cache="float8_e4m3fn")


def prefill_cases(layout: str = "heads") -> Iterator[tuple[str, Case]]:
    for model in MODELS:
        yield f"{model} 8 x 2048", Case([(2048, 2048)] * 8, MODELS[model], layout, 0, layers=2)
    heads = MODELS["Llama-3.1-8B"]
    yield "Llama-3.1-8B 8 x 1024", Case([(1024, 1024)] * 8, heads, layout, 0, layers=8)
    yield "Llama-3.1-8B 1 x 512", Case([(512, 512)], heads, layout, 0, layers=32)
    yield "Llama-3.1-8B 1 x 8192", Case([(8192, 8192)], heads, layout, 0, layers=2)
    yield "Llama-3.1-8B 16 of 30..900", Case([(n, n) for n in MIXED_ROWS], heads, layout, 0, layers=8)
    yield "Llama-3.1-8B 8 x 64 behind 1024", Case([(64, 1088)] * 8, heads, layout, 0, layers=8)


def prefill() -> Iterator[dict[str, Any]]:
    for layout in ("heads", "slots"):
        for name, case in prefill_cases(layout):
            yield prefill_row(name, case, case.microseconds(case.attend), layout=layout)


def launch() -> Iterator[dict[str, Any]]:
    """Host time of one call of each kernel, without waiting for the device."""
    for name, case in (
        ("decode", decode_case("Llama-3.1-8B", 1, 64, "heads")),
        ("prefill", Case([(16, 16)], MODELS["Llama-3.1-8B"], "heads", 0)),
    ):
        times = []
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(32):
                case.attend(*case.layers[0])
            times.append(time.perf_counter() - start)
        yield {"metric": "launch", "name": name, "us": round(median(times) / 32 * 1e6, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="decode,prefill,launch")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of Octavo, where there is no git to ask")
    arguments = parser.parse_args()
    require_cuda("gpu_attention")
    torch.manual_seed(0)
    versions = {"torch": torch.__version__}
    lines = []
    for suite in arguments.only.split(","):
        for line in {"decode": decode, "prefill": prefill, "launch": launch}[suite]():
            print(json.dumps(line), flush=True)
            lines.append({"device": torch.cuda.get_device_name(), "versions": versions} | line)
    if arguments.out is not None:
        record(arguments.out, "gpu_attention", lines, commit=arguments.commit)


if __name__ == "__main__":
    main()
