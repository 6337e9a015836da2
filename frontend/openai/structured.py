"""The form of an output: OpenAI's response_format and vLLM's structured_outputs, as an OutputConstraint."""

from collections.abc import Mapping
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct

from octavo.frontend.openai.errors import bad_field
from octavo.frontend.openai.schema import NOTHING, GenerationBody, ResponseFormat
from octavo.v1 import generation_pb2 as pb

T = TypeVar("T", bound=Struct)

_FORMAT, _OUTPUTS = "response_format", "structured_outputs"

PLACES = (
    "constraint",
    "constraint.json_schema",
    "constraint.json_object",
    "constraint.regex",
    "constraint.grammar",
    "constraint.choice",
    "constraint.choice.values",
    "constraint.structural_tag",
)
"""Places in a GenerationInput that come from these fields; which of them is said by what `constrain` returns."""


class _JsonSchema(Struct, forbid_unknown_fields=True):
    """A schema with a name; strict or not, it is held to."""

    name: str
    schema: Raw = NOTHING
    description: str | None = None
    strict: bool | None = None


class _StructuredOutputs(Struct, forbid_unknown_fields=True):
    """One of these says what the output is."""

    json: Raw = NOTHING
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


def constrain(body: GenerationBody, one: pb.GenerationInput) -> Mapping[str, str]:
    """Set the constraint that a body asks for; return the JSON names of its places.

    Raises:
        HttpError: the form is not known, or there are two.
    """
    has_format = body.response_format is not None and body.response_format.type != "text"
    has_outputs = bytes(body.structured_outputs) not in (b"", b"null")
    if has_format and has_outputs:
        raise bad_field(_OUTPUTS, f"it cannot be had together with {_FORMAT}")
    if body.response_format is not None:
        _by_format(body.response_format, one.constraint if has_format else pb.OutputConstraint())
    if has_outputs:
        _by_outputs(_decode(body.structured_outputs, _StructuredOutputs, _OUTPUTS), one.constraint)
    if has_outputs:
        names = {place: place.replace("constraint", _OUTPUTS, 1).removesuffix(".values") for place in PLACES}
        return names | {"constraint.json_schema": f"{_OUTPUTS}.json"}
    return dict.fromkeys(PLACES, _FORMAT) | {"constraint.json_schema": f"{_FORMAT}.json_schema.schema"}


def _by_format(form: ResponseFormat, constraint: pb.OutputConstraint) -> None:
    has_schema = bytes(form.json_schema) not in (b"", b"null")
    if form.type == "json_schema":
        path = f"{_FORMAT}.json_schema"
        if not has_schema:
            raise bad_field(path, "it is missing")
        described = _decode(form.json_schema, _JsonSchema, path)
        if not bytes(described.schema):
            raise bad_field(f"{path}.schema", "it is missing")
        constraint.json_schema = bytes(described.schema).decode()
        return
    if form.type not in ("text", "json_object"):
        raise bad_field(f"{_FORMAT}.type", "it must be text, json_object or json_schema")
    if has_schema:
        raise bad_field(f"{_FORMAT}.json_schema", "it is only taken with the type json_schema")
    constraint.json_object = True


def _by_outputs(outputs: _StructuredOutputs, constraint: pb.OutputConstraint) -> None:
    schema = bytes(outputs.json)
    given = {name for name in ("regex", "choice", "grammar", "structural_tag") if getattr(outputs, name) is not None}
    given |= {"json"} if schema not in (b"", b"null") else set()
    given |= {"json_object"} if outputs.json_object is not None else set()
    if len(given) != 1:
        names = ", ".join(_StructuredOutputs.__struct_fields__)
        raise bad_field(_OUTPUTS, f"exactly one of {names} must be set, not {len(given)}")
    (name,) = given
    if name == "json":
        # vLLM takes a schema as an object, or as a text that holds one.
        constraint.json_schema = msgspec.json.decode(schema, type=str) if schema.startswith(b'"') else schema.decode()
    elif name == "choice":
        constraint.choice.values.extend(outputs.choice or [])
        constraint.choice.SetInParent()
    else:
        setattr(constraint, name, getattr(outputs, name))


def _decode(raw: Raw, kind: type[T], path: str) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise bad_field(path, str(error)) from error
