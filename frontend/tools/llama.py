"""Calls as Llama 3.1 and 3.2 write them: the answer is {"name": "f", "parameters": {...}}, or several of them with ';'
between, perhaps behind <|python_tag|>."""

from collections.abc import Set

from octavo.frontend.tools.machine import MAX_SPACE_CHARS, Machine
from octavo.frontend.tools.sink import Sink


class LlamaJsonParser(Machine):
    """Reads such calls at the start of the text and behind the marker; an object elsewhere stays text."""

    marker = "<|python_tag|>"
    needs_arguments = True

    def __init__(self, names: Set[str], sink: Sink, after_form: bool = False) -> None:
        super().__init__(names, sink, after_form)
        self._state = self._start

    def _start(self, char: str) -> bool:
        if char.isspace() and len(self._held) < MAX_SPACE_CHARS:
            return self._hold(char)
        if char == "{":
            return self._begin_object(char)
        self._state = self._text
        return False

    def _opened(self, char: str) -> bool:
        if char.isspace():
            return self._hold(char)
        return self._begin_object(char) if char == "{" else self._fail()

    def _closed(self, char: str) -> bool:
        if char == "<":
            return self._begin_marker(char)
        if char in ";,":
            self._state = self._opened
            return self._hold(char)
        return self._opened(char)
