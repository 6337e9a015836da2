"""Times of sampling on a GPU, one JSON line each: replays of a CUDA graph that runs an operation several times.

    python -m benchmarks.gpu_sampling [--rows 256 1 64] [--vocabularies 128256 151936] [--out FILE]

Logits are random (normal, standard deviation 3), rotated over copies that together exceed the L2 cache. ``floor`` is
the time to read the logits once at the measured copy bandwidth. Filters work in place: their figures include restoring
the logits, whose time alone is subtracted.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._cuda import require_cuda
from benchmarks._record import record
from octavo.kernels.gpu.filters import filter_logits
from octavo.kernels.gpu.logprobs import logprobs
from octavo.kernels.gpu.penalties import apply_penalties
from octavo.kernels.gpu.sampling import sample
from octavo.kernels.gpu.sampling_masks import apply_allowed, apply_logit_bias

BANDWIDTH = 4210e9  # bytes a second, device to device, read and written
L2_BYTES = 60e6
REPLAYS = 9


def graph_us(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of a call in microseconds, in a graph of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(3 + REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[3:])


def copies(rows: int, vocabulary: int, dtype: torch.dtype) -> list[Tensor]:
    """Enough random logits that one is out of the cache when its turn comes again, but at least 8 and at most 24."""
    one = torch.finfo(dtype).bits // 8 * rows * vocabulary
    count = max(8, min(24, int(2 * L2_BYTES / one)))
    return [(torch.randn(rows, vocabulary, device="cuda") * 3).to(dtype) for _ in range(count)]


def line(name: str, logits: Tensor, us: float, **more: object) -> dict[str, Any]:
    num_bytes = logits.numel() * logits.element_size()
    rows, vocabulary = logits.shape
    shape = {"rows": rows, "vocabulary": vocabulary, "dtype": f"{logits.dtype}".removeprefix("torch.")}
    figures = {
        "us": round(us, 2),
        "floor_us": round(num_bytes / BANDWIDTH * 1e6, 2),
        "gb_per_s": round(num_bytes / us * 1e-3, 1),
        "fraction": round(num_bytes / us * 1e6 / BANDWIDTH, 3),
    }
    found = {"metric": name, **shape, **more, **figures}
    print(json.dumps(found), flush=True)
    return found


def draw_lines(rows: int, vocabulary: int) -> list[dict[str, Any]]:
    lines = []
    seeds, zeros = torch.arange(rows, device="cuda") * 7919, torch.zeros(rows, dtype=torch.int64, device="cuda")
    for dtype in (torch.bfloat16, torch.float32):
        sets = copies(rows, vocabulary, dtype)
        for temperature in (0.0, 1.0):
            column = torch.full((rows,), temperature, device="cuda")
            calls = [partial(sample, x, column, seeds, zeros, zeros) for x in sets]
            lines.append(line("sample", sets[0], graph_us(calls), temperature=temperature))
    return lines


def filter_lines(rows: int, vocabulary: int) -> list[dict[str, Any]]:
    lines = []
    sets = copies(rows, vocabulary, torch.float32)[:8]
    sources = [x.clone() for x in sets[:2]]
    restore = graph_us([partial(x.copy_, sources[i % 2]) for i, x in enumerate(sets)])
    for temperature, min_p, top_k, top_p in (
        (1.0, 0.0, 0, 1.0),
        (0.0, 0.1, 50, 0.9),
        (1.0, 0.0, 50, 1.0),
        (1.0, 0.0, 50, 0.9),
        (1.0, 0.05, 0, 1.0),
        (0.3, 0.0, 0, 0.9),
        (1.0, 0.0, 0, 0.9),
        (3.0, 0.0, 0, 0.95),
        (1.0, 0.0, 5000, 0.9),
    ):
        columns = [torch.full((rows,), value, device="cuda") for value in (temperature, min_p, 0.0, top_p)]
        columns[2] = torch.full((rows,), top_k, device="cuda")

        def call(i: int, x: Tensor, columns: list[Tensor] = columns) -> None:
            x.copy_(sources[i % 2])
            filter_logits(x, *columns)

        us = graph_us([partial(call, i, x) for i, x in enumerate(sets)]) - restore
        more = {"temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p}
        lines.append(line("filter_logits", sets[0], us, **more))
    return lines


def other_lines(rows: int, vocabulary: int) -> list[dict[str, Any]]:
    lines = []
    sets = copies(rows, vocabulary, torch.float32)[:8]
    seen = torch.rand(rows, vocabulary, device="cuda") < 0.005
    counts = torch.randint(0, 3, (rows, vocabulary), device="cuda", dtype=torch.int32) * seen.flip(0)
    order, ones = torch.arange(rows, device="cuda"), torch.ones(rows, device="cuda")
    pairs = torch.randint(0, rows, (300,), device="cuda"), torch.randint(0, vocabulary, (300,), device="cuda")
    values = torch.randn(300, device="cuda")
    operations: list[tuple[str, Callable[[Tensor], object]]] = [
        ("apply_penalties", lambda x: apply_penalties(x, order, seen, counts, ones * 0.1, ones * 0.1, ones * 1.1)),
        ("apply_logit_bias_300", lambda x: apply_logit_bias(x, *pairs, values)),
        ("apply_allowed_300", lambda x: apply_allowed(x, *pairs)),
        ("logprobs_top_0", lambda x: logprobs(x, order, 0)),
        ("logprobs_top_5", lambda x: logprobs(x, order, 5)),
        ("logprobs_top_20", lambda x: logprobs(x, order, 20)),
    ]
    for name, operation in operations:
        us = graph_us([partial(operation, x) for x in sets])
        lines.append(line(name, sets[0], us))
    return lines


def table(lines: list[dict[str, Any]]) -> None:
    for found in lines:
        parameters = [found[key] for key in ("dtype", "temperature", "min_p", "top_k", "top_p") if key in found]
        print(
            f"{found['metric']:22} {found['rows']:4} x {found['vocabulary']:6} {found['us']:9.2f} us"
            f" (floor {found['floor_us']:6.2f}) {parameters}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Time sampling on a GPU.")
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1, 64])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[128256, 151936])
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    parser.add_argument("--commit", help="of Octavo, where there is no git to ask")
    arguments = parser.parse_args()
    require_cuda("gpu_sampling")
    torch.manual_seed(0)
    lines: list[dict[str, Any]] = []
    with torch.inference_mode():
        for vocabulary in arguments.vocabularies:
            for rows in arguments.rows:
                for part in (draw_lines, filter_lines, other_lines):
                    lines.extend(part(rows, vocabulary))
    if arguments.out is not None:
        device = torch.cuda.get_device_name()
        record(arguments.out, "kernels-sampling", lines, device, arguments.commit)
    table(lines)


if __name__ == "__main__":
    main()
