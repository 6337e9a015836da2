"""Cache hits, forks and copies on a tiny model: a row that shares blocks draws what it draws alone."""

from collections.abc import Iterator
from random import Random

import pytest
from torch import Tensor

from octavo.wire.columns import pack_floats, pack_ints, unpack_floats, unpack_ints
from octavo.wire.plan import FAULT_NO_CANDIDATE, FAULT_NONFINITE_LOGITS, RowSampling, StepResult
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.interface import Batch, KVCache
from octavo.worker.runner import EagerRunner
from tests.support.plan_driver import PlanDriver, faults_of, generate, logprob_bits, tokens_of
from tests.support.tiny_models import TINY_LLAMA, load_eager, write_model

CONFIG = TINY_LLAMA | {"tie_word_embeddings": False}
PREFIX = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]  # three blocks
LONGER = [*PREFIX, 43, 38, 32, 79, 50]
OTHER = [27, 18, 28]
NUM_OUTPUT = 10
GREEDY = RowSampling(seed=0, temperature=0.0, logprobs=4)
SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": RowSampling(seed=2**64 - 5, temperature=0.9, logprobs=4),
    "filters": RowSampling(seed=8, temperature=1.3, top_p=0.9, top_k=30, min_p=0.01, logprobs=0),
    "penalties": RowSampling(
        seed=9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, min_tokens=4,
        stop_token_ids=pack_ints([5, 6]), logit_bias_ids=pack_ints([5]), logit_bias_values=pack_floats([3.0]),
        logprobs=2,
    ),
}  # fmt: skip

Output = tuple[list[int], list[bytes]]
"""Ids, and the bits of the log-probabilities that came with each."""


class Outputs:
    """Collects what each row draws, from the results of plans."""

    def __init__(self, runner: EagerRunner, driver: PlanDriver) -> None:
        self.of: dict[int, Output] = {}
        self._runner = runner
        self._driver = driver

    def step(self, counts: dict[int, int]) -> StepResult:
        result = self._runner.execute(self._driver.plan(counts))
        assert faults_of(result) == {}
        bits = logprob_bits(result)
        for row, token in tokens_of(result).items():
            ids, of_row = self.of.setdefault(row, ([], []))
            ids.append(token)
            of_row.append(bits[row])
        return result


def load(folder_factory: pytest.TempPathFactory, backend: str) -> EagerRunner:
    return load_eager(write_model(folder_factory.mktemp("model"), CONFIG), backend=backend)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> EagerRunner:
    return load(tmp_path_factory, "reference")


@pytest.fixture(scope="module")
def loaded_cpu(tmp_path_factory: pytest.TempPathFactory) -> EagerRunner:
    return load(tmp_path_factory, "cpu")


def fill_caches(runner: EagerRunner, value: float) -> None:
    for cache in runner._caches:
        cache.keys.fill_(value)
        cache.values.fill_(value)


def poisoned(runner: EagerRunner) -> Iterator[EagerRunner]:
    """Yield a runner without rows whose slots hold NaN: what is read before it was written shows."""
    runner.clear()
    fill_caches(runner, float("nan"))
    yield runner
    fill_caches(runner, 0.0)


@pytest.fixture
def runner(loaded: EagerRunner) -> Iterator[EagerRunner]:
    yield from poisoned(loaded)


@pytest.fixture
def runner_cpu(loaded_cpu: EagerRunner) -> Iterator[EagerRunner]:
    yield from poisoned(loaded_cpu)


def alone(runner: EagerRunner, prompt: list[int], sampling: RowSampling, choice: int = 0) -> Output:
    output = generate(runner, prompt, NUM_OUTPUT, sampling, choice=choice)
    fill_caches(runner, float("nan"))  # else the same keys and values might lie where the test expects them
    return output


def hit_in_the_same_plan(runner: EagerRunner, sampling: RowSampling) -> Outputs:
    """Row 5 fills three blocks; row 2 begins with them in that very plan, and goes on beside it."""
    driver = PlanDriver.of(runner)
    outputs = Outputs(runner, driver)
    driver.begin(5, PREFIX, sampling)
    driver.begin(2, LONGER, sampling, num_cached=12, cached_from=driver.rows[5])
    outputs.step({5: 12, 2: 5})
    assert driver.rows[2].table[:3] == driver.rows[5].table
    while len(outputs.of[2][0]) < NUM_OUTPUT:
        outputs.step({5: 1, 2: 1})
    return outputs


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_hit_on_blocks_that_the_same_plan_fills(runner: EagerRunner, sampling: RowSampling) -> None:
    expected = {5: alone(runner, PREFIX, sampling), 2: alone(runner, LONGER, sampling)}
    assert hit_in_the_same_plan(runner, sampling).of == expected


