"""Bad words: which ids would complete one, given the ends of the rows' outputs.

Nothing is kept between steps: what a row's output ends with is looked up in its ids, on the device. So there is no state
that forks, preemption and replay would have to carry.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.wire.plan import MAX_BAD_WORD_TOKENS
from octavo.worker.transfer import to_device

_ANY = -1
"""In a word's row, before its first id: whatever stands there."""
_NOTHING = -2
"""Where the output has no token."""


def words_table(ids: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return [W, MAX_BAD_WORD_TOKENS] int64: each word's ids, the last one in the last column, _ANY before the first."""
    flat: list[int] = []
    begin = 0
    for length in lengths:
        flat += [_ANY] * (MAX_BAD_WORD_TOKENS - length)
        flat += ids[begin : begin + length]
        begin += length
    return to_device(flat, torch.int64, device).view(len(lengths), MAX_BAD_WORD_TOKENS)


def completing_ids(words: Tensor, ids: Tensor, lines: Tensor, num_prompt: Tensor, num_known: Tensor) -> Tensor:
    """Say of which words only the last id is missing at the end of an output.

    Args:
        words: [W, MAX_BAD_WORD_TOKENS] int64, see `words_table`.
        ids: [N, L] integer: known ids, of which each word's row has a line.
        lines: [W] int64: that line.
        num_prompt: [W] int64: tokens of the prompt there.
        num_known: [W] int64: tokens of prompt and output there.

    Returns:
        [W] bool.
    """
    span = MAX_BAD_WORD_TOKENS - 1
    places = num_known[:, None] - span + torch.arange(span, device=ids.device)
    ending = ids[lines[:, None], places.clamp_min(0)].long()
    ending = torch.where(places >= num_prompt[:, None], ending, _NOTHING)
    before = words[:, :span]
    return ((before == ending) | (before == _ANY)).all(dim=1)
