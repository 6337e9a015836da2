"""Price of products whose bits do not depend on the batch: each linear layer of Llama-3.1-8B against cuBLAS.

    python benchmarks/gpu_matmul.py [--out results.jsonl] [--tokens 1,8,64,256,2048] [--tiles]

Prints one JSON line a shape, and with ``--tiles`` one for every tile that might be used. Times are medians over
replays of a CUDA graph of several calls, on weights that together are several times the L2 cache.
"""

import argparse
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks._cuda import require_cuda
from benchmarks._record import record
from benchmarks.gpu_dense import COPY_GB_S, median_us, random, rotations
from octavo.kernels.gpu import matmul
from octavo.kernels.gpu.matmul import TILE, Tile, descriptor_product

SHAPES = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
HEAD = (128256, 4096)
LAYERS = 32

CANDIDATES = (
    TILE,
    Tile(64, 64, 128, 4, 4),
    Tile(64, 64, 128, 4, 6),
    Tile(64, 128, 64, 4, 6),
    Tile(128, 64, 64, 4, 4),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 256, 64, 8, 4),
)
"""Tiles to compare."""


def line(name: str, tokens: int, shape: tuple[int, int], us: float, **more: Any) -> dict[str, Any]:
    outputs, size = shape
    num_bytes = 2 * (outputs * size + tokens * (outputs + size))
    return {
        "bench": "batch-invariant linear",
        "layer": name,
        "shape": f"M{tokens} N{outputs} K{size}",
        "us": round(us, 2),
        "tflop_s": round(2 * tokens * outputs * size / us / 1e6, 1),
        "of_copy": round(num_bytes / us / 1e3 / COPY_GB_S, 3),
        **more,
    }


def time_us(product: Callable[[Tensor, Tensor], object], x: Tensor, weights: list[Tensor]) -> float:
    """Return microseconds of one product, of many with a weight each."""
    return median_us([functools.partial(product, x, weight) for weight in weights])


def of_tiles(name: str, tokens: int, x: Tensor, weights: list[Tensor]) -> Iterator[dict[str, Any]]:
    """Time every candidate, and compare its bits with those of the tile that is used."""
    shape = (weights[0].shape[0], weights[0].shape[1])
    out = torch.empty(tokens, shape[0], dtype=x.dtype, device=x.device)
    expected = matmul.linear(x, weights[0])
    for tile in CANDIDATES:
        out.fill_(float("nan"))
        descriptor_product(x, weights[0], None, out, tile)
        same = torch.equal(out.view(torch.int16), expected.view(torch.int16))
        us = time_us(functools.partial(descriptor_product, bias=None, out=out, tile=tile), x, weights)
        yield line(name, tokens, shape, us, tile=list(tile), same_bits=same)


def measure(tokens: int, with_tiles: bool) -> Iterator[dict[str, Any]]:
    total = {"ours": 0.0, "cublas": 0.0}
    for name, shape in (SHAPES | {"head": HEAD}).items():
        weights = [random(*shape) * shape[1] ** -0.5 for _ in range(min(8, rotations(shape[0] * shape[1] * 2)))]
        lines = min(tokens, 256) if name == "head" else tokens
        x = random(lines, shape[1])
        ours, theirs = time_us(matmul.linear, x, weights), time_us(functional.linear, x, weights)
        times = 1 if name == "head" else LAYERS
        total["ours"] += times * ours
        total["cublas"] += times * theirs
        yield line(name, lines, shape, ours, cublas_us=round(theirs, 2))
        if with_tiles:
            yield from of_tiles(name, lines, x, weights)
    yield {
        "bench": "batch-invariant linear",
        "layer": "all of the model",
        "shape": f"M{tokens}",
        "us": round(total["ours"]),
        "cublas_us": round(total["cublas"]),
        "of_cublas": round(total["ours"] / total["cublas"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="append lines here, with date, commit and device")
    parser.add_argument("--tokens", default="1,8,64,256,2048", help="numbers of tokens, comma-separated")
    parser.add_argument("--tiles", action="store_true", help="time other tiles too")
    options = parser.parse_args()
    require_cuda("gpu_matmul")
    torch.manual_seed(0)
    lines = []
    for tokens in map(int, options.tokens.split(",")):
        for found in measure(tokens, options.tiles):
            lines.append(found)
            print(json.dumps(found), flush=True)
    if options.out:
        versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        record(options.out, "batch-invariant-linear", [versions | found for found in lines])


if __name__ == "__main__":
    main()
