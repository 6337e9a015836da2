"""Stop strings: found wherever tokens split them, never leaked, in time linear in the text.

One Knuth-Morris-Pratt automaton a stop string (Knuth, Morris, Pratt: Fast Pattern Matching in Strings, SIAM J. Comput.
6(2), 1977) runs over the characters. Its state is the length of the longest prefix of the stop string that ends here:
that many characters may still become a stop string and are held back.
"""

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop string that was found."""

    stop_string: str
    text: str  # what may be shown of everything fed so far and not shown yet


class StopMatcher:
    """Finds the first stop string to complete in a text that comes in pieces.

    The law: what `feed` and `flush` return, put together, is the text fed, up to the start of the match (or its end
    with `include`); how the text was cut into pieces changes nothing. Of stop strings that complete at one character
    the longest wins.

    Args:
        stop_strings: none empty.
        include: whether the stop string itself is shown.
    """

    def __init__(self, stop_strings: Sequence[str], include: bool) -> None:
        # Longest first: at one character the first automaton to complete is then the longest.
        self._stops = sorted(set(stop_strings), key=len, reverse=True)
        self._fallbacks = [_fallback_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._include = include
        self._held = ""

    def feed(self, piece: str, may_match: bool = True) -> str | StopMatch:
        """Take a piece of text and return what can be shown now, or the match.

        Args:
            piece: the next characters.
            may_match: whether a stop string that completes in this piece counts (not before min_tokens).
        """
        if not self._held and self._first_chars.isdisjoint(piece):
            return piece
        text = self._held + piece
        for end in range(len(self._held) + 1, len(text) + 1):
            found = self._advance(text[end - 1])
            if found is not None and may_match:
                self._held = ""
                return StopMatch(found, text[: end if self._include else end - len(found)])
        num_held = max(self._states)
        shown, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        return shown

    def flush(self) -> str:
        """Return what was held back: the text has ended without a match."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        found = None
        for i, stop in enumerate(self._stops):
            state, fallback = self._states[i], self._fallbacks[i]
            while state and stop[state] != char:
                state = fallback[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                found = found or stop
                state = fallback[state - 1]
            self._states[i] = state
        return found


def _fallback_table(pattern: str) -> list[int]:
    """Return for each prefix of the pattern the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    matched = 0
    for i in range(1, len(pattern)):
        while matched and pattern[i] != pattern[matched]:
            matched = table[matched - 1]
        if pattern[i] == pattern[matched]:
            matched += 1
        table[i] = matched
    return table
