"""Times of the dense GPU kernels and of both models' linear layers against cuBLAS, one JSON line each.

    python benchmarks/gpu_dense.py [--out results.jsonl] [--only norm,gate,rotary,copy,inputs,linear,layers]

Times are medians over replays of a CUDA graph that holds many calls, each on tensors of its own, together several times
the L2 cache, so that weights and activations come from memory. ``copies`` is the time over what a device-to-device copy
(4,210 GB/s read and written) would take for the bytes that the operation must move.
"""

import argparse
import importlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks._cuda import require_cuda
from benchmarks._record import record
from octavo.kernels.gpu.activation import act_and_mul
from octavo.kernels.gpu.copy import copy_blocks
from octavo.kernels.gpu.inputs import prepare_inputs
from octavo.kernels.gpu.norm import rms_norm
from octavo.kernels.gpu.rotary import rotary_and_write_kv, rotary_cos_sin

product = importlib.import_module("octavo.kernels.gpu.linear")

COPY_GB_S = 4210
ROTATE_BYTES = 300_000_000
REPLAYS = 9
TOKENS = (1, 8, 64, 256, 8192)
LINEAR_TOKENS = (1, 2, 4, 8, 16, 32, 64)
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4096, 14336, 32, 8, 128, 16
DTYPE = torch.bfloat16

Line = dict[str, Any]

MODELS = {
    "llama-3.1-8b": (32, [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)], (128256, 4096)),
    "qwen3-0.6b": (28, [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)], (151936, 1024)),
}


def median_us(calls: list[Callable[[], object]]) -> float:
    """Return microseconds a call, of a graph of them all."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[REPLAYS // 2] / len(calls)


def rotations(num_bytes: int) -> int:
    """Return how many sets of tensors of that size pass the L2 cache by."""
    return max(4, min(64, ROTATE_BYTES // max(1, num_bytes)))


def line(name: str, shape: str, us: float, num_bytes: int, **more: Any) -> Line:
    rate = num_bytes / us / 1e3
    return {
        "bench": name,
        "shape": shape,
        "us": round(us, 2),
        "gb_s": round(rate),
        "of_copy": round(rate / COPY_GB_S, 3),
        **more,
    }


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device="cuda")


def norms() -> Iterator[Line]:
    for tokens in TOKENS:
        num_bytes = 4 * tokens * HIDDEN * 2
        weight = random(HIDDEN)
        sets = [(random(tokens, HIDDEN), random(tokens, HIDDEN)) for _ in range(rotations(num_bytes))]
        us = median_us([partial(rms_norm, x, weight, 1e-5, residual) for x, residual in sets])
        yield line("rms_norm", f"T{tokens} H{HIDDEN}", us, num_bytes)


def gates() -> Iterator[Line]:
    for tokens in TOKENS:
        num_bytes = 3 * tokens * INTERMEDIATE * 2
        sets = [random(tokens, 2 * INTERMEDIATE) for _ in range(rotations(num_bytes))]
        us = median_us([partial(act_and_mul, x) for x in sets])
        yield line("act_and_mul", f"T{tokens} I{INTERMEDIATE}", us, num_bytes)


def rotary_calls(tokens: int, heads: int, normed: bool, cache: torch.dtype) -> list[Callable[[], object]]:
    q_size, kv_size = heads * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    table = rotary_cos_sin(10000.0 ** -(torch.arange(0, HEAD_SIZE, 2, device="cuda") / HEAD_SIZE), 16384)
    blocks = max(64, tokens // BLOCK_SIZE * 2)
    norm = random(HEAD_SIZE) if normed else None
    calls: list[Callable[[], object]] = []
    for _ in range(rotations(tokens * (2 * q_size + 4 * kv_size) * 2)):
        fused = random(tokens, q_size + 2 * kv_size)
        q, k, v = (x.unflatten(1, (-1, HEAD_SIZE)) for x in fused.split([q_size, kv_size, kv_size], dim=1))
        caches = torch.zeros(2, blocks, KV_HEADS, BLOCK_SIZE, HEAD_SIZE, dtype=cache, device="cuda").transpose(2, 3)
        slots = torch.randperm(blocks * BLOCK_SIZE, device="cuda")[:tokens]
        positions = torch.randint(0, 16384, (tokens,), device="cuda", dtype=torch.int32)
        calls.append(
            partial(rotary_and_write_kv, q, k, v, positions, table, caches[0], caches[1], slots, norm, norm, 1e-6)
        )
    return calls


def rotaries() -> Iterator[Line]:
    for tokens in TOKENS:
        for heads, normed, cache in (
            (HEADS, False, DTYPE),
            (16, True, DTYPE),
            (HEADS, False, torch.float8_e4m3fn),
        ):
            us = median_us(rotary_calls(tokens, heads, normed, cache))
            num_bytes = tokens * HEAD_SIZE * (2 * heads * 2 + 2 * KV_HEADS * (2 + cache.itemsize))
            shape = f"T{tokens} nq{heads} nkv{KV_HEADS} d{HEAD_SIZE}"
            yield line("rotary_and_write_kv", shape, us, num_bytes, head_norm=normed, cache=str(cache)[6:])


def copies() -> Iterator[Line]:
    caches = torch.randn(2, 40_000, KV_HEADS, BLOCK_SIZE, HEAD_SIZE, dtype=DTYPE, device="cuda").transpose(2, 3)
    for count in (1, 16, 256, 4096):
        calls: list[Callable[[], object]] = []
        for _ in range(4):
            ids = torch.randperm(caches.shape[1], device="cuda")[: 2 * count]
            calls.append(partial(copy_blocks, caches[0], caches[1], ids[:count], ids[count:]))
        num_bytes = 4 * count * BLOCK_SIZE * KV_HEADS * HEAD_SIZE * 2
        yield line("copy_blocks", f"n{count} B{BLOCK_SIZE} nkv{KV_HEADS} d{HEAD_SIZE}", median_us(calls), num_bytes)


def preparations() -> Iterator[Line]:
    ids = torch.randint(0, 100_000, (256, 8192), dtype=torch.int32, device="cuda")
    tables = torch.randint(0, 100_000, (256, 512), dtype=torch.int32, device="cuda")
    for rows in (1, 8, 64, 256):
        query_start = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
        slots = torch.randperm(256, device="cuda")[:rows].int()
        starts = torch.randint(500, 1500, (rows,), dtype=torch.int32, device="cuda")
        small = [torch.empty(rows, dtype=torch.int32, device="cuda") for _ in range(3)]
        wide, out = torch.empty(rows, dtype=torch.int64, device="cuda"), torch.empty_like(tables[:rows])
        call = partial(prepare_inputs, ids, tables, slots, starts, query_start, BLOCK_SIZE, small[0], small[1], wide)
        us = median_us([partial(call, small[2], out)] * 20)
        yield line("prepare_inputs", f"R{rows} decode, about 1000 tokens each", us, rows * 600)


def linears() -> Iterator[Line]:
    """Each weight shape alone, ours against cuBLAS."""
    for model, (_, shapes, head) in MODELS.items():
        for outputs, size in [*shapes, head]:
            num_bytes = outputs * size * 2
            weights = [random(outputs, size) * size**-0.5 for _ in range(rotations(num_bytes))]
            for tokens in LINEAR_TOKENS:
                x = random(tokens, size)
                ours = median_us([partial(product.linear, x, weight) for weight in weights])
                theirs = median_us([partial(functional.linear, x, weight) for weight in weights])
                shape = f"M{tokens} N{outputs} K{size}"
                yield line("linear", shape, ours, num_bytes, model=model, cublas_us=round(theirs, 2))


class Decoder:
    """The weights of a model's linear layers, random."""

    def __init__(self, num_layers: int, shapes: list[tuple[int, int]], head: tuple[int, int]) -> None:
        self.layers = [[random(n, k) * k**-0.5 for n, k in shapes] for _ in range(num_layers)]
        self.head = random(*head) * head[1] ** -0.5
        self.norm = random(head[1])
        self.num_bytes = 2 * (num_layers * sum(n * k for n, k in shapes) + head[0] * head[1])

    def linears(self, linear: Callable[..., Tensor], xs: dict[int, Tensor]) -> None:
        """Multiply all weights in order, each by the input [M, K] that xs has for its K."""
        for layer in self.layers:
            for weight in layer:
                linear(xs[weight.shape[1]], weight)
        linear(xs[self.head.shape[1]], self.head)

    def dense(self, linear: Callable[..., Tensor], gated: Callable[..., Tensor], x: Tensor) -> None:
        """Run a step on x [M, H] without its attention: norms, linear layers, gates."""
        residual = x
        for qkv, out, gate_up, down in self.layers:
            x, residual = rms_norm(x, self.norm, 1e-5, residual)
            attended = linear(x, qkv)[:, : out.shape[1]]
            x, residual = rms_norm(linear(attended, out), self.norm, 1e-5, residual)
            x = linear(gated(x, gate_up), down)
        linear(rms_norm(x, self.norm, 1e-5, residual)[0], self.head)


