"""JSON one character at a time: where a value ends, and whether it is one."""

import json
import re
from enum import Enum

MAX_DEPTH = 64
"""Of arrays and objects within each other."""

MAX_SCALAR_CHARS = 512
"""Of a number; longer ones are none."""

SPACE = " \t\n\r"

_STRING_STOPS = re.compile(r'["\\\x00-\x1f]')


class Progress(Enum):
    """What a character has done."""

    MORE = "more"
    """It belongs to the value, which goes on."""
    DONE = "done"
    """It is the last one of the value."""
    BEFORE = "before"
    """The value, a number or a word, ended in front of it."""
    BAD = "bad"
    """With it there is no value."""


class _Place(Enum):
    VALUE = 0
    FIRST_ITEM = 1
    FIRST_KEY = 2
    KEY = 3
    COLON = 4
    NEXT = 5
    STRING = 6
    ESCAPE = 7
    SCALAR = 8


class JsonScanner:
    """Reads one value. Control characters are taken within strings, where models write line breaks; `valid` writes them as
    JSON does.

    Each character costs a constant number of steps; what is kept is a number or word, and one character a level.
    """

    __slots__ = ("_is_key", "_place", "_scalar", "_stack")

    def __init__(self) -> None:
        self._place = _Place.VALUE
        self._stack: list[str] = []
        self._is_key = False
        self._scalar = ""

    def push(self, char: str) -> Progress:
        """Take a character. Nothing may follow one that did not answer MORE."""
        place = self._place
        if place is _Place.STRING:
            return self._in_string(char)
        if place is _Place.ESCAPE:
            self._place = _Place.STRING
            return Progress.MORE
        if place is _Place.SCALAR:
            return self._in_scalar(char)
        if char in SPACE:
            return Progress.MORE
        if place is _Place.COLON:
            return self._go(_Place.VALUE) if char == ":" else Progress.BAD
        if place is _Place.NEXT:
            if char == ",":
                return self._go(_Place.KEY if self._stack[-1] == "}" else _Place.VALUE)
            return self._close(char)
        if place in (_Place.KEY, _Place.FIRST_KEY):
            if char == '"':
                self._is_key = True
                return self._go(_Place.STRING)
            return self._close(char) if place is _Place.FIRST_KEY else Progress.BAD
        if place is _Place.FIRST_ITEM and char == "]":
            return self._close(char)
        return self._begin_value(char)

    def plain_until(self, text: str, place: int) -> int:
        """Return where the characters end, from a place on, that may be taken without being pushed: those within a
        string that do not end it and are written as they are."""
        if self._place is not _Place.STRING:
            return place
        found = _STRING_STOPS.search(text, place)
        return found.start() if found else len(text)

    def valid(self, char: str) -> str:
        """Return the next character as valid JSON has it, before it is pushed."""
        return json.dumps(char)[1:-1] if char < " " and self._place is _Place.STRING else char

    def _begin_value(self, char: str) -> Progress:
        if char in "{[":
            if len(self._stack) >= MAX_DEPTH:
                return Progress.BAD
            self._stack.append("}" if char == "{" else "]")
            return self._go(_Place.FIRST_KEY if char == "{" else _Place.FIRST_ITEM)
        if char == '"':
            self._is_key = False
            return self._go(_Place.STRING)
        if char not in "-tfn0123456789":
            return Progress.BAD
        self._scalar = char
        return self._go(_Place.SCALAR)

    def _in_string(self, char: str) -> Progress:
        if char == "\\":
            return self._go(_Place.ESCAPE)
        if char != '"':
            return Progress.MORE
        return self._go(_Place.COLON) if self._is_key else self._after_value()

    def _in_scalar(self, char: str) -> Progress:
        if char.isascii() and (char.isalnum() or char in "+-."):
            self._scalar += char
            return Progress.MORE if len(self._scalar) <= MAX_SCALAR_CHARS else Progress.BAD
        if not _is_scalar(self._scalar):
            return Progress.BAD
        if not self._stack:
            return Progress.BEFORE
        self._place = _Place.NEXT
        return self.push(char)

    def _close(self, char: str) -> Progress:
        if not self._stack or char != self._stack[-1]:
            return Progress.BAD
        self._stack.pop()
        return self._after_value()

    def _after_value(self) -> Progress:
        if not self._stack:
            return Progress.DONE
        return self._go(_Place.NEXT)

    def _go(self, place: _Place) -> Progress:
        self._place = place
        return Progress.MORE


def _is_scalar(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
