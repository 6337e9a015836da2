"""Small model folders with random weights, written without transformers, and workers that have loaded them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.kernels.ops import get_ops
from octavo.worker.config import WorkerConfig
from octavo.worker.loading import LoadedWorker, load
from octavo.worker.models.config import parse_model_config
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.targets import Placement, ShardSpec
from octavo.worker.runner import EagerRunner

TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "dtype": "float32",
}

TINY_QWEN2_MOE: dict[str, Any] = {key: value for key, value in TINY_LLAMA.items() if key != "mlp_bias"} | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
    "shared_expert_intermediate_size": 36,
    "norm_topk_prob": False,
}
"""Routed experts and a shared one."""


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Return a checkpoint's tensors for a config, large enough that logits differ clearly."""
    cpu = Placement(torch.float32, torch.device("cpu"))
    description = parse_model_config(config)
    targets = Decoder(description, get_ops("reference"), cpu, ShardSpec(), 2).targets()
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, target in targets.items():
        scale = 0.5 if len(target.full_shape) == 1 else target.full_shape[-1] ** -0.5
        tensors[name] = torch.randn(target.full_shape, generator=generator) * scale
        if "norm" in name or ".ln_" in name:
            tensors[name] += 1.0
    tensors[f"{description.names.embedding}.weight"] *= 3.0
    return tensors


def write_model(
    folder: Path, config: dict[str, Any] | None = None, tensors: dict[str, Tensor] | None = None, num_shards: int = 0
) -> Path:
    """Write a model folder; with `num_shards`, through an index.

    Returns:
        The folder.
    """
    config = TINY_LLAMA if config is None else config
    tensors = random_tensors(config) if tensors is None else tensors
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if not num_shards:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[shard::num_shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def worker_config(folder: Path, **settings: Any) -> WorkerConfig:
    """Return a config for a small CPU worker; `settings` replace what is here."""
    defaults: dict[str, Any] = {
        "address": "ipc:///nowhere",
        "device": "cpu",
        "backend": "reference",
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 129,
        "num_threads": 1,
    }
    return WorkerConfig(model_path=folder, **(defaults | settings))


def load_worker(folder: Path, **settings: Any) -> LoadedWorker:
    """Load a small worker from a folder."""
    return load(worker_config(folder, **settings), lambda: None)


def load_eager(folder: Path, **settings: Any) -> EagerRunner:
    """Load a small worker of a backend that executes each plan at once; return its runner."""
    runner = load_worker(folder, **settings).runner
    assert isinstance(runner, EagerRunner)
    return runner
