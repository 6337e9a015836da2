"""Counter-based noise: Philox4x32-10 and the Gumbel noise that sampling draws from it.

A value is a pure function of (seed, choice index, position, vocabulary id): it needs no generator state and depends
neither on the batch nor on what was drawn before. Source: Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3".
"""

import torch
from torch import Tensor

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK32 = 0xFFFFFFFF


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> Tensor:
    """Encrypt counters with keys: int64 tensors of 32-bit words that broadcast together.

    Returns the four output words in int64, stacked in a last dimension [..., 4]."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # Products wrap modulo 2^64, so their bits are right although int64 is signed.
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (high >> 32 & _MASK32) ^ c1 ^ k0,
            high & _MASK32,
            (low >> 32 & _MASK32) ^ c3 ^ k1,
            low & _MASK32,
        )
        k0, k1 = k0 + _WEYL[0] & _MASK32, k1 + _WEYL[1] & _MASK32
    return torch.stack((c0, c1, c2, c3), dim=-1)


def noise_words(seed: int, choice_index: int, position: int, groups: Tensor) -> Tensor:
    """The 32-bit words of vocabulary ids ``4 * group + lane``: groups [n] int64 -> [n, 4] int64 in [0, 2^32).

    ``seed`` holds 64 bits, signed or not: its low and high word are the key. The counter is
    ``(group, position, choice_index, 0)``.
    """
    zero = torch.zeros((), dtype=torch.int64, device=groups.device)
    key = (zero + (seed & _MASK32), zero + (seed >> 32 & _MASK32))
    return philox4x32(
        (groups, zero + (position & _MASK32), zero + (choice_index & _MASK32), zero.expand_as(groups)), key
    )


def exponential_noise(seed: int, choice_index: int, position: int, ids: Tensor) -> Tensor:
    """Standard exponential noise for vocabulary ids [n] int64 -> [n] float64, always positive and finite.

    The word w of an id gives the uniform u = (w + 1/2) / 2^32 in (0, 1) and the noise -log(1 - u), which is finest near
    0, where the winners are: the least of ``noise * exp(-logit)`` follows softmax(logits).
    """
    words = noise_words(seed, choice_index, position, ids >> 2)
    return words_to_noise(words.gather(-1, (ids & 3).unsqueeze(-1)).squeeze(-1))


def words_to_noise(words: Tensor) -> Tensor:
    """Exponential noise of 32-bit words in int64, of any shape -> float64."""
    return -torch.log1p((words.double() + 0.5) * -(2.0**-32))
