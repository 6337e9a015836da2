"""What a frontend has been told of a prompt: its tokens' log-probabilities, position by position."""

from array import array
from typing import NamedTuple

from octavo.frontend.positions import PositionGap
from octavo.wire.columns import unpack_floats, unpack_ints
from octavo.wire.prompt_logprobs import PromptLogprobs


class PromptToken(NamedTuple):
    """One token of a prompt; the i-th of the likeliest in its place has rank i + 1."""

    logprob: float
    rank: int
    top_ids: "array[int]"
    top_logprobs: "array[float]"


class ToldPrompt:
    """Log-probabilities of one prompt, in the order of its positions.

    The law: they grow by what comes next or not at all; whatever sessions they come in, each position is kept once.

    Args:
        num_tokens: of the prompt. The first token has no log-probability.
        num_top: likeliest ids that come with each.

    Attributes:
        num_taken: positions that the client has been sent.
    """

    def __init__(self, num_tokens: int, num_top: int) -> None:
        self.num_tokens = num_tokens
        self.num_taken = 0
        self._num_top = num_top
        self._logprobs, self._ranks = array("f"), array("i")
        self._top_ids, self._top_logprobs = array("i"), array("f")

    @property
    def num_told(self) -> int:
        """Positions of which all is known, the first among them."""
        return 1 + len(self._logprobs)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing."""
        return self.num_told >= self.num_tokens

    def push(self, told: PromptLogprobs) -> None:
        """Take a part; positions that are known already are repetitions.

        Raises:
            PositionGap: positions before it are missing, or it is none of this prompt.
        """
        end = told.first_position + told.count
        if told.first_position > self.num_told or end > self.num_tokens or told.num_top != self._num_top:
            raise PositionGap(f"log-probabilities from {told.first_position} to {end} came after {self.num_told}")
        if end <= self.num_told:
            return
        new = told.without(self.num_told - told.first_position)
        self._logprobs.extend(unpack_floats(new.logprob))
        self._ranks.extend(unpack_ints(new.rank))
        self._top_ids.extend(unpack_ints(new.top_ids))
        self._top_logprobs.extend(unpack_floats(new.top_logprobs))

    def at(self, position: int) -> PromptToken | None:
        """Return what is known of the token at a position; None at the first."""
        if position == 0:
            return None
        place, count = position - 1, self._num_top
        top = slice(place * count, (place + 1) * count)
        return PromptToken(self._logprobs[place], self._ranks[place], self._top_ids[top], self._top_logprobs[top])
