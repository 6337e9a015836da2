"""The noise generator: published words, one value for each id, and its distribution."""

import math

import pytest
import torch

from octavo.kernels.philox import exponential_noise, noise_words, philox4x32, words_to_noise


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
    assert philox4x32((c0, c1, c2, c3), (k0, k1)).tolist() == [words]


def test_seed_position_and_choice_are_the_key_and_counter() -> None:
    words = noise_words(0x299F31D0A4093822, 0x13198A2E, 0x85A308D3, torch.tensor([0x243F6A88]))
    zero = torch.tensor([0])
    expected = philox4x32(
        (zero + 0x243F6A88, zero + 0x85A308D3, zero + 0x13198A2E, zero), (zero + 0xA4093822, zero + 0x299F31D0)
    )
    assert torch.equal(words, expected)


def test_a_seed_is_64_bits_signed_or_not() -> None:
    ids = torch.arange(100)
    assert torch.equal(exponential_noise(2**64 - 5, 0, 3, ids), exponential_noise(-5, 0, 3, ids))
    assert not torch.equal(exponential_noise(5, 0, 3, ids), exponential_noise(5 + 2**32, 0, 3, ids))


def test_noise_of_an_id_does_not_depend_on_the_other_ids() -> None:
    everything = exponential_noise(2**64 - 1, 3, 17, torch.arange(1000))
    some = torch.tensor([0, 3, 4, 5, 6, 7, 500, 502, 999])
    assert torch.equal(exponential_noise(2**64 - 1, 3, 17, some), everything[some])
    shared = words_to_noise(noise_words(2**64 - 1, 3, 17, torch.arange(250))).flatten()
    assert torch.equal(shared, everything)


def test_noise_differs_by_seed_choice_and_position() -> None:
    ids = torch.arange(8)
    noises = {
        tuple(exponential_noise(seed, choice, position, ids).tolist())
        for seed in (0, 1, 2**32, 2**63)
        for choice in (0, 1)
        for position in (0, 1)
    }
    assert len(noises) == 16


def test_extreme_words_give_positive_finite_noise() -> None:
    least, greatest = words_to_noise(torch.tensor([0, 2**32 - 1])).tolist()
    assert least == pytest.approx(2.0**-33)
    assert greatest == pytest.approx(33 * math.log(2))


def test_noise_is_exponential() -> None:
    noise = exponential_noise(7, 0, 0, torch.arange(200_000))
    for quantile in (0.001, 0.1, 0.5, 0.9, 0.999):
        share = float((noise < -math.log1p(-quantile)).double().mean())
        assert share == pytest.approx(quantile, abs=4 * math.sqrt(quantile * (1 - quantile) / 200_000))
