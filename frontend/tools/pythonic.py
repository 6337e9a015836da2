"""Calls as Python: the answer is [f(a=1, b="x"), g()], perhaps behind <|python_start|>."""

from collections.abc import Set

from octavo.frontend.tools.literals import MAX_CALL_CHARS, BadLiteral, keyword_arguments
from octavo.frontend.tools.machine import MAX_SPACE_CHARS, Machine
from octavo.frontend.tools.sink import Sink

MAX_NAME_CHARS = 64


class PythonicParser(Machine):
    """Reads such calls at the start of the text and behind the marker; a list elsewhere stays text. A call is told when
    its last bracket has come: only then its arguments can be written as JSON."""

    marker = "<|python_start|>"

    def __init__(self, names: Set[str], sink: Sink, after_form: bool = False) -> None:
        super().__init__(names, sink, after_form)
        self._name = ""
        self._arguments: list[str] = []
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self._state = self._start

    def _start(self, char: str) -> bool:
        if char.isspace() and len(self._held) < MAX_SPACE_CHARS:
            return self._hold(char)
        self._state = self._opened if char == "[" else self._text
        return False

    def _opened(self, char: str) -> bool:
        if char == "[":
            self._state = self._before_call
            return self._hold(char)
        return self._hold(char) if char.isspace() else self._fail()

    def _before_call(self, char: str) -> bool:
        if char.isspace():
            return self._hold(char)
        self._name = ""
        self._state = self._in_name
        return False

    def _in_name(self, char: str) -> bool:
        if char == "(":
            if self._name not in self._names:
                return self._fail()
            self._arguments, self._depth, self._quote = [], 0, ""
            self._state = self._in_arguments
        elif not (char.isascii() and (char.isalnum() or char in "_-")) or len(self._name) >= MAX_NAME_CHARS:
            return self._fail()
        self._name += char
        return self._hold(char)

    def _in_arguments(self, char: str) -> bool:
        if not self._quote and char == ")" and not self._depth:
            return self._end_call()
        if len(self._arguments) >= MAX_CALL_CHARS:
            return self._fail()
        self._arguments.append(char)
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == self._quote:
                self._quote = ""
        elif char in "'\"":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
        return self._hold(char)

    def _end_call(self) -> bool:
        try:
            arguments = keyword_arguments("".join(self._arguments))
        except BadLiteral:
            return self._fail()
        self._sink.begin(self._name.removesuffix("("))
        self._sink.arguments(arguments)
        return self._end_form(self._closed)

    def _closed(self, char: str) -> bool:
        if char == "]":
            return self._end_form(self._text)
        if char == ",":
            self._state = self._before_call
            return self._hold(char)
        return self._hold(char) if char.isspace() else self._fail()
