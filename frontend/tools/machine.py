"""The base of all parsers of calls: text goes through until a marker, what could be a call is held until it is one."""

import re
from collections.abc import Callable, Set

from octavo.frontend.tools.call_object import CallObject
from octavo.frontend.tools.json_scanner import Progress
from octavo.frontend.tools.sink import Sink

MAX_HELD_CHARS = 131072
"""Of what could be a call; longer ones are text."""

MAX_SPACE_CHARS = 256
"""Of white space that waits for what it stands before."""


class Machine:
    """Reads a text one character at a time.

    The law: each character goes to the text, to a call, or is dropped as part of the form in which calls are written;
    what is held goes to the text whole as soon as it cannot become a call, and is not looked at again, but for the
    character that decided it. So the result does not depend on how the text is cut, and each character costs a bounded
    number of steps. White space around calls belongs to their form.

    Args:
        names: of the tools: a call of another one stays text.
        sink: is told what is found.
        after_form: whether the text stands behind something of which white space around it is a part.
    """

    marker = ""
    """What begins a call within a text; '' for nothing."""

    needs_arguments = False
    """Whether an object with a name alone is no call."""

    def __init__(self, names: Set[str], sink: Sink, after_form: bool = False) -> None:
        self.num_steps = 0
        self._names = names
        self._sink = sink
        self._state: Callable[[str], bool] = self._text
        self._held: list[str] = []
        self._num_matched = 0
        self._after_form = after_form
        self._object = self._new_object()
        self._stops = re.compile(rf"[\s{re.escape(self.marker[:1])}]")

    @property
    def in_arguments(self) -> bool:
        """Whether the arguments of a call that has begun are not complete."""
        if self._state == self._in_object:
            return self._object.begun and self._object.in_arguments
        return self._state == self._in_bad_arguments

    def feed(self, text: str) -> None:
        """Take the next part of the text."""
        place, end = 0, len(text)
        while place < end:
            if (num_plain := self._take_plain(text, place)) > 0:
                place += num_plain
                self.num_steps += num_plain
                continue
            char = text[place]
            place += 1
            self.num_steps += 1
            # A state that leaves a character to another one returns False.
            while not self._state(char):
                self.num_steps += 1

    def _take_plain(self, text: str, place: int) -> int:
        """Take characters that change nothing, many at once; return how many."""
        if self._state == self._text:
            if self._held or self._after_form:
                return 0
            found = self._stops.search(text, place)
            stop = found.start() if found else len(text)
            if stop > place:
                self._sink.text(text[place:stop])
            return stop - place
        return self._object.take_plain(text, place) if self._state == self._in_object else 0

    def finish(self) -> None:
        """The text has ended: what is held is text."""
        if self._state == self._in_bad_arguments:
            self._sink.arguments(self.end_marker[: self._num_matched])
        held = "".join(self._held)
        if not (self._after_form and not held.strip()):
            self._sink.text(held)
        self._held = []

    def _opened(self, char: str) -> bool:
        """The marker is complete: what follows is a call, if it is one."""
        raise NotImplementedError

    def _text(self, char: str) -> bool:
        if char.isspace():
            if len(self._held) >= MAX_SPACE_CHARS:
                self._release()
            self._held.append(char)
        elif self.marker and char == self.marker[0]:
            return self._begin_marker(char)
        else:
            if self._after_form:
                self._held = []
            self._release()
            self._sink.text(char)
        return True

    def _begin_marker(self, char: str) -> bool:
        self._num_matched = 0
        self._state = self._in_marker
        return self._in_marker(char)

    def _in_marker(self, char: str) -> bool:
        if char != self.marker[self._num_matched]:
            return self._fail()
        self._held.append(char)
        self._num_matched += 1
        if self._num_matched == len(self.marker):
            self._state = self._opened
        return True

    def _hold(self, char: str) -> bool:
        """Keep a character until it is known what it belongs to."""
        if len(self._held) >= MAX_HELD_CHARS:
            return self._fail()
        self._held.append(char)
        return True

    def _fail(self) -> bool:
        """What is held is text; so may be the character that showed it."""
        held = "".join(self._held)
        self._held = [held.lstrip() if self._after_form else held]
        self._release()
        self._state = self._text
        return False

    def _release(self) -> None:
        if self._held:
            self._sink.text("".join(self._held))
            self._held = []
        self._after_form = False

    def _end_form(self, next_state: Callable[[str], bool]) -> bool:
        """The form of a call is complete: drop what of it is held."""
        self._held = []
        self._after_form = True
        self._state = next_state
        return True

    def _new_object(self) -> CallObject:
        return CallObject(self._names, self._sink, self.needs_arguments)

    def _begin_object(self, char: str) -> bool:
        self._object = self._new_object()
        self._state = self._in_object
        return self._in_object(char)

    def _in_object(self, char: str) -> bool:
        was_begun = self._object.begun
        progress = self._object.push(char)
        if self._object.begun and not was_begun:
            self._end_form(self._state)
        if progress is Progress.DONE:
            return self._end_form(self._closed)
        if progress is Progress.MORE:
            return self._object.begun or self._hold(char)
        if not self._object.begun:
            return self._fail()
        self._num_matched = 0
        self._state = self._in_bad_arguments if self._object.in_arguments else self._closed
        return False

    def _closed(self, char: str) -> bool:
        """A call is complete."""
        raise NotImplementedError

    end_marker = ""
    """What ends arguments that are no JSON; '' for nothing but the end of the text."""

    def _in_bad_arguments(self, char: str) -> bool:
        """Arguments that are no JSON are told as they are written, until a marker ends them."""
        if self.end_marker and char == self.end_marker[self._num_matched]:
            self._num_matched += 1
            if self._num_matched == len(self.end_marker):
                return self._after_bad_arguments()
            return True
        if self._num_matched:
            self._sink.arguments(self.end_marker[: self._num_matched])
            self._num_matched = 0
            return False
        self._sink.arguments(char)
        return True

    def _after_bad_arguments(self) -> bool:
        return self._end_form(self._text)


class PlainText(Machine):
    """No calls: all is text."""
