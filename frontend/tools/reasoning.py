"""What a model thinks before it answers: <think>...</think> in front of the text."""

import re
from collections.abc import Callable
from enum import Enum

from octavo.frontend.tools.machine import MAX_SPACE_CHARS, Machine
from octavo.frontend.tools.sink import Sink

BEGIN, END = "<think>", "</think>"
_STOPS = re.compile(r"[\s<]")


class Start(Enum):
    """Where a text begins."""

    OUTSIDE = "outside"
    """In front of <think>, if it comes."""
    INSIDE = "inside"
    """In what is thought: <think> has been written, or the model leaves it out."""
    BEHIND = "behind"
    """In the answer."""


class ReasoningParser:
    """Reads what is thought, and hands the rest to the parser of the answer. Markers within the answer are text. White
    space around markers belongs to them.

    Args:
        start: where the text begins.
        sink: is told what is found.
        make_next: makes the parser of the answer; it is told whether the answer stands behind a marker.
    """

    def __init__(self, start: Start, sink: Sink, make_next: Callable[[bool], Machine]) -> None:
        self.num_steps = 0
        self._sink = sink
        self._make_next = make_next
        self._next: Machine | None = make_next(True) if start is Start.BEHIND else None
        self._inside = start is Start.INSIDE
        self._at_start = True  # nothing has been thought yet
        # A model may write the marker though it was opened for it.
        self._markers: tuple[str, ...] = (BEGIN, END) if self._inside else (BEGIN,)
        self._space = ""
        self._partial = ""

    def feed(self, text: str) -> None:
        """Take the next part of the text."""
        place, end = 0, len(text)
        while place < end:
            if self._next is not None:
                self._next.feed(text[place:])
                return
            stop = place
            if self._inside and not (self._space or self._partial or self._at_start):
                # Characters that change nothing, many at once.
                found = _STOPS.search(text, place)
                stop = found.start() if found else end
            if stop > place:
                self._sink.reasoning(text[place:stop])
                self.num_steps += stop - place
                place = stop
            else:
                self._push(text[place])
                place += 1

    @property
    def in_arguments(self) -> bool:
        """Whether the arguments of a call that has begun are not complete."""
        return self._next is not None and self._next.in_arguments

    def finish(self) -> None:
        """The text has ended: half a marker is none."""
        if self._next is None:
            if self._partial:
                self._other(self._partial)
            elif not self._inside:
                self._other("")
        if self._next is not None:
            self._next.finish()

    def _push(self, char: str) -> None:
        self.num_steps += 1
        if self._partial or char == "<":
            candidate = self._partial + char
            if any(marker.startswith(candidate) for marker in self._markers):
                self._partial = candidate
                if candidate in self._markers:
                    self._reach(candidate)
                return
            if self._partial:
                partial, self._partial = self._partial, ""
                self._other(partial)
                if self._next is not None:
                    self._next.feed(char)
                else:
                    self._push(char)
                return
        if not char.isspace() or len(self._space) >= MAX_SPACE_CHARS:
            self._other(char)
        else:
            self._space += char

    def _reach(self, marker: str) -> None:
        self._space = self._partial = ""
        if marker == BEGIN:
            self._inside = True
            self._markers = (END,)
        else:
            self._next = self._make_next(True)

    def _other(self, piece: str) -> None:
        """Take what is no marker."""
        space, self._space = self._space, ""
        if not self._inside:
            self._next = self._make_next(False)
            self._next.feed(space + piece)
            return
        if self._at_start and not piece.isspace():
            space = ""
        self._at_start = False
        # Whatever has been thought, the marker of its begin does not come any more.
        self._markers = (END,)
        self._sink.reasoning(space + piece)
