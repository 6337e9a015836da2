"""The sampler against a slow oracle in plain Python, row by row, in mixed batches."""

import math
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from octavo.kernels.ops import Ops, get_ops
from octavo.kernels.philox import exponential_noise
from octavo.wire.columns import pack_floats, pack_ints, unpack_floats, unpack_ints
from octavo.wire.plan import RowSampling
from octavo.worker.sampler import RowSampler, Sampled, SamplingRow, draw

VOCAB = 23
VALID = 21
OPS = get_ops("reference")
DEVICE = torch.device("cpu")


@dataclass
class Case:
    """One row: its parameters, ids and logits."""

    sampling: RowSampling
    prompt: list[int]
    output: list[int]
    logits: list[float]
    choice: int = 0

    def row(self, line: int) -> SamplingRow:
        sampler = RowSampler(self.sampling, self.choice, DEVICE)
        return SamplingRow(sampler, line, len(self.prompt), len(self.prompt + self.output))


def sample(ops: Ops, logits: Tensor, cases: list[Case]) -> list[Sampled]:
    """Draw for each case; what a row of the ids holds behind its own is no id at all."""
    ids = torch.full((len(cases), max(len(c.prompt + c.output) for c in cases) + 3), 2**30)
    for line, case in enumerate(cases):
        known = case.prompt + case.output
        ids[line, : len(known)] = torch.tensor(known)
    return draw(ops, logits, ids, [case.row(line) for line, case in enumerate(cases)], VALID).collect()


def run(cases: list[Case]) -> list[Sampled]:
    return sample(OPS, torch.tensor([case.logits for case in cases], dtype=torch.float32), cases)


def oracle(case: Case) -> int | None:
    """Return the id to draw, by the documented order, one id at a time."""
    p = case.sampling
    scores = {i: value for i, value in enumerate(case.logits) if i < VALID}
    if allowed := unpack_ints(p.allowed_token_ids):
        scores = {i: value for i, value in scores.items() if i in allowed}
    words = list(unpack_ints(p.bad_word_ids))
    for length in unpack_ints(p.bad_word_lengths):
        *before, last = [words.pop(0) for _ in range(length)]
        if not before or case.output[-len(before) :] == before:
            scores.pop(last, None)
    if len(case.output) < p.min_tokens:
        scores = {i: value for i, value in scores.items() if i not in unpack_ints(p.stop_token_ids)}
    for i, bias in zip(unpack_ints(p.logit_bias_ids), unpack_floats(p.logit_bias_values), strict=True):
        if i in scores:
            scores[i] += bias
    for i in scores:
        if i in case.prompt or i in case.output:
            scores[i] = scores[i] / p.repetition_penalty if scores[i] > 0 else scores[i] * p.repetition_penalty
        count = case.output.count(i)
        scores[i] -= p.frequency_penalty * count + (p.presence_penalty if count else 0.0)
    if not scores:
        return None
    if p.temperature < 1e-5:
        return max(scores, key=lambda i: (scores[i], -i))
    scaled = {i: value / p.temperature for i, value in scores.items()}
    best = max(scaled.values())
    scaled = {i: value for i, value in scaled.items() if math.exp(value - best) >= p.min_p}
    ranked = sorted(scaled, key=lambda i: (-scaled[i], i))
    if p.top_k:
        ranked = ranked[: p.top_k]
    total = sum(math.exp(scaled[i] - best) for i in ranked)
    kept, mass = [], 0.0
    for i in ranked:
        if mass >= p.top_p:
            break
        kept.append(i)
        mass += math.exp(scaled[i] - best) / total
    noise = exponential_noise(p.seed, case.choice, len(case.output), torch.tensor(kept)).tolist()
    return max(zip(kept, noise, strict=True), key=lambda pair: scaled[pair[0]] - math.log(pair[1]))[0]


def bad_words(random: Random, known: list[int]) -> list[list[int]]:
    """Return words whose beginnings often stand at the end of what is known, perhaps reaching into the prompt."""
    words = []
    for _ in range(random.choice([0, 0, 1, 5])):
        length = random.choice([1, 2, 3, 8])
        before = known[len(known) - length + 1 :] if random.random() < 0.7 and length <= len(known) else []
        words.append([*(before or random.choices(range(VALID), k=length - 1)), random.randrange(VALID)])
    return words


