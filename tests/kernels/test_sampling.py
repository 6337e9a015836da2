"""Sampling: oracles in plain Python, distributions, and rows that never meet."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels import sampling
from octavo.kernels.ops import BACKENDS, get_ops
from octavo.kernels.philox import exponential_noise

INF = math.inf


def draw(logits: Tensor, temperature: float, seed: int = 1, choice: int = 0, position: int = 0) -> int:
    (drawn,) = sampling.sample(
        logits[None], *(torch.tensor([x]) for x in (temperature, seed, choice, position))
    ).tolist()
    return int(drawn)


def filtered(logits: list[float], temperature: float, min_p: float, top_k: int, top_p: float) -> list[int]:
    row = torch.tensor([logits])
    parameters = (torch.tensor([x]) for x in (temperature, min_p, top_k, top_p))
    sampling.filter_logits(row, *parameters)
    kept = (row[0] > -INF).nonzero().flatten().tolist()
    assert [row[0, i].item() for i in kept] == [torch.tensor(logits[i]).item() for i in kept]  # stay unscaled
    return [int(i) for i in kept]


# Masks and penalties


def test_only_allowed_ids_are_left_in_the_rows_named() -> None:
    logits = torch.arange(12.0).view(3, 4)
    sampling.apply_allowed(logits, torch.tensor([2, 0, 2]), torch.tensor([3, 1, 0]))
    assert logits.tolist() == [[-INF, 1, -INF, -INF], [4, 5, 6, 7], [8, -INF, -INF, 11]]


def test_biases_add_up_and_minus_infinity_forbids() -> None:
    logits = torch.zeros(2, 3)
    rows, ids = torch.tensor([0, 1, 0, 1]), torch.tensor([0, 2, 0, 1])
    sampling.apply_logit_bias(logits, rows, ids, torch.tensor([1.0, -INF, 0.5, -2.0]))
    sampling.apply_logit_bias(logits, torch.tensor([1]), torch.tensor([2]), torch.tensor([100.0]))
    assert logits.tolist() == [[1.5, 0, 0], [0, -2, -INF]]


def penalty_oracle(
    logit: float, in_prompt: bool, count: int, presence: float, frequency: float, repetition: float
) -> float:
    if in_prompt or count:
        logit = logit / repetition if logit > 0 else logit * repetition
    return logit - frequency * count - (presence if count else 0)


def test_penalties_are_those_of_the_oracle() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 50) * 3
    logits[1, :3] = -INF
    before = logits.clone()
    rows = torch.tensor([3, 1, 0])
    in_prompt, counts = torch.rand(3, 50) < 0.3, torch.randint(0, 4, (3, 50), dtype=torch.int32)
    presence, frequency, repetition = torch.tensor([[0.5, 0, -1], [0.25, 0, 2], [1.3, 0.7, 1]])
    sampling.apply_penalties(logits, rows, in_prompt, counts, presence, frequency, repetition)
    assert torch.equal(logits[2], before[2])
    for place, row in enumerate(rows.tolist()):
        expected = [
            penalty_oracle(
                before[row, i].item(),
                bool(in_prompt[place, i]),
                int(counts[place, i]),
                *(float(factor[place]) for factor in (presence, frequency, repetition)),
            )
            for i in range(50)
        ]
        assert logits[row].tolist() == pytest.approx(expected, abs=1e-5)


# Filters


def filter_oracle(logits: list[float], temperature: float, min_p: float, top_k: int, top_p: float) -> list[int]:
    scaled = [x / temperature for x in logits]
    highest = max(scaled)
    alive = [i for i, x in enumerate(scaled) if x > -INF and (min_p == 0 or x >= highest + math.log(min_p))]
    ranked = sorted(alive, key=lambda i: (-logits[i], i))
    if top_k > 0:
        ranked = ranked[:top_k]
    if top_p < 1:
        weights = [math.exp(scaled[i] - highest) for i in ranked]
        total, mass = sum(weights), 0.0
        kept: list[int] = []
        for i, weight in zip(ranked, weights, strict=True):
            if kept and mass / total >= top_p:
                break
            kept.append(i)
            mass += weight
        ranked = kept
    return sorted(ranked)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([-INF, -3.0, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=30).filter(
        lambda x: max(x) > -INF
    ),
    st.sampled_from([0.25, 1.0, 2.0]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.sampled_from([-1, 0, 1, 2, 3, 7, 40]),
    st.sampled_from([1e-9, 0.1234, 0.4987, 0.7713, 0.9511, 1.0]),
)
def test_filters_are_those_of_the_oracle(
    logits: list[float], temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    expected = filter_oracle(logits, temperature, min_p, top_k, top_p)
    assert filtered(logits, temperature, min_p, top_k, top_p) == expected


@pytest.mark.parametrize("top_p", [0.2, 0.5, 0.9, 0.9999])
@pytest.mark.parametrize("width", [0.2, 1.0, 4.0])
def test_nuclei_of_a_whole_vocabulary_are_those_of_the_oracle(width: float, top_p: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(20_000) * width
    top_p = torch.tensor(top_p).item()
    sizes = [len(filter_oracle(logits.tolist(), 1.0, 0.0, 0, p)) for p in (top_p - 1e-6, top_p + 1e-6)]
    kept = filtered(logits.tolist(), 1.0, 0.0, 0, top_p)
    assert sizes[0] <= len(kept) <= sizes[1]
    left_out = torch.ones(20_000, dtype=torch.bool)
    left_out[kept] = False
    assert logits[kept].min() > logits[left_out].max()


def test_a_nucleus_after_top_k_looks_at_what_top_k_left() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5000).tolist()
    assert filtered(logits, 1.0, 0.0, 20, 0.55) == filter_oracle(logits, 1.0, 0.0, 20, 0.55)


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 2500, 4999])
def test_among_equals_a_nucleus_takes_the_lowest_ids(count: int) -> None:
    assert filtered([0.0] * 5000, 1.0, 0.0, 0, (count - 0.5) / 5000) == list(range(count))


def test_greedy_rows_and_rows_without_filters_stay_as_they_are() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 100)
    before = logits.clone()
    temperature, off = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0.5, 0.0, 0.0])
    sampling.filter_logits(logits, temperature, off, torch.tensor([3, 0, 3]), torch.tensor([0.1, 1.0, 1.0]))
    assert torch.equal(logits[:2], before[:2])
    assert int((logits[2] > -INF).sum()) == 3


# Drawing


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(4, 1000)
    logits[1, [700, 300]] = 1.0
    temperature = torch.tensor([0.0, 9e-6, 0.0, 0.0])
    zeros = torch.zeros(4, dtype=torch.int64)
    logits[2, :5] = -INF
    assert sampling.sample(logits, temperature, zeros, zeros, zeros).tolist() == [0, 300, 5, 0]


@pytest.mark.parametrize("padding", [0, 200], ids=["all ids", "few ids left"])
def test_drawing_follows_the_distribution(padding: int) -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    temperature = 0.5
    logits = torch.cat((probabilities.log() * temperature, torch.full((padding,), -INF)))
    count = 3000
    parameters = torch.arange(count), torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    drawn = Counter(sampling.sample(logits.repeat(count, 1), torch.full((count,), temperature), *parameters).tolist())
    chi_square = sum((drawn[i] - count * p) ** 2 / (count * p) for i, p in enumerate(probabilities.tolist()))
    assert sum(drawn[i] for i in range(5)) == count
    assert chi_square < 18.5  # 99.9 % quantile of 4 degrees of freedom


@pytest.mark.parametrize("temperature", [1e-4, 0.7, 1.0, 50.0])
@pytest.mark.parametrize("width", [0.0, 3.0, 1e4])
def test_the_short_cut_finds_the_winner_of_the_exact_scores(width: float, temperature: float) -> None:
    torch.manual_seed(0)
    temperature = torch.tensor(temperature).item()  # as fp32 holds it
    for seed in range(8):
        logits = torch.randn(4099) * width
        noise = exponential_noise(seed, 2, 5, torch.arange(4099))
        expected = int((logits.double() / temperature - noise.log()).argmax())
        assert draw(logits, temperature, seed, 2, 5) == expected


def test_masked_ids_are_never_drawn_and_do_not_change_the_draw() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1000)
    for seed in range(20):
        winner = draw(logits, 1.0, seed)
        others = logits.clone()
        others[torch.randperm(1000)[:950]] = -INF  # few are left: noise is drawn id by id
        others[winner] = logits[winner]
        assert draw(others, 1.0, seed) == winner
        others[winner] = -INF
        assert others[draw(others, 1.0, seed)] > -INF


def test_a_draw_depends_on_its_row_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(12, 3001) * 2
    logits[4, 10:] = -INF
    temperature = torch.tensor([0.0, 0.5, 1.0] * 4)
    seeds, choices, positions = torch.arange(12) * 977 - 5, torch.arange(12) % 3, torch.arange(12) * 7
    together = sampling.sample(logits, temperature, seeds, choices, positions)
    order = torch.randperm(12)
    shuffled = sampling.sample(logits[order], temperature[order], seeds[order], choices[order], positions[order])
    assert torch.equal(shuffled, together[order])
    for row in range(12):
        one = slice(row, row + 1)
        alone = sampling.sample(logits[one], temperature[one], seeds[one], choices[one], positions[one])
        assert torch.equal(alone, together[one])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, INF], ids=["nan", "inf"])
def test_a_faulty_row_gives_no_id_and_leaves_its_neighbours_alone(bad: float, temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 2000)
    zeros, temperatures = torch.zeros(4, dtype=torch.int64), torch.full((4,), temperature)
    off = torch.zeros(4)

    def run(work: Tensor) -> list[int]:
        sampling.filter_logits(work, temperatures, off + 0.001, zeros + 50, off + 0.9)
        return [int(i) for i in sampling.sample(work, temperatures, zeros + 3, zeros, zeros).tolist()]

    expected = run(logits.clone())
    expected_logprobs = sampling.logprobs(logits, zeros, 3)
    logits[1, 17], logits[2] = bad, -INF
    assert sampling.first_nonfinite(logits).tolist() == [False, True, True, False]
    got = sampling.logprobs(logits, zeros, 3)
    for ours, theirs in zip(got, expected_logprobs, strict=True):
        assert torch.equal(ours[[0, 3]], theirs[[0, 3]])
    assert run(logits) == [expected[0], -1, -1, expected[3]]


def test_masked_ids_of_raw_logits_are_no_fault() -> None:
    logits = torch.full((2, 50), 3e38)
    logits[0, 17] = -INF
    assert sampling.first_nonfinite(logits).tolist() == [False, False]


# Log-probabilities


def test_logprobs_are_those_of_the_raw_logits() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 3001) * 4
    ids = torch.tensor([0, 1500, 3000, 7, int(logits[4].argmax())])
    logprob, rank, top_ids, top_logprobs = sampling.logprobs(logits, ids, 6)
    expected = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(logprob.double(), expected.gather(1, ids[:, None])[:, 0], rtol=1e-6, atol=1e-5)
    values, best = expected.topk(6)
    assert torch.equal(top_ids, best)
    torch.testing.assert_close(top_logprobs.double(), values, rtol=1e-6, atol=1e-5)
    for row in range(5):
        assert int(rank[row]) == 1 + sum(x > logits[row, ids[row]].item() for x in logits[row].tolist())


def test_equal_logits_share_a_rank_and_come_by_id() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 2.0, 2.0]])
    for drawn, expected_rank in ((1, 1), (3, 1), (4, 3), (5, 3), (2, 5), (0, 6)):
        _, rank, top_ids, _ = sampling.logprobs(logits, torch.tensor([drawn]), 3)
        assert rank.tolist() == [expected_rank]
        assert top_ids.tolist() == [[1, 3, 4]]
    assert sampling.logprobs(logits, torch.tensor([0]), 100)[2].tolist() == [[1, 3, 4, 5, 2, 0]]


def test_no_top_ids_and_no_rows() -> None:
    logits = torch.randn(2, 9)
    _, _, top_ids, top_logprobs = sampling.logprobs(logits, torch.tensor([1, 2]), 0)
    assert top_ids.shape == top_logprobs.shape == (2, 0)
    nothing = sampling.logprobs(logits[:0], torch.empty(0, dtype=torch.int64), 4)
    assert [part.shape for part in nothing] == [(0,), (0,), (0, 4), (0, 4)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_samples_alike(backend: str) -> None:
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    logits = torch.randn(1, 500)
    temperature, seed, zero = (torch.tensor([x], device=device) for x in (1.0, 3, 0))
    drawn = get_ops(backend).sample(logits.to(device), temperature, seed, zero, zero)
    assert drawn.tolist() == [draw(logits[0], 1.0, 3)]
