"""Plans to results on a tiny model: run-ahead, mixed batches, faults, blocks."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo.wire.columns import pack_ints, unpack_ints
from octavo.wire.plan import FAULT_NO_CANDIDATE, FAULT_NONFINITE_LOGITS, RowSampling, StepPlan
from octavo.worker.errors import PlanError
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.interface import Batch, KVCache
from octavo.worker.runner import EagerRunner
from tests.support.plan_driver import GREEDY, PlanDriver, faults_of, generate, logprob_bits, tokens_of
from tests.support.tiny_models import TINY_LLAMA, load_eager, random_tensors, write_model

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32]
OTHER = [27, 18, 28]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> EagerRunner:
    # Untied: a tied head of random weights only repeats the last id.
    return load_eager(write_model(tmp_path_factory.mktemp("model"), TINY_LLAMA | {"tie_word_embeddings": False}))


@pytest.fixture
def runner(loaded: EagerRunner) -> EagerRunner:
    loaded.clear()
    return loaded


def test_plans_may_be_written_before_ids_are_known(runner: EagerRunner) -> None:
    expected, _ = generate(runner, PROMPT, 6)
    driver = PlanDriver.of(runner)
    driver.begin(0, PROMPT)
    plans = [driver.plan({0: len(PROMPT)})] + [driver.plan({0: 1}) for _ in range(5)]  # all before the first result
    assert [tokens_of(runner.execute(plan))[0] for plan in plans] == expected
    assert len(set(expected)) > 1


def test_a_row_that_samples_nothing_yields_nothing(runner: EagerRunner) -> None:
    driver = PlanDriver.of(runner)
    driver.begin(0, PROMPT)
    assert tokens_of(runner.execute(driver.plan({0: 4}))) == {}
    assert tokens_of(runner.execute(driver.plan({0: 5}))).keys() == {0}


def test_results_come_in_the_order_of_the_plan(runner: EagerRunner) -> None:
    driver = PlanDriver.of(runner)
    for row in (5, 1, 3):
        driver.begin(row, [*OTHER, row])
    result = runner.execute(driver.plan({5: 4, 1: 4, 3: 4}))
    assert (result.epoch, result.step, list(unpack_ints(result.row))) == (1, 1, [5, 1, 3])


def test_prefill_and_decode_share_a_step(runner: EagerRunner) -> None:
    first, _ = generate(runner, PROMPT, 3)
    second, _ = generate(runner, OTHER, 2)
    driver = PlanDriver.of(runner)
    driver.begin(2, PROMPT)
    runner.execute(driver.plan({2: len(PROMPT)}))
    driver.begin(0, OTHER)
    assert tokens_of(runner.execute(driver.plan({0: 2, 2: 1}))) == {2: first[1]}
    assert tokens_of(runner.execute(driver.plan({0: 1, 2: 1}))) == {0: second[0], 2: first[2]}
    assert tokens_of(runner.execute(driver.plan({0: 1}))) == {0: second[1]}


def test_an_empty_plan_is_answered(runner: EagerRunner) -> None:
    driver = PlanDriver.of(runner)
    driver.begin(0, OTHER)
    runner.execute(driver.plan({0: 3}))
    driver.end(0)
    result = runner.execute(driver.plan({}))
    assert (result.step, result.row, result.fault_row) == (2, b"", b"")
    assert len(runner.rows) == 0


def test_a_row_and_its_blocks_can_be_taken_by_the_plan_that_frees_them(runner: EagerRunner) -> None:
    expected, _ = generate(runner, PROMPT, 1)
    driver = PlanDriver(4, 4)  # three blocks, all of them needed
    driver.begin(0, list(range(12)))
    runner.execute(driver.plan({0: 12}))
    driver.end(0)
    driver.begin(0, PROMPT)
    assert tokens_of(runner.execute(driver.plan({0: 9}))) == {0: expected[0]}


def test_the_null_block_is_never_written(runner: EagerRunner) -> None:
    driver = PlanDriver.of(runner)
    for row in range(8):
        driver.begin(row, [*PROMPT[:7], row])
    runner.execute(driver.plan(dict.fromkeys(range(8), 8)))
    for cache in runner._caches:
        assert not cache.keys[0].any()
        assert not cache.values[0].any()


def test_unwritten_slots_are_never_read(runner: EagerRunner) -> None:
    expected = generate(runner, PROMPT, 8, RowSampling(seed=0, temperature=0.0, logprobs=3), chunk=4)
    for cache in runner._caches:
        cache.keys.fill_(float("nan"))
        cache.values.fill_(float("nan"))
    try:
        sampling = RowSampling(seed=0, temperature=0.0, logprobs=3)
        assert generate(runner, PROMPT, 8, sampling, chunk=4) == expected
    finally:
        for cache in runner._caches:
            cache.keys.zero_()
            cache.values.zero_()


def break_logits(monkeypatch: pytest.MonkeyPatch, place: int, value: float) -> None:
    """Put a value into the logits of the sampling row at a place."""
    forward = Decoder.forward

    def broken(self: Decoder, batch: Batch, caches: list[KVCache]) -> Tensor:
        logits = forward(self, batch, caches)
        logits[place, 5] = value
        return logits

    monkeypatch.setattr(Decoder, "forward", broken)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [GREEDY, RowSampling(seed=3, top_k=5, top_p=0.9, min_p=0.1, logprobs=2)])
def test_nonfinite_logits_fault_their_row_alone(
    runner: EagerRunner, monkeypatch: pytest.MonkeyPatch, value: float, sampling: RowSampling
) -> None:
    expected, _ = generate(runner, OTHER, 2, sampling)
    driver = PlanDriver.of(runner)
    driver.begin(4, PROMPT, sampling)
    driver.begin(6, OTHER, sampling)
    with monkeypatch.context() as patch:
        break_logits(patch, 0, value)
        result = runner.execute(driver.plan({4: 9, 6: 3}))
    assert faults_of(result) == {4: FAULT_NONFINITE_LOGITS}
    assert tokens_of(result) == {6: expected[0]}
    assert logprob_bits(result).keys() == ({6} if sampling.logprobs >= 0 else set())
    # The plan that was already on its way names both rows still.
    assert tokens_of(runner.execute(driver.plan({4: 1, 6: 1})))[6] == expected[1]


def test_minus_infinity_is_no_fault(runner: EagerRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = PlanDriver.of(runner)
    driver.begin(0, OTHER)
    break_logits(monkeypatch, 0, float("-inf"))
    assert faults_of(runner.execute(driver.plan({0: 3}))) == {}


def test_a_row_without_candidates_faults_alone(runner: EagerRunner) -> None:
    expected, _ = generate(runner, OTHER, 1)
    ids = pack_ints([7, 8])
    driver = PlanDriver.of(runner)
    driver.begin(0, PROMPT, RowSampling(seed=0, allowed_token_ids=ids, stop_token_ids=ids, min_tokens=1))
    driver.begin(1, OTHER)
    result = runner.execute(driver.plan({0: 9, 1: 3}))
    assert faults_of(result) == {0: FAULT_NO_CANDIDATE}
    assert tokens_of(result) == {1: expected[0]}


def test_poisoned_weights_fault_every_row(tmp_path: Path) -> None:
    tensors = random_tensors(TINY_LLAMA)
    tensors["model.layers.0.mlp.down_proj.weight"][3, 3] = float("nan")
    runner = load_eager(write_model(tmp_path, tensors=tensors))
    driver = PlanDriver.of(runner)
    driver.begin(0, PROMPT)
    assert faults_of(runner.execute(driver.plan({0: 9}))) == {0: FAULT_NONFINITE_LOGITS}


def test_ids_behind_the_tokenizer_are_never_drawn(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    folder = write_model(tmp_path)
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(50)}, unk_token="0"))
    tokenizer.save(str(folder / "tokenizer.json"))
    runner = load_eager(folder)
    bias = RowSampling(seed=0, logit_bias_ids=pack_ints([60]), logit_bias_values=b"\0\0\xc8\x42")  # 100.0
    ids, _ = generate(runner, [*PROMPT[:3], 90], 20, bias)
    assert max(ids) < 50


def test_a_plan_error_leaves_the_weights_usable(runner: EagerRunner) -> None:
    expected, _ = generate(runner, PROMPT, 2)
    with pytest.raises(PlanError):
        runner.execute(StepPlan(1, 1, pack_ints([3]), pack_ints([1]), pack_ints([1])))
    runner.clear()
    assert generate(runner, PROMPT, 2)[0] == expected


def test_the_time_of_a_step_is_reported(runner: EagerRunner) -> None:
    driver = PlanDriver.of(runner)
    driver.begin(0, PROMPT)
    assert runner.execute(driver.plan({0: 9})).compute_us > 0
    assert not torch.is_inference_mode_enabled()