def random_case(random: Random) -> Case:
    def maybe(value: float, off: float, share: float = 0.4) -> float:
        return value if random.random() < share else off

    def ids(most: int) -> list[int]:
        return random.sample(range(VOCAB), random.randint(1, most)) if random.random() < 0.4 else []

    bias_ids = ids(6)
    prompt = [random.randrange(VALID) for _ in range(random.randint(1, 6))]
    output = [random.randrange(VALID) for _ in range(random.randint(0, 9))]
    words = bad_words(random, prompt + output)
    sampling = RowSampling(
        seed=random.getrandbits(64),
        temperature=random.choice([0.0, 1e-6, 0.3, 1.0, 2.5]),
        top_p=maybe(random.uniform(0.05, 1.0), 1.0),
        top_k=int(maybe(random.randint(1, 40), 0)),
        min_p=maybe(random.uniform(0.0, 0.6), 0.0),
        presence_penalty=maybe(random.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(random.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(random.uniform(0.5, 2.0), 1.0),
        min_tokens=random.choice([0, 0, 2, 5]),
        stop_token_ids=pack_ints(ids(8)),
        logit_bias_ids=pack_ints(bias_ids),
        logit_bias_values=pack_floats(random.uniform(-8, 8) for _ in bias_ids),
        allowed_token_ids=pack_ints(ids(random.choice([2, 12]))),
        logprobs=random.choice([-1, -1, 0, 3]),
        bad_word_ids=pack_ints(token_id for word in words for token_id in word),
        bad_word_lengths=pack_ints(map(len, words)),
    )
    return Case(sampling, prompt, output, [random.gauss(0, 2) for _ in range(VOCAB)], random.randint(0, 3))


@pytest.mark.parametrize("seed", range(20))
def test_mixed_batches_agree_with_the_oracle(seed: int) -> None:
    random = Random(seed)
    cases = [random_case(random) for _ in range(16)]
    drawn = run(cases)
    for case, result in zip(cases, drawn, strict=True):
        assert result.token == oracle(case), case
        assert not result.nonfinite


def test_the_oracles_cases_draw_more_than_the_most_likely() -> None:
    random = Random(0)
    cases = [random_case(random) for _ in range(300)]
    tokens = [oracle(case) for case in cases]
    best = [max(range(VALID), key=lambda i: case.logits[i]) for case in cases]
    assert None in tokens
    assert 30 < sum(token == b for token, b in zip(tokens, best, strict=True)) < 270


@pytest.mark.parametrize("seed", range(5))
def test_a_row_does_not_depend_on_its_batch(seed: int) -> None:
    random = Random(100 + seed)
    cases = [random_case(random) for _ in range(12)]
    together = run(cases)
    assert together == [run([case])[0] for case in cases]
    assert together == run(cases[::-1])[::-1]


GREEDY = RowSampling(seed=0, temperature=0.0)


def plain(sampling: RowSampling = GREEDY, output: int = 0, logits: list[float] | None = None) -> Case:
    return Case(sampling, [1, 2], [3] * output, logits or [float(i % 7) for i in range(VOCAB)])


def test_noise_is_keyed_by_seed_choice_and_output_position() -> None:
    flat = [0.0] * VOCAB

    def draw(seed: int = 1, choice: int = 0, output: int = 0) -> int | None:
        case = Case(RowSampling(seed=seed), [1, 2], [3] * output, flat, choice)
        return run([case])[0].token

    assert draw() == draw()
    for variants in (
        [draw(seed=s) for s in range(12)],
        [draw(choice=c) for c in range(12)],
        [draw(output=o) for o in range(12)],
    ):
        assert len(set(variants)) > 4
    # The prompt's length is no part of the key.
    longer = Case(RowSampling(seed=1), [1, 2, 4, 5, 6], [], flat)
    assert run([longer])[0].token == draw()


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1])
def test_all_64_bits_of_a_seed_count(seed: int) -> None:
    case = plain(RowSampling(seed=seed, temperature=3.0))
    assert run([case])[0].token == oracle(case)


def test_draws_follow_the_distribution() -> None:
    probabilities = [0.5, 0.3, 0.15, 0.05]
    logits = [math.log(p) for p in probabilities] + [-math.inf] * (VOCAB - 4)
    count = 4000
    cases = [Case(RowSampling(seed=s), [0], [], logits) for s in range(count)]
    drawn = [result.token for result in run(cases)]
    chi2 = sum((drawn.count(i) - count * p) ** 2 / (count * p) for i, p in enumerate(probabilities))
    assert chi2 < 16.3  # 0.1% point with 3 degrees of freedom


def test_min_tokens_ends_with_the_right_token() -> None:
    sampling = msgspec.structs.replace(GREEDY, min_tokens=3, stop_token_ids=pack_ints([6]))
    tokens = [run([plain(sampling, output)])[0].token for output in range(5)]
    assert tokens == [13, 13, 13, 6, 6]


