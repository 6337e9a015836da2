"""Log-probabilities of prompts: against transformers, whatever the chunks, beside other rows, on every backend."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tokenizers import Tokenizer

from octavo.wire.columns import unpack_floats, unpack_ints
from octavo.wire.plan import FAULT_NONFINITE_LOGITS, RowSampling, StepPlan, StepResult
from octavo.worker import prompt_logprobs
from octavo.worker.errors import PlanError
from octavo.worker.interface import Runner
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.interface import Hidden
from tests.support.architectures import CONFIGS, write_with_transformers
from tests.support.plan_driver import GREEDY, PlanDriver, faults_of, generate, tokens_of
from tests.support.tiny_models import load_eager, load_worker

CUDA = torch.cuda.is_available()
TOP = 3
TELLING = RowSampling(seed=0, temperature=0.0, prompt_logprobs=TOP)
PROMPT = [(31 * i + i * i) % 97 for i in range(41)]
OTHER = [3, 14, 15]


@dataclass
class Heard:
    """What was told of a prompt, from position 1 on."""

    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    top_ids: list[tuple[int, ...]] = field(default_factory=list)
    top_logprobs: list[tuple[float, ...]] = field(default_factory=list)

    def hear(self, result: StepResult, row: int, first: int = 1) -> None:
        """Take what a result tells of a row; nothing may be missing in between."""
        for told in result.prompt_logprobs:
            if told.of != row:
                continue
            assert told.first_position == first + len(self.logprobs)
            self.logprobs += unpack_floats(told.logprob)
            self.ranks += unpack_ints(told.rank)
            top, top_logprobs = unpack_ints(told.top_ids), unpack_floats(told.top_logprobs)
            self.top_ids += [tuple(top[i : i + TOP]) for i in range(0, len(top), TOP)]
            self.top_logprobs += [tuple(top_logprobs[i : i + TOP]) for i in range(0, len(top), TOP)]


def hear_alone(runner: Runner, prompt: list[int], chunk: int, sampling: RowSampling = TELLING) -> Heard:
    """Return what a row tells of its prompt when it is alone, computed in chunks."""
    runner.clear()
    driver, heard = PlanDriver.of(runner), Heard()
    driver.begin(5, prompt, sampling)
    for counts in driver.chunks(5, chunk):
        result = runner.execute(driver.plan(counts))
        assert faults_of(result) == {}
        heard.hear(result, 5)
    assert not runner.execute(driver.plan({5: 1})).prompt_logprobs, "the output is told otherwise"
    runner.clear()
    return heard


@torch.inference_mode()
def check(heard: Heard, model: Any, prompt: list[int], tolerance: float) -> None:
    """Compare with what transformers makes of the whole prompt at once."""
    theirs = model(torch.tensor([prompt])).logits[0, :-1].double().log_softmax(-1)
    chosen = theirs.gather(-1, torch.tensor(prompt[1:])[:, None])
    assert heard.logprobs == pytest.approx(chosen[:, 0].tolist(), abs=tolerance)
    top = torch.tensor(heard.top_ids)
    assert torch.tensor(heard.top_logprobs).flatten().tolist() == pytest.approx(
        theirs.gather(-1, top).flatten().tolist(), abs=tolerance
    )
    # The likeliest are the likeliest, and ranks are right, as far as the tolerance can tell.
    assert (theirs.gather(-1, top) > theirs.topk(TOP).values - 2 * tolerance).all()
    least = 1 + (theirs > chosen + 2 * tolerance).sum(-1)
    most = 1 + (theirs > chosen - 2 * tolerance).sum(-1)
    ranks = torch.tensor(heard.ranks)
    assert ((least <= ranks) & (ranks <= most)).all()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    kind, changes = CONFIGS["llama-biases"]
    return folder, write_with_transformers(folder, kind, changes | ({"head_dim": 64} if CUDA else {}))


@pytest.fixture(scope="module", params=["reference", "cpu"])
def runner(tiny: tuple[Path, Any], request: pytest.FixtureRequest) -> Runner:
    return load_eager(tiny[0], backend=request.param, block_size=4, max_num_batched_tokens=64)


@pytest.mark.parametrize("chunk", [64, 7, 1])
def test_transformers_says_the_same(
    runner: Runner, tiny: tuple[Path, Any], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "SLICE_TOKENS", 5)
    check(hear_alone(runner, PROMPT, chunk), tiny[1], PROMPT, 1e-3)


def test_bits_of_the_reference_do_not_depend_on_chunks_and_neighbours(tiny: tuple[Path, Any]) -> None:
    runner = load_eager(tiny[0], backend="reference", block_size=4, max_num_batched_tokens=64)
    alone = hear_alone(runner, PROMPT, 64)
    assert hear_alone(runner, PROMPT, 5) == alone
    driver = PlanDriver.of(runner)
    heard, fewer = Heard(), Heard()
    driver.begin(0, OTHER, GREEDY)
    driver.begin(1, PROMPT, TELLING)
    driver.begin(2, PROMPT[:9], msgspec.structs.replace(TELLING, prompt_logprobs=0))
    drawn = []
    for counts in ({0: 3, 1: 2, 2: 8}, {0: 1, 1: 33, 2: 1}, {0: 1, 2: 1, 1: 6}):
        result = runner.execute(driver.plan(counts))
        drawn.append(tokens_of(result)[0])
        heard.hear(result, 1)
        for told in result.prompt_logprobs:
            if told.of == 2:
                assert told.num_top == 0
                fewer.logprobs += unpack_floats(told.logprob)
    runner.clear()
    assert heard == alone
    assert fewer.logprobs == alone.logprobs[:8]
    assert drawn == generate(runner, OTHER, 3)[0]


def test_a_row_that_comes_back_tells_what_is_missing(runner: Runner) -> None:
    whole = hear_alone(runner, PROMPT, 64)
    driver = PlanDriver.of(runner)
    plan = first_told(driver, [*PROMPT, 5, 6], num_prompt=len(PROMPT), first=17, count=43)
    heard = Heard()
    heard.hear(runner.execute(plan), 0, first=17)
    assert heard.logprobs == pytest.approx(whole.logprobs[16:], abs=1e-4)
    runner.clear()


def first_told(driver: PlanDriver, ids: list[int], num_prompt: int, first: int, count: int) -> StepPlan:
    """Return a plan in which row 0 begins and tells from a position on."""
    driver.begin(0, ids, TELLING, num_prompt=num_prompt)
    plan = driver.plan({0: count})
    new = msgspec.structs.replace(plan.new_rows[0], first_prompt_logprob=first)
    return msgspec.structs.replace(plan, new_rows=(new,))


def test_nothing_is_told_that_was_not_computed(runner: Runner) -> None:
    runner.clear()
    driver = PlanDriver.of(runner)
    driver.begin(0, PROMPT)
    runner.execute(driver.plan({0: 41}))
    driver.begin(1, PROMPT, TELLING, num_cached=8, cached_from=driver.rows[0])
    with pytest.raises(PlanError, match="computed before it: 8"):
        runner.execute(driver.plan({1: 33}))
    runner.clear()


@pytest.mark.parametrize("samples", [False, True])
def test_logits_that_are_not_finite_fault_the_row_alone(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, samples: bool
) -> None:
    expected = hear_alone(runner, OTHER, 3)
    driver, logits = PlanDriver.of(runner), Decoder.logits
    driver.begin(0, PROMPT, TELLING)
    driver.begin(1, OTHER, TELLING)

    def broken(self: Decoder, hidden: Hidden, wanted: torch.Tensor | None) -> torch.Tensor:
        found = logits(self, hidden, wanted)
        if found.shape[0] > 2:  # of prompts, not of those that draw
            found[3, 1] = float("nan")
        return found

    monkeypatch.setattr(Decoder, "logits", broken)
    result = runner.execute(driver.plan({0: 41 if samples else 20, 1: 3}))
    heard = Heard()
    heard.hear(result, 1)
    assert faults_of(result) == {0: FAULT_NONFINITE_LOGITS}
    assert (heard.ranks, heard.top_ids) == (expected.ranks, expected.top_ids)
    assert heard.logprobs == pytest.approx(expected.logprobs, abs=1e-5)  # the batch may change last bits
    assert {told.of for told in result.prompt_logprobs} == {1}
    assert tokens_of(result).keys() == {1}
    runner.clear()


@pytest.mark.skipif(not CUDA, reason="needs a GPU; without one the interpreter is tried below")
def test_a_gpu_says_the_same(tiny: tuple[Path, Any]) -> None:
    worker = load_worker(tiny[0], backend="triton", device="cuda", dtype="float32")
    check(hear_alone(worker.runner, PROMPT, 7), tiny[1], PROMPT, 1e-2)


def test_the_demo_model_and_its_tokenizer(demo_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    prompt = Tokenizer.from_file(str(demo_model / "tokenizer.json")).encode(text).ids[:80]
    model: Any = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    runner = load_eager(demo_model, backend="cpu", block_size=16, max_num_batched_tokens=64, num_gpu_blocks_override=20)
    check(hear_alone(runner, prompt, 33), model.eval(), prompt, 2e-3)
