"""Calls as Hermes and Qwen models write them: <tool_call>{"name": "f", "arguments": {...}}</tool_call>, anywhere."""

from octavo.frontend.tools.machine import Machine

_END = "</tool_call>"


class HermesParser(Machine):
    """Reads such calls. A missing end marker and braces too many behind the object are forgiven."""

    marker = "<tool_call>"
    end_marker = _END

    def finish(self) -> None:
        """The text has ended: what is held is text, but for half an end marker."""
        if self._state == self._in_end:
            self._held = []
        super().finish()

    def _opened(self, char: str) -> bool:
        if char.isspace():
            return self._hold(char)
        return self._begin_object(char) if char == "{" else self._fail()

    def _closed(self, char: str) -> bool:
        if char.isspace():
            return self._hold(char)
        if char == "}":
            return True
        if char == "<":
            self._num_matched = 1
            self._state = self._in_end
            return self._hold(char)
        return self._fail()

    def _in_end(self, char: str) -> bool:
        if char != _END[self._num_matched]:
            if self._num_matched == 1:
                # It may be the next call's marker.
                self._state = self._in_marker
                return False
            return self._fail()
        self._num_matched += 1
        return self._end_form(self._text) if self._num_matched == len(_END) else self._hold(char)
