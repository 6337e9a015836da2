"""Times of expert layers on the GPU, against PyTorch's grouped products and a loop over the experts, one JSON line each.

    python -m benchmarks.gpu_experts [--out results.jsonl] [--models mixtral-8x7b,qwen3-30b-a3b] [--tokens 1,8] [--sweep]

First each layer's result is compared with the reference. Times are medians over replays of a CUDA graph that holds many
calls, each with tokens and choices of its own; the loop asks the host which experts have tokens, so it is timed without a
graph. ``gb_s`` counts the weights of the experts that have tokens, once; ``sort`` is the routing and the sort alone.
``--sweep`` times other tiles as well.
"""

import argparse
import importlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from triton.runtime.errors import OutOfResources

from benchmarks._cuda import require_cuda
from benchmarks._record import record
from benchmarks.gpu_dense import median_us
from octavo.kernels import reference
from octavo.kernels.gpu import invariant
from octavo.kernels.gpu.activation import act_and_mul
from octavo.kernels.gpu.routing import route, sort_pairs

gpu = importlib.import_module("octavo.kernels.gpu.experts")

Line = dict[str, Any]
DTYPE = torch.bfloat16
BOUND = 2e-2
"""Of the relative error of a layer's result against the reference."""
SETS = 6
"""Of tokens and choices in a graph: together they pass the L2 cache by."""


class Sizes(NamedTuple):
    """One layer of a model."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int


MODELS = {"qwen3-30b-a3b": Sizes(128, 8, 2048, 768), "mixtral-8x7b": Sizes(8, 2, 4096, 14336)}
TOKENS = (1, 8, 64, 256, 2048)
TILES = [
    gpu.Tile(tokens, rows, depth, warps, stages)
    for (tokens, rows, warps), (depth, stages) in product(
        ((16, 64, 4), (16, 128, 4), (32, 128, 4), (64, 128, 4), (64, 256, 8), (128, 128, 4), (128, 256, 8)),
        ((64, 3), (64, 4), (128, 3)),
    )
]


@dataclass(frozen=True)
class Layer:
    """Weights of a layer."""

    sizes: Sizes
    gate_up: Tensor
    down: Tensor

    @classmethod
    def random(cls, sizes: Sizes) -> "Layer":
        """Draw one."""
        gate_up = torch.empty(sizes.num_experts, 2 * sizes.inner, sizes.hidden, dtype=DTYPE, device="cuda")
        down = torch.empty(sizes.num_experts, sizes.hidden, sizes.inner, dtype=DTYPE, device="cuda")
        return cls(sizes, gate_up.normal_(0.0, sizes.hidden**-0.5), down.normal_(0.0, sizes.inner**-0.5))

    def inputs(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw tokens and logits; return both with what was chosen: x, logits, ids, weights."""
        x = torch.randn(num_tokens, self.sizes.hidden, dtype=DTYPE, device="cuda")
        logits = torch.randn(num_tokens, self.sizes.num_experts, dtype=DTYPE, device="cuda")
        return x, logits, *route(logits, self.sizes.top_k, renormalize=True)


