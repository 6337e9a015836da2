"""A call written as a JSON object: {"name": "f", "arguments": {...}}, members in any order, others beside them."""

from collections.abc import Set
from enum import Enum

from octavo.frontend.tools.json_scanner import SPACE, JsonScanner, Progress
from octavo.frontend.tools.sink import Sink

ARGUMENT_KEYS = ("arguments", "parameters")

MAX_KEY_CHARS = 64
MAX_EARLY_CHARS = 65536
"""Of arguments that come before the name, which are kept until it does."""


class _Place(Enum):
    START = 0
    FIRST_KEY = 1
    KEY = 2
    IN_KEY = 3
    COLON = 4
    VALUE = 5
    IN_NAME = 6
    IN_VALUE = 7
    NEXT = 8


class CallObject:
    """Reads one object. As soon as name and the arguments' brace are there, the call has begun; before that, the object
    may turn out to be no call.

    Args:
        names: of the tools; an object with another name is no call.
        sink: is told of the call.
        needs_arguments: whether an object without arguments is no call.
    """

    def __init__(self, names: Set[str], sink: Sink, needs_arguments: bool) -> None:
        self.begun = False
        self.in_arguments = False  # the last character that was taken belongs to them
        self._names = names
        self._sink = sink
        self._needs_arguments = needs_arguments
        self._place = _Place.START
        self._key = ""
        self._name: str | None = None
        self._has_arguments = False
        self._early: list[str] = []
        self._scanner = JsonScanner()

    def push(self, char: str) -> Progress:
        """Take a character; never answers BEFORE. After BAD, `begun` says whether a call is lost, and `in_arguments`
        whether it was in them."""
        place = self._place
        if place is _Place.IN_VALUE:
            return self._in_value(char)
        if place is _Place.IN_KEY:
            return self._in_key(char)
        if place is _Place.IN_NAME:
            return self._in_name(char)
        if char in SPACE and place is not _Place.START:
            return Progress.MORE
        match place, char:
            case (_Place.START, "{"):
                return self._go(_Place.FIRST_KEY)
            case (_Place.FIRST_KEY | _Place.KEY, '"'):
                self._key = ""
                return self._go(_Place.IN_KEY)
            case (_Place.COLON, ":"):
                return self._go(_Place.VALUE)
            case (_Place.NEXT, ","):
                return self._go(_Place.KEY)
            case (_Place.NEXT, "}"):
                return self._close()
            case (_Place.VALUE, _):
                return self._begin_value(char)
        return Progress.BAD

    def take_plain(self, text: str, place: int) -> int:
        """Take characters of a text, from a place on, that change nothing; return how many."""
        if not (self.begun and self.in_arguments):
            return 0
        stop = self._scanner.plain_until(text, place)
        if stop > place:
            self._sink.arguments(text[place:stop])
        return stop - place

    def _begin_value(self, char: str) -> Progress:
        if self._key == "name":
            if char != '"' or self._name is not None:
                return Progress.BAD
            self._name = ""
            return self._go(_Place.IN_NAME)
        self._scanner = JsonScanner()
        if self._key in ARGUMENT_KEYS:
            if char != "{" or self._has_arguments:
                return Progress.BAD
            self.in_arguments = self._has_arguments = True
            if self._name is not None:
                self._begin(self._name)
        self._place = _Place.IN_VALUE
        return self._in_value(char)

    def _in_value(self, char: str) -> Progress:
        written = self._scanner.valid(char)
        progress = self._scanner.push(char)
        if progress is Progress.BEFORE:
            self._place = _Place.NEXT
            return self.push(char)
        if progress is Progress.BAD:
            return progress
        if self.in_arguments:
            if self.begun:
                self._sink.arguments(written)
            elif len(self._early) < MAX_EARLY_CHARS:
                self._early.append(written)
            else:
                return Progress.BAD
        if progress is Progress.DONE:
            self.in_arguments = False
            self._place = _Place.NEXT
        return Progress.MORE

    def _in_key(self, char: str) -> Progress:
        if char == '"':
            return self._go(_Place.COLON)
        self._key += char
        return Progress.MORE if len(self._key) <= MAX_KEY_CHARS and char != "\\" else Progress.BAD

    def _in_name(self, char: str) -> Progress:
        name = self._name or ""
        if char == '"':
            if name not in self._names:
                return Progress.BAD
            if self._has_arguments:
                self._begin(name)
            return self._go(_Place.NEXT)
        self._name = name + char
        return Progress.MORE if len(name) < MAX_KEY_CHARS else Progress.BAD

    def _close(self) -> Progress:
        if self._name is None:
            return Progress.BAD
        if not self.begun:
            if self._needs_arguments:
                return Progress.BAD
            self._begin(self._name)
            self._sink.arguments("{}")
        return Progress.DONE

    def _begin(self, name: str) -> None:
        self.begun = True
        self._sink.begin(name)
        if self._early:
            self._sink.arguments("".join(self._early))
            self._early = []

    def _go(self, place: _Place) -> Progress:
        self._place = place
        return Progress.MORE
