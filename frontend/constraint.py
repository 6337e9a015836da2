"""What form a request's text must have."""

from dataclasses import dataclass
from enum import StrEnum


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
    """

    kind: ConstraintKind
    text: str = ""
