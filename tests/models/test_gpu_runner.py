"""The GPU runner against the eager reference: same plans, same tokens. Without a GPU Triton's interpreter runs it."""

import gc
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from octavo.wire.columns import pack_ints, unpack_floats, unpack_ints
from octavo.wire.plan import FAULT_NO_CANDIDATE, FAULT_NONFINITE_LOGITS, RowSampling, StepPlan, StepResult
from octavo.worker.errors import PlanError
from octavo.worker.gpu import graphs
from octavo.worker.gpu.runner import GpuRunner
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.interface import Batch, KVCache
from octavo.worker.runner import EagerRunner
from tests.support.gpu import settle
from tests.support.plan_driver import GREEDY, PlanDriver, faults_of, generate, logprob_bits, tokens_of
from tests.support.tiny_models import TINY_LLAMA, load_worker, write_model

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# A head size that the kernels are made for on a GPU; the interpreter takes any.
SHAPE = TINY_LLAMA | {"tie_word_embeddings": False} | ({"head_dim": 64} if CUDA else {"num_hidden_layers": 1})
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32]
OTHER = [27, 18, 28]
NUM_AFTER = 12 if CUDA else 2  # steps in the session after
FILTERS = RowSampling(seed=11, temperature=0.9, top_k=20, top_p=0.9, min_p=0.01)
PENALTIES = RowSampling(seed=2**63 + 1, temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, logprobs=3)
MASKS = RowSampling(
    seed=4,
    temperature=1.0,
    min_tokens=3,
    stop_token_ids=pack_ints([5, 6]),
    allowed_token_ids=pack_ints(range(40)),
    logit_bias_ids=pack_ints([9, 60]),
    logit_bias_values=b"\0\0\0\x40\0\0\xc8\x42",  # 2.0, 100.0
    bad_word_ids=pack_ints(token_id for first in range(40) for token_id in (first, 9)),  # 9 only as the first id
    bad_word_lengths=pack_ints([2] * 40),
)
PLAIN = RowSampling(seed=9, temperature=0.8)
EVERY = {"greedy": GREEDY, "plain": PLAIN, "filters": FILTERS, "penalties": PENALTIES, "masks": MASKS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), SHAPE)


@pytest.fixture(scope="module")
def expected_by(folder: Path) -> EagerRunner:
    runner = load_worker(folder).runner
    assert isinstance(runner, EagerRunner)
    return runner


@pytest.fixture(scope="module", params=["eager", "captured"])
def loaded(folder: Path, request: pytest.FixtureRequest) -> GpuRunner:
    eager = request.param == "eager"
    runner = load_worker(folder, backend="triton", device=DEVICE, dtype="float32", enforce_eager=eager).runner
    assert isinstance(runner, GpuRunner)
    return runner


@pytest.fixture
def runner(loaded: GpuRunner, expected_by: EagerRunner) -> GpuRunner:
    loaded.clear()
    expected_by.clear()
    return loaded


def run_ahead(runner: GpuRunner, plans: list[StepPlan], depth: int) -> list[StepResult]:
    """Execute plans with `depth` of them under way."""
    results: list[StepResult] = []
    left = list(plans)
    while len(results) < len(plans):
        while left and runner.num_in_flight < depth:
            runner.launch(left.pop(0))
        results += runner.take_results()
    return results


def fill_caches(runner: GpuRunner, value: float) -> None:
    """Fill all blocks; the runner's stream waits for no other, so the device must be done with it."""
    for cache in runner._caches:
        cache.keys.fill_(value)
        cache.values.fill_(value)
    if CUDA:
        torch.cuda.synchronize()


@pytest.mark.parametrize("name", EVERY)
def test_one_sequence_draws_what_the_reference_draws(runner: GpuRunner, expected_by: EagerRunner, name: str) -> None:
    for chunk, count in ((32, 5), (4, 2)):
        ids, _ = generate(runner, PROMPT, count, EVERY[name], chunk=chunk)
        assert ids == generate(expected_by, PROMPT, count, EVERY[name], chunk=chunk)[0]


def test_a_rehearsal_touches_no_row_and_no_block(runner: GpuRunner) -> None:
    fill_caches(runner, 7.0)
    rows = runner._device_rows
    before = rows.ids[: rows.scratch].clone(), rows.tables.clone()
    settle()
    runner.rehearse(prompts=False)
    runner.rehearse(prompts=True)
    assert all(bool((part == 7.0).all()) for cache in runner._caches for part in (cache.keys, cache.values))
    assert torch.equal(rows.ids[: rows.scratch], before[0])
    assert torch.equal(rows.tables, before[1])


