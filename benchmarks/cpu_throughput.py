"""The engine on the CPU beside transformers, in one run: a Llama shape of 160M parameters with random weights.

    python -m benchmarks.cpu_throughput [--variants fp32 int8] [--rounds 2] [--out FILE] [--profile]

- W1: one request, 128 tokens in, 64 out: time to first token, and time per output token (TPOT).
- W2: 32 requests at once, prompts of 16 to 256 tokens, outputs of 16 to 128, at most 32, 16 or 8 of them running.
- W3: 16 requests that share 256 tokens and have 16 of their own, 16 out.
- W4: 8 prompts of 512 tokens, 1 out.

transformers runs `generate` on left-padded static batches in fp32, in this process, and its OpenMP threads spin no longer
than the worker's (octavo.worker says why: on a busy machine it would come off many times worse). Of each variant scheduler
and worker run as processes of their own, as in production, started anew for each round. Everything is greedy, nothing ends
early, and the outputs that were asked for are counted. Rounds alternate between the engines, and medians count. W1, which is
short, is run by both in turns, several times a round, while the engine stands by: its ratios are those of these pairs.
"""

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks._record import record
from octavo.cli.bench_client import EngineClient, Run
from octavo.cli.bench_engine import Engine, EngineSettings, running_engine
from octavo.cli.bench_models import CONFIGS
from octavo.cli.bench_workloads import Request, Workload
from octavo.worker import config as _config  # noqa: F401 - the package says how long threads spin, before torch is there

