"""What form a request's text must have."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from octavo.frontend.errors import InvalidArgument
from octavo.v1 import generation_pb2 as pb

MAX_CONSTRAINT_BYTES = 64 * 1024
"""Of a constraint's text."""

MAX_CHOICES = 1024


class ConstraintKind(StrEnum):
    """How a form is described; the names are those of OutputConstraint."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True)
class Constraint:
    """A form of texts.

    Attributes:
        kind: how it is described.
        text: the description: JSON schema, regular expression, EBNF, structural tag in JSON, a JSON list of choices;
            '' for any JSON object.
        field_path: the field that asks for it, which errors name; '' for that of its kind.
    """

    kind: ConstraintKind
    text: str = ""
    field_path: str = ""

    @property
    def path(self) -> str:
        """The field that errors name."""
        return self.field_path or f"input.constraint.{self.kind}"


def read_constraint(message: pb.OutputConstraint) -> Constraint:
    """Return the constraint of a request; whether it can be compiled is not known yet.

    Raises:
        InvalidArgument: it says nothing, or more than a request may.
    """
    name = message.WhichOneof("kind")
    if name is None:
        kinds = ", ".join(ConstraintKind)
        raise InvalidArgument(f"one of {kinds} must be set", field_path="input.constraint")
    kind = ConstraintKind(name)
    constraint = Constraint(kind, _TEXTS[kind](message))
    if (num_bytes := len(constraint.text.encode())) > MAX_CONSTRAINT_BYTES:
        raise InvalidArgument(f"{num_bytes} bytes, limit {MAX_CONSTRAINT_BYTES}", field_path=constraint.path)
    return constraint


def check_ending(
    constraint: Constraint, stopping: pb.StoppingParams, sampling: pb.SamplingParams, eos_ids: tuple[int, ...]
) -> None:
    """See that a text of that form can end.

    Raises:
        InvalidArgument: end of sequence is ignored or unknown, or the search would end elsewhere.
    """
    if stopping.ignore_eos:
        message = "a constrained output ends with the end of sequence, which must not be ignored"
        raise InvalidArgument(message, field_path="input.stopping.ignore_eos")
    if not eos_ids:
        message = "the model names no end of sequence, with which a constrained output would end"
        raise InvalidArgument(message, field_path=constraint.path)
    if sampling.HasField("beam_search"):
        raise InvalidArgument("a beam search excludes it", field_path=constraint.path)


def _json_object(message: pb.OutputConstraint) -> str:
    if not message.json_object:
        raise InvalidArgument("it must be true, or left out", field_path="input.constraint.json_object")
    return ""


def _choice(message: pb.OutputConstraint) -> str:
    path, values = "input.constraint.choice.values", message.choice.values
    if not values:
        raise InvalidArgument("at least one choice is needed", field_path=path)
    if len(values) > MAX_CHOICES:
        raise InvalidArgument(f"{len(values)} choices, limit {MAX_CHOICES}", field_path=path)
    for index, value in enumerate(values):
        if not value:
            raise InvalidArgument("a choice must not be empty", field_path=f"{path}[{index}]")
    return json.dumps(list(values), ensure_ascii=False)


_TEXTS: Mapping[ConstraintKind, Callable[[pb.OutputConstraint], str]] = {
    ConstraintKind.JSON_SCHEMA: lambda message: message.json_schema,
    ConstraintKind.JSON_OBJECT: _json_object,
    ConstraintKind.REGEX: lambda message: message.regex,
    ConstraintKind.GRAMMAR: lambda message: message.grammar,
    ConstraintKind.CHOICE: _choice,
    ConstraintKind.STRUCTURAL_TAG: lambda message: message.structural_tag,
}
