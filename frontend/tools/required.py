"""Calls that must be made: the form that the text is held to, and what reads it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.frontend.constraint import MAX_CONSTRAINT_BYTES, Constraint, ConstraintKind
from octavo.frontend.errors import InvalidArgument
from octavo.frontend.tools.definitions import ToolUse
from octavo.frontend.tools.mistral import MistralParser
from octavo.frontend.tools.parser import HERMES, LLAMA3_JSON, MISTRAL, PYTHONIC, ToolDialect
from octavo.frontend.tools.reasoning import BEGIN, END, Start

MAX_SPACES = 1
"""Of white space in arguments, in a row: where it is free, small models write nothing else."""


@dataclass(frozen=True)
class _Form:
    """How calls are written where they must be made.

    Attributes:
        dialect: what reads them.
        begin: what stands in front of a call's name, and between name and arguments.
        end: what stands behind the arguments.
        separator: what stands between calls.
        around: what stands in front of all calls and behind them.
    """

    dialect: ToolDialect
    begin: tuple[str, str]
    end: str
    separator: str
    around: tuple[str, str] = ("", "")


# A special token cannot be asked for by its text: the list stands without its marker.
_MISTRAL_LIST = replace(MISTRAL, parser=lambda names, sink, behind: MistralParser(names, sink, behind, in_list=True))

_LLAMA_FORM = _Form(LLAMA3_JSON, ('{"name": "', '", "parameters": '), "}", "; ")
_FORMS = {
    HERMES.name: _Form(HERMES, ('<tool_call>\n{"name": "', '", "arguments": '), "}\n</tool_call>", "\n"),
    LLAMA3_JSON.name: _LLAMA_FORM,
    MISTRAL.name: _Form(_MISTRAL_LIST, ('{"name": "', '", "arguments": '), "}", ", ", ("[", "]")),
    # Schemas describe JSON, so the calls are written in JSON.
    PYTHONIC.name: _LLAMA_FORM,
}


_SAYS_TYPE = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"})
"""Keywords beside which a schema needs no type."""


def required_dialect(dialect: ToolDialect) -> ToolDialect:
    """Return what reads calls that must be made, of a model that writes them as `dialect` where it may."""
    return _FORMS[dialect.name].dialect


def required_calls(
    dialect: ToolDialect, use: ToolUse, described: Sequence[dict[str, Any]], start: Start | None
) -> Constraint:
    """Return the form of a text that makes the calls which are required, and says nothing else but what is thought.

    Args:
        dialect: how the model writes calls where it may.
        use: what is required.
        described: the tools, as templates have them.
        start: where the text begins.

    Raises:
        InvalidArgument: the tools' schemas are too large together.
    """
    form = _FORMS[dialect.name]
    functions = [tool["function"] for tool in described]
    tags = [_tag(form, one["name"], one["parameters"]) for one in functions if use.named in ("", one["name"])]
    calls: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": not use.parallel,
    }
    before, behind = form.around
    if before:
        calls = _sequence(_text(before), calls, _text(behind))
    if start is Start.INSIDE:
        calls = _sequence(_thought(""), _text("\n\n"), calls)
    elif start is Start.OUTSIDE:
        calls = {"type": "or", "elements": [_sequence(_thought(BEGIN), _text("\n\n"), calls), calls]}
    text = json.dumps({"type": "structural_tag", "format": calls}, ensure_ascii=False)
    if (num_bytes := len(text.encode())) > MAX_CONSTRAINT_BYTES:
        message = f"the form of calls that must be made has {num_bytes} bytes, limit {MAX_CONSTRAINT_BYTES}"
        raise InvalidArgument(message, field_path="input.chat.tools")
    return Constraint(ConstraintKind.STRUCTURAL_TAG, text, "input.chat.tools")


def _tag(form: _Form, name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    schema = parameters if _SAYS_TYPE.intersection(parameters) else {"type": "object", **parameters}
    content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_SPACES}
    return {"type": "tag", "begin": name.join(form.begin), "content": content, "end": form.end}


def _thought(begin: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": END}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}