def grouped(layer: Layer, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Do it with PyTorch's grouped products."""
    multiply = getattr(functional, "grouped_mm", None) or torch._grouped_mm
    top_k, flat = ids.shape[1], ids.flatten().long()
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(layer.sizes.num_experts, dtype=torch.int32, device=x.device)
    ends = counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32)).cumsum(0).int()
    inner = act_and_mul(multiply(x[order // top_k], layer.gate_up.transpose(1, 2), offs=ends))
    results = torch.empty(len(flat), x.shape[1], dtype=x.dtype, device=x.device)
    results[order] = multiply(inner, layer.down.transpose(1, 2), offs=ends)
    return (results.view(*ids.shape, -1).float() * weights[..., None]).sum(1).to(x.dtype)


def loop(layer: Layer, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Do it expert by expert with cuBLAS."""
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, place = torch.where(ids == expert)
        gate, up = functional.linear(x[token], layer.gate_up[expert]).chunk(2, -1)
        result = functional.linear(functional.silu(gate) * up, layer.down[expert])
        out.index_add_(0, token, result * weights[token, place, None].to(x.dtype))
    return out


def eager_us(calls: list[Callable[[], object]]) -> float:
    """Return microseconds a call, launch by launch."""
    calls[0]()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / len(calls)


def tried(calls: list[Callable[[], object]]) -> float | str:
    """Return microseconds a call, or why there are none."""
    try:
        return round(median_us(calls), 2)
    except (RuntimeError, AttributeError, OutOfResources) as error:
        return str(error).splitlines()[0][:120]


def error_of(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def compile_ahead(layer: Layer, tokens: list[int]) -> None:
    """Have all kernels compiled, several at a time."""
    kinds = [(operation, layer.inputs(count)) for operation in (gpu.experts, invariant.experts) for count in tokens]

    def run(kind: tuple[Callable[..., Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]) -> None:
        operation, (x, _, ids, weights) = kind
        operation(x, ids, weights, layer.gate_up, layer.down)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(run, kinds))
    torch.cuda.synchronize()


def routed(layer: Layer, logits: Tensor) -> None:
    ids, _ = route(logits, layer.sizes.top_k, renormalize=True)
    sort_pairs(ids, layer.sizes.num_experts)


def measured(model: str, layer: Layer, num_tokens: int) -> Line:
    """Compare with the reference, then time."""
    sets = [layer.inputs(num_tokens) for _ in range(SETS)]
    x, _, ids, weights = sets[0]
    expected = reference.experts(x, ids, weights, layer.gate_up, layer.down)
    errors = {
        name: round(error_of(operation(x, ids, weights, layer.gate_up, layer.down), expected), 5)
        for name, operation in (("error", gpu.experts), ("invariant_error", invariant.experts))
    }
    if not all(error < BOUND for error in errors.values()):
        raise SystemExit(f"{model} at {num_tokens} tokens is wrong: {errors}")

    def calls(operation: Callable[..., Tensor], *arguments: object) -> list[Callable[[], object]]:
        return [partial(operation, x, ids, weights, *arguments) for x, _, ids, weights in sets]

    us = median_us(calls(gpu.experts, layer.gate_up, layer.down))
    used = sum(int(ids.unique().numel()) for _, _, ids, _ in sets) / SETS
    num_bytes = used * 3 * layer.sizes.inner * layer.sizes.hidden * DTYPE.itemsize
    operations = 6 * num_tokens * layer.sizes.top_k * layer.sizes.inner * layer.sizes.hidden
    return {
        "bench": "experts",
        "model": model,
        "tokens": num_tokens,
        "us": round(us, 2),
        "gb_s": round(num_bytes / us / 1e3),
        "tflop_s": round(operations / us / 1e6, 1),
        "experts_used": round(used, 1),
        "sort_us": round(median_us([partial(routed, layer, logits) for _, logits, _, _ in sets]), 2),
        "invariant_us": round(median_us(calls(invariant.experts, layer.gate_up, layer.down)), 2),
        "grouped_mm_us": tried([partial(grouped, layer, x, ids, weights) for x, _, ids, weights in sets]),
        "loop_us": round(eager_us([partial(loop, layer, x, ids, weights) for x, _, ids, weights in sets[:2]]), 1),
        **errors,
    }


def swept(model: str, layer: Layer, num_tokens: int) -> Iterator[Line]:
    """Time every tile, the same for both layers."""
    sets = [layer.inputs(num_tokens) for _ in range(SETS)]
    for tile in TILES:
        shape = gpu.Shape(tile, tile)
        run = partial(gpu.run_experts, activation="silu", shape=shape, sorts=num_tokens > 1)
        us = tried([partial(run, x, ids, weights, layer.gate_up, layer.down) for x, _, ids, weights in sets])
        yield {"bench": "experts tile", "model": model, "tokens": num_tokens, "tile": list(tile), "us": us}


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="append lines here, with date, commit and device")
    parser.add_argument("--commit", help="of Octavo, where there is no git to ask")
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="comma-separated")
    parser.add_argument("--sweep", action="store_true", help="time other tiles, too; takes minutes")
    options = parser.parse_args()
    require_cuda("gpu_experts")
    torch.manual_seed(0)
    versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    tokens = [int(count) for count in options.tokens.split(",")]
    for model in options.models.split(","):
        layer = Layer.random(MODELS[model])
        compile_ahead(layer, tokens)
        lines: list[Line] = []
        for count in tokens:
            for found in (measured(model, layer, count), *(swept(model, layer, count) if options.sweep else ())):
                lines.append(versions | found)
                print(json.dumps(found), flush=True)
        if options.out:
            record(options.out, "kernels-experts", lines, commit=options.commit)


if __name__ == "__main__":
    main()
