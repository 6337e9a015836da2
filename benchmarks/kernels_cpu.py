"""Times of the CPU kernels at the demo model's shape, one JSON line each.

    python benchmarks/kernels_cpu.py [--backend cpu] [--threads 2] [--context 256]

Each figure is the best of several runs over the layers of a whole step, so weights and caches come from memory as they
do in a forward pass. A decode step has one new token a row.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from octavo.kernels.ops import BACKENDS, Ops, get_ops

LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 30, 576, 1536, 49152
HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 9, 3, 64, 16
ROWS = (1, 8, 32)
RUNS = 5


def report(metric: str, seconds: float) -> None:
    print(json.dumps({"metric": metric, "value": round(seconds * 1e3, 3), "unit": "ms"}), flush=True)


def best(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(RUNS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def linear_times(ops: Ops, dtype: torch.dtype) -> None:
    shapes = [((HEADS + 2 * KV_HEADS) * HEAD_SIZE, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN)]
    shapes.append((HIDDEN, INTERMEDIATE))
    layers = [[ops.prepare_weight(torch.randn(shape), dtype) for shape in shapes] for _ in range(LAYERS)]
    head = ops.prepare_weight(torch.randn(VOCABULARY, HIDDEN), dtype)
    for rows in ROWS:
        inputs = [torch.randn(rows, shape[1]).to(dtype) for shape in shapes]
        hidden = torch.randn(rows, HIDDEN).to(dtype)

        def all_layers(inputs: list[Tensor] = inputs) -> None:
            for weights in layers:
                for x, weight in zip(inputs, weights, strict=True):
                    ops.linear(x, weight)

        name = f"{dtype}".removeprefix("torch.")
        report(f"linear_{name}_30_layers_T{rows}", best(all_layers))
        report(f"linear_{name}_head_T{rows}", best(partial(ops.linear, hidden, head)))


def attention_time(ops: Ops, new_tokens: list[int], context: list[int]) -> float:
    blocks = [-(-keys // BLOCK_SIZE) for keys in context]
    order = torch.randperm(sum(blocks)).int() + 1
    tables = torch.zeros(len(context), max(blocks), dtype=torch.int32)
    for row, part in enumerate(torch.split(order, blocks)):
        tables[row, : len(part)] = part
    shape = (sum(blocks) + 1, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    caches = [(torch.randn(shape), torch.randn(shape)) for _ in range(LAYERS)]
    q = torch.randn(sum(new_tokens), HEADS, HEAD_SIZE)
    query_start = torch.tensor([0, *new_tokens]).cumsum(0).int()
    seq_lens = torch.tensor(context).int()

    def all_layers() -> None:
        for keys, values in caches:
            ops.paged_attention(q, keys, values, tables, query_start, seq_lens, HEAD_SIZE**-0.5)

    return best(all_layers)


def attention_times(ops: Ops, context: int) -> None:
    for rows in ROWS:
        report(
            f"attention_30_layers_decode_R{rows}_context{context}", attention_time(ops, [1] * rows, [context] * rows)
        )
    ragged = [32 * (row + 1) for row in range(16)]
    report("attention_30_layers_decode_R16_context32to512", attention_time(ops, [1] * 16, ragged))
    report("attention_30_layers_prefill_1x64", attention_time(ops, [64], [64]))
    report("attention_30_layers_prefill_1x512", attention_time(ops, [512], [512]))
    report("attention_30_layers_prefill_20x64", attention_time(ops, [64] * 20, [64] * 20))
    report("attention_30_layers_mixed_15x1_1x64", attention_time(ops, [1] * 15 + [64], [context] * 15 + [128]))


def small_times(ops: Ops) -> None:
    weight, caches = torch.randn(HIDDEN), torch.zeros(2, 128, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    cos_sin = ops.rotary_cos_sin(torch.rand(HEAD_SIZE // 2), 8192)
    for rows in ROWS:
        x, gate_up = torch.randn(rows, HIDDEN), torch.randn(rows, 2 * INTERMEDIATE)
        q, k, v = torch.split(torch.randn(rows, HEADS + 2 * KV_HEADS, HEAD_SIZE), [HEADS, KV_HEADS, KV_HEADS], dim=1)
        positions = torch.arange(rows)

        def all_layers(
            x: Tensor = x, gate_up: Tensor = gate_up, qkv: tuple[Tensor, ...] = (q, k, v), positions: Tensor = positions
        ) -> None:
            for _ in range(LAYERS):
                ops.rms_norm(x, weight, 1e-5, x)
                ops.rotary_and_write_kv(qkv[0], qkv[1], qkv[2], positions, cos_sin, caches[0], caches[1], positions)
                ops.rms_norm(x, weight, 1e-5, x)
                ops.act_and_mul(gate_up)

        report(f"norm_rotary_gate_30_layers_T{rows}", best(all_layers))


def sampling_times(ops: Ops) -> None:
    for rows in ROWS:
        logits = torch.randn(rows, VOCABULARY) * 3
        zeros = torch.zeros(rows, dtype=torch.int64)
        report(f"logprobs_top5_S{rows}", best(partial(ops.logprobs, logits, zeros, 5)))
        report(f"sample_greedy_S{rows}", best(partial(draw, ops, logits, 0.0, 0, 1.0)))
        report(f"sample_temperature_S{rows}", best(partial(draw, ops, logits, 1.0, 0, 1.0)))
        report(f"sample_top_k50_S{rows}", best(partial(draw, ops, logits, 1.0, 50, 1.0)))
        report(f"sample_top_p0.95_S{rows}", best(partial(draw, ops, logits, 1.0, 0, 0.95)))


def draw(ops: Ops, logits: Tensor, temperature: float, top_k: int, top_p: float) -> None:
    rows = logits.shape[0]
    zeros, temperatures = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), temperature)
    work = logits.clone()
    if top_k or top_p < 1:
        ops.filter_logits(work, temperatures, torch.zeros(rows), zeros + top_k, torch.full((rows,), top_p))
    ops.sample(work, temperatures, torch.arange(rows), zeros, zeros)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the CPU kernels at the demo model's shape.")
    parser.add_argument("--backend", choices=BACKENDS, default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=256, help="keys of each decode row")
    parser.add_argument("--bf16", action="store_true", help="also time linear layers in bfloat16")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    ops = get_ops(arguments.backend)
    with torch.inference_mode():
        linear_times(ops, torch.float32)
        if arguments.bf16:
            linear_times(ops, torch.bfloat16)
        attention_times(ops, arguments.context)
        small_times(ops)
        sampling_times(ops)


if __name__ == "__main__":
    main()
