"""Parity with transformers: our greedy ids and log-probabilities against its logits over the same sequences.

transformers sees each of our sequences whole, so every place is compared on its own: a place where ids part does not
spoil those behind it.
"""

from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from octavo.wire.columns import unpack_floats, unpack_ints
from octavo.wire.plan import RowSampling
from octavo.worker.runner import Runner
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


@torch.inference_mode()
def logprobs_of(model: Any, output: Output) -> Tensor:
    """Return transformers' log-probabilities where our ids were drawn: [len(ids), vocab] float64."""
    ids = torch.tensor([output.prompt + output.ids], device=model.device)
    logits: Tensor = model(ids).logits[0, len(output.prompt) - 1 : -1]
    return logits.double().log_softmax(-1).cpu()


def margins(outputs: list[Output], expected: list[Tensor]) -> Tensor:
    """Return how much less likely than the most likely id each of ours is; 0 where it is that one."""
    parts = [
        theirs.max(-1).values - theirs.gather(-1, torch.tensor(output.ids)[:, None])[:, 0]
        for output, theirs in zip(outputs, expected, strict=True)
    ]
    return torch.cat(parts)


def at_our_top(outputs: list[Output], theirs: list[Tensor]) -> Tensor:
    """Return transformers' log-probabilities of the ids that we found most likely: [places, TOP]."""
    return torch.cat([x.gather(-1, torch.tensor(output.top_ids)) for output, x in zip(outputs, theirs, strict=True)])


def ours(outputs: list[Output]) -> Tensor:
    """Return our log-probabilities: [places, TOP]."""
    return torch.tensor([line for output in outputs for line in output.top_logprobs], dtype=torch.float64)
