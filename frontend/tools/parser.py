"""From the text of one choice to what it says: answer, calls, reasoning."""

from collections.abc import Callable, Set
from dataclasses import dataclass, field

from octavo.frontend.tools.hermes import HermesParser
from octavo.frontend.tools.llama import LlamaJsonParser
from octavo.frontend.tools.machine import Machine, PlainText
from octavo.frontend.tools.mistral import MistralParser
from octavo.frontend.tools.pythonic import PythonicParser
from octavo.frontend.tools.reasoning import ReasoningParser, Start
from octavo.frontend.tools.sink import Parsed, Sink, new_call_id, new_short_id


@dataclass(frozen=True)
class ToolDialect:
    """How a model writes calls.

    Attributes:
        name: as --tool-call-parser has it.
        parser: reads them.
        markers: texts that take part; where they are special tokens, they must be shown to the parser.
        make_id: draws the ids of calls, in the form that the model's template takes.
    """

    name: str
    parser: Callable[[Set[str], Sink, bool], Machine]
    markers: tuple[str, ...]
    make_id: Callable[[], str] = new_call_id


HERMES = ToolDialect("hermes", HermesParser, ("<tool_call>", "</tool_call>"))
LLAMA3_JSON = ToolDialect("llama3_json", LlamaJsonParser, ("<|python_tag|>",))
MISTRAL = ToolDialect("mistral", MistralParser, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), new_short_id)
PYTHONIC = ToolDialect("pythonic", PythonicParser, ("<|python_start|>",))

TOOL_DIALECTS = {dialect.name: dialect for dialect in (HERMES, LLAMA3_JSON, MISTRAL, PYTHONIC)}


@dataclass(frozen=True)
class OutputForm:
    """What a chat's choices are read by.

    Attributes:
        dialect: how calls are written; None: there are none.
        names: of the tools.
        max_calls: calls of a choice that are told; None: all are.
        start: where the texts begin; None: nothing is thought.
    """

    dialect: ToolDialect | None = None
    names: frozenset[str] = field(default_factory=frozenset)
    max_calls: int | None = None
    start: Start | None = None

    def parser(self) -> "OutputParser":
        """Return what reads one choice."""
        return OutputParser(self)


class OutputParser:
    """Reads one choice's text in pieces; what it says does not depend on how they are cut.

    Args:
        form: how the text is written.
    """

    def __init__(self, form: OutputForm) -> None:
        self._sink = Sink(form.max_calls, form.dialect.make_id if form.dialect else new_call_id)
        self._parser = (
            self._answer_parser(form, False)
            if form.start is None
            else ReasoningParser(form.start, self._sink, lambda behind: self._answer_parser(form, behind))
        )

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return self._sink.num_calls

    @property
    def in_arguments(self) -> bool:
        """Whether the arguments of a call that has begun are not complete."""
        return self._parser.in_arguments

    def feed(self, text: str) -> Parsed:
        """Take the next piece; return what is known by it."""
        self._parser.feed(text)
        return self._sink.take()

    def finish(self) -> Parsed:
        """The text has ended: return what was held back."""
        self._parser.finish()
        return self._sink.take()

    def _answer_parser(self, form: OutputForm, after_form: bool) -> Machine:
        make = form.dialect.parser if form.dialect else PlainText
        return make(form.names, self._sink, after_form)
