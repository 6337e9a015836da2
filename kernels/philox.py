"""Counter-based noise: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A random word is a function of a key and a counter alone, so a token's noise depends on its request's seed, its choice
and its place, never on the batch, on preemption or on the device.
"""

import torch
from torch import Tensor

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return four random 32-bit words for each counter.

    Args:
        counter: four int64 tensors that broadcast together, values in [0, 2**32).
        key: two int64 tensors that broadcast with them, values in [0, 2**32).

    Returns:
        Four int64 tensors of the broadcast shape, values in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap around, but their 64 bits are those of the unsigned product.
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> 32 & _MASK) ^ c1 ^ k0,
            product_1 & _MASK,
            (product_0 >> 32 & _MASK) ^ c3 ^ k1,
            product_0 & _MASK,
        )
        k0, k1 = k0 + _WEYL_0 & _MASK, k1 + _WEYL_1 & _MASK
    return c0, c1, c2, c3


def gumbel(seed: int, choice: int, position: int, ids: Tensor) -> Tensor:
    """Return Gumbel(0, 1) noise for the ids of one drawing: argmax(logits + noise) samples from softmax(logits).

    The counter is (id // 4, position, choice, 0), the word id % 4; 23 of its bits make a uniform number that is never 0
    or 1, so the noise is finite and at most 16.7.

    Args:
        seed: 64 bits, the key.
        choice: index among the request's choices.
        position: place of the drawn token in the output.
        ids: [n] int64.

    Returns:
        [n] float32.
    """
    words = _words_of(seed, choice, position, ids)
    uniform = ((words >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _words_of(seed: int, choice: int, position: int, ids: Tensor) -> Tensor:
    groups, inverse = torch.unique_consecutive(ids // 4, return_inverse=True)
    scalar = ids.new_tensor
    words = philox4x32(
        (groups, scalar(position), scalar(choice), scalar(0)), (scalar(seed & _MASK), scalar(seed >> 32 & _MASK))
    )
    expanded = torch.stack([w.expand_as(groups) for w in words], dim=-1)  # [groups, 4]
    return expanded.flatten()[inverse * 4 + ids % 4]
