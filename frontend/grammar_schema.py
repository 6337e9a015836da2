"""Which JSON schemas are enforced whole: what would be dropped or weakened on the way to a grammar is refused by name.

JSON Schema lets a validator pass over what it does not know. Here a schema is a promise about the text, so every keyword
must be one that the grammar holds to, or one that constrains nothing.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 32
"""Of a schema, from its root; references count as one step."""

MAX_SCHEMAS = 4096
"""Subschemas that are looked at, references followed."""

_ANNOTATIONS = frozenset(
    {
        "$schema",
        "$id",
        "$comment",
        "$anchor",
        "$dynamicAnchor",
        "$defs",
        "definitions",
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
    }
)
_OF_TYPE: Mapping[str, tuple[str, ...]] = {
    "minimum": ("integer", "number"),
    "maximum": ("integer", "number"),
    "exclusiveMinimum": ("integer", "number"),
    "exclusiveMaximum": ("integer", "number"),
    "multipleOf": ("integer",),
    "minLength": ("string",),
    "maxLength": ("string",),
    "pattern": ("string",),
    "format": ("string",),
    "items": ("array",),
    "prefixItems": ("array",),
    "minItems": ("array",),
    "maxItems": ("array",),
    "unevaluatedItems": ("array",),
    "properties": ("object",),
    "required": ("object",),
    "additionalProperties": ("object",),
    "unevaluatedProperties": ("object",),
    "patternProperties": ("object",),
    "minProperties": ("object",),
    "maxProperties": ("object",),
}
"""Keywords that are enforced, with the types that they need beside them."""

_IMPLIED: Mapping[str, str] = {"properties": "object", "items": "array", "prefixItems": "array"}
"""Keywords that say the type where none is named: then only that type is left."""

_COMBINERS = ("$ref", "anyOf", "oneOf", "allOf")
_VALUES = ("enum", "const")
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_FORMATS = frozenset(
    {
        "date",
        "time",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uri",
        "uri-reference",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
        "uuid",
    }
)
_EXCLUSIVE = (
    ("pattern", "minLength"),
    ("pattern", "maxLength"),
    ("pattern", "format"),
    ("format", "minLength"),
    ("format", "maxLength"),
    ("patternProperties", "properties"),
)
"""Pairs of which only one would be enforced."""


class SchemaError(Exception):
    """A schema cannot be held to; the message says where and why."""


def parse_json(text: str, what: str) -> Any:
    """Return what a JSON text says, strictly: no NaN, no infinite numbers, no key twice.

    Raises:
        SchemaError: it is none.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique)
    except RecursionError as error:
        raise SchemaError(f"{what} is nested too deeply") from error
    except ValueError as error:
        raise SchemaError(f"{what} is no JSON: {error}") from error


def check_schema(root: Any) -> None:
    """See that all that a schema says will be enforced.

    Raises:
        SchemaError: names the place and the keyword.
    """
    _Checker(root).check(root, "#", 0)


