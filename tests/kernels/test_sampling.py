"""Sampling: known answers of the generator, oracles in plain Python, distributions, and rows that never meet."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import sampling
from octavo.kernels.philox import gumbel, philox4x32


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # from the authors' known-answer file for philox4x32-10
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_words(counter: list[int], key: list[int], words: list[int]) -> None:
    c0, c1, c2, c3 = (torch.tensor([c]) for c in counter)
    k0, k1 = (torch.tensor([k]) for k in key)
    assert [int(w) for w in philox4x32((c0, c1, c2, c3), (k0, k1))] == words


def test_noise_of_an_id_does_not_depend_on_the_other_ids() -> None:
    everything = gumbel(2**64 - 1, 3, 17, torch.arange(1000))
    some = torch.tensor([0, 3, 4, 5, 6, 7, 500, 502, 999])
    assert torch.equal(gumbel(2**64 - 1, 3, 17, some), everything[some])


def test_noise_differs_by_seed_choice_and_position_and_is_finite() -> None:
    ids = torch.arange(100_000)
    noises = [gumbel(s, c, p, ids) for s in (0, 1, 2**32, 2**63) for c in (0, 1) for p in (0, 1)]
    assert all(torch.isfinite(n).all() for n in noises)
    assert len({tuple(n[:8].tolist()) for n in noises}) == len(noises)
    assert abs(float(noises[0].mean()) - 0.5772) < 0.02


def test_drawing_follows_the_distribution() -> None:
    probabilities = [0.5, 0.25, 0.15, 0.07, 0.03]
    logits = torch.tensor(probabilities).log()
    count = 4000
    drawn = Counter(sampling.draw(logits, torch.arange(5), seed, 0, 0) for seed in range(count))
    chi_square = sum((drawn[i] - count * p) ** 2 / (count * p) for i, p in enumerate(probabilities))
    assert chi_square < 18.5  # 99.9 % quantile of 4 degrees of freedom


def survivors_oracle(logits: list[float], min_p: float, top_k: int, top_p: float) -> list[int]:
    highest = max(logits)
    alive = [i for i, x in enumerate(logits) if x > -math.inf and (min_p == 0 or x >= highest + math.log(min_p))]
    ranked = sorted(alive, key=lambda i: (-logits[i], i))[: top_k or None]
    if top_p < 1:
        weights = [math.exp(logits[i] - highest) for i in ranked]
        total, mass = sum(weights), 0.0
        kept: list[int] = []
        for i, weight in zip(ranked, weights, strict=True):
            if mass / total >= top_p and kept:
                break
            kept.append(i)
            mass += weight
        ranked = kept
    return sorted(ranked)


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from([-math.inf, -3.0, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=30).filter(
        lambda x: max(x) > -math.inf
    ),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.integers(0, 40),
    st.sampled_from([1e-9, 0.1234, 0.4987, 0.7713, 0.9511, 1.0]),
)
def test_filters_are_those_of_the_oracle(logits: list[float], min_p: float, top_k: int, top_p: float) -> None:
    kept = sampling.survivors(torch.tensor(logits), min_p, top_k, top_p)
    assert kept.tolist() == survivors_oracle(logits, min_p, top_k, top_p)


def test_a_nucleus_wider_than_the_small_sort_is_found() -> None:
    logits = torch.zeros(5000)
    assert sampling.survivors(logits, 0.0, 0, 0.49999).tolist() == list(range(2500))


def test_among_equals_the_lowest_id_wins() -> None:
    logits = torch.zeros(100)
    assert sampling.survivors(logits, 0.0, 3, 1.0).tolist() == [0, 1, 2]
    assert sampling.greedy(logits[None]).tolist() == [0]
    assert sampling.token_logprobs(logits, 50, 3).top_ids.tolist() == [0, 1, 2]


def test_only_allowed_ids_are_left() -> None:
    logits = torch.arange(6.0)
    sampling.keep_only(logits, torch.tensor([4, 1]))
    assert logits.tolist() == [-math.inf, 1, -math.inf, -math.inf, 4, -math.inf]


def test_penalties_are_those_of_the_oracle() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5])
    seen = torch.tensor([True, True, False, True])
    counts = torch.tensor([3, 0, 0, 1])
    sampling.apply_penalties(logits, seen, counts, presence=0.5, frequency=0.25, repetition=2.0)
    assert logits.tolist() == [1.0 - 0.75 - 0.5, -4.0, 1.0, 0.25 - 0.25 - 0.5]


def test_rank_and_top_are_of_the_raw_logits() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0, 2.0])
    got = sampling.token_logprobs(logits, 2, 3)
    expected = torch.log_softmax(logits.double(), 0)
    assert got.rank == 4
    assert got.logprob == pytest.approx(float(expected[2]), abs=1e-6)
    assert got.top_ids.tolist() == [1, 3, 4]
    assert got.top_logprobs.tolist() == pytest.approx(expected[[1, 3, 4]].tolist(), abs=1e-6)
    assert sampling.token_logprobs(logits, 2, 0).top_ids.numel() == 0


def test_logprobs_of_a_row_do_not_depend_on_its_memory_or_company() -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 49152)
    alone = [sampling.token_logprobs(row.clone(), 7, 5) for row in logits]
    for row, expected in zip(logits, alone, strict=True):
        got = sampling.token_logprobs(row, 7, 5)
        assert got.logprob == expected.logprob
        assert torch.equal(got.top_logprobs, expected.top_logprobs)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_are_named(bad: float) -> None:
    logits = torch.full((3, 50), 3e38)
    logits[1, 17] = bad
    assert sampling.has_nonfinite(logits).tolist() == [False, True, False]
