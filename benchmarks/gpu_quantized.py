"""Products with packed weights against plain ones in cuBLAS, at the sizes of Llama-3.1-8B's layers.

    python -m benchmarks.gpu_quantized [--out results.jsonl] [--kinds awq,...] [--tokens 1,8,...] [--sweep]
        [--time-limit S]

Each product is first compared with the weight dequantised by its definition. Then one line a product says its time, and a
table the times of all layers of the model: the products' times added up (``sum``), and one graph of a step's norms and
products in their order, launched ahead as in a decode step (``step``). With ``--sweep`` every way to cut the work that
might be used is timed too, and the best of each product is named; the table then has the sum of the best as well.

Times are medians over replays of a CUDA graph of several calls, on weights that together are several times the L2 cache.
What no longer fits into the time limit is skipped, and named.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks._cuda import require_cuda
from benchmarks._record import record
from benchmarks.gpu_dense import COPY_GB_S, median_us, rotations
from octavo.kernels import gpu as ops
from octavo.kernels.gpu.activation import act_and_mul
from octavo.kernels.gpu.quantized import PackedWeight, prepare
from octavo.kernels.gpu.quantized_inputs import take_inputs
from octavo.kernels.gpu.quantized_linear import PackedShape, packed_product
from octavo.kernels.gpu.quantized_sparse import sparse_product
from octavo.kernels.weights import Float8Weight, GroupedWeight, SparseRows, TableWeight, Weight, dequantized

LAYERS = 32
PRODUCTS = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
HEAD = (128256, 4096)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
KINDS = ("awq", "gptq-act", "squeezellm", "squeezellm-sparse", "fp8")
DTYPES = {"fp8": torch.bfloat16}
BOUNDS = {"fp8": 0.06}
"""Most relative error; float8 inputs have three bits behind the point."""

Line = dict[str, Any]


def random_weight(kind: str, outputs: int, inputs: int, generator: torch.Generator, device: str = "cuda") -> Weight:
    """Draw a canonical weight of one of KINDS, whose numbers have a variance of about 1 / K."""
    size = inputs**-0.5
    if kind == "fp8":
        codes = torch.randn(outputs, inputs, generator=generator, device=device).mul_(64.0)
        scales = torch.full((outputs, 1), size / 64.0, device=device)
        return Float8Weight(codes.clamp_(-448, 448).to(torch.float8_e4m3fn), scales, None, "dynamic", 1, inputs)
    packed = torch.randint(
        -(2**31), 2**31, (outputs, inputs // 8), dtype=torch.int32, generator=generator, device=device
    )
    if kind.startswith("squeezellm"):
        table = torch.randn(outputs, 16, generator=generator, device=device).mul_(size).half()
        return TableWeight(packed, 4, table, _outliers(outputs, inputs, generator) if kind.endswith("sparse") else None)
    groups = inputs // 128
    scales = torch.rand(groups, outputs, generator=generator, device=device).add_(0.5).mul_(size / 4).half()
    zeros = torch.randint(6, 10, (groups, outputs), dtype=torch.uint8, generator=generator, device=device)
    perm = torch.randperm(inputs, generator=generator, device=device).int() if kind == "gptq-act" else None
    return GroupedWeight(packed, 4, scales, zeros, 128, perm)


def _outliers(outputs: int, inputs: int, generator: torch.Generator) -> SparseRows:
    """Return 0.45% of the places, drawn at random."""
    device = generator.device
    chosen = torch.rand(outputs, inputs, generator=generator, device=device) < 0.0045
    row, column = chosen.nonzero().unbind(1)
    start = torch.zeros(outputs + 1, dtype=torch.int32, device=device)
    start[1:] = torch.bincount(row, minlength=outputs).cumsum(0)
    values = torch.randn(len(row), generator=generator, device=device).mul_(inputs**-0.5).half()
    return SparseRows(start, column.int(), values)


def candidates(tokens: int, weight: PackedWeight) -> Iterator[PackedShape]:
    """Yield the ways to cut a product that are worth a try."""
    deep = max(1, 8 // weight.bits)
    if tokens <= 16:
        padded = 8 if tokens <= 8 else 16
        for rows, depth, stages, split, warps in (
            (128, deep, 3, 2, 4),
            (128, deep, 3, 4, 4),
            (128, deep, 3, 8, 4),
            (128, deep, 3, 16, 4),
            (128, deep, 4, 4, 8),
            (128, 2 * deep, 2, 4, 8),
            (64, deep, 4, 1, 4),
            (64, deep, 4, 2, 4),
            (64, deep, 4, 4, 4),
            (64, deep, 4, 8, 4),
            (64, 2 * deep, 3, 4, 4),
        ):
            yield PackedShape(rows, padded, depth, stages, split, warps)
    elif tokens <= 64:
        padded = 32 if tokens <= 32 else 64
        for rows, stages, split, warps in (
            (128, 4, 1, 4),
            (128, 3, 2, 4),
            (128, 3, 4, 4),
            (128, 3, 8, 4),
            (128, 3, 4, 8),
            (64, 4, 2, 4),
            (64, 4, 4, 4),
        ):
            yield PackedShape(rows, padded, 1, stages, split, warps)
    else:
        for rows, padded, stages, split, warps in (
            (128, 128, 4, 1, 8),
            (128, 128, 2, 1, 8),
            (128, 128, 2, 2, 8),
            (128, 128, 4, 4, 8),
            (128, 256, 3, 1, 8),
            (128, 256, 3, 2, 8),
            (128, 256, 3, 4, 8),
            (64, 256, 3, 1, 4),
            (256, 128, 3, 1, 8),
        ):
            yield PackedShape(rows, padded, 1, stages, split, warps)


class Product:
    """One layer's product on weights that together pass the L2 cache by."""

    def __init__(self, kind: str, name: str, generator: torch.Generator) -> None:
        self.kind, self.name = kind, name
        outputs, inputs = self.size = PRODUCTS[name]
        self.is_gated = name == "gate_up"
        self.dtype = DTYPES.get(kind, torch.float16)
        first = random_weight(kind, outputs, inputs, generator)
        self.plain = dequantized(first, self.dtype)
        self.packed = [_packed(first, self.dtype)]
        count = min(8, rotations(self.packed[0].words.nbytes))
        for _ in range(count - 1):
            self.packed.append(_packed(random_weight(kind, outputs, inputs, generator), self.dtype))
        self.plains = [self.plain, *(torch.randn_like(self.plain) for _ in range(min(3, count - 1)))]

    def run(self, x: Tensor, weight: PackedWeight, shape: PackedShape | None = None) -> Tensor:
        """Multiply as the backend does, or as one shape of the kernel does."""
        if shape is None:
            return ops.linear_act_and_mul(x, weight) if self.is_gated else ops.linear(x, weight)
        addend = None if weight.sparse is None else sparse_product(x, weight.sparse)
        x = x if weight.perm is None else take_inputs(x, weight.perm)
        return packed_product(x, weight, None, shape, activation="silu" if self.is_gated else None, addend=addend)

    def run_plain(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply in cuBLAS."""
        out = functional.linear(x, weight)
        return act_and_mul(out) if self.is_gated else out

    def error(self, x: Tensor, shape: PackedShape | None) -> float:
        """Return the relative error against the product with the plain weight in fp32."""
        exact = x.float() @ self.plain.float().T
        if self.is_gated:
            gate, up = exact.chunk(2, 1)
            exact = functional.silu(gate) * up
        got = self.run(x, self.packed[0], shape).float()
        return float((got - exact).norm() / exact.norm())

    def time(self, x: Tensor, shape: PackedShape | None) -> float:
        """Return microseconds."""
        return median_us([functools.partial(self.run, x, weight, shape) for weight in self.packed])

    def time_plain(self, x: Tensor) -> float:
        """Return microseconds."""
        return median_us([functools.partial(self.run_plain, x, weight) for weight in self.plains])


def _packed(weight: Weight, dtype: torch.dtype) -> PackedWeight:
    packed = prepare(weight, dtype)
    if not isinstance(packed, PackedWeight):
        raise TypeError(f"{type(weight).__name__} was not packed")
    return packed


def measure(product: Product, tokens: int, sweep: bool, ends: float) -> Iterator[Line]:
    """Check and time one product."""
    outputs, inputs = product.size
    x = torch.randn(tokens, inputs, dtype=product.dtype, device="cuda")
    what = {"bench": "packed product", "kind": product.kind, "layer": product.name, "tokens": tokens}
    bound = BOUNDS.get(product.kind, 0.005)
    if (error := product.error(x, None)) > bound:
        raise ArithmeticError(f"{what}: relative error {error}, allowed are {bound}")
    us, plain = product.time(x, None), product.time_plain(x)
    num_bytes = product.packed[0].words.nbytes + product.packed[0].metas.nbytes
    yield what | {
        "us": round(us, 2),
        "cublas_us": round(plain, 2),
        "of_copy": round(num_bytes / us / 1e3 / COPY_GB_S, 3),
        "tflop_s": round(2 * tokens * outputs * inputs / us / 1e6, 1),
        "error": round(error, 5),
    }
    if not sweep or tokens > 512:
        return
    best = (us, "as chosen")
    for shape in candidates(tokens, product.packed[0]):
        if time.monotonic() > ends:
            break
        try:
            if (error := product.error(x, shape)) > 0.005:
                raise ArithmeticError(f"{what} {shape}: relative error {error}")
            found = product.time(x, shape)
        except (RuntimeError, ArithmeticError) as problem:  # more shared memory than there is, say
            yield what | {"shape": str(shape), "problem": str(problem)[:200]}
            continue
        yield what | {"shape": str(shape), "us": round(found, 2)}
        best = min(best, (found, str(shape)))
    yield what | {"best": best[1], "us": round(best[0], 2)}


def step_us(kind: str, tokens: int, generator: torch.Generator) -> float:
    """Return microseconds of a step's norms and products (without attention and head) in one graph."""
    dtype = DTYPES.get(kind, torch.float16)
    made = {name: _packed(random_weight(kind, *size, generator), dtype) for name, size in PRODUCTS.items()}
    layers = [{name: _copy(weight) for name, weight in made.items()} for _ in range(LAYERS)]
    start, norm = torch.randn(tokens, 4096, dtype=dtype, device="cuda"), torch.ones(4096, dtype=dtype, device="cuda")

    def step() -> None:
        x = residual = start
        for layer in layers:
            x, residual = ops.rms_norm(x, norm, 1e-5, residual)
            attended = ops.linear(x, layer["qkv"])[:, :4096]
            x, residual = ops.rms_norm(ops.linear(attended, layer["output"]), norm, 1e-5, residual)
            x = ops.linear(ops.linear_act_and_mul(x, layer["gate_up"]), layer["down"])

    return median_us([step])


def _copy(weight: PackedWeight) -> PackedWeight:
    """Return the same weight in other memory."""
    return replace(weight, words=weight.words.clone(), metas=weight.metas.clone())


def head_us(tokens: int, dtype: torch.dtype) -> float:
    """Return microseconds of the plain output head, of at most 256 tokens."""
    weight = torch.randn(*HEAD, dtype=dtype, device="cuda")
    x = torch.randn(min(tokens, 256), HEAD[1], dtype=dtype, device="cuda")
    return median_us([functools.partial(ops.linear, x, weight)] * 2)


def measure_all(options: argparse.Namespace, write: Callable[[Line], None]) -> list[Line]:
    """Measure what was asked for, as far as the time reaches; return the rows of the table."""
    ends = time.monotonic() + options.time_limit
    generator = torch.Generator("cuda").manual_seed(0)
    rows: dict[tuple[str, int], Line] = {}
    for kind in options.kinds.split(","):
        for name in PRODUCTS:
            if time.monotonic() > ends:
                print(f"# skipped: {kind} {name}", flush=True)
                continue
            product = Product(kind, name, generator)
            for tokens in map(int, options.tokens.split(",")):
                if time.monotonic() > ends:
                    print(f"# skipped: {kind} {name} at {tokens} tokens", flush=True)
                    break
                row = rows.setdefault((kind, tokens), {"sum": 0.0, "best": 0.0, "cublas": 0.0, "products": 0})
                found = list(measure(product, tokens, options.sweep, ends))
                for line in found:
                    write(line)
                row["sum"] += found[0]["us"] * LAYERS
                row["cublas"] += found[0]["cublas_us"] * LAYERS
                row["best"] += found[-1]["us"] * LAYERS
                row["products"] += 1
            del product
    for (kind, tokens), row in rows.items():
        if time.monotonic() < ends:
            row["step"] = step_us(kind, tokens, generator)
            row["head"] = head_us(tokens, DTYPES.get(kind, torch.float16))
        write({"bench": "packed layers", "kind": kind, "tokens": tokens, **row})
    return [{"kind": kind, "tokens": tokens, **row} for (kind, tokens), row in rows.items()]


def print_table(rows: list[Line]) -> None:
    """Print milliseconds of all layers, and of the head."""
    columns = ("sum", "best", "step", "cublas", "head")
    print(f"{'kind':18} {'tokens':>6} " + " ".join(f"{column:>8}" for column in columns))
    for row in rows:
        times = [f"{row[column] / 1e3:8.3f}" if column in row else f"{'-':>8}" for column in columns]
        partial = "" if row["products"] == len(PRODUCTS) else f"  {row['products']} products of {len(PRODUCTS)}"
        print(f"{row['kind']:18} {row['tokens']:6} " + " ".join(times) + partial)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="append lines here, with date, commit and device")
    parser.add_argument("--kinds", default="awq", help=f"of {', '.join(KINDS)}, comma-separated")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="numbers of tokens, comma-separated")
    parser.add_argument("--sweep", action="store_true", help="time other ways to cut the work too")
    parser.add_argument("--time-limit", type=float, default=230.0, help="seconds for all of it")
    parser.add_argument("--commit", help="of Octavo, where there is no git to ask")
    options = parser.parse_args()
    require_cuda("gpu_quantized")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    lines: list[Line] = []
    versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}

    def write(line: Line) -> None:
        lines.append(versions | line)
        print(json.dumps(line), flush=True)

    try:
        rows = measure_all(options, write)
    finally:
        if options.out:
            record(options.out, "packed-products", lines, device=versions["gpu"], commit=options.commit)
    print_table(rows)


if __name__ == "__main__":
    main()
