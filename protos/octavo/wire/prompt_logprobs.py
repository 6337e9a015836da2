"""Log-probabilities of a part of a prompt, on their way from the worker through the scheduler to a frontend."""

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from octavo.wire.columns import column_length, same_length, unpack_floats
from octavo.wire.errors import MalformedMessage

Int31 = Annotated[int, Meta(ge=0, lt=2**31)]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of prompt tokens under the raw logits, n of them in a row; k likeliest ids for each.

    The token at position 0 has none. The i-th of the likeliest at a position has rank i + 1.
    """

    of: Int31  # the row at the worker, then the handle of the request
    first_position: Annotated[int, Meta(ge=1, lt=2**31)]
    logprob: bytes  # float32 [n]
    rank: bytes  # int32 [n], from 1
    top_ids: bytes = b""  # int32 [n * k]
    top_logprobs: bytes = b""  # float32 [n * k]

    def __post_init__(self) -> None:
        """Check the columns against each other.

        Raises:
            MalformedMessage: there is nothing, lengths differ, or a log-probability is no number or above 0.
        """
        count = same_length("prompt log-probabilities", self.logprob, self.rank)
        num_top = same_length("likeliest of a prompt", self.top_ids, self.top_logprobs)
        if not count or num_top % count:
            raise MalformedMessage(f"{count} prompt log-probabilities with {num_top} likeliest ids")
        for column in (self.logprob, self.top_logprobs):
            # Minus infinity is a log-probability; sums tell the others in one pass.
            if not (total := sum(unpack_floats(column))) < math.inf:
                raise MalformedMessage(f"prompt log-probabilities sum up to {total}")

    @property
    def count(self) -> int:
        """Number of positions."""
        return column_length(self.logprob)

    @property
    def num_top(self) -> int:
        """Likeliest ids of each position."""
        return column_length(self.top_ids) // self.count

    def without(self, num_positions: int) -> "PromptLogprobs":
        """Return what is left after the first few positions; there must be something."""
        skipped, skipped_top = 4 * num_positions, 4 * num_positions * self.num_top
        return PromptLogprobs(
            self.of,
            self.first_position + num_positions,
            self.logprob[skipped:],
            self.rank[skipped:],
            self.top_ids[skipped_top:],
            self.top_logprobs[skipped_top:],
        )