def test_the_fast_backend_writes_a_layer_before_it_attends(runner_cpu: EagerRunner) -> None:
    """Its bits may differ with the cut into chunks; a NaN that is read instead of a key would fault the row."""
    expected = [alone(runner_cpu, prompt, GREEDY) for prompt in (PREFIX, LONGER)]
    outputs = hit_in_the_same_plan(runner_cpu, GREEDY)
    for row, (ids, _) in zip((5, 2), expected, strict=True):
        assert outputs.of[row][0] == ids


def test_the_fast_backend_gives_close_logprobs_after_a_hit(runner_cpu: EagerRunner) -> None:
    driver = PlanDriver.of(runner_cpu)
    driver.begin(0, LONGER, GREEDY)
    whole = runner_cpu.execute(driver.plan({0: 17}))
    driver.begin(1, LONGER, GREEDY, num_cached=12, cached_from=driver.rows[0])
    hit = runner_cpu.execute(driver.plan({1: 5}))
    assert hit.logprobs[0].top_ids == whole.logprobs[0].top_ids
    expected = pytest.approx(unpack_floats(whole.logprobs[0].top_logprobs), abs=1e-4)
    assert unpack_floats(hit.logprobs[0].top_logprobs) == expected


def test_a_chain_of_hits_in_one_plan(runner: EagerRunner) -> None:
    """Row 1 fills what row 2 begins with, whose next block row 3 begins with, and both decode what they filled."""
    prompts = {1: PREFIX[:4], 2: PREFIX[:9], 3: LONGER}
    expected = {row: alone(runner, prompt, GREEDY) for row, prompt in prompts.items()}
    driver = PlanDriver.of(runner)
    outputs = Outputs(runner, driver)
    driver.begin(1, prompts[1], GREEDY)
    driver.begin(2, prompts[2], GREEDY, num_cached=4, cached_from=driver.rows[1])
    driver.begin(3, prompts[3], GREEDY, num_cached=8, cached_from=driver.rows[2])
    outputs.step({1: 4, 2: 5, 3: 9})
    while len(outputs.of[3][0]) < NUM_OUTPUT:
        outputs.step({3: 1, 1: 1, 2: 1})
    assert outputs.of == expected


