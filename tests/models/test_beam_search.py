"""Beam search of scheduler and worker on tiny models against transformers: ids, order and scores."""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from octavo.scheduler.core import Scheduler
from octavo.scheduler.events import RequestSubmitted, StepCompleted, WorkerReady
from octavo.scheduler.instructions import EmitOutput, SendPlan
from octavo.wire.columns import pack_ints
from octavo.wire.handshake import WorkerFacts
from octavo.wire.ids import BootId, SessionId
from octavo.wire.plan import RowSampling
from octavo.wire.requests import BeamParams, FinishReason, SubmitRequest, num_candidates
from octavo.worker.runner import EagerRunner
from tests.support.architectures import write_with_transformers
from tests.support.core_driver import FRONTEND, make_config
from tests.support.fake_frontend import Received
from tests.support.tiny_models import load_eager

PROMPT = [3, 14, 15, 92, 65, 35]
MAX_TOKENS = 12


class Engine:
    """A scheduler's core and a runner, without processes."""

    def __init__(self, runner: EagerRunner) -> None:
        runner.clear()
        self._runner = runner
        self._core = Scheduler(make_config())
        self.received = Received()
        limits = runner.rows.limits
        facts = WorkerFacts(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            backend="reference",
            device="cpu",
            dtype="float32",
        )
        self._tell(WorkerReady(SessionId(1), facts, BootId("w")))

    def run(self, *requests: SubmitRequest) -> None:
        """Run requests to their end."""
        self._tell(*(RequestSubmitted(FRONTEND, request) for request in requests))

    def _tell(self, *events: Any) -> None:
        pending = self._core.on_events(events, 0.0)
        while pending:
            instruction = pending.pop(0)
            match instruction:
                case EmitOutput(_, output):
                    self.received.take(output)
                case SendPlan(plan):
                    pending += self._core.on_events([StepCompleted(self._runner.execute(plan))], 0.0)
                    self._core.check()


def search(
    handle: int, prompt: list[int], n: int, beams: BeamParams, stops: list[int], min_tokens: int = 0
) -> SubmitRequest:
    sampling = RowSampling(seed=0, temperature=0.0, min_tokens=min_tokens, logprobs=num_candidates(beams, len(stops)))
    stop_ids = pack_ints(stops)
    return SubmitRequest(handle, pack_ints(prompt), n, MAX_TOKENS, sampling, stop_token_ids=stop_ids, beams=beams)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("beams")
    return folder, write_with_transformers(folder, "llama", {})


@pytest.fixture(scope="module")
def runner(model: tuple[Path, Any]) -> EagerRunner:
    return load_eager(model[0])


def theirs(
    oracle: Any, prompt: list[int], n: int, beams: BeamParams, stops: list[int], min_tokens: int = 0
) -> list[tuple[list[int], float]]:
    """Return transformers' ids and scores."""
    with torch.inference_mode():
        found = oracle.generate(
            torch.tensor([prompt]),
            num_beams=beams.width,
            num_return_sequences=n,
            max_new_tokens=MAX_TOKENS,
            min_new_tokens=min_tokens or None,
            length_penalty=beams.length_penalty,
            early_stopping=beams.early_stopping,
            eos_token_id=stops or None,
            pad_token_id=stops[0] if stops else 0,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
    return [
        (ids[len(prompt) :].tolist(), float(score))
        for ids, score in zip(found.sequences, found.sequences_scores, strict=True)
    ]


@pytest.mark.parametrize("width", [3, 8])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0])
@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("stops", [[], [7], list(range(0, 97, 9))], ids=["no-end", "one-end", "ends"])
def test_ids_and_scores_are_those_of_transformers(
    model: tuple[Path, Any],
    runner: EagerRunner,
    width: int,
    length_penalty: float,
    early_stopping: bool,
    stops: list[int],
) -> None:
    beams = BeamParams(width, length_penalty, early_stopping)
    min_tokens = 3 if width == 3 else 0
    expected = theirs(model[1], PROMPT, width, beams, stops, min_tokens)
    engine = Engine(runner)
    engine.run(search(1, PROMPT, width, beams, stops, min_tokens))
    for choice, (ids, score) in enumerate(expected):
        own = engine.received.tokens[1, choice]
        end = engine.received.finished[1, choice]
        assert own == ids[: len(own)]
        assert set(ids[len(own) :]) <= {*stops[:1]}, "padding"
        assert end.cumulative_logprob is not None
        assert end.cumulative_logprob / len(own) ** length_penalty == pytest.approx(score, rel=2e-6, abs=2e-5)
        assert end.reason is (FinishReason.STOP if own[-1] in stops else FinishReason.LENGTH)


def test_searches_beside_each_other_do_not_change_each_other(runner: EagerRunner) -> None:
    alone: dict[int, list[list[int]]] = {}
    prompts = {1: PROMPT, 2: PROMPT[:4], 3: [*PROMPT, 8, 9]}
    for handle, prompt in prompts.items():
        engine = Engine(runner)
        engine.run(search(handle, prompt, 2, BeamParams(2), [7]))
        alone[handle] = [engine.received.tokens[handle, choice] for choice in range(2)]
    together = Engine(runner)
    together.run(*(search(handle, prompt, 2, BeamParams(2), [7]) for handle, prompt in prompts.items()))
    found = {h: [together.received.tokens[h, choice] for choice in range(2)] for h in prompts}
    assert found == alone


def test_log_probabilities_of_the_prompt_are_those_of_a_draw(runner: EagerRunner) -> None:
    engine = Engine(runner)
    searching = search(1, PROMPT, 2, BeamParams(3), [7])
    telling = replace(searching, sampling=replace(searching.sampling, prompt_logprobs=2))
    drawing = replace(telling, handle=2, num_choices=1, beams=None)
    engine.run(telling, drawing)
    engine.run(replace(searching, handle=3))
    parts = {handle: [replace(part, of=0) for part in engine.received.prompts[handle]] for handle in (1, 2)}
    assert sum(part.count for part in parts[1]) == len(PROMPT) - 1
    assert parts[1] == parts[2]
    for choice in range(2):
        assert engine.received.tokens[1, choice] == engine.received.tokens[3, choice]
