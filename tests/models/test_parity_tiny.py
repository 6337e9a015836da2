"""Tiny random models against transformers in fp32: prefill in odd chunks, then decode, logits within 1e-3."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.worker.models.interface import Batch, KVCache, Model
from tests.support.plan_driver import PlanDriver
from tests.support.tiny_models import load_eager

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "llama-no-gqa": ("llama", {"num_key_value_heads": 6}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("llama", {"head_dim": 20}),
    "llama-head-80": ("llama", {"head_dim": 80, "num_hidden_layers": 1}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 100.0}}),
    "llama-eps": ("llama", {"rms_norm_eps": 0.5}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-tied": ("qwen3", {"head_dim": 20, "tie_word_embeddings": True, "num_key_value_heads": 6}),
    "qwen3-biases": ("qwen3", {"head_dim": 8, "attention_bias": True, "rms_norm_eps": 0.5}),
    "qwen3-default-head": ("qwen3", {"num_hidden_layers": 1}),
}


def write_with_transformers(folder: Path, kind: str, changes: dict[str, Any]) -> Any:
    """Write a random model as transformers writes it; return it in fp32."""
    import transformers

    prefix = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    values: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "tie_word_embeddings": False,
    } | changes
    torch.manual_seed(0)
    config: Any = getattr(transformers, f"{prefix}Config")(**values)
    model: Any = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # transformers' own start would hide mistakes in small logits
            parameter.normal_(0.0, 0.5 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5)
            if "norm" in name:
                parameter += 1.0
    model.eval()
    model.save_pretrained(folder)
    return model


def logits_of(model: Model, caches: list[KVCache], ids: list[int], chunks: list[int], block_size: int) -> Tensor:
    """Return the logits at every position of one sequence that is computed in chunks."""
    blocks = list(range(1, 1 - (-len(ids) // block_size)))[::-1]
    table = torch.tensor([blocks], dtype=torch.int32)
    parts, begin = [], 0
    for chunk in chunks:
        positions = torch.arange(begin, begin + chunk)
        slots = table[0, positions // block_size].long() * block_size + positions % block_size
        batch = Batch(
            input_ids=torch.tensor(ids[begin : begin + chunk]),
            positions=positions,
            slot_mapping=slots,
            block_tables=table,
            query_start=torch.tensor([0, chunk], dtype=torch.int32),
            seq_lens=torch.tensor([begin + chunk], dtype=torch.int32),
            logits_index=torch.arange(chunk),
        )
        parts.append(model.forward(batch, caches))
        begin += chunk
    assert begin == len(ids)
    return torch.cat(parts)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_agree(tmp_path: Path, name: str, backend: str) -> None:
    theirs = write_with_transformers(tmp_path, *CONFIGS[name])
    runner = load_eager(tmp_path, backend=backend)
    ids = torch.randint(97, (100,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = theirs(ids[None]).logits[0]
    assert expected.std() > 0.3
    for chunks in ([100], [1, 7, 33, 16, 5, 2, *([1] * 36)]):
        ours = logits_of(runner._model, runner._caches, ids.tolist(), chunks, runner.rows.limits.block_size)
        assert (ours - expected).abs().max() < 1e-3, chunks


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_greedy_ids_agree_in_a_mixed_batch(tmp_path: Path, kind: str) -> None:
    theirs = write_with_transformers(tmp_path, kind, {})
    runner = load_eager(tmp_path)
    driver = PlanDriver.of(runner)
    prompts = {row: torch.randint(97, (5 + 9 * row,)).tolist() for row in range(4)}
    for row, prompt in prompts.items():
        driver.begin(row, prompt)
    while any(state.num_known < len(prompts[row]) + 10 for row, state in driver.rows.items()):
        counts = {}
        for row, state in driver.rows.items():
            left = state.num_known - state.num_computed
            if state.num_known < len(prompts[row]) + 10:
                counts[row] = min(left, 7 + row)
        runner.execute(driver.plan(counts))
    for row, prompt in prompts.items():
        ids = runner.rows.known_ids(row)
        with torch.inference_mode():
            best = theirs(ids[None]).logits[0].argmax(-1)
        assert ids[len(prompt) :].tolist() == best[len(prompt) - 1 : -1].tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_half_precision_stays_close(tmp_path: Path, kind: str, backend: str, dtype: str) -> None:
    theirs = write_with_transformers(tmp_path, kind, {"num_hidden_layers": 1})
    runner = load_eager(tmp_path, backend=backend, dtype=dtype)
    ids = torch.randint(97, (60,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = theirs(ids[None]).logits[0]
    ours = logits_of(runner._model, runner._caches, ids.tolist(), [41, *([1] * 19)], runner.rows.limits.block_size)
    assert ours.dtype is getattr(torch, dtype)
    assert (ours - expected).abs().mean() < 0.03 * expected.std()
