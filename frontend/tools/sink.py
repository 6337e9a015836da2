"""What parsers find in a text: its parts, kept apart until somebody takes them."""

import secrets
from collections.abc import Callable
from typing import NamedTuple


class CallDelta(NamedTuple):
    """What is new of a call, by its number in the choice; id and name come with its first delta, arguments with later ones."""

    number: int
    call_id: str
    name: str
    arguments: str


class Parsed(NamedTuple):
    """What is new of a choice."""

    text: str
    reasoning: str
    calls: tuple[CallDelta, ...]


NOTHING = Parsed("", "", ())


def new_call_id() -> str:
    """Draw the id of a call."""
    return f"call_{secrets.token_hex(12)}"


def new_short_id() -> str:
    """Draw the id of a call for templates that take nine letters and digits only."""
    return secrets.token_hex(5)[:9]


class Sink:
    """Takes the parts of one choice's text from its parsers.

    Args:
        max_calls: calls that are told; further ones are dropped. None: all are.
        make_id: draws the id of a call.
    """

    def __init__(self, max_calls: int | None = None, make_id: Callable[[], str] = new_call_id) -> None:
        self.num_calls = 0
        self._max_calls = max_calls
        self._make_id = make_id
        self._dropping = False
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[CallDelta] = []
        self._arguments: list[str] = []

    def text(self, piece: str) -> None:
        """Take text of the answer."""
        self._text.append(piece)

    def reasoning(self, piece: str) -> None:
        """Take text of what is thought before the answer."""
        self._reasoning.append(piece)

    def begin(self, name: str) -> None:
        """Begin a call."""
        self._end_arguments()
        self._dropping = self._max_calls is not None and self.num_calls >= self._max_calls
        if not self._dropping:
            self._calls.append(CallDelta(self.num_calls, self._make_id(), name, ""))
            self.num_calls += 1

    def arguments(self, piece: str) -> None:
        """Take text of the arguments of the call that was begun last."""
        if not self._dropping:
            self._arguments.append(piece)

    def take(self) -> Parsed:
        """Return what came since it was asked last."""
        self._end_arguments()
        if not (self._text or self._reasoning or self._calls):
            return NOTHING
        parsed = Parsed("".join(self._text), "".join(self._reasoning), tuple(self._calls))
        self._text, self._reasoning, self._calls = [], [], []
        return parsed

    def _end_arguments(self) -> None:
        if self._arguments:
            self._calls.append(CallDelta(self.num_calls - 1, "", "", "".join(self._arguments)))
            self._arguments = []
