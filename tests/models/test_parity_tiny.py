"""Tiny random models against transformers in fp32: prefill in odd chunks, then decode, logits within 1e-3."""

from pathlib import Path

import pytest
import torch

from tests.support.architectures import CONFIGS, expected_logits, logits_of, write_with_transformers
from tests.support.plan_driver import PlanDriver
from tests.support.tiny_models import load_eager


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_agree(tmp_path: Path, name: str, backend: str) -> None:
    theirs = write_with_transformers(tmp_path, *CONFIGS[name])
    runner = load_eager(tmp_path, backend=backend)
    ids = torch.randint(97, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = expected_logits(theirs, ids)
    assert expected.std() > 0.3
    for chunks in ([100], [1, 7, 33, 16, 5, 2, *([1] * 36)]):
        ours = logits_of(runner._model, runner._caches, ids, chunks, runner.rows.limits.block_size)
        assert (ours - expected).abs().max() < 1e-3, chunks


@pytest.mark.parametrize("served", [32, 33])
def test_longrope_takes_its_factors_by_the_length_that_is_served(tmp_path: Path, served: int) -> None:
    """transformers takes them by the length of each sequence: both agree on sequences as long as those that are served."""
    theirs = write_with_transformers(tmp_path, *CONFIGS["phi3-longrope"])
    runner = load_eager(tmp_path, max_model_len=served)
    ids = torch.randint(97, (served,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = expected_logits(theirs, ids)
    ours = logits_of(runner._model, runner._caches, ids, [served], runner.rows.limits.block_size)
    assert (ours - expected).abs().max() < 1e-3


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
@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "gpt2", "llama", "qwen3"])
def test_half_precision_stays_close(tmp_path: Path, kind: str, backend: str, dtype: str) -> None:
    theirs = write_with_transformers(tmp_path, kind, {"n_layer": 1} if kind == "gpt2" else {"num_hidden_layers": 1})
    runner = load_eager(tmp_path, backend=backend, dtype=dtype)
    ids = torch.randint(97, (60,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = theirs(ids[None]).logits[0]
    ours = logits_of(runner._model, runner._caches, ids.tolist(), [41, *([1] * 19)], runner.rows.limits.block_size)
    assert ours.dtype is getattr(torch, dtype)
    assert (ours - expected).abs().mean() < 0.03 * expected.std()