def mixed_plans(seed: int, num_steps: int) -> list[StepPlan]:
    """Write plans of a random mix: chunks, decodes, hits, forks, copies, rows that end and begin anew."""
    rng = random.Random(seed)
    driver = PlanDriver(4, 129, seed=seed)
    plans = []
    for _ in range(num_steps):
        fresh = [row for row in range(8) if row not in driver.rows]
        begun: list[int] = []
        for row in fresh:
            if rng.random() < 0.4:
                ids = [rng.randrange(97) for _ in range(rng.randint(1, 20))]
                driver.begin(row, ids, rng.choice(list(EVERY.values())), choice=rng.randrange(3))
                begun.append(row)
        counts: dict[int, int] = {}
        for row, state in driver.rows.items():
            left = state.num_known - state.num_computed
            if rng.random() < 0.85 and sum(counts.values()) + left < 60:
                counts[row] = rng.randint(1, left)
        free = [row for row in range(8) if row not in driver.rows]
        samples = [r for r, n in counts.items() if driver.rows[r].num_computed + n == driver.rows[r].num_known]
        if free and samples and rng.random() < 0.3:
            driver.fork(samples[0], free[0], 5)
        plans.append(driver.plan(counts))
        for row in list(driver.rows):
            if driver.rows[row].num_known > 30 or rng.random() < 0.05:
                driver.end(row)
    return plans


@pytest.mark.parametrize("seed", range(20 if CUDA else 1))
def test_any_mix_of_rows_draws_what_the_reference_draws(runner: GpuRunner, expected_by: EagerRunner, seed: int) -> None:
    plans = mixed_plans(seed, 40 if CUDA else 10)
    expected = [expected_by.execute(plan) for plan in plans]
    parted = Parted()
    for step, (plan, ours, theirs) in enumerate(zip(plans, run_ahead(runner, plans, 3), expected, strict=True)):
        parted.follow(plan)
        assert list(unpack_ints(ours.row)) == list(unpack_ints(theirs.row)), step
        assert faults_of(ours) == faults_of(theirs), step
        same = parted.compare(tokens_of(ours), tokens_of(theirs))
        for mine, reference in zip(ours.logprobs, theirs.logprobs, strict=True):
            if mine.row in same:
                assert mine.top_ids == reference.top_ids, step
                assert mine.logprob == pytest.approx(reference.logprob, abs=1e-3), step
    # On a GPU sums are made in another order: once in ten thousand draws that decides between two ids.
    assert parted.count <= (2 if CUDA else 0)


class Parted:
    """Rows that drew other ids than the reference once, until they begin anew."""

    def __init__(self) -> None:
        self.count = 0
        self._rows: set[int] = set()

    def follow(self, plan: StepPlan) -> None:
        self._rows -= {*unpack_ints(plan.freed_rows), *(new.row for new in plan.new_rows)}
        for source, target in zip(unpack_ints(plan.fork_src), unpack_ints(plan.fork_dst), strict=True):
            self._rows.discard(target)
            if source in self._rows:
                self._rows.add(target)

    def compare(self, ours: dict[int, int], theirs: dict[int, int]) -> set[int]:
        """Note rows that part here; return those that drew the same and have the same past."""
        together = {row for row in theirs if row not in self._rows}
        parting = {row for row in together if ours[row] != theirs[row]}
        self.count += len(parting)
        self._rows |= parting
        return together - parting


def test_a_row_that_begins_with_cached_blocks_reads_them(runner: GpuRunner, expected_by: EagerRunner) -> None:
    prompt = list(range(1, 14))

    def plans() -> list[StepPlan]:
        driver = PlanDriver(4, 129)
        driver.begin(0, prompt)
        driver.begin(1, prompt, num_cached=12, cached_from=driver.rows[0])  # found in the plan that fills them
        first = driver.plan({0: 13, 1: 1})
        driver.begin(2, prompt, num_cached=8, cached_from=driver.rows[0])
        return [first, driver.plan({0: 1, 1: 1, 2: 5}), driver.plan({0: 1, 1: 1, 2: 1})]

    assert [tokens_of(r) for r in run_ahead(runner, plans(), 2)] == [
        tokens_of(expected_by.execute(plan)) for plan in plans()
    ]