def gated_in_two(x: Tensor, weight: Tensor) -> Tensor:
    return act_and_mul(functional.linear(x, weight))


def whole_models() -> Iterator[Line]:
    """All linear layers of a model in order; then the same with norms and gates between, as a step has them."""
    for model, (num_layers, shapes, head) in MODELS.items():
        decoder = Decoder(num_layers, shapes, head)
        for tokens in LINEAR_TOKENS:
            xs = {size: random(tokens, size) for _, size in [*shapes, head]}
            x = xs[head[1]]
            ours = median_us([partial(decoder.linears, product.linear, xs)])
            theirs = median_us([partial(decoder.linears, functional.linear, xs)])
            more = {"model": model, "cublas_us": round(theirs, 2)}
            yield line("all linears", f"M{tokens}", ours, decoder.num_bytes, **more)
            ours = median_us([partial(decoder.dense, product.linear, product.linear_act_and_mul, x)])
            theirs = median_us([partial(decoder.dense, functional.linear, gated_in_two, x)])
            more = {"model": model, "cublas_us": round(theirs, 2)}
            yield line("linears, norms, gates", f"M{tokens}", ours, decoder.num_bytes, **more)


PARTS = {
    "norm": norms,
    "gate": gates,
    "rotary": rotaries,
    "copy": copies,
    "inputs": preparations,
    "linear": linears,
    "layers": whole_models,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="append lines here, with date, commit and device")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, comma-separated")
    options = parser.parse_args()
    require_cuda("gpu_dense")
    torch.manual_seed(0)
    versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for part in options.only.split(","):
        lines = []
        for found in PARTS[part]():
            lines.append(versions | found)
            print(json.dumps(found), flush=True)
        if options.out:
            record(options.out, "kernels-dense", lines)


if __name__ == "__main__":
    main()