def test_a_bias_cannot_bring_a_forbidden_id_back() -> None:
    sampling = msgspec.structs.replace(
        GREEDY,
        allowed_token_ids=pack_ints([4, 6]),
        min_tokens=1,
        stop_token_ids=pack_ints([6]),
        logit_bias_ids=pack_ints([6, 5, 22]),
        logit_bias_values=pack_floats([100.0, 100.0, 100.0]),
    )
    assert run([plain(sampling)])[0].token == 4


def test_ids_beyond_the_tokenizer_are_never_drawn() -> None:
    logits = [0.0] * VALID + [50.0, 60.0]
    assert run([plain(GREEDY, logits=logits)])[0].token == 0


def test_temperatures_near_zero_are_greedy() -> None:
    logits = [5.0, 5.001, *([0.0] * (VOCAB - 2))]
    for temperature in (0.0, 1e-7, 9e-6, 1e-5, 1e-4):
        case = plain(RowSampling(seed=9, temperature=temperature), logits=logits)
        assert run([case])[0].token == 1


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = [math.sin(i) for i in range(VOCAB)]
    norm = math.log(sum(math.exp(v) for v in logits[:VALID]))
    sampling = RowSampling(
        seed=0,
        temperature=0.0,
        logprobs=3,
        repetition_penalty=1.9,
        logit_bias_ids=pack_ints([5]),
        logit_bias_values=pack_floats([50.0]),
    )
    unasked, asked, none = run([plain(logits=logits), plain(sampling, logits=logits), plain(logits=logits)])
    assert unasked.logprobs is None
    assert none.logprobs is None
    assert asked.logprobs is not None
    assert asked.token == 5
    ranked = sorted(range(VALID), key=lambda i: -logits[i])
    assert asked.logprobs.logprob == pytest.approx(logits[5] - norm, abs=1e-5)
    assert asked.logprobs.rank == 1 + ranked.index(5)
    assert asked.logprobs.top_ids == ranked[:3]
    assert asked.logprobs.top_logprobs == pytest.approx([logits[i] - norm for i in ranked[:3]], abs=1e-5)


def test_each_row_gets_as_many_logprobs_as_it_asked_for() -> None:
    counts = [0, 5, -1, 2]
    results = run([plain(msgspec.structs.replace(GREEDY, logprobs=count)) for count in counts])
    assert [None if r.logprobs is None else len(r.logprobs.top_ids) for r in results] == [0, 5, None, 2]


def test_the_operations_never_see_a_row_that_is_not_finite() -> None:
    seen: list[torch.Tensor] = []

    def watch(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(logits.clone())
        return OPS.sample(logits, *rest)

    functions = {name: getattr(OPS, name) for name in ("first_nonfinite", "filter_logits", "logprobs")}
    ops: Any = SimpleNamespace(**functions, sample=watch)
    cases = [plain(RowSampling(seed=1, top_k=3)), plain(RowSampling(seed=1, top_k=3), logits=[math.nan] * VOCAB)]
    logits = torch.tensor([case.logits for case in cases])
    assert [r.nonfinite for r in sample(ops, logits, cases)] == [False, True]
    assert not seen[0].isnan().any()


def test_nonfinite_rows_leave_their_neighbours_alone() -> None:
    filtered = RowSampling(seed=4, top_p=0.5, top_k=4, min_p=0.1, repetition_penalty=1.2, logprobs=2)
    healthy = plain(filtered)
    broken = [plain(filtered, logits=[value] * VOCAB) for value in (math.nan, math.inf, -math.inf)]
    results = run([broken[0], healthy, broken[1], broken[2]])
    assert [result.nonfinite for result in results] == [True, False, True, True]
    assert [results[i].token for i in (0, 2, 3)] == [None] * 3
    assert [results[i].logprobs for i in (0, 2, 3)] == [None] * 3
    assert results[1] == run([healthy])[0]


def test_a_bad_word_is_held_back_only_after_its_beginning_in_the_output() -> None:
    sampling = RowSampling(
        seed=0, temperature=0.0, bad_word_ids=pack_ints([5, 6, 7, 8]), bad_word_lengths=pack_ints([3, 1])
    )
    logits = [0.0] * VOCAB
    logits[8], logits[7], logits[3] = 3.0, 2.0, 1.0
    cases = [Case(sampling, [1, 5, 6], output, logits) for output in ([], [5], [6], [5, 6], [2, 5, 6], [5, 6, 2])]
    cases.append(Case(sampling, [1, 5], [6], logits))
    assert [result.token for result in run(cases)] == [7, 7, 7, 3, 3, 7, 7]