def test_forks_that_copy_their_last_block_in_one_plan_keep_apart(runner: GpuRunner, expected_by: EagerRunner) -> None:
    def plans() -> list[StepPlan]:
        driver = PlanDriver(4, 129)
        driver.begin(0, PROMPT[:6], PLAIN)
        driver.fork(0, 3, 1)
        driver.fork(0, 5, 2)
        driver.fork(0, 1, 3)
        first = driver.plan({0: 6})
        copying = driver.plan({3: 1, 5: 1, 1: 1, 0: 1})
        assert len(unpack_ints(copying.copy_row)) == 3
        return [first, copying, driver.plan({0: 1, 1: 1, 3: 1, 5: 1})]

    expected = [tokens_of(expected_by.execute(plan)) for plan in plans()]
    assert [tokens_of(result) for result in run_ahead(runner, plans(), 2)] == expected


def test_beams_go_on_as_on_the_reference(runner: GpuRunner, expected_by: EagerRunner) -> None:
    sampling = RowSampling(seed=0, temperature=0.0, logprobs=5)

    def plans() -> list[StepPlan]:
        driver = PlanDriver(4, 129)
        driver.begin(0, PROMPT[:6], sampling)
        driver.begin(7, OTHER, PLAIN)
        found = [driver.plan({0: 6, 7: 3})]
        for row, token in ((0, 11), (3, 12), (5, 13)):
            driver.go_on(row, 0, token)
        found.append(driver.plan({0: 1, 7: 1, 3: 1, 5: 1}))
        assert len(unpack_ints(found[-1].copy_row)) == 2
        driver.end(0)
        for row, source, token in ((5, 5, 21), (0, 3, 22), (3, 3, 23)):
            driver.go_on(row, source, token)
        found.append(driver.plan({5: 1, 0: 1, 3: 1, 7: 1}))
        return [*found, driver.plan({0: 1, 3: 1, 5: 1, 7: 1})]

    expected = [expected_by.execute(plan) for plan in plans()]
    for ours, theirs in zip(run_ahead(runner, plans(), 2), expected, strict=True):
        assert tokens_of(ours) == tokens_of(theirs)
        for mine, reference in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert (mine.row, mine.top_ids) == (reference.row, reference.top_ids)
            assert mine.logprob == pytest.approx(reference.logprob, abs=1e-3)


