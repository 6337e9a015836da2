"""Arguments of a Python call, which are literals, as JSON. Nothing is evaluated: this is a parser of its own."""

import json
import re
from typing import Final, TypeAlias

MAX_CALL_CHARS: Final = 65536
MAX_DEPTH: Final = 32

Value: TypeAlias = "str | int | float | bool | list[Value] | dict[str, Value] | None"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NUMBER = re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?|[-+]?\.[0-9]+")
_WORDS: dict[str, bool | None] = {
    "True": True,
    "False": False,
    "None": None,
    "true": True,
    "false": False,
    "null": None,
}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_ESCAPES |= {char: char for char in "\\'\"/"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class BadLiteral(Exception):
    """The text is no list of keyword arguments whose values are literals."""


def keyword_arguments(text: str) -> str:
    """Return `a=1, b="x"` as a JSON object; '' is {}.

    Raises:
        BadLiteral: it is something else, is nested too deeply, or names an argument twice.
    """
    reader = _Reader(text)
    found: dict[str, Value] = {}
    while not reader.ended():
        name = reader.match(_NAME)
        reader.expect("=")
        if name in found:
            raise BadLiteral
        found[name] = reader.value(0)
        if not reader.ended():
            reader.expect(",")
    return json.dumps(found, ensure_ascii=False)


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    def ended(self) -> bool:
        self._skip_space()
        return self._place == len(self._text)

    def match(self, pattern: "re.Pattern[str]") -> str:
        self._skip_space()
        found = pattern.match(self._text, self._place)
        if found is None:
            raise BadLiteral
        self._place = found.end()
        return found.group()

    def expect(self, char: str) -> None:
        if not self._take(char):
            raise BadLiteral

    def value(self, depth: int) -> Value:
        if depth > MAX_DEPTH:
            raise BadLiteral
        self._skip_space()
        char = self._text[self._place : self._place + 1]
        if char in ("'", '"'):
            return self._string(char)
        if char == "[":
            return self._items("]", depth)
        if char == "(":
            return self._items(")", depth)
        if char == "{":
            return self._pairs(depth)
        if char and char in "-+.0123456789":
            return _number(self.match(_NUMBER))
        word = self.match(_NAME)
        if word not in _WORDS:
            raise BadLiteral
        return _WORDS[word]

    def _items(self, end: str, depth: int) -> list[Value]:
        self._place += 1
        items: list[Value] = []
        while not self._take(end):
            items.append(self.value(depth + 1))
            if not self._take(","):
                self.expect(end)
                break
        return items

    def _pairs(self, depth: int) -> dict[str, Value]:
        self._place += 1
        pairs: dict[str, Value] = {}
        while not self._take("}"):
            key = self.value(depth + 1)
            if not isinstance(key, str):
                raise BadLiteral
            self.expect(":")
            pairs[key] = self.value(depth + 1)
            if not self._take(","):
                self.expect("}")
                break
        return pairs

    def _string(self, quote: str) -> str:
        pieces: list[str] = []
        place, text = self._place + 1, self._text
        while True:
            char = text[place : place + 1]
            if not char:
                raise BadLiteral
            place += 1
            if char == quote:
                self._place = place
                return "".join(pieces)
            if char == "\\":
                char, place = self._escape(place)
            pieces.append(char)

    def _escape(self, place: int) -> tuple[str, int]:
        char = self._text[place : place + 1]
        if char in _HEX_DIGITS:
            end = place + 1 + _HEX_DIGITS[char]
            digits = self._text[place + 1 : end]
            try:
                code = int(digits, 16) if digits.isalnum() and len(digits) == _HEX_DIGITS[char] else -1
            except ValueError:
                code = -1
            if not 0 <= code < 0x110000 or 0xD800 <= code < 0xE000:
                raise BadLiteral
            return chr(code), end
        # An unknown escape is what it looks like, as in Python.
        return _ESCAPES.get(char, "\\" + char), place + 1

    def _take(self, char: str) -> bool:
        self._skip_space()
        if not self._text.startswith(char, self._place):
            return False
        self._place += 1
        return True

    def _skip_space(self) -> None:
        while self._text[self._place : self._place + 1].isspace():
            self._place += 1


def _number(text: str) -> int | float:
    try:
        return float(text) if set(text) & set(".eE") else int(text)
    except ValueError:
        raise BadLiteral from None
