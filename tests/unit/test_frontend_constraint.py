"""What of a constraint is checked before it is compiled, and that it stays with its request."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from octavo.frontend.config import FrontendConfig
from octavo.frontend.constraint import MAX_CHOICES, MAX_CONSTRAINT_BYTES, Constraint, ConstraintKind
from octavo.frontend.errors import InvalidArgument
from octavo.frontend.generation_config import SamplingDefaults
from octavo.frontend.journal import Journal
from octavo.frontend.validation import Bounds, check_params, resolve_call
from octavo.v1 import generation_pb2 as pb
from octavo.wire.handshake import ServiceFacts

CONFIG = FrontendConfig(model_path=Path("model"), served_model_names=("tiny",), address="ipc:///nowhere")
BOUNDS = Bounds(CONFIG, vocab_size=300, max_model_len=64, defaults=SamplingDefaults(), eos_ids=(256,))
LONG = "a" * (MAX_CONSTRAINT_BYTES + 1)


def parse(constraint: dict[str, Any], **fields: Any) -> pb.GenerationInput:
    return json_format.ParseDict({"constraint": constraint, **fields}, pb.GenerationInput())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"jsonSchema": "{}"}, Constraint(ConstraintKind.JSON_SCHEMA, "{}")),
        ({"jsonObject": True}, Constraint(ConstraintKind.JSON_OBJECT)),
        ({"regex": "a+"}, Constraint(ConstraintKind.REGEX, "a+")),
        ({"grammar": "root ::= x"}, Constraint(ConstraintKind.GRAMMAR, "root ::= x")),
        ({"choice": {"values": ["a", "é"]}}, Constraint(ConstraintKind.CHOICE, '["a", "é"]')),
        ({"structuralTag": "{}"}, Constraint(ConstraintKind.STRUCTURAL_TAG, "{}")),
        ({"regex": LONG[1:]}, Constraint(ConstraintKind.REGEX, LONG[1:])),
    ],
    ids=lambda value: str(value)[:40],
)
def test_constraints(fields: dict[str, Any], expected: Constraint) -> None:
    assert check_params(parse(fields), BOUNDS).constraint == expected
    assert check_params(pb.GenerationInput(), BOUNDS).constraint is None


@pytest.mark.parametrize(
    ("fields", "path", "reason"),
    [
        ({}, "input.constraint", "must be set"),
        ({"jsonObject": False}, "input.constraint.json_object", "must be true"),
        ({"jsonSchema": LONG}, "input.constraint.json_schema", "65537 bytes, limit 65536"),
        ({"regex": "é" * 40_000}, "input.constraint.regex", "80000 bytes, limit 65536"),
        ({"grammar": LONG}, "input.constraint.grammar", "limit 65536"),
        ({"structuralTag": LONG}, "input.constraint.structural_tag", "limit 65536"),
        ({"choice": {}}, "input.constraint.choice.values", "at least one"),
        ({"choice": {"values": ["a", ""]}}, "input.constraint.choice.values[1]", "empty"),
        (
            {"choice": {"values": ["a"] * (MAX_CHOICES + 1)}},
            "input.constraint.choice.values",
            "1025 choices, limit 1024",
        ),
        ({"choice": {"values": [LONG]}}, "input.constraint.choice", "limit 65536"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_constraints_that_are_none(fields: dict[str, Any], path: str, reason: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        check_params(parse(fields), BOUNDS)
    assert raised.value.field_path == path
    assert reason in raised.value.message


def test_a_constrained_output_must_be_able_to_end() -> None:
    with pytest.raises(InvalidArgument) as raised:
        check_params(parse({"regex": "a"}, stopping={"ignoreEos": True}), BOUNDS)
    assert raised.value.field_path == "input.stopping.ignore_eos"
    with pytest.raises(InvalidArgument) as raised:
        check_params(parse({"regex": "a"}), replace(BOUNDS, eos_ids=()))
    assert raised.value.field_path == "input.constraint.regex"


@pytest.mark.parametrize(("inner", "path"), [(b"", "input.constraint"), (b"\x2a", "input.constraint.choice")])
def test_unknown_fields_inside_are_refused(inner: bytes, path: str) -> None:
    unknown = b"\x78\x01"  # field 15
    request = parse({"choice": {"values": ["a"]}})
    target = request.constraint.choice if inner else request.constraint
    target.MergeFromString(unknown)
    with pytest.raises(InvalidArgument, match="field number 15") as raised:
        check_params(request, BOUNDS)
    assert raised.value.field_path == path


def test_a_replayed_request_has_its_grammar() -> None:
    call = resolve_call(check_params(parse({"regex": "a"}), BOUNDS), "text", [1, 2, 3], BOUNDS)
    journal, facts = Journal(call, "digest", grammar=b"compiled"), ServiceFacts(300, 64, 16, 8)
    assert journal.to_request(1, None, facts).grammar == b"compiled"
    journal.is_started = True
    journal.outputs[0].append(5)
    replayed = journal.to_request(2, None, facts)
    assert (replayed.grammar, replayed.output_ids) == (b"compiled", (b"\5\0\0\0",))