def test_what_captured_steps_read_outlives_the_capture(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph holds addresses alone; here its part is played by something that holds nothing of what it ran."""
    runner = load_worker(folder, backend="triton", device=DEVICE, dtype="float32", enforce_eager=True).runner
    forward, seen = Decoder.forward, set[int]()

    def watched(self: Decoder, batch: Batch, caches: list[KVCache]) -> torch.Tensor:
        parts = (batch.input_ids, batch.positions, batch.slot_mapping, batch.block_tables, batch.query_start)
        seen.update(part.untyped_storage().data_ptr() for part in (*parts, batch.seq_lens))
        return forward(self, batch, caches)

    def forgetful(self: graphs._Recorder, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        out = run()
        return lambda: out

    monkeypatch.setattr(Decoder, "forward", watched)
    monkeypatch.setattr(graphs._Recorder, "__call__", forgetful)
    monkeypatch.setattr(graphs.StepGraphs, "_drop_slow", lambda *_: None)
    runner.capture()
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) is torch.Tensor]
    assert seen
    assert seen <= {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.layout == torch.strided}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy, which warns of NaN
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [GREEDY, PLAIN, PENALTIES], ids=["greedy", "plain", "penalties"])
def test_nonfinite_logits_fault_their_row_alone(runner: GpuRunner, value: float, sampling: RowSampling) -> None:
    """A captured step runs no Python, so it is a weight that is broken, in the place where the graph reads it."""
    expected, _ = generate(runner, OTHER, 2, sampling)
    driver = PlanDriver.of(runner)
    driver.begin(4, PROMPT, sampling)
    driver.begin(6, OTHER, sampling)
    assert isinstance(runner._model, Decoder)
    line = runner._model._embedding[PROMPT[-1]]
    good = line.clone()
    line[:] = value
    settle()
    try:
        result = runner.execute(driver.plan({4: 9, 6: 3}))
    finally:
        line.copy_(good)
        settle()
    assert faults_of(result) == {4: FAULT_NONFINITE_LOGITS}
    assert tokens_of(result) == {6: expected[0]}
    assert logprob_bits(result).keys() == ({6} if sampling.logprobs >= 0 else set())
    assert tokens_of(runner.execute(driver.plan({4: 1, 6: 1})))[6] == expected[1]


def test_a_row_without_candidates_faults_alone(runner: GpuRunner) -> None:
    ids = pack_ints([7, 8])
    driver = PlanDriver.of(runner)
    driver.begin(0, PROMPT, RowSampling(seed=0, allowed_token_ids=ids, stop_token_ids=ids, min_tokens=1))
    driver.begin(1, OTHER)
    result = runner.execute(driver.plan({0: 9, 1: 3}))
    assert faults_of(result) == {0: FAULT_NO_CANDIDATE}
    assert tokens_of(result).keys() == {1}


def test_an_empty_plan_is_answered_in_its_turn(runner: GpuRunner) -> None:
    driver = PlanDriver.of(runner)
    driver.begin(0, OTHER)
    plans = [driver.plan({0: 3})]
    driver.end(0)
    plans.append(driver.plan({}))
    assert [result.step for result in run_ahead(runner, plans, 2)] == [1, 2]
    assert len(runner.rows) == 0


def test_a_plan_error_leaves_the_weights_usable(runner: GpuRunner) -> None:
    expected, _ = generate(runner, PROMPT, 2)
    driver = PlanDriver.of(runner)
    driver.begin(0, PROMPT)
    runner.launch(driver.plan({0: 9}))
    with pytest.raises(PlanError, match="row 3 is not live"):
        runner.launch(StepPlan(1, 1, pack_ints([3]), pack_ints([1]), pack_ints([1])))
    runner.clear()
    assert (runner.num_in_flight, runner.take_results()) == (0, [])
    assert generate(runner, PROMPT, 2)[0] == expected


def test_the_null_block_and_free_blocks_are_never_written(runner: GpuRunner) -> None:
    fill_caches(runner, 7.0)
    driver = PlanDriver.of(runner)
    for row in range(3):
        driver.begin(row, [*PROMPT[:7], row])
    runner.execute(driver.plan(dict.fromkeys(range(3), 8)))
    runner.execute(driver.plan(dict.fromkeys(range(3), 1)))
    used = {block for row in driver.rows.values() for block in row.table}
    untouched = torch.tensor([block for block in range(129) if block not in used])
    for cache in runner._caches:
        for half in (cache.keys.cpu(), cache.values.cpu()):
            assert bool((half[untouched] == 7.0).all())


def test_unwritten_slots_are_never_read(runner: GpuRunner) -> None:
    expected = generate(runner, PROMPT, 6, PENALTIES, chunk=4)
    fill_caches(runner, float("nan"))
    assert generate(runner, PROMPT, 6, PENALTIES, chunk=4) == expected


def test_the_largest_step_can_be_tried_without_a_trace(runner: GpuRunner) -> None:
    fill_caches(runner, 0.0)
    before = [cache.keys.clone() for cache in runner._caches]
    runner.profile()
    runner.profile_sampling()
    assert all(torch.equal(cache.keys, keys) for cache, keys in zip(runner._caches, before, strict=True))
    assert len(runner.rows) == 0


def test_prompts_are_told_as_the_reference_tells_them(runner: GpuRunner, expected_by: EagerRunner) -> None:
    telling = RowSampling(seed=1, temperature=0.0, prompt_logprobs=2)

    def plans() -> list[StepPlan]:
        driver = PlanDriver.of(runner)
        driver.begin(6, OTHER, PLAIN)
        driver.begin(2, PROMPT, telling)
        return [driver.plan({2: 4, 6: 3}), driver.plan({2: 5, 6: 1}), driver.plan({6: 1, 2: 1})]

    expected = [expected_by.execute(plan) for plan in plans()]
    for ours, theirs in zip(run_ahead(runner, plans(), 3), expected, strict=True):
        assert tokens_of(ours) == tokens_of(theirs)
        assert len(ours.prompt_logprobs) == len(theirs.prompt_logprobs)
        for mine, reference in zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True):
            assert (mine.of, mine.first_position, mine.rank) == (2, reference.first_position, reference.rank)
            assert mine.top_ids == reference.top_ids
            for name in ("logprob", "top_logprobs"):
                found, wanted = (unpack_floats(getattr(told, name)) for told in (mine, reference))
                assert found == pytest.approx(wanted, abs=1e-3)
    assert [told.count for result in expected for told in result.prompt_logprobs] == [4, 4]


def with_choices() -> tuple[PlanDriver, list[StepPlan]]:
    """Write the plans of five rows, one of them a second choice: prompts of 9, 3 and 6 tokens, then ids for all."""
    driver = PlanDriver(4, 129)
    driver.begin(0, PROMPT, GREEDY)
    driver.begin(2, OTHER, PENALTIES)
    driver.begin(5, PROMPT[:6], PLAIN)
    driver.begin(6, OTHER, MASKS)
    driver.fork(5, 1, 1)
    return driver, [driver.plan({0: 9, 2: 3, 5: 6, 6: 3})]


def test_rows_go_on_in_a_new_session_from_what_the_one_before_has_left(runner: GpuRunner) -> None:
    """F40: its plans are in flight when the scheduler is lost; the next one names all ids and gives out other rows."""
    driver, plans = with_choices()
    plans += [driver.plan(dict.fromkeys((0, 2, 5, 6, 1), 1)) for _ in range(1 + NUM_AFTER)]
    expected: dict[int, list[int]] = {row: [] for row in (0, 2, 5, 6, 1)}
    for result in run_ahead(runner, plans, 3):
        for row, token in tokens_of(result).items():
            expected[row].append(token)
    runner.clear()
    for plan in plans[:2]:
        runner.launch(plan)
    left = {(row.num_prompt_tokens, row.choice, row.output_ids): row for row in runner.hold()}
    assert (len(runner.rows), runner.num_in_flight, runner.take_results()) == (0, 0, [])

    driver = PlanDriver.of(runner, seed=1)
    kinds = {0: (PROMPT, GREEDY, 7), 2: (OTHER, PENALTIES, 6), 5: (PROMPT[:6], PLAIN, 2), 6: (OTHER, MASKS, 5)}
    kinds[1] = (*kinds[5][:2], 0)
    counts = {}
    for was, (prompt, sampling, row) in kinds.items():
        held = left.pop((len(prompt), int(was == 1), pack_ints(expected[was][:2])))
        assert held.num_computed_tokens == len(prompt) + 1, "all but the newest id"
        num_cached = 8 if was == 0 else 0  # goes on from before its end, with whole blocks
        driver.adopt(row, held, [*prompt, *expected[was][:2]], sampling, num_cached=num_cached)
        counts[row] = len(prompt) + 2 - num_cached if num_cached else 1
    assert not left
    found = run_ahead(
        runner, [driver.plan(counts), *(driver.plan(dict.fromkeys(counts, 1)) for _ in range(NUM_AFTER - 1))], 2
    )
    for was, (_, _, row) in kinds.items():
        assert [tokens_of(result)[row] for result in found] == expected[was][2:], was


def test_a_row_that_begins_with_other_ids_than_its_blocks_hold_is_refused(runner: GpuRunner) -> None:
    driver, plans = with_choices()
    for plan in [*plans, driver.plan(dict.fromkeys((0, 2, 5, 6, 1), 1))]:
        runner.launch(plan)
    held = next(row for row in runner.hold() if row.num_prompt_tokens == len(PROMPT))
    ids = [*PROMPT, *unpack_ints(held.output_ids)]
    ids[4] += 1
    driver = PlanDriver.of(runner)
    driver.adopt(3, held, ids, GREEDY)
    with pytest.raises(PlanError, match="begins with 10 computed tokens that are not those of row 0"):
        runner.launch(driver.plan({3: 1}))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_whose_fault_nobody_was_told_of_is_not_held(runner: GpuRunner) -> None:
    driver = PlanDriver.of(runner)
    driver.begin(4, PROMPT)
    driver.begin(6, OTHER)
    assert isinstance(runner._model, Decoder)
    line = runner._model._embedding[PROMPT[-1]]
    good = line.clone()
    line[:] = float("nan")
    settle()
    try:
        runner.launch(driver.plan({4: 9, 6: 3}))
        held = runner.hold()
    finally:
        line.copy_(good)
        settle()
    assert [row.request for row in held] == ["row 6"]