VOCABULARY = 32_000
CONFIG: dict[str, Any] = CONFIGS["tiny"] | {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
VARIANTS: dict[str, dict[str, object]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
}
CONCURRENCIES = (32, 16, 8)
TARGETS = {"W2_c32": 2.6, "W2_c8": 3.5, "W1_fp32": 0.5, "W1_int8": 0.25}
PAIRS = 5
Figures = dict[str, float]


def workloads() -> dict[str, Workload]:
    rng = np.random.default_rng(7)

    def ids(count: int) -> list[int]:
        return [int(drawn) for drawn in rng.integers(1000, VOCABULARY, size=count)]

    lengths = [(int(rng.integers(16, 257)), int(rng.integers(16, 129))) for _ in range(32)]
    shared = ids(256)
    return {
        "W1": Workload("W1", [Request(ids(128), 64)]),
        "W2": Workload("W2", [Request(ids(prompt), out) for prompt, out in lengths]),
        "W3": Workload("W3", [Request(shared + ids(16), 16) for _ in range(16)]),
        "W4": Workload("W4", [Request(ids(512), 1) for _ in range(8)]),
    }


class Transformers:
    """Static batches through `generate`, in fp32."""

    def __init__(self, threads: int) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self._torch = torch
        self._model = LlamaForCausalLM(LlamaConfig(**CONFIG)).train(False)
        self._model.generation_config.eos_token_id = None

    def __call__(self, workload: Workload, concurrency: int) -> float:
        """Return the seconds that a workload takes in batches of so many requests."""
        began = time.perf_counter()
        for start in range(0, len(workload.requests), concurrency):
            self._generate(workload.requests[start : start + concurrency])
        return time.perf_counter() - began

    def _generate(self, requests: list[Request]) -> None:
        longest = max(len(request.prompt_ids) for request in requests)
        ids = self._torch.zeros(len(requests), longest, dtype=self._torch.int64)
        mask = self._torch.zeros_like(ids)
        for line, request in enumerate(requests):
            ids[line, longest - len(request.prompt_ids) :] = self._torch.tensor(request.prompt_ids)
            mask[line, longest - len(request.prompt_ids) :] = 1
        wanted = max(request.num_output_tokens for request in requests)
        with self._torch.inference_mode():
            out = self._model.generate(ids, attention_mask=mask, max_new_tokens=wanted, do_sample=False, pad_token_id=0)
        if out.shape[1] != longest + wanted:
            raise RuntimeError(f"generate put out {out.shape[1] - longest} tokens, wanted were {wanted}")


def measure_transformers(run: Transformers, loads: dict[str, Workload], names: list[str]) -> Figures:
    figures: Figures = {}
    if "W1" in names:
        w1 = loads["W1"]
        first = run(Workload("W1", [Request(w1.requests[0].prompt_ids, 1)]), 1)
        figures["W1_ttft_ms"] = first * 1e3
        figures["W1_tpot_ms"] = (run(w1, 1) - first) / (w1.num_output_tokens - 1) * 1e3
    for concurrency in CONCURRENCIES:
        if f"W2_c{concurrency}" in names:
            figures[f"W2_c{concurrency}_tok_s"] = loads["W2"].num_output_tokens / run(loads["W2"], concurrency)
    if "W3" in names:
        figures["W3_s"] = run(loads["W3"], 16)
    if "W4" in names:
        figures["W4_s"] = run(loads["W4"], 8)
    return figures


def measure_engine(client: EngineClient, loads: dict[str, Workload], names: list[str]) -> Figures:
    def run(name: str, concurrency: int | None = None) -> Run:
        client.reset_prefix_cache()
        return client.run(loads[name], concurrency=concurrency)

    figures: Figures = {}
    if "W1" in names:
        done = run("W1")
        figures["W1_ttft_ms"] = float(done.ttft_s[0]) * 1e3
        figures["W1_tpot_ms"] = float(done.tpot_s[0]) * 1e3
    for concurrency in CONCURRENCIES:
        if f"W2_c{concurrency}" in names:
            figures[f"W2_c{concurrency}_tok_s"] = loads["W2"].num_output_tokens / run("W2", concurrency).wall_s
    if "W3" in names:
        figures["W3_s"] = run("W3").wall_s
    if "W4" in names:
        figures["W4_s"] = run("W4").wall_s
    return figures


@contextmanager
def engine(variant: str, threads: int | None) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory(prefix="octavo-cpu-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        flags: dict[str, object] = {"device": "cpu", "load-format": "dummy", **VARIANTS[variant]}
        if threads is not None:
            flags["num-threads"] = threads
        with running_engine(EngineSettings(folder, flags)) as started:
            yield started


def measure_pairs(
    run: Transformers | None, client: EngineClient, loads: dict[str, Workload]
) -> tuple[Figures, Figures]:
    """Run W1 by both in turns; return medians of transformers, and of the engine.

    With the latter come two ratios of the TPOT: the median of the pairs' and that of the least ones, which other work on the
    machine disturbs less.
    """
    theirs, ours = [], []
    for _ in range(PAIRS):
        if run is not None:
            theirs.append(measure_transformers(run, loads, ["W1"]))
        ours.append(measure_engine(client, loads, ["W1"]))
    for mine, other in zip(ours, theirs, strict=False):
        mine["W1_tpot_ratio"] = mine["W1_tpot_ms"] / other["W1_tpot_ms"]
    figures = medians_of(ours)
    if theirs:
        figures["W1_tpot_least_ratio"] = min(one["W1_tpot_ms"] for one in ours) / min(
            one["W1_tpot_ms"] for one in theirs
        )
    return medians_of(theirs), figures


def medians_of(figures: list[Figures]) -> Figures:
    return {name: median(one[name] for one in figures) for name in (figures[0] if figures else {})}


def compare(medians: dict[str, Figures]) -> list[str]:
    """Return lines that say how variants stand against transformers, and what was wanted."""
    lines = []
    base = medians.get("transformers", {})
    for variant, figures in medians.items():
        for name, value in figures.items():
            wanted = TARGETS.get(f"W1_{variant}" if name.endswith("_ratio") else name.removesuffix("_tok_s"))
            has_ratio = variant != "transformers" and name in base and not name.startswith("W1")  # W1 has its own
            ratio = f"  {value / base[name]:5.2f}x" if has_ratio else ""
            lines.append(f"{variant:13}{name:14}{value:10.2f}{ratio}" + (f" (wanted {wanted}x)" if wanted else ""))
    return lines


def rows(medians: dict[str, Figures], all_figures: dict[str, list[Figures]], note: str) -> list[dict[str, Any]]:
    base = medians.get("transformers", {})
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")}
    made = []
    for variant, figures in medians.items():
        for name, value in figures.items():
            row: dict[str, Any] = {
                "engine": "transformers" if variant == "transformers" else "octavo",
                "variant": "fp32" if variant == "transformers" else variant,
                "metric": name,
                "value": round(value, 3),
                "unit": name.rpartition("_")[2] if not name.endswith("tok_s") else "tok/s",
                "runs": [round(one[name], 3) for one in all_figures[variant]],
                "load": [round(x, 2) for x in os.getloadavg()],
                **versions,
            }
            if variant != "transformers" and name in base and not name.startswith("W1"):
                row["of_transformers"] = round(value / base[name], 3)
            made.append(row | ({"note": note} if note else {}))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["W1", *(f"W2_c{c}" for c in CONCURRENCIES), "W3", "W4"]
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=["fp32", "int8"])
    parser.add_argument("--workloads", nargs="*", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of either engine; default: of transformers all cores")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--note", default="")
    parser.add_argument("--out", type=Path, help="file that rows are appended to")
    chosen = parser.parse_args()
    loads = workloads()
    cores = len(os.sched_getaffinity(0))
    measured: dict[str, list[Figures]] = {}
    base = None if chosen.no_transformers else Transformers(chosen.threads or cores)
    others = [name for name in chosen.workloads if name != "W1"]
    for number in range(chosen.rounds):
        if base is not None:
            measure_transformers(base, loads, ["W1"])  # warm
            measured.setdefault("transformers", []).append(measure_transformers(base, loads, others))
        for name in chosen.variants:
            with engine(name, chosen.threads) as started:
                figures: Figures = {}
                if "W1" in chosen.workloads:
                    theirs, figures = measure_pairs(base, started.client, loads)
                    if base is not None:
                        measured["transformers"][-1] |= theirs
                figures |= measure_engine(started.client, loads, others)
            measured.setdefault(name, []).append(figures)
            sys.stderr.write(f"round {number + 1}: {measured.get('transformers', [])[-1:]}, {name}: {figures}\n")
    medians = {name: medians_of(figures) for name, figures in measured.items()}
    print("\n".join(compare(medians)))
    if chosen.out is not None:
        record(chosen.out, "benchmarks/cpu_throughput.py", rows(medians, measured, chosen.note))


if __name__ == "__main__":
    main()
