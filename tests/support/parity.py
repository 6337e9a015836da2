"""Parity with transformers: our greedy ids and log-probabilities against its logits over the same sequences.

transformers sees each of our sequences whole, so every place is compared on its own: a place where ids part does not
spoil those behind it.
"""

from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from octavo.wire.columns import unpack_floats, unpack_ints
from octavo.wire.plan import RowSampling
from octavo.worker.interface import Runner
from tests.support.plan_driver import PlanDriver, faults_of, tokens_of

TOP = 20
"""Log-probabilities that are compared at each place."""


@dataclass
class Output:
    """What became of one prompt."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)  # of each place, if they were asked for
    top_logprobs: list[list[float]] = field(default_factory=list)


def run_together(
    runner: Runner, prompts: list[list[int]], num_output: int, *, logprobs: bool, longest_chunk: int
) -> list[Output]:
    """Generate greedily for all prompts at once: they begin one after another, in chunks, beside rows that decode.

    What a prompt has in common with an earlier one, it takes from that one's blocks.
    """
    runner.clear()
    driver, random = PlanDriver.of(runner), Random(0)
    limits = runner.rows.limits
    sampling = RowSampling(seed=0, temperature=0.0, logprobs=TOP if logprobs else -1)
    outputs = [Output(prompt) for prompt in prompts]
    step = 0
    while any(len(output.ids) < num_output for output in outputs):
        if step % 3 == 0 and step // 3 < len(prompts):
            _begin(driver, step // 3, prompts, sampling, limits.block_size)
        step += 1
        counts: dict[int, int] = {}
        budget = limits.max_num_batched_tokens
        for row, state in driver.rows.items():
            left = state.num_known - state.num_computed
            if len(outputs[row].ids) < num_output and budget:
                counts[row] = min(left, budget, random.randint(1, longest_chunk))
                budget -= counts[row]
        result = runner.execute(driver.plan(counts))
        assert faults_of(result) == {}
        for row, token in tokens_of(result).items():
            outputs[row].ids.append(token)
        for entry in result.logprobs:
            outputs[entry.row].top_ids.append(list(unpack_ints(entry.top_ids)))
            outputs[entry.row].top_logprobs.append(list(unpack_floats(entry.top_logprobs)))
    runner.clear()
    return outputs


def _begin(driver: PlanDriver, row: int, prompts: list[list[int]], sampling: RowSampling, block_size: int) -> None:
    prompt, best, source = prompts[row], 0, None
    for earlier, state in driver.rows.items():
        common = next(
            (i for i, (a, b) in enumerate(zip(prompt[:-1], prompts[earlier], strict=False)) if a != b),
            min(len(prompt) - 1, len(prompts[earlier])),
        )
        cached = min(common, state.num_computed) // block_size * block_size
        if cached > best:
            best, source = cached, state
    driver.begin(row, prompt, sampling, num_cached=best, cached_from=source)


class Oracle:
    """transformers on one checkpoint: exact arithmetic on the weights as rounded to a dtype, and its own in that dtype.

    The second says how far from the exact values a good implementation in that dtype is.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        def load(how: torch.dtype, attention: str) -> Any:
            # Loaded in its dtype, not converted: that would round the frequencies of the rotary embedding too.
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=how, attn_implementation=attention)
            return model.to(device).eval()

        self._exact, self._own = load(torch.float32, "eager"), load(dtype, "sdpa")
        for parameter in self._exact.parameters():
            parameter.data = parameter.data.to(dtype).float()
        self._is_exact = dtype is torch.float32

    def check(self, outputs: list[Output]) -> None:
        """Check outputs of greedy rows: each id, and log-probabilities where they were asked for.

        An id may differ from transformers' most likely one by the margin: six times the error (root mean square) that
        its own arithmetic in the dtype has, or 1e-3 in float32. Our error must be at most 1.3 times as large as that
        one, or 1e-4 in float32.
        """
        exact = [_logprobs(self._exact, output) for output in outputs]
        likely = [x.topk(TOP).indices for x in exact]
        error = 1e-4 if self._is_exact else _rms(self._own_error(outputs, exact, likely))
        margin = 1e-3 if self._is_exact else 6 * error
        for output, theirs in zip(outputs, exact, strict=True):
            behind = theirs.max(-1).values - theirs.gather(-1, torch.tensor(output.ids)[:, None])[:, 0]
            parted = int((behind > 0).int().argmax())
            assert float(behind.max()) < margin, (
                f"ids part at {parted}, worst by {float(behind.max()):.4f} of {margin:.4f}"
            )
        if outputs[0].top_ids:
            ours = [torch.tensor(output.top_logprobs, dtype=torch.float64) for output in outputs]
            theirs_there = [x.gather(-1, torch.tensor(o.top_ids)) for o, x in zip(outputs, exact, strict=True)]
            found = _rms(torch.cat(ours) - torch.cat(theirs_there))
            assert found < (error if self._is_exact else 1.3 * error), (
                f"error {found:.5f}, transformers' own {error:.5f}"
            )

    def _own_error(self, outputs: list[Output], exact: list[Tensor], likely: list[Tensor]) -> Tensor:
        own = [_logprobs(self._own, output) for output in outputs]
        parts = [(a - b).gather(-1, ids) for a, b, ids in zip(own, exact, likely, strict=True)]
        return torch.cat(parts)


@torch.inference_mode()
def _logprobs(model: Any, output: Output) -> Tensor:
    """Return a model's log-probabilities where our ids were drawn: [len(ids), vocab] float64."""
    ids = torch.tensor([output.prompt + output.ids], device=model.device)
    logits: Tensor = model(ids).logits[0, len(output.prompt) - 1 : -1]
    return logits.double().log_softmax(-1).cpu()


def _rms(x: Tensor) -> float:
    return float(x.pow(2).mean().sqrt())
