"""Rows with grammars on the GPU runner, with steps under way, against the eager reference. Without a GPU: the interpreter."""

import json
import re
from pathlib import Path

import msgspec
import pytest
import torch

from octavo.wire.columns import unpack_ints
from octavo.wire.plan import FAULT_GRAMMAR, RowSampling, StepPlan, StepResult
from octavo.worker.gpu.runner import GpuRunner
from octavo.worker.grammar import Grammars
from octavo.worker.runner import EagerRunner
from tests.support.grammars import compile_grammar
from tests.support.plan_driver import PlanDriver, faults_of, tokens_of
from tests.support.tiny_models import TINY_LLAMA, load_worker, write_model

CUDA = torch.cuda.is_available()
SHAPE = TINY_LLAMA | ({"head_dim": 64} if CUDA else {"num_hidden_layers": 1})
END = 0
PIECES = ["<end>", *map(chr, range(ord("a"), ord("z") + 1)), *"0123456789", "ab", "cd", "abab"]
REGEX = "(ab|c)[0-9]{2,3}(x|cd)"
RANDOM = RowSampling(seed=5, temperature=8.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_model(tmp_path_factory.mktemp("model"), SHAPE)
    vocabulary = {piece: number for number, piece in enumerate(PIECES)}
    ending = {"id": END, "content": PIECES[END], "special": True}
    described = {"model": {"vocab": vocabulary}, "decoder": {"type": "ByteLevel"}, "added_tokens": [ending]}
    # The model's own folder has no tokenizer: what the worker makes of it is not the subject.
    (made / "pieces").mkdir()
    (made / "pieces" / "tokenizer.json").write_text(json.dumps(described))
    return made


@pytest.fixture(scope="module")
def runners(folder: Path) -> tuple[EagerRunner, GpuRunner]:
    eager = load_worker(folder).runner
    # The interpreter is slow: there the steps are not warmed up as if they were captured.
    device = "cuda" if CUDA else "cpu"
    gpu = load_worker(folder, backend="triton", device=device, dtype="float32", enforce_eager=not CUDA).runner
    assert isinstance(eager, EagerRunner)
    assert isinstance(gpu, GpuRunner)
    eager._grammars, gpu._grammars = Grammars(folder / "pieces"), Grammars(folder / "pieces")
    return eager, gpu


def with_grammar(plan: StepPlan, row: int, grammar: bytes) -> StepPlan:
    """Return a plan in which a row that begins has a grammar."""
    new = tuple(msgspec.structs.replace(one, grammar=1) if one.row == row else one for one in plan.new_rows)
    return msgspec.structs.replace(plan, new_rows=new, grammars=(grammar,))


def write_plans(grammar: bytes, output: str = "") -> list[StepPlan]:
    """Write plans of a row with a grammar, two that are forked from it, and one without; all go on after their ends."""
    driver = PlanDriver(4, 129, seed=1)
    driver.begin(0, [3, 14, 15, *map(PIECES.index, output)], RANDOM, num_prompt=3)
    driver.begin(1, [27, 18, 28], RANDOM)
    driver.fork(0, 2, 1)
    driver.fork(0, 3, 2)
    plans = [with_grammar(driver.plan({0: 3 + len(output), 1: 3}), 0, grammar)]
    return plans + [driver.plan(dict.fromkeys(range(4), 1)) for _ in range(8)]


def run_ahead(runner: GpuRunner, plans: list[StepPlan], depth: int) -> list[StepResult]:
    results: list[StepResult] = []
    left = list(plans)
    while len(results) < len(plans):
        while left and runner.num_in_flight < depth:
            runner.launch(left.pop(0))
        results += runner.take_results()
    return results


def text_of(results: list[StepResult], row: int) -> str:
    """Return a row's text up to its end."""
    ids = [tokens_of(result)[row] for result in results]
    return "".join(PIECES[one] for one in ids[: ids.index(END)])


@pytest.mark.parametrize("output", ["", "c1"])
def test_rows_with_grammars_draw_what_the_reference_draws(
    folder: Path, runners: tuple[EagerRunner, GpuRunner], output: str
) -> None:
    eager, gpu = runners
    plans = write_plans(compile_grammar(folder / "pieces", "regex", REGEX, (END,)), output)
    eager.clear()
    expected = [eager.execute(plan) for plan in plans]
    for row in (0, 2, 3):
        assert re.fullmatch(REGEX, output + text_of(expected, row))
    assert len({text_of(expected, row) for row in (0, 2, 3)}) > 1
    gpu.clear()
    found = run_ahead(gpu, plans, depth=2)
    assert [(r.row, r.token, r.fault) for r in found] == [(r.row, r.token, r.fault) for r in expected]


def test_a_dead_end_is_that_rows_fault(folder: Path, runners: tuple[EagerRunner, GpuRunner]) -> None:
    grammar = compile_grammar(folder / "pieces", "regex", REGEX, (END,))
    driver = PlanDriver(4, 129, seed=1)
    driver.begin(0, [3, 14, PIECES.index("z")], RANDOM, num_prompt=2)
    driver.begin(1, [27, 18, 28], RANDOM)
    plans = [with_grammar(driver.plan({0: 3, 1: 3}), 0, grammar), driver.plan({0: 1, 1: 1})]
    for runner in runners:
        runner.clear()
        results = [runner.execute(plan) for plan in plans]
        assert [faults_of(result) for result in results] == [{0: FAULT_GRAMMAR}] * 2
        assert [list(unpack_ints(result.row)) for result in results] == [[1], [1]]
