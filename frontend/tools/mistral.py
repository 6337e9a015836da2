"""Calls as Mistral models write them: [TOOL_CALLS] and then either a JSON list of objects with name and arguments, or the
name and its arguments, with [CALL_ID]... or [ARGS] between where the model has them; the marker comes with each call."""

from collections.abc import Set

from octavo.frontend.tools.json_scanner import JsonScanner, Progress
from octavo.frontend.tools.machine import Machine
from octavo.frontend.tools.sink import Sink

MAX_NAME_CHARS = 64
_TAGS = ("[ARGS]", "[CALL_ID]")


class MistralParser(Machine):
    """Reads such calls.

    Args:
        names: of the tools.
        sink: is told what is found.
        after_form: as in Machine.
        in_list: whether the marker is not there and the text is the list.
    """

    marker = "[TOOL_CALLS]"
    end_marker = "[TOOL_CALLS]"

    def __init__(self, names: Set[str], sink: Sink, after_form: bool = False, in_list: bool = False) -> None:
        super().__init__(names, sink, after_form)
        self._name = ""
        self._tag = ""
        self._arguments = JsonScanner()
        if in_list:
            self._state = self._opened

    @property
    def in_arguments(self) -> bool:
        """Whether the arguments of a call that has begun are not complete."""
        return self._state == self._in_arguments or super().in_arguments

    def _opened(self, char: str) -> bool:
        if char.isspace():
            return self._hold(char)
        if char == "[":
            self._state = self._before_object
            return self._hold(char)
        self._name = ""
        self._state = self._in_name
        return False

    def _before_object(self, char: str) -> bool:
        if char.isspace():
            return self._hold(char)
        return self._begin_object(char) if char == "{" else self._fail()

    def _closed(self, char: str) -> bool:
        if char == "]":
            return self._end_form(self._text)
        if char == ",":
            self._state = self._before_object
            return self._hold(char)
        return self._hold(char) if char.isspace() else self._fail()

    def _in_name(self, char: str) -> bool:
        if char == "{" or char == "[" or char.isspace():
            if self._name not in self._names:
                return self._fail()
            self._state = self._after_name
            return False
        self._name += char
        return self._hold(char) if len(self._name) <= MAX_NAME_CHARS else self._fail()

    def _after_name(self, char: str) -> bool:
        if char == "{":
            self._end_form(self._in_arguments)
            self._sink.begin(self._name)
            self._arguments = JsonScanner()
            return False
        if char == "[":
            self._tag = ""
            self._state = self._in_tag
            return False
        return self._hold(char) if char.isspace() else self._fail()

    def _in_tag(self, char: str) -> bool:
        self._tag += char
        if self._tag == "[ARGS]":
            self._state = self._after_name
        elif self._tag == "[CALL_ID]":
            self._state = self._in_call_id
        elif not any(tag.startswith(self._tag) for tag in _TAGS):
            return self._fail()
        return self._hold(char)

    def _in_call_id(self, char: str) -> bool:
        if char.isascii() and char.isalnum():
            return self._hold(char)
        self._state = self._after_name
        return False

    def _take_plain(self, text: str, place: int) -> int:
        if self._state != self._in_arguments:
            return super()._take_plain(text, place)
        stop = self._arguments.plain_until(text, place)
        if stop > place:
            self._sink.arguments(text[place:stop])
        return stop - place

    def _in_arguments(self, char: str) -> bool:
        written = self._arguments.valid(char)
        progress = self._arguments.push(char)
        if progress is Progress.BAD:
            self._num_matched = 0
            self._state = self._in_bad_arguments
            return False
        self._sink.arguments(written)
        return self._end_form(self._text) if progress is Progress.DONE else True

    def _after_bad_arguments(self) -> bool:
        return self._end_form(self._opened)
