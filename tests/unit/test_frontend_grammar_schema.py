"""Schemas and other forms: what is taken is enforced whole, what is not is refused by name."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from octavo.frontend import grammar_compiler
from octavo.frontend.grammar_compiler import Compiler, GrammarError
from octavo.frontend.grammar_jobs import Job
from octavo.frontend.grammar_schema import MAX_DEPTH, SchemaError, check_pattern, check_schema, parse_json
from octavo.wire.grammar import load_core, tokenizer_info, unpack
from octavo.wire.vocabulary import read_token_bytes
from tests.support.tiny_tokenizers import EOS_ID, byte_level

STOPS = (EOS_ID,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    byte_level().save(str(made / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def compiler(folder: Path) -> Compiler:
    return Compiler(folder, STOPS)


class Matching:
    """Says which texts a form takes."""

    def __init__(self, compiler: Compiler, folder: Path, kind: str, text: str) -> None:
        core = load_core()
        compiled, stops = unpack(compiler.compile(Job(kind, text)))
        info = tokenizer_info(core, read_token_bytes(folder), stops)
        grammar = core.CompiledGrammar.deserialize_json(compiled, info)
        self._new = partial(core.GrammarMatcher, grammar, list(stops), False, -1, None)

    def takes(self, text: str) -> bool:
        matcher = self._new()
        return bool(matcher.accept_string(text, False) and matcher.is_completed())


def one(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": fields}, "required": ["a"]}


ENFORCED: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "integer", "minimum": 3, "maximum": 12}, ["3", "12"], ["2", "13", "3.5", '"3"']),
    ({"type": "integer", "exclusiveMinimum": 3, "maximum": 12, "multipleOf": 5}, ["5", "10"], ["3", "0", "7", "15"]),
    ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 2}, ["-0.5", "1.99", "0"], ["-0.6", "2", "2.0", "1e9"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"äöü"'], ['"a"', '"abcd"', "3"]),
    ({"type": "string", "maxLength": 9}, ['""', '"a b"'], ['"\t"', '"\x03"', '"\x1f"', '"\n"']),
    (one(type="string", minLength=1, maxLength=2000), ['{"a": "x"}'], ['{"a": "\x00"}', '{"a": ""}']),
    ({"type": "string", "pattern": "^[a-c]{2}-\\d$"}, ['"ab-1"'], ['"ad-1"', '"ab-"', '"xab-1"']),
    ({"type": "string", "pattern": '^[^"x]+$'}, ['"abc"'], ['"axc"', '"a\n"']),
    ({"type": "string", "format": "date"}, ['"2024-02-03"'], ['"2024-13-03"', '"today"']),
    ({"type": "string", "format": "uuid"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"123"']),
    ({"type": ["string", "null"], "maxLength": 1}, ['"a"', "null"], ['"ab"', "3"]),
    ({"enum": ["a", 1, None, {"b": [1, 2]}]}, ['"a"', "1", "null", '{"b":[1,2]}'], ['"b"', "2", "{}"]),
    ({"type": "string", "const": "x\n"}, ['"x\\n"'], ['"x"']),
    ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}, ["[true]"], ["[]", "[1]"]),
    ({"type": "array", "prefixItems": [{"type": "null"}], "items": False}, ["[null]", "[]"], ["[null, null]", "[1]"]),
    ({"properties": {"a": {"type": "integer"}}}, ["{}", '{"a": 1}'], ['{"a": "x"}', '{"b": 1}', "3"]),
    (one(type="integer"), ['{"a": 1}'], ["{}", '{"a": 1, "b": 2}']),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        ["{}", '{"a": 1, "b": "x"}'],
        ['{"b": 1}', '{"a": "x"}'],
    ),
    ({"type": "object", "patternProperties": {"^x$": {"type": "null"}}}, ['{"x": null}'], ['{"x": 1}', '{"y": null}']),
    ({"type": "object"}, ["{}", '{"a": [1, "b"]}'], ["[]", "1"]),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}], "title": "x"}, ["1", "null"], ['"a"']),
    ({"oneOf": [one(const=1), one(const=2)]}, ['{"a": 1}', '{"a": 2}'], ['{"a": 3}']),
    ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "integer"}}}, ["1"], ['"a"']),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "integer"}}}, ["1"], ['"a"']),
    (
        {"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
        ["{}", '{"n": {"n": {}}}'],
        ['{"n": 1}', '{"n": {"m": {}}}'],
    ),
    ({}, ["1", '{"a": 1}'], ["x"]),
    (True, ["null"], [""]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), ENFORCED, ids=[json.dumps(s)[:60] for s, _, _ in ENFORCED])
def test_what_a_schema_says_is_enforced(
    compiler: Compiler, folder: Path, schema: Any, good: list[str], bad: list[str]
) -> None:
    matching = Matching(compiler, folder, "json_schema", json.dumps(schema))
    for text in good:
        assert matching.takes(text), text
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    for text in bad:
        assert not matching.takes(text), text


ODD: list[tuple[Any, list[str], list[str]]] = [
    (
        {"enum": ["français", "aéb", "日本a", "😀b", "x\\xe7a", "\x01a", "\x85b"]},
        ["français", "aéb", "日本a", "😀b"],
        ["fran\u0e7ais"],
    ),
    ({"type": "string", "pattern": "^[é-üa]{2}ça$"}, ["éaça"], ["éa\u0e7a", "xxça"]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), ODD)
def test_characters_beyond_ascii(
    compiler: Compiler, folder: Path, schema: Any, good: list[str], bad: list[str]
) -> None:
    beside = {"type": "string", "maxLength": 2}
    for whole in (one(**schema), {**one(**schema), "properties": {"é": beside, "a": schema}, "required": ["é", "a"]}):
        matching = Matching(compiler, folder, "json_schema", json.dumps(whole))
        before = {"é": "x"} if "é" in whole["properties"] else {}
        assert all(matching.takes(json.dumps(before | {"a": value}, ensure_ascii=False)) for value in good)
        assert not any(matching.takes(json.dumps(before | {"a": value}, ensure_ascii=False)) for value in bad)


BESIDE = [entry for entry in ENFORCED if not (isinstance(entry[0], dict) and "$defs" in entry[0])]


@pytest.mark.parametrize(("schema", "good", "bad"), BESIDE, ids=[json.dumps(s)[:60] for s, _, _ in BESIDE])
def test_what_stands_beside_a_bounded_string_is_enforced(
    compiler: Compiler, folder: Path, schema: Any, good: list[str], bad: list[str]
) -> None:
    whole = {
        "type": "object",
        "properties": {"s": {"type": "string", "maxLength": 2}, "v": schema},
        "required": ["s", "v"],
    }
    matching = Matching(compiler, folder, "json_schema", json.dumps(whole))
    for text in good:
        assert matching.takes(f'{{"s": "é", "v": {text}}}'), text
    for text in bad:
        assert not matching.takes(f'{{"s": "é", "v": {text}}}'), text


REFUSED: list[tuple[Any, str]] = [
    ({"type": 3}, "#/type: 3 is no type"),
    ({"type": "text"}, '#/type: "text" is no type'),
    ({"type": []}, "the list is empty"),
    ([1], "a schema must be an object or a boolean"),
    ({"maxLength": 3}, "'maxLength' is only enforced beside 'type': 'string'"),
    ({"type": "integer", "maxLength": 3}, "'maxLength' is only enforced beside"),
    ({"type": "integer", "typo": 3}, "'typo' is not enforced"),
    ({"type": "number", "multipleOf": 0.1}, "'multipleOf' is only enforced beside"),
    ({"type": ["number", "integer"], "multipleOf": 2}, "'multipleOf' is only enforced for integers"),
    ({"type": "integer", "multipleOf": 2.5}, "multipleOf"),
    ({"type": "integer", "multipleOf": 5, "minimum": 3}, "not be enforced whole: range + multipleOf"),
    ({"type": "string", "format": "regex"}, 'format "regex" is not enforced'),
    ({"type": "string", "format": "date", "maxLength": 3}, "'maxLength' beside 'format'"),
    ({"type": "string", "pattern": "a", "minLength": 3}, "'minLength' beside 'pattern'"),
    ({"type": "string", "pattern": "^(?=a)b"}, "not be enforced whole"),
    ({"type": "string", "pattern": "a^b"}, "not be enforced whole"),
    ({"type": "string", "pattern": "(a)\\1"}, "ackreference"),
    ({"type": "string", "pattern": 'a"b'}, "characters that JSON escapes"),
    ({"type": "string", "pattern": "("}, "parenthesis"),
    ({"type": "array", "items": {"type": "null"}, "uniqueItems": True}, "'uniqueItems' is not enforced"),
    ({"type": "array", "contains": {"const": 1}}, "'contains' is not enforced"),
    ({"type": "array", "items": [{"type": "integer"}]}, "#/items: a schema must be"),
    ({"type": "object", "required": ["b"]}, '"b" is not among the properties'),
    ({"type": "object", "propertyNames": {"maxLength": 1}}, "'propertyNames' is not enforced"),
    ({"type": "object", "minProperties": 1, "additionalProperties": True}, "'minProperties' is only enforced"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "'dependentRequired' is not enforced"),
    (
        {"type": "object", "properties": {"xa": {}}, "patternProperties": {"^x": {"type": "null"}}},
        "'properties' beside 'patternProperties'",
    ),
    (one(type="integer", **{"not": {"const": 1}}), "#/properties/a: 'not' is not enforced"),
    ({"if": {"type": "integer"}, "then": {"minimum": 3}}, "'if' is not enforced"),
    ({"type": "integer", "anyOf": [{"minimum": 5}]}, "'type' beside 'anyOf' is not enforced"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "not be enforced whole"),
    ({"allOf": [{"type": "integer"}, {"type": "number"}]}, "'allOf' with more than one schema"),
    ({"anyOf": []}, "at least one"),
    ({"enum": ["a", "bb"], "maxLength": 1}, "'maxLength' beside 'enum'"),
    ({"type": "integer", "enum": [1, "a"]}, '"a" is not of the type "integer"'),
    ({"const": 1, "enum": [2]}, "'enum' beside 'const'"),
    ({"enum": []}, "at least one"),
    ({"$ref": "http://example.com/schema"}, "only references into the schema itself"),
    ({"$ref": "file:///etc/passwd"}, "only references into the schema itself"),
    ({"$ref": "#/$defs/nothing"}, "names nothing in the schema"),
    ({"$ref": "#"}, "ircular"),
    ({"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": {"type": "integer"}}}, "'minimum' beside '$ref'"),
    ({"$dynamicRef": "#a"}, "'$dynamicRef' is not enforced"),
    ({"$defs": {"a": {"$id": "b", "type": "null"}}, "$ref": "#/$defs/a"}, "'$id' below the root"),
    (False, "cannot accept any value"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "greater than"),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=[json.dumps(s)[:60] for s, _ in REFUSED])
def test_what_would_not_be_enforced_is_refused_by_name(compiler: Compiler, schema: Any, reason: str) -> None:
    with pytest.raises(GrammarError) as raised:
        compiler.compile(Job("json_schema", json.dumps(schema)))
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is no JSON"),
        ("{", "is no JSON"),
        ('{"const": NaN}', "NaN"),
        ('{"const": 1e999}', "too large a number"),
        ('{"type": "null", "type": "string"}', "comes twice"),
        ("[" * 60_000, "nested too deeply"),
    ],
)
def test_texts_that_are_no_schema(text: str, reason: str) -> None:
    with pytest.raises(SchemaError) as raised:
        parse_json(text, "the schema")
    assert reason in str(raised.value)


def test_depth_and_references_are_bounded() -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(MAX_DEPTH):
        schema = {"type": "array", "items": schema}
    check_schema(schema)
    with pytest.raises(SchemaError, match="nested more than"):
        check_schema({"type": "array", "items": schema})
    # References that double at each step are looked at once each.
    doubling = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(14)} | {"a14": {"type": "null"}}
    check_schema({"$ref": "#/$defs/a0", "$defs": doubling})


@pytest.mark.parametrize("pattern", ["a\\nb", "\\x22", "[\\t]", "\\\\", '["]', "\\u000a", "a\tb", "\\cA"])
def test_patterns_that_would_break_json(pattern: str) -> None:
    with pytest.raises(SchemaError, match="characters that JSON escapes"):
        check_pattern(pattern, "#/pattern")


@pytest.mark.parametrize(
    "pattern", ['^[^"\\\\]$', "\\d\\w\\s", "[a-z]", "\\.", "\\u00e9", "[^\\n]", "]", "[]a]", "a/b"]
)
def test_patterns_that_are_safe(pattern: str) -> None:
    check_pattern(pattern, "#/pattern")


TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f>"],
        "tags": [
            {
                "begin": "<f>",
                "content": {"type": "json_schema", "json_schema": one(type="string", maxLength=3)},
                "end": "</f>",
            }
        ],
    },
}


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_object", "", ['{"a": {"b": [1, null]}}', "{}"], ["[]", "1", '{"a"}']),
        ("regex", "[0-9]{3}|x", ["123", "x"], ["12", "1234", "xx"]),
        ("regex", "^a+$", ["a", "aa"], ["", "b"]),
        ("grammar", 'root ::= "a" root | "b"', ["b", "aab"], ["a", "bb"]),
        (
            "structural_tag",
            json.dumps(TAG),
            ['x <f>{"a": "bc"}</f> y', "x"],
            ['<f>{"a": "b\t"}</f>', '<f>{"a": "bcde"}</f>'],
        ),
        ("choice", json.dumps(['say "a"\\', "é\n\x01", "<|end|>"]), ['say "a"\\', "é\n\x01", "<|end|>"], ["say", "x"]),
    ],
)
def test_other_forms(compiler: Compiler, folder: Path, kind: str, text: str, good: list[str], bad: list[str]) -> None:
    matching = Matching(compiler, folder, kind, text)
    assert all(map(matching.takes, good))
    assert not any(map(matching.takes, bad))


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "", "empty"),
        ("regex", "(", "parenthesis"),
        ("regex", "(?=a)b", "Lookahead"),
        ("regex", "a^b", "not be enforced whole"),
        ("regex", "(" * 5000 + "a" + ")" * 5000, "Nest layer"),
        ("grammar", "hello", "root"),
        ("grammar", "root ::= other", '"other" is not defined'),
        ("structural_tag", "{}", "format"),
        ("structural_tag", "{", "is no JSON"),
        (
            "structural_tag",
            json.dumps({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"not": {}}}}),
            "'not' is not enforced",
        ),
    ],
)
def test_other_forms_that_are_none(compiler: Compiler, kind: str, text: str, reason: str) -> None:
    with pytest.raises(GrammarError) as raised:
        compiler.compile(Job(kind, text))
    assert reason in str(raised.value)
    assert ".cc:" not in str(raised.value)


@pytest.mark.parametrize(
    ("limit", "reason"), [("PROBE_LIMIT_S", "masks take more"), ("UNPACK_LIMIT_S", "unpacking it")]
)
def test_what_would_hold_up_the_worker_is_refused(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, limit: str, reason: str
) -> None:
    job = Job("grammar", 'root ::= root root | "a" | [a-z]* | "é"')
    compiler.compile(job)
    monkeypatch.setattr(grammar_compiler, limit, 0.0)
    with pytest.raises(GrammarError, match=reason):
        compiler.compile(job)


def test_special_tokens_are_no_text(compiler: Compiler, folder: Path) -> None:
    found = read_token_bytes(folder)
    assert found[EOS_ID : EOS_ID + 3] == [b""] * 3
    assert found[:256] == [bytes([i]) for i in range(256)]