class _Checker:
    """One walk over a schema; each subschema is looked at once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._seen: set[int] = set()

    def check(self, schema: Any, place: str, depth: int) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise SchemaError(f"{place}: a schema must be an object or a boolean, not {_shown(schema)}")
        if depth > MAX_DEPTH:
            raise SchemaError(f"{place}: nested more than {MAX_DEPTH} deep")
        if id(schema) in self._seen:
            return
        self._seen.add(id(schema))
        if len(self._seen) > MAX_SCHEMAS:
            raise SchemaError(f"more than {MAX_SCHEMAS} subschemas")
        self._check_keywords(schema, place, depth)
        for name, inner in _children(schema, place):
            self.check(inner, f"{place}/{name}", depth + 1)

    def _check_keywords(self, schema: dict[str, Any], place: str, depth: int) -> None:
        asserting = [key for key in schema if key not in _ANNOTATIONS and not key.startswith("x-")]
        for key in asserting:
            if key not in _OF_TYPE and key not in _COMBINERS and key not in _VALUES and key != "type":
                raise SchemaError(f"{place}: {key!r} is not enforced, and so not taken")
        if "$id" in schema and place != "#":
            raise SchemaError(f"{place}: '$id' below the root would change what references mean: it is not taken")
        combining = [key for key in asserting if key in _COMBINERS]
        if combining:
            self._check_combination(schema, combining[0], asserting, place, depth)
        elif any(key in schema for key in _VALUES):
            _check_values(schema, asserting, place)
        else:
            _check_types(schema, asserting, place)
            _check_pairs(schema, place)
            if "pattern" in schema:
                check_pattern(schema["pattern"], f"{place}/pattern")
            for pattern in _object_of(schema, "patternProperties", place):
                check_pattern(pattern, f"{place}/patternProperties")
            _check_object(schema, place)

    def _check_combination(
        self, schema: dict[str, Any], key: str, asserting: list[str], place: str, depth: int
    ) -> None:
        if len(asserting) > 1:
            other = next(one for one in asserting if one != key)
            raise SchemaError(f"{place}: {other!r} beside {key!r} is not enforced: move it into the schemas of {key!r}")
        if key == "$ref":
            self.check(self._resolve(schema["$ref"], place), str(schema["$ref"]), depth + 1)
        elif not isinstance(schema[key], list) or not schema[key]:
            raise SchemaError(f"{place}/{key}: it must be a list of schemas, at least one")
        elif key == "allOf" and len(schema[key]) > 1:
            raise SchemaError(f"{place}: 'allOf' with more than one schema is not enforced: merge them")

    def _resolve(self, reference: Any, place: str) -> Any:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise SchemaError(
                f"{place}: $ref {_shown(reference)}: only references into the schema itself (#/...) are taken"
            )
        found = self._root
        for step in reference.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                raise SchemaError(f"{place}: $ref {_shown(reference)} names nothing in the schema")
            found = found[name]
        return found


def _children(schema: dict[str, Any], place: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key in ("properties", "patternProperties"):
        found += [(f"{key}/{name}", inner) for name, inner in _object_of(schema, key, place).items()]
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        inner = schema.get(key, [])
        if not isinstance(inner, list):
            raise SchemaError(f"{place}/{key}: it must be a list of schemas")
        found += [(f"{key}/{index}", one) for index, one in enumerate(inner)]
    found += [(key, schema[key]) for key in ("items", "additionalProperties") if key in schema]
    return found


def _check_types(schema: dict[str, Any], asserting: list[str], place: str) -> None:
    if "type" not in schema and (implied := {_IMPLIED[key] for key in asserting if key in _IMPLIED}):
        schema["type"] = implied.pop() if len(implied) == 1 else sorted(implied)
    types = schema.get("type", [])
    types = types if isinstance(types, list) else [types]
    if "type" in schema and not types:
        raise SchemaError(f"{place}/type: the list is empty")
    for one in types:
        if one not in _TYPES:
            raise SchemaError(f"{place}/type: {_shown(one)} is no type: there are {', '.join(_TYPES)}")
    for key in asserting:
        if key != "type" and not any(one in types for one in _OF_TYPE[key]):
            needed = " or ".join(repr(one) for one in _OF_TYPE[key])
            raise SchemaError(f"{place}: {key!r} is only enforced beside 'type': {needed}")
    if "multipleOf" in schema and "number" in types:
        raise SchemaError(f"{place}: 'multipleOf' is only enforced for integers")
    if "format" in schema and schema["format"] not in _FORMATS:
        raise SchemaError(
            f"{place}: format {_shown(schema['format'])} is not enforced: there are {', '.join(sorted(_FORMATS))}"
        )
    for key in ("unevaluatedItems", "unevaluatedProperties"):
        if key in schema and not isinstance(schema[key], bool):
            raise SchemaError(f"{place}: {key!r} is only enforced as true or false")


def _check_pairs(schema: dict[str, Any], place: str) -> None:
    for one, other in _EXCLUSIVE:
        if one in schema and other in schema:
            raise SchemaError(f"{place}: {other!r} beside {one!r} is not enforced")


def _check_object(schema: dict[str, Any], place: str) -> None:
    names = schema.get("required", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SchemaError(f"{place}/required: it must be a list of names")
    properties = _object_of(schema, "properties", place)
    for name in names:
        if name not in properties:
            raise SchemaError(
                f"{place}/required: {_shown(name)} is not among the properties, so it would not be enforced"
            )
    patterns = _object_of(schema, "patternProperties", place)
    is_open = any(schema.get(key, False) is not False for key in ("additionalProperties", "unevaluatedProperties"))
    if len(patterns) > 1 or (patterns and is_open):
        raise SchemaError(f"{place}: 'patternProperties' is only enforced with one pattern, and nothing beside it")
    if schema.get("minProperties") and (patterns or is_open):
        raise SchemaError(f"{place}: 'minProperties' is only enforced where all properties are named: keys may repeat")


def _check_values(schema: dict[str, Any], asserting: list[str], place: str) -> None:
    key = next(key for key in asserting if key in _VALUES)
    for other in asserting:
        if other not in (key, "type"):
            raise SchemaError(f"{place}: {other!r} beside {key!r} is not enforced")
    values = [schema[key]] if key == "const" else schema[key]
    if not isinstance(values, list) or not values:
        raise SchemaError(f"{place}/{key}: it must be a list of values, at least one")
    if "type" not in schema:
        return
    _check_types({"type": schema["type"]}, ["type"], place)
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    for value in values:
        if not any(_is_of(value, one) for one in types):
            raise SchemaError(f"{place}/{key}: {_shown(value)} is not of the type {_shown(schema['type'])}")


def _is_of(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    kinds: Mapping[str, tuple[type, ...]] = {
        "null": (type(None),),
        "integer": (int,),
        "number": (int, float),
        "string": (str,),
        "array": (list,),
        "object": (dict,),
    }
    if isinstance(value, float) and name == "integer":
        return value.is_integer()
    return isinstance(value, kinds.get(name, ()))


_CLASS_OR_REST = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\[xu][0-9A-Fa-f]*|\\.|.", re.DOTALL)
_BREAKING_ESCAPES = ("\\\\", '\\"', "\\n", "\\r", "\\t", "\\f", "\\v", "\\b", "\\0", "\\c")


def check_pattern(pattern: Any, place: str) -> None:
    r"""See that a pattern matches no text that JSON would have to escape: the grammar writes it as it is.

    Raises:
        SchemaError: it is no text, or names quotes, backslashes or control characters (outside of [^...]).
    """
    if not isinstance(pattern, str):
        raise SchemaError(f"{place}: it must be a text, not {_shown(pattern)}")
    for part in _CLASS_OR_REST.findall(pattern):
        if part.startswith("[^"):
            continue
        inner = _CLASS_OR_REST.findall(part[1:-1]) if part.startswith("[") and len(part) > 1 else [part]
        for one in inner:
            if one == '"' or one < " " or one.startswith(_BREAKING_ESCAPES) or _breaks(one):
                raise SchemaError(f"{place}: {_shown(one)}: characters that JSON escapes are not taken in patterns")


def _breaks(escape: str) -> bool:
    if not re.fullmatch(r"\\[xu][0-9A-Fa-f]+", escape):
        return False
    code = int(escape[2:], 16)
    return code < 0x20 or code in (0x22, 0x5C)


def _object_of(schema: dict[str, Any], key: str, place: str) -> dict[str, Any]:
    found = schema.get(key, {})
    if not isinstance(found, dict):
        raise SchemaError(f"{place}/{key}: it must be an object")
    return found


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large a number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} comes twice")
    return found
