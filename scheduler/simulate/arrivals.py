"""Requests to simulate: drawn from distributions, or read from a trace."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

PROCESSES = ("poisson", "gamma", "uniform")
"""How the gaps between arrivals may be distributed."""

_CHUNK = 16_384
"""Requests that are drawn at once. It is part of what a seed means."""


class BadTraffic(ValueError):
    """A trace or a distribution cannot be used; the message names the line or the option."""


class Arrival(NamedTuple):
    """One request and when it comes."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    """That each choice will have; nobody but the simulated worker knows it in advance."""
    max_tokens: int
    """That the caller allows: where it exceeds num_output_tokens, each choice ends with a stop id."""
    caller: str = ""
    priority: int = 0
    prefix_group: str = ""
    """Requests of one group begin with the same tokens."""
    num_prefix_tokens: int = 0
    """How many; of no meaning without a group."""
    num_choices: int = 1
    prompt_ids: tuple[int, ...] = ()
    """The very ids, where a trace gives them."""


# Distributions


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens: fixed, uniform or log-normal, rounded and clipped."""

    kind: str
    first: float
    """The number, the least one, or the mean before clipping."""
    second: float = 0.0
    """The greatest one, or sigma of the logarithm."""
    least: int = 1
    greatest: int = 2**20

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Read `N`, `uniform:LO,HI` or `lognormal:MEAN,SIGMA[,LO,HI]`.

        Raises:
            BadTraffic: it is none of these.
        """
        kind, _, rest = text.rpartition(":")
        try:
            numbers = [float(part) for part in rest.split(",")]
        except ValueError:
            numbers = []
        usable = all(math.isfinite(number) and number >= 0 for number in numbers)
        if usable and not kind and len(numbers) == 1 and numbers[0] >= 1:
            return cls("fixed", numbers[0])
        if usable and kind == "uniform" and len(numbers) == 2 and 1 <= numbers[0] <= numbers[1]:
            return cls("uniform", numbers[0], numbers[1])
        if usable and kind == "lognormal" and len(numbers) in (2, 4) and numbers[0] > 0:
            least, greatest = (int(numbers[2]), int(numbers[3])) if len(numbers) == 4 else (1, 2**20)
            if 1 <= least <= greatest:
                return cls("lognormal", numbers[0], numbers[1], least, greatest)
        raise BadTraffic(f"lengths {text!r}: expected N, uniform:LO,HI or lognormal:MEAN,SIGMA[,LO,HI]")

    def draw(self, rng: np.random.Generator, count: int) -> Integers:
        """Draw numbers of tokens."""
        if self.kind == "fixed":
            return np.full(count, int(self.first), np.int64)
        if self.kind == "uniform":
            return rng.integers(int(self.first), int(self.second) + 1, count)
        mu = math.log(self.first) - self.second**2 / 2
        drawn = np.rint(np.exp(mu + self.second * rng.standard_normal(count)))
        return np.clip(drawn, self.least, self.greatest).astype(np.int64)


def parse_shares(text: str, prefix: str) -> dict[str, float]:
    """Read `N` (so many equal ones, named by the prefix and a number) or `NAME=SHARE,...`.

    Raises:
        BadTraffic: it is neither, or the shares do not make more than 0.
    """
    if text.isdecimal() and int(text) > 0:
        return {f"{prefix}{number}": 1.0 for number in range(int(text))}
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, _, share = part.partition("=")
        try:
            shares[name] = float(share)
        except ValueError:
            raise BadTraffic(f"{text!r}: expected a number of them, or NAME=SHARE,NAME=SHARE,...") from None
    if not all(0 <= share < math.inf for share in shares.values()) or sum(shares.values()) <= 0:
        raise BadTraffic(f"{text!r}: shares must be finite, at least 0, and more than 0 together")
    return shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """What random traffic looks like.

    Raises:
        BadTraffic: a number is out of its range.
    """

    num_requests: int
    rate: float
    """Requests a second in the mean; infinite: all come at once."""
    process: str = "poisson"
    """poisson, gamma or uniform: how the gaps between arrivals are distributed."""
    burstiness: float = 2.0
    """Coefficient of variation of the gaps, for gamma: 1 is poisson, more comes in bursts."""
    prompt: Lengths
    output: Lengths
    callers: dict[str, float] = field(default_factory=lambda: {"": 1.0})
    priorities: dict[int, float] = field(default_factory=lambda: {0: 1.0})
    prefix_share: float = 0.0
    """Share of the requests that begin with the tokens of a group; these come before those that `prompt` counts."""
    num_prefix_groups: int = 1
    num_prefix_tokens: int = 512
    max_tokens: int = 0
    """That every caller allows; 0: exactly what will be put out."""
    seed: int = 0

    def __post_init__(self) -> None:
        rules = (
            ("requests", self.num_requests, self.num_requests >= 1, "at least 1"),
            ("rate", self.rate, self.rate > 0, "above 0"),
            ("arrivals", self.process, self.process in PROCESSES, f"one of {', '.join(PROCESSES)}"),
            ("burstiness", self.burstiness, 0 < self.burstiness < math.inf, "above 0 and finite"),
            ("prefix-share", self.prefix_share, 0 <= self.prefix_share <= 1, "from 0 to 1"),
            ("prefix-groups", self.num_prefix_groups, self.num_prefix_groups >= 1, "at least 1"),
            ("prefix-tokens", self.num_prefix_tokens, self.num_prefix_tokens >= 0, "at least 0"),
            ("max-tokens", self.max_tokens, self.max_tokens >= 0, "at least 0"),
            ("seed", self.seed, self.seed >= 0, "at least 0"),
        )
        for name, value, is_kept, limit in rules:
            if not is_kept:
                raise BadTraffic(f"{name} is {value}: it must be {limit}")

    def arrivals(self) -> Iterator[Arrival]:
        """Draw the requests, the same ones each time, in the order in which they come."""
        rng = np.random.default_rng(self.seed)
        callers, priorities = list(self.callers), list(self.priorities)
        caller_shares, priority_shares = _normalised(self.callers.values()), _normalised(self.priorities.values())
        now, left = 0.0, self.num_requests
        while left > 0:
            count = min(left, _CHUNK)
            times = now + np.cumsum(self._gaps(rng, _CHUNK))
            now, left = float(times[-1]), left - count
            prompts, outputs = self.prompt.draw(rng, _CHUNK), self.output.draw(rng, _CHUNK)
            shared = rng.random(_CHUNK) < self.prefix_share
            groups = np.where(shared, rng.integers(0, self.num_prefix_groups, _CHUNK), -1)
            prompts = prompts + shared * self.num_prefix_tokens
            drawn_callers = rng.choice(len(callers), _CHUNK, p=caller_shares)
            drawn_priorities = rng.choice(len(priorities), _CHUNK, p=priority_shares)
            columns = (times, prompts, outputs, groups, drawn_callers, drawn_priorities)
            for at, prompt, output, group, caller, priority in zip(*(column[:count].tolist() for column in columns)):
                yield Arrival(
                    at,
                    prompt,
                    output,
                    max(self.max_tokens, output),
                    callers[caller],
                    priorities[priority],
                    f"group-{group}" if group >= 0 else "",
                    self.num_prefix_tokens if group >= 0 else 0,
                )

    def _gaps(self, rng: np.random.Generator, count: int) -> Floats:
        if math.isinf(self.rate):
            return np.zeros(count)
        if self.process == "uniform":
            return np.full(count, 1 / self.rate)
        if self.process == "gamma":
            shape = self.burstiness**-2
            return rng.gamma(shape, 1 / (self.rate * shape), count)
        return rng.exponential(1 / self.rate, count)


def _normalised(shares: Iterable[float]) -> Floats:
    array: Floats = np.array(list(shares), np.float64)
    array /= array.sum()
    return array


# Traces

_Count = Annotated[int, Meta(ge=1, lt=2**31)]
_Id = Annotated[int, Meta(ge=0, lt=2**31)]


class _Line(Struct, forbid_unknown_fields=True):
    arrival_s: Annotated[float, Meta(ge=0)]
    output_tokens: _Count
    prompt_tokens: _Count | None = None
    prompt_ids: tuple[_Id, ...] = ()
    max_tokens: _Count | None = None
    caller: str = ""
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    prefix_group: str = ""
    prefix_tokens: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    num_choices: Annotated[int, Meta(ge=1, le=1024)] = 1


def read_trace(path: Path) -> Iterator[Arrival]:
    """Read requests from a file of JSON lines, in the order of `arrival_s`; docs/scheduling.md lists the fields.

    Raises:
        BadTraffic: the file or a line of it cannot be read, a request comes before the one in the line above, or there
            is no request.
    """
    decoder = msgspec.json.Decoder(_Line)
    latest, is_empty = 0.0, True
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                arrival = _from_line(decoder, text, f"{path}:{number}")
                if arrival.at_s < latest:
                    raise BadTraffic(f"{path}:{number}: arrival_s {arrival.at_s} is before {latest}: sort the lines")
                latest, is_empty = arrival.at_s, False
                yield arrival
    except OSError as error:
        raise BadTraffic(f"{path}: {error.strerror or error}") from error
    if is_empty:
        raise BadTraffic(f"{path}: there is no request in it")


def _from_line(decoder: "msgspec.json.Decoder[_Line]", text: bytes, place: str) -> Arrival:
    try:
        line = decoder.decode(text)
    except msgspec.DecodeError as error:
        raise BadTraffic(f"{place}: {error}") from error
    num_prompt = len(line.prompt_ids) or line.prompt_tokens
    if num_prompt is None or line.prompt_tokens not in (None, num_prompt):
        raise BadTraffic(f"{place}: give prompt_tokens or prompt_ids, and the same number if both")
    if line.prefix_tokens > num_prompt:
        raise BadTraffic(f"{place}: prefix_tokens {line.prefix_tokens} exceed the prompt's {num_prompt}")
    max_tokens = line.max_tokens or line.output_tokens
    if max_tokens < line.output_tokens:
        raise BadTraffic(f"{place}: output_tokens {line.output_tokens} exceed max_tokens {max_tokens}")
    return Arrival(
        line.arrival_s,
        num_prompt,
        line.output_tokens,
        max_tokens,
        line.caller,
        line.priority,
        line.prefix_group,
        line.prefix_tokens,
        line.num_choices,
        line.prompt_ids,
    )
