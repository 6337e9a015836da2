"""Values that the configs of several formats share."""

import json
from typing import Any

from octavo.worker.models.fields import Fields

MAX_NAMES = 65536
"""Entries of a list of layers: a layer of a large mixture has hundreds of its own."""


def choose_bits(fields: Fields, names: tuple[str, ...], supported: tuple[int, ...]) -> int:
    """Read the width of codes under the first of several names that is there.

    Raises:
        ModelConfigError: it is not supported.
    """
    name = next((name for name in names if fields.has(name)), names[0])
    bits = fields.count(name)
    if bits not in supported:
        raise fields.refusal(name, bits, f"not supported; supported are {', '.join(map(str, supported))}")
    return bits


def read_group_size(fields: Fields, name: str) -> int | None:
    """Read a group size; None for -1, one group of all inputs.

    Raises:
        ModelConfigError: it is neither -1 nor at least 1.
    """
    return None if fields.raw(name) == -1 else fields.count(name)


def read_names(fields: Fields, name: str) -> tuple[str, ...]:
    """Read a list of names that may be absent.

    Raises:
        ModelConfigError: it is something else, or too long.
    """
    value = fields.raw(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value) or len(value) > MAX_NAMES:
        raise fields.refusal(name, value, f"expected a list of at most {MAX_NAMES} names")
    return tuple(value)


def refuse_unless(fields: Fields, name: str, supported: tuple[Any, ...]) -> None:
    """Refuse a value that is none of those that are supported.

    Raises:
        ModelConfigError: it is not.
    """
    value = fields.raw(name)
    if not any(value is choice or value == choice for choice in supported):
        shown = ", ".join("none" if choice is None else json.dumps(choice) for choice in supported)
        raise fields.refusal(name, value, f"not supported; supported: {shown}")
