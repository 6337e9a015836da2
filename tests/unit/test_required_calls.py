"""The form of calls that must be made: whatever is written in it is read as calls by the parser that goes with it."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from octavo.frontend.constraint import ConstraintKind
from octavo.frontend.errors import InvalidArgument
from octavo.frontend.grammar_compiler import Compiler, GrammarError
from octavo.frontend.grammar_jobs import Job
from octavo.frontend.tools.definitions import ToolUse
from octavo.frontend.tools.parser import HERMES, TOOL_DIALECTS, OutputForm
from octavo.frontend.tools.reasoning import Start
from octavo.frontend.tools.required import required_calls, required_dialect
from tests.support.grammars import write_tokenizer
from tests.support.tiny_tokenizers import EOS_ID

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 4},
            "n": {"type": "integer", "maximum": 9, "minimum": 0},
        },
        "required": ["city"],
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
DESCRIBED = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
NAMES = tuple(SCHEMAS)
MAX_TOKENS = 2000


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return Compiler(write_tokenizer(tmp_path_factory.mktemp("tokenizer")), (EOS_ID,))


def written(compiler: Compiler, tag: str, start: Start | None, draw: random.Random) -> str:
    """Return a text of a form, drawn byte by byte; its end is taken as soon as it may be."""
    compiled = compiler._compiler.compile_structural_tag(tag)
    matcher = compiler._core.GrammarMatcher(compiled, [EOS_ID], False, -1, None)
    mask = np.zeros((1, -(-compiler._info.vocab_size() // 32)), dtype=np.int32)
    text = ""
    while len(text) < MAX_TOKENS:
        matcher.fill_next_token_bitmask(mask, 0, False)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if EOS_ID in allowed:
            return text
        piece = chr(draw.choice([int(i) for i in allowed if i < 127]))
        # A thought would hardly ever end by itself.
        thinks = start is Start.INSIDE or (start is Start.OUTSIDE and text.startswith("<think>"))
        if thinks and "</think>" not in text and draw.random() < 0.2:
            piece = "</think>"
        assert matcher.accept_string(piece, False)
        text += piece
    raise AssertionError("the text does not end")


@pytest.mark.parametrize("start", [None, *Start])
@pytest.mark.parametrize("named", ["", "weather"])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", TOOL_DIALECTS)
def test_what_is_written_is_read(
    compiler: Compiler, name: str, parallel: bool, named: str, start: Start | None
) -> None:
    dialect, use = TOOL_DIALECTS[name], ToolUse(NAMES, True, named, parallel)
    constraint = required_calls(dialect, use, DESCRIBED, start)
    assert (constraint.kind, constraint.path) == (ConstraintKind.STRUCTURAL_TAG, "input.chat.tools")
    for seed in range(3):
        text = written(compiler, constraint.text, start, random.Random(seed))
        parser = OutputForm(required_dialect(dialect), frozenset(NAMES), None, start).parser()
        parts = [*map(parser.feed, text), parser.finish()]
        assert "".join(part.text for part in parts) == "", text
        calls = [call for part in parts for call in part.calls]
        assert parser.num_calls >= 1
        assert parallel or parser.num_calls == 1
        for number in range(parser.num_calls):
            called = "".join(call.name for call in calls if call.number == number)
            arguments = "".join(call.arguments for call in calls if call.number == number)
            assert called == named or not named
            jsonschema.validate(json.loads(arguments), SCHEMAS[called])


def test_schemas_have_a_limit() -> None:
    schema = {"type": "object", "description": "x" * 65536}
    described = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(InvalidArgument, match="limit 65536") as raised:
        required_calls(HERMES, ToolUse(("f",), True), described, None)
    assert raised.value.field_path == "input.chat.tools"


def test_keywords_that_would_not_be_enforced_are_refused(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    described = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    constraint = required_calls(HERMES, ToolUse(("f",), True), described, None)
    with pytest.raises(GrammarError, match="not"):
        Compiler(write_tokenizer(tmp_path), (EOS_ID,)).compile(Job(str(constraint.kind), constraint.text))


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"q": SCHEMAS["weather"]}, "$ref": "#/$defs/q"},
        {"anyOf": [SCHEMAS["weather"], SCHEMAS["now"]]},
    ],
)
def test_schemas_that_say_their_type_elsewhere(compiler: Compiler, schema: dict[str, object]) -> None:
    described = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    constraint = required_calls(HERMES, ToolUse(("f",), True), described, None)
    compiler.compile(Job(str(constraint.kind), constraint.text))
    text = written(compiler, constraint.text, None, random.Random(0))
    parser = OutputForm(HERMES, frozenset("f"), None, None).parser()
    calls = [call for part in (parser.feed(text), parser.finish()) for call in part.calls]
    jsonschema.validate(json.loads("".join(call.arguments for call in calls)), schema)