@pytest.mark.parametrize("keeps_row", [True, False], ids=["a live row", "a row that has ended"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_hit_on_blocks_of(runner: EagerRunner, sampling: RowSampling, keeps_row: bool) -> None:
    expected = alone(runner, LONGER, sampling, choice=3)
    driver = PlanDriver.of(runner)
    outputs = Outputs(runner, driver)
    driver.begin(0, [*PREFIX, 7, 8, 9], sampling)
    outputs.step({0: 11})  # the third block is filled by a later plan
    outputs.step({0: 4})
    source = driver.rows[0]
    if not keeps_row:
        driver.end(0)
    driver.begin(1, LONGER, sampling, choice=3, num_cached=12, cached_from=source)
    outputs.step({1: 2})
    outputs.step({1: 3})
    while len(outputs.of[1][0]) < NUM_OUTPUT:
        outputs.step({1: 1} | ({0: 1} if keeps_row else {}))
    assert outputs.of[1] == expected


def test_a_readmitted_row_hits_its_own_blocks(runner: EagerRunner) -> None:
    """Penalties and min_tokens are rebuilt from the ids, though most of them are not computed again."""
    sampling = SAMPLINGS["penalties"]
    ids, bits = alone(runner, LONGER, sampling)
    driver = PlanDriver.of(runner)
    outputs = Outputs(runner, driver)
    driver.begin(0, LONGER, sampling)
    outputs.step({0: 17})
    for _ in range(5):
        outputs.step({0: 1})
    source = driver.rows[0]
    driver.end(0)
    known = [*LONGER, *outputs.of[0][0]]
    assert len(known) == 23
    driver.begin(0, known, sampling, num_prompt=17, num_cached=20, cached_from=source)
    outputs.step({0: 3})
    while len(outputs.of[0][0]) < NUM_OUTPUT:
        outputs.step({0: 1})
    assert outputs.of[0] == (ids, bits)


CHOICES = {6: 0, 1: 1, 3: 2, 2: 3}
"""Row -> choice; row 6 is the one that computes the prompt."""


@pytest.mark.parametrize(
    "prompt", [PREFIX, LONGER, PREFIX[:3]], ids=["whole blocks", "part of a block", "less than a block"]
)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_four_forks_are_four_rows(runner: EagerRunner, sampling: RowSampling, prompt: list[int]) -> None:
    expected = {row: alone(runner, prompt, sampling, choice) for row, choice in CHOICES.items()}
    expected[0] = alone(runner, OTHER, GREEDY)
    driver = PlanDriver.of(runner)
    outputs = Outputs(runner, driver)
    driver.begin(0, OTHER, GREEDY)  # samples before them in every plan
    driver.begin(6, prompt, sampling)
    for row, choice in CHOICES.items():
        if choice:
            driver.fork(6, row, choice)
    result = outputs.step({0: 3, 6: len(prompt)})
    assert list(unpack_ints(result.row)) == [0, 6, 1, 3, 2]
    while len(outputs.of[6][0]) < NUM_OUTPUT:
        outputs.step(dict.fromkeys((0, 6, 1, 3, 2), 1))
    assert outputs.of == expected
    if sampling is not GREEDY:
        assert len({tuple(expected[row][0]) for row in CHOICES}) == 4


def test_a_block_is_copied_for_each_row_but_the_last_that_writes(runner: EagerRunner) -> None:
    """Rows that wait keep reading the shared block meanwhile."""
    sampling = SAMPLINGS["seeded"]
    expected = {row: alone(runner, LONGER, sampling, choice) for row, choice in CHOICES.items()}
    driver = PlanDriver.of(runner)
    outputs = Outputs(runner, driver)
    driver.begin(6, LONGER, sampling)
    for row in (1, 3, 2):
        driver.fork(6, row, CHOICES[row])
    outputs.step({6: 17})
    shared = driver.rows[6].table[-1]
    for counts, num_shared in (({3: 1, 6: 1}, 2), ({3: 1}, 2), ({1: 1}, 1), ({2: 1, 1: 1}, 1)):
        outputs.step(counts)
        assert sum(shared in state.table for state in driver.rows.values()) == num_shared
    assert driver.rows[2].table[4] == shared
    random = Random(5)
    while any(len(ids) < NUM_OUTPUT for ids, _ in outputs.of.values()):
        left = [row for row, (ids, _) in outputs.of.items() if len(ids) < NUM_OUTPUT]
        outputs.step(dict.fromkeys(random.sample(left, random.randint(1, len(left))), 1))
    assert outputs.of == expected


def test_plans_behind_a_fork_may_be_written_before_its_ids_are_known(runner: EagerRunner) -> None:
    sampling = SAMPLINGS["seeded"]
    expected = {row: alone(runner, LONGER, sampling, choice)[0] for row, choice in ((0, 0), (1, 1))}
    driver = PlanDriver.of(runner)
    driver.begin(0, LONGER, sampling)
    driver.fork(0, 1, 1)
    plans = [driver.plan({0: 17}), *(driver.plan({1: 1, 0: 1}) for _ in range(NUM_OUTPUT - 1))]
    drawn = [tokens_of(runner.execute(plan)) for plan in plans]
    assert {row: [tokens[row] for tokens in drawn] for row in (0, 1)} == expected


def test_a_fork_of_a_row_that_has_output(runner: EagerRunner) -> None:
    """The fork has the same output so far, which counts in its penalties, min_tokens and the position of its noise."""
    sampling = SAMPLINGS["penalties"]
    driver = PlanDriver.of(runner)
    outputs = Outputs(runner, driver)
    driver.begin(0, LONGER, sampling)
    outputs.step({0: 17})
    for _ in range(3):
        outputs.step({0: 1})
    known = [*LONGER, *outputs.of[0][0]]
    driver.fork(0, 4, 7)
    for _ in range(4):
        outputs.step({0: 1, 4: 1} if 4 in driver.rows else {0: 1})
    drawn = outputs.of[4]
    runner.clear()
    driver = PlanDriver.of(runner)
    outputs = Outputs(runner, driver)
    driver.begin(4, known, sampling, num_prompt=17, choice=7)
    outputs.step({4: len(known)})
    for _ in range(3):
        outputs.step({4: 1})
    assert outputs.of[4] == drawn


def test_min_tokens_holds_stop_ids_back_in_forks(runner: EagerRunner) -> None:
    sampling = RowSampling(
        seed=4, min_tokens=3, stop_token_ids=pack_ints([5]), logit_bias_ids=pack_ints([5]),
        logit_bias_values=pack_floats([1000.0]), logprobs=0,
    )  # fmt: skip
    driver = PlanDriver.of(runner)
    outputs = Outputs(runner, driver)
    driver.begin(0, LONGER, sampling)
    driver.fork(0, 1, 1)
    outputs.step({0: 17})
    for _ in range(4):
        outputs.step({0: 1, 1: 1})
    for ids, _ in outputs.of.values():
        assert 5 not in ids[:3]
        assert ids[3:] == [5, 5]
    assert outputs.of[0][0][:3] != outputs.of[1][0][:3]


def break_logits(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """Put a NaN into a line of the logits that the model computes."""
    forward = Decoder.forward

    def broken(self: Decoder, batch: Batch, caches: list[KVCache]) -> Tensor:
        logits = forward(self, batch, caches)
        logits[place, 5] = float("nan")
        return logits

    monkeypatch.setattr(Decoder, "forward", broken)


def test_a_faulting_row_faults_its_forks_and_nobody_else(runner: EagerRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = alone(runner, OTHER, GREEDY)
    driver = PlanDriver.of(runner)
    driver.begin(4, LONGER, SAMPLINGS["seeded"])
    driver.begin(6, OTHER, GREEDY)
    driver.fork(4, 0, 1)
    driver.fork(6, 1, 1)
    driver.fork(4, 2, 2)
    with monkeypatch.context() as patch:
        break_logits(patch, 0)
        result = runner.execute(driver.plan({4: 17, 6: 3}))
    assert list(unpack_ints(result.fault_row)) == [4, 0, 2]
    assert set(unpack_ints(result.fault)) == {FAULT_NONFINITE_LOGITS}
    assert tokens_of(result) == {6: expected[0], 1: expected[0]}
    assert logprob_bits(result).keys() == {6, 1}
    # The plan that was already on its way names them all still.
    again = runner.execute(driver.plan({4: 1, 6: 1, 0: 1, 1: 1, 2: 1}))
    assert tokens_of(again).keys() == {4, 6, 0, 1, 2}


def test_a_fork_may_fault_alone(runner: EagerRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = PlanDriver.of(runner)
    outputs = Outputs(runner, driver)
    expected = {row: alone(runner, LONGER, SAMPLINGS["seeded"], row)[0] for row in (0, 1)}
    driver.begin(0, LONGER, SAMPLINGS["seeded"])
    driver.fork(0, 1, 1)
    outputs.step({0: 17})
    with monkeypatch.context() as patch:
        break_logits(patch, 1)
        result = runner.execute(driver.plan({0: 1, 1: 1}))
    assert faults_of(result) == {1: FAULT_NONFINITE_LOGITS}
    assert tokens_of(result) == {0: expected[0][1]}
    driver.end(1)
    assert tokens_of(runner.execute(driver.plan({0: 1}))) == {0: expected[0][2]}


def test_forks_without_candidates_fault(runner: EagerRunner) -> None:
    ids = pack_ints([7, 8])
    driver = PlanDriver.of(runner)
    driver.begin(0, OTHER, RowSampling(seed=0, allowed_token_ids=ids, stop_token_ids=ids, min_tokens=1))
    driver.fork(0, 1, 1)
    result = runner.execute(driver.plan({0: 3}))
    assert faults_of(result) == {0: FAULT_NO_CANDIDATE, 1: FAULT_NO_CANDIDATE}
    again = runner.execute(driver.plan({0: 1, 1: 1}))  # min_tokens counts the placeholders, as the scheduler does
    assert faults_of(again) == {}
