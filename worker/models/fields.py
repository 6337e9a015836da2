"""Typed access to the values of config.json."""

import sys
from collections.abc import Sequence
from typing import Any

from octavo.worker.errors import ModelConfigError


class Fields:
    """The values of an object in config.json; null counts as absent.

    Args:
        values: the object.
        path: where it stands, for messages: "" for the file itself, else as `rope_scaling.`.
    """

    def __init__(self, values: dict[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    def has(self, *names: str) -> bool:
        """Say whether one of these values is there."""
        return any(self._values.get(name) is not None for name in names)

    def names(self, name: str) -> bool:
        """Say whether the object has this key, be its value null."""
        return name in self._values

    def with_defaults(self, defaults: dict[str, Any]) -> "Fields":
        """Return the same object with values for those that are absent."""
        return Fields(
            defaults | {k: v for k, v in self._values.items() if v is not None or k not in defaults}, self._path
        )

    def raw(self, name: str) -> Any:
        """Return a value as it stands, None if it is absent."""
        return self._values.get(name)

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return an integer from `least` to 2**31 - 1."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            raise self.refusal(name, value, f"expected an integer from {least} to 2**31 - 1")
        return value

    def number(self, name: str, default: float | None, above: float) -> float:
        """Return a finite number above a bound."""
        return _number(self, name, self._get(name, default), above)

    def numbers(self, name: str, count: int, above: float) -> tuple[float, ...]:
        """Return a list of so many finite numbers above a bound."""
        value = self._get(name, None)
        if not isinstance(value, list) or len(value) != count:
            raise self.refusal(name, value, f"expected a list of {count} numbers")
        return tuple(_number(self, name, entry, above) for entry in value)

    def all_numbers(self, name: str, above: float) -> tuple[float, ...]:
        """Return a list of finite numbers above a bound, however many."""
        value = self._get(name, None)
        if not isinstance(value, list):
            raise self.refusal(name, value, "expected a list of numbers")
        return self.numbers(name, len(value), above)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.refusal(name, value, "expected true or false")
        return value

    def flags(self, name: str, count: int) -> tuple[bool, ...] | None:
        """Return a list of 0 and 1, or false and true, for each of `count` layers, None if it is absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count or not all(e in (0, 1) for e in value):
            raise self.refusal(name, value, f"expected 0 or 1 for each of {count} layers")
        return tuple(bool(e) for e in value)

    def choice(self, name: str, default: str | None, supported: Sequence[str]) -> str:
        """Return one of the names that are supported."""
        value = self._get(name, default)
        if not isinstance(value, str) or value not in supported:
            raise ModelConfigError(
                f"{self._path}{name} = {value!r} is not supported; supported {_are(supported)} {', '.join(supported)}"
            )
        return value

    def part(self, name: str) -> "Fields | None":
        """Return an object within, None if it is absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refusal(name, value, "expected an object")
        return Fields(value, f"{self._path}{name}.")

    def choices(self, name: str, count: int, supported: Sequence[str]) -> tuple[str, ...] | None:
        """Return a list with a supported name for each of `count` layers, None if it is absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(e, str) and e in supported for e in value):
            raise ModelConfigError(
                f"{self._path}{name} = {value!r} is not supported; only {', '.join(supported)} {_are(supported)}"
            )
        if len(value) != count:
            raise self.refusal(name, value, f"expected a name for each of {count} layers")
        return tuple(value)

    def refusal(self, name: str, value: object, why: str) -> ModelConfigError:
        """Return the error that says what is wrong with a value."""
        return ModelConfigError(f"{self._path}{name} = {value!r}: {why}")

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        value = default if value is None else value
        if value is None:
            raise ModelConfigError(f"{self._path}{name} is missing")
        return value


def _number(fields: Fields, name: str, value: object, above: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= sys.float_info.max:
        raise fields.refusal(name, value, f"expected a finite number above {above:g}")
    return float(value)


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
