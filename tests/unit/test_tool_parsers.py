"""Calls and reasoning in texts: what is one, what only looks like one, and that pieces make no difference."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.tools.hermes import HermesParser
from octavo.frontend.tools.llama import LlamaJsonParser
from octavo.frontend.tools.machine import MAX_HELD_CHARS, Machine
from octavo.frontend.tools.mistral import MistralParser
from octavo.frontend.tools.parser import HERMES, LLAMA3_JSON, MISTRAL, PYTHONIC, TOOL_DIALECTS, OutputForm
from octavo.frontend.tools.pythonic import PythonicParser
from octavo.frontend.tools.reasoning import ReasoningParser, Start
from octavo.frontend.tools.sink import Sink

NAMES = frozenset({"get_weather", "add", "f-1"})


@dataclass
class Found:
    """What a text says, put together from all its pieces."""

    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)


def read(form: OutputForm, pieces: list[str]) -> Found:
    parser, found = form.parser(), Found()
    for parsed in [*map(parser.feed, pieces), parser.finish()]:
        found.text += parsed.text
        found.reasoning += parsed.reasoning
        for delta in parsed.calls:
            if delta.name:
                assert delta.number == len(found.calls)
                assert delta.call_id
                assert not delta.arguments
                found.calls.append([delta.name, ""])
                found.ids.append(delta.call_id)
            else:
                assert delta.number == len(found.calls) - 1
                assert not delta.call_id
                found.calls[-1][1] += delta.arguments
    assert parser.num_calls == len(found.calls)
    assert len(set(found.ids)) == len(found.ids)
    return found


def hermes(text: str) -> Found:
    return read(OutputForm(HERMES, NAMES), [text])


def llama(text: str) -> Found:
    return read(OutputForm(LLAMA3_JSON, NAMES), [text])


def mistral(text: str) -> Found:
    return read(OutputForm(MISTRAL, NAMES), [text])


def pythonic(text: str) -> Found:
    return read(OutputForm(PYTHONIC, NAMES), [text])


PARIS = '{"city": "Paris"}'
WEATHER = ["get_weather", PARIS]
ADD = ["add", '{"a": 1, "b": [2, -3.5e1, null, {"c": "}]\\""}]}']
TRAP = '{"s": "</tool_call>"}'
WITH_ID = f'{{"name": "get_weather", "arguments": {PARIS}, "id": "abcdefghi"}}'
PLAIN_ADD = f'{{"name": "add", "arguments": {ADD[1]}}}'
HERMES_CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
HERMES_ADD = f'<tool_call>{{"arguments": {ADD[1]}, "name": "add"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        (HERMES_CALL, "", [WEATHER]),
        (f"\n{HERMES_CALL}\n{HERMES_ADD}\n", "", [WEATHER, ADD]),
        (f"Let me see.\n\n{HERMES_CALL}", "Let me see.", [WEATHER]),
        (f"{HERMES_CALL}\nIt is done. ", "It is done. ", [WEATHER]),
        (f"a < b {HERMES_CALL}<tool_cal> c", "a < b<tool_cal> c", [WEATHER]),
        (HERMES_CALL.replace("</tool_call>", HERMES_ADD), "", [WEATHER, ADD]),
        (HERMES_CALL.replace("}}", "}}}"), "", [WEATHER]),
        (HERMES_CALL.replace('"arguments"', '"parameters"'), "", [WEATHER]),
        ('<tool_call>{"name": "add"}</tool_call>', "", [["add", "{}"]]),
        ('<tool_call>{"id": 12, "name": "add", "arguments": {}, "x": [1]}</tool_call>', "", [["add", "{}"]]),
        (f'<tool_call>{{"name": "add", "arguments": {TRAP}}}</tool_call>.', ".", [["add", TRAP]]),
    ],
)  # fmt: skip
def test_hermes(text: str, shown: str, calls: list[list[str]]) -> None:
    found = hermes(text)
    assert (found.text, found.calls) == (shown, calls)
    assert all(call_id.startswith("call_") for call_id in found.ids)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n ",
        "plain <tool> text",
        "<tool_call>",
        "<tool_call>get_weather</tool_call>",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "a"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": null}</tool_call>',
        '<tool_call>{"name": 1}</tool_call>',
        '<tool_call>{"name": "add" "arguments": {}}</tool_call>',
        '<tool_call>[{"name": "add", "arguments": {}}]</tool_call>',
        '<tool_call>{"na',
        '<tool_call>{"name": "add", "arguments": ',
        '<tool_call>{"arguments": {"a": 1',
        '<tool_call>{"name": "add", "name": "add"}</tool_call>',
        '{"name": "add", "arguments": {}}',
        "</tool_call>",
        '<tool_call>{"' + "k" * 100 + '": 1, "name": "add"}</tool_call>',
        '<tool_call>{"x": ' + "[" * 100 + "]" * 100 + ', "name": "add"}</tool_call>',
        '<tool_call>{"x": 1.2.3, "name": "add"}</tool_call>',
        '<tool_call>{"x": ' + "1" * 1000 + ', "name": "add"}</tool_call>',
        "<tool_call>" + " " * (MAX_HELD_CHARS + 10) + '{"name": "add"}',
        '<tool_call>{"arguments": {"a": "' + "x" * 70000 + '"}, "name": "add"}</tool_call>',
    ],
)
def test_what_only_looks_like_a_call_stays_text(text: str) -> None:
    found = hermes(text)
    assert (found.text, found.calls) == (text, [])


@pytest.mark.parametrize(
    ("text", "shown", "arguments"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1', "", '{"a": 1'),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}', "", '{"a": 1}'),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}\n</tool', "", '{"a": 1}'),
        ('<tool_call>{"name": "add", "arguments": {"a": True}}</tool_call> x', "x", '{"a": True}}'),
        ('<tool_call>{"name": "add", "arguments": {a: 1}}</tool_x</tool_call>', "", "{a: 1}}</tool_x"),
        ('<tool_call>{"name": "add", "arguments": {a</tool', "", "{a</tool"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1} x', " x", '{"a": 1}'),
    ],
)
def test_a_call_that_was_told_stays_one(text: str, shown: str, arguments: str) -> None:
    found = hermes(text)
    assert (found.text.strip(), found.calls) == (shown.strip(), [["add", arguments]])


LLAMA_CALL = f'{{"name": "get_weather", "parameters": {PARIS}}}'


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        (LLAMA_CALL, "", [WEATHER]),
        (f"\n\n {LLAMA_CALL}\n", "", [WEATHER]),
        (f"<|python_tag|>{LLAMA_CALL}", "", [WEATHER]),
        (f'{LLAMA_CALL}; {{"type": "function", "name": "add", "parameters": {ADD[1]}}}', "", [WEATHER, ADD]),
        (f"{LLAMA_CALL}\n{LLAMA_CALL}", "", [WEATHER, WEATHER]),
        (f"I call it: {LLAMA_CALL}", f"I call it: {LLAMA_CALL}", []),
        (f"I call it: <|python_tag|>{LLAMA_CALL}", "I call it:", [WEATHER]),
        (f"{LLAMA_CALL} and more", "and more", [WEATHER]),
        ('{"name": "Bob", "age": 5}', '{"name": "Bob", "age": 5}', []),
        ('{"name": "add"}', '{"name": "add"}', []),
        ('<|python_tag|>brave.call(q="x")', '<|python_tag|>brave.call(q="x")', []),
        ("{", "{", []),
    ],
)
def test_llama(text: str, shown: str, calls: list[list[str]]) -> None:
    found = llama(text)
    assert (found.text, found.calls) == (shown, calls)


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        (f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}]', "", [WEATHER]),
        (f"[TOOL_CALLS][{WITH_ID}, {PLAIN_ADD}]", "", [WEATHER, ADD]),
        (f"[TOOL_CALLS]get_weather{PARIS}", "", [WEATHER]),
        (f"Well. [TOOL_CALLS]get_weather{PARIS}[TOOL_CALLS]add{ADD[1]}", "Well.", [WEATHER, ADD]),
        (f"[TOOL_CALLS]get_weather[ARGS]{PARIS}", "", [WEATHER]),
        (f"[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{PARIS}", "", [WEATHER]),
        (f"[TOOL_CALLS]nothing{PARIS}", f"[TOOL_CALLS]nothing{PARIS}", []),
        ("[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
        ("[1, 2] is a list", "[1, 2] is a list", []),
        ("[TOOL_CALLS]add{a: 1}[TOOL_CALLS]add{}", "", [["add", "{a: 1}"], ["add", "{}"]]),
        ("[TOOL_CALLS]add[ARG]{}", "[TOOL_CALLS]add[ARG]{}", []),
    ],
)  # fmt: skip
def test_mistral(text: str, shown: str, calls: list[list[str]]) -> None:
    found = mistral(text)
    assert (found.text, found.calls) == (shown, calls)
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in found.ids)


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ("[get_weather(city='Paris')]", "", [WEATHER]),
        ("<|python_start|>[get_weather(city='Paris'), add()]", "", [WEATHER, ["add", "{}"]]),
        ("[add(a=1, b=[2.5, -3, True, None, (1,), {'k': 'v)]'}], c='it\\'s \\u00e9 \\x41\\n\\d',)]", "",
         [["add", '{"a": 1, "b": [2.5, -3, true, null, [1], {"k": "v)]"}], "c": "it\'s é A\\n\\\\d"}']]),
        ("[f-1()]", "", [["f-1", "{}"]]),
        ("[add(a=1)", "", [["add", '{"a": 1}']]),
        ("[1, 2]", "[1, 2]", []),
        ("[add]", "[add]", []),
        ("[other(a=1)]", "[other(a=1)]", []),
        ("[add(1)]", "[add(1)]", []),
        ("[add(a=__import__('os'))]", "[add(a=__import__('os'))]", []),
        ("[add(a=1, a=2)]", "[add(a=1, a=2)]", []),
        ("[add(a=b)]", "[add(a=b)]", []),
        ("[add(a=1", "[add(a=1", []),
        ("[add(a='\\ud800')]", "[add(a='\\ud800')]", []),
        ("[add(a=" + "[" * 40 + "]" * 40 + ")]", "[add(a=" + "[" * 40 + "]" * 40 + ")]", []),
        ("see [add(a=1)]", "see [add(a=1)]", []),
        ("[add(a=1)], then", ", then", [["add", '{"a": 1}']]),
        ("[add(a={1: 2})]", "[add(a={1: 2})]", []),
        ("[add(a=" + "9" * 5000 + ")]", "[add(a=" + "9" * 5000 + ")]", []),
    ],
)  # fmt: skip
def test_pythonic(text: str, shown: str, calls: list[list[str]]) -> None:
    found = pythonic(text)
    assert (found.text, found.calls) == (shown, calls)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in found.calls)


@pytest.mark.parametrize(
    ("start", "text", "thought", "shown"),
    [
        (Start.OUTSIDE, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (Start.OUTSIDE, "\n<think>Hm. </think>Yes. ", "Hm.", "Yes. "),
        (Start.OUTSIDE, "<think></think>Yes.", "", "Yes."),
        (Start.OUTSIDE, "\nYes. <think>no</think>", "", "\nYes. <think>no</think>"),
        (Start.OUTSIDE, "</think>", "", "</think>"),
        (Start.OUTSIDE, "<think", "", "<think"),
        (Start.OUTSIDE, " ", "", " "),
        (Start.OUTSIDE, "<think>a</thin", "a</thin", ""),
        (Start.OUTSIDE, "<<think>a</think>b", "", "<<think>a</think>b"),
        (Start.INSIDE, "\nHm.\n\n1 < 2 <think></think>\nYes.", "Hm.\n\n1 < 2 <think>", "Yes."),
        (Start.INSIDE, "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
        (Start.INSIDE, "</think>Yes.", "", "Yes."),
        (Start.INSIDE, "Hm", "Hm", ""),
        (Start.INSIDE, "a<</think>b", "a<", "b"),
        (Start.BEHIND, "\n\nYes <think>", "", "Yes <think>"),
    ],
)
def test_reasoning(start: Start, text: str, thought: str, shown: str) -> None:
    found = read(OutputForm(start=start), [text])
    assert (found.reasoning, found.text) == (thought, shown)


def test_line_breaks_in_arguments_are_written_as_json_has_them() -> None:
    arguments = '{"code":\n"a\tb\nc\\n"}'
    for found in (
        hermes(f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'),
        llama(f'{{"parameters": {arguments}, "name": "add"}}'),
        mistral(f"[TOOL_CALLS]add{arguments}"),
    ):
        assert json.loads(found.calls[0][1]) == {"code": "a\tb\nc\n"}


def test_calls_come_after_reasoning() -> None:
    text = f"<think>\nI could write {HERMES_CALL}.\n</think>\n\n{HERMES_CALL}"
    found = read(OutputForm(HERMES, NAMES, start=Start.OUTSIDE), [text])
    assert (found.reasoning, found.text, found.calls) == (f"I could write {HERMES_CALL}.", "", [WEATHER])
    found = read(OutputForm(LLAMA3_JSON, NAMES, start=Start.OUTSIDE), [f"<think>x</think>\n{LLAMA_CALL}"])
    assert found.calls == [WEATHER]


def test_at_most_so_many_calls() -> None:
    found = read(OutputForm(HERMES, NAMES, max_calls=1), [f"{HERMES_CALL}\n{HERMES_ADD}{HERMES_CALL} end"])
    assert (found.text, found.calls) == ("end", [WEATHER])


def test_arguments_come_as_they_are_written() -> None:
    parser = OutputForm(HERMES, NAMES).parser()
    assert parser.feed('ok <tool_call>{"name": "add", "argum').text == "ok"
    (begin, rest) = parser.feed('ents": {"a"').calls
    assert (begin.name, begin.arguments, rest.arguments) == ("add", "", '{"a"')
    assert [delta.arguments for delta in parser.feed(": 1}}").calls] == [": 1}"]


# Pieces of every form, and what breaks them.
PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "</tool"),
        *('{"name": "add", "arguments": {"a": 1}}', '"name": "add"', '"arguments": {', '{"a": "b}"}', LLAMA_CALL),
        *("{", "}", "[", "]", '"', ",", ";", ":", " ", "\n", "<", "x", "\\", "1", "add", "add(", "a='b'", ")", "é"),
        *(HERMES_CALL, "[add(a=1)]", f"[TOOL_CALLS]get_weather{PARIS}"),
    ]
)
TEXTS = st.lists(PIECES, max_size=14).map("".join)
FORMS = st.builds(
    OutputForm,
    dialect=st.sampled_from([None, *TOOL_DIALECTS.values()]),
    names=st.just(NAMES),
    max_calls=st.sampled_from([None, 1]),
    start=st.sampled_from([None, *Start]),
)


@settings(max_examples=600, deadline=None)
@given(FORMS, TEXTS, st.data())
def test_pieces_make_no_difference(form: OutputForm, text: str, data: st.DataObject) -> None:
    whole = read(form, [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for found in (read(form, pieces), read(form, list(text))):
        assert (found.text, found.reasoning, found.calls) == (whole.text, whole.reasoning, whole.calls)


@settings(max_examples=300, deadline=None)
@given(FORMS, TEXTS)
def test_nothing_of_a_text_without_calls_is_lost(form: OutputForm, text: str) -> None:
    found = read(form, [text])
    if not found.calls and form.start is None:
        assert found.text == text
    for _, arguments in found.calls:
        assert arguments.replace("\\n", "\n") in text or form.dialect is PYTHONIC or arguments == "{}"


@settings(max_examples=200, deadline=None)
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
))  # fmt: skip
def test_any_json_is_an_argument(value: object) -> None:
    arguments = json.dumps({"value": value}, ensure_ascii=False, indent=1)
    for found in (
        hermes(f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'),
        llama(f'{{"parameters": {arguments}, "name": "add"}}'),
        mistral(f"[TOOL_CALLS]add{arguments}"),
    ):
        assert (found.text, found.calls) == ("", [["add", arguments]])
    found = pythonic(f"[add(value={value!r})]")
    if not found.calls:  # Python writes some texts with escapes of surrogates
        assert "\\ud" in repr(value)
    else:
        assert json.loads(found.calls[0][1]) == {"value": value}


HARD = [
    "<tool_call>" * 2000,
    "<tool_call>{" * 2000,
    '<tool_call>{"name": "add", "arguments": {' * 2000,
    "<" * 20000,
    "<think><" * 3000,
    "</think" * 3000,
    " " * 20000,
    "\n<tool_call>\n" * 2000,
    '{"a": ' * 5000,
    "[TOOL_CALLS][" * 3000,
    "[TOOL_CALLS]add{a" * 2000,
    "[add(a=1), " * 3000,
    "[add(" + "[" * 20000,
    "[add(a='" + "\\" * 20000,
    HERMES_CALL * 500,
    "</tool_call>" * 2000,
]
MACHINES: list[Callable[..., Machine]] = [HermesParser, LlamaJsonParser, MistralParser, PythonicParser]


@pytest.mark.parametrize("text", HARD, ids=range(len(HARD)))
def test_steps_are_linear(text: str) -> None:
    for make in MACHINES:
        machine = make(NAMES, Sink())
        machine.feed(text)
        assert machine.num_steps <= 4 * len(text)
        reader = ReasoningParser(Start.INSIDE, Sink(), lambda behind, make=make: make(NAMES, Sink(), behind))  # type: ignore[misc]
        for char in text:
            reader.feed(char)
        assert reader.num_steps <= 2 * len(text)
