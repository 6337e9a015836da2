"""How long a step takes at the worker, as a linear model of what the step does."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec


class BadCost(ValueError):
    """A cost model cannot be read, or a number in it is out of range."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a plan makes a worker do."""

    num_prefill_tokens: int
    """Of rows that compute more than one token."""
    num_decode_rows: int
    """Rows that compute one token."""
    num_context_tokens: int
    """Tokens whose keys and values are read: of each row, all up to its last computed one."""
    num_rows: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return self.num_prefill_tokens + self.num_decode_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """time = base + prefill_token * prefill tokens + decode_row * decode rows + context_token * context tokens.

    The defaults are those of an 8B model (Llama-3.1-8B's shape) in bfloat16 on one NVIDIA H200; docs/scheduling.md says
    how they were found. They are good to about a tenth there and to nothing elsewhere: fit your own.

    Raises:
        BadCost: a number is negative or not finite, or the base is 0.
    """

    base_ms: float = 4.9
    """Reading the weights once, and launching."""
    prefill_token_us: float = 22.5
    decode_row_us: float = 12.0
    context_token_ns: float = 31.0

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            if not 0 <= getattr(self, name) < float("inf"):
                raise BadCost(f"{name} is {getattr(self, name)}: it must be at least 0 and finite")
        if self.base_ms == 0:
            raise BadCost("base_ms is 0: a step that takes no time makes a clock that stands still")

    def seconds(self, load: StepLoad) -> float:
        """Return how long a step takes."""
        return (
            self.base_ms * 1e-3
            + self.prefill_token_us * 1e-6 * load.num_prefill_tokens
            + self.decode_row_us * 1e-6 * load.num_decode_rows
            + self.context_token_ns * 1e-9 * load.num_context_tokens
        )

    def with_changes(self, changes: dict[str, Any]) -> "StepCost":
        """Return this model with some numbers replaced.

        Raises:
            BadCost: there is no such number, or it is out of range.
        """
        names = [field.name for field in fields(self)]
        for name, value in changes.items():
            if name not in names:
                raise BadCost(f"{name!r} is no part of a step's cost: there are {', '.join(names)}")
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise BadCost(f"{name} is {value!r}: it must be a number")
        return replace(self, **changes)


def read_cost(path: Path) -> StepCost:
    """Read a JSON object with some or all of the numbers of StepCost; the others keep their defaults.

    Raises:
        BadCost: the file cannot be read, or is no such object.
    """
    try:
        found = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise BadCost(f"{path}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise BadCost(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise BadCost(f"{path}: expected a JSON object")
    try:
        return StepCost().with_changes(found)
    except BadCost as error:
        raise BadCost(f"{path}: {error}") from error
