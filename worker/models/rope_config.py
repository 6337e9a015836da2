"""The rotary embedding as config.json describes it."""

import math
from dataclasses import dataclass

from octavo.worker.errors import ModelConfigError
from octavo.worker.models.fields import Fields

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_OLDER_NAMES = {"su": "longrope"}
_LEAST, _MOST = 1e-9, 1e30
"""Bounds of every number: what is beyond is a mistake, and makes no number in fp32."""

_MOST_POSITIONS = 2**31 - 1


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding; what `worker.models.rope` makes of the numbers is said there."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    original_max_positions: int = 0  # of dynamic, llama3, yarn and longrope: what the model was trained for first
    rotated_share: float = 1.0  # of a head's dimensions, the first ones
    attention_factor: float = 1.0  # cosines and sines are multiplied by it: yarn and longrope
    beta_fast: float = 32.0  # yarn: dimensions that turn so often in the original length stay as they are
    beta_slow: float = 1.0  # and those that turn so seldom are stretched by the whole factor
    truncates: bool = True  # whether the bounds between them are whole dimensions
    short_factors: tuple[float, ...] = ()  # longrope: of each pair of dimensions
    long_factors: tuple[float, ...] = ()

    def num_rotated(self, head_size: int) -> int:
        """Return how many dimensions of a head are rotated, as they come out of the share; an odd one takes a pair."""
        return int(head_size * self.rotated_share)

    def longest(self, max_positions: int) -> int:
        """Return the positions that a model is good for.

        linear, dynamic and yarn stretch those that config.json gives (yarn: the original ones) by their factor; for the
        others config.json gives the stretched ones.

        Raises:
            ModelConfigError: they are more than 2**31 - 1.
        """
        if self.kind not in ("linear", "dynamic", "yarn"):
            return max_positions
        stretched = (self.original_max_positions if self.kind == "yarn" else max_positions) * self.factor
        if stretched > _MOST_POSITIONS:
            raise ModelConfigError(f"factor = {self.factor:g} stretches the positions beyond {_MOST_POSITIONS}")
        return max(max_positions, int(stretched))


def parse_rope(fields: Fields, given: Fields, theta: float = 10000.0, *, older_theta: str = "rope_theta") -> RopeConfig:
    """Read one rotary embedding.

    Args:
        fields: of config.json, where older files have rope_theta, partial_rotary_factor and
            original_max_position_embeddings.
        given: rope_parameters, or the older rope_scaling.
        theta: where neither has one.
        older_theta: what older files call rope_theta.

    Raises:
        ModelConfigError: its type is not supported, or a number is missing or malformed.
    """
    kind = _kind(given)
    if given.has("rope_theta"):
        theta = given.number("rope_theta", None, above=0.0)
    else:
        theta = fields.number(older_theta, theta, above=0.0)
    share = _share(fields, given)
    if kind == "default":
        return RopeConfig(theta, rotated_share=share)
    if kind == "yarn":
        return _yarn(fields, given, theta, share)
    if kind == "longrope":
        return _longrope(fields, given, theta, share)
    factor = given.number("factor", None, above=0.0)
    if kind == "linear":
        return RopeConfig(theta, kind, factor, rotated_share=share)
    if kind == "dynamic":
        original = fields.count("max_position_embeddings")
        return RopeConfig(theta, kind, _stretch(given), original_max_positions=original, rotated_share=share)
    low = given.number("low_freq_factor", None, above=0.0)
    high = given.number("high_freq_factor", None, above=0.0)
    if high <= low:
        raise ModelConfigError(f"high_freq_factor = {high} must be above low_freq_factor = {low}")
    return RopeConfig(theta, kind, factor, low, high, _original(fields, given), share)


def given_rope(fields: Fields) -> Fields:
    """Return what config.json says of its one rotary embedding: the older rope_scaling over rope_parameters.

    So it is in transformers 5, whose own files have rope_parameters alone: where both stand, somebody added the former by
    hand. An empty object says nothing.
    """
    for name in ("rope_scaling", "rope_parameters"):
        if fields.raw(name) != {} and (given := fields.part(name)) is not None:
            return given
    return Fields({})


def check_rope(rope: RopeConfig, head_size: int) -> None:
    """Check that a rotary embedding fits the heads.

    Raises:
        ModelConfigError: it does not.
    """
    numbers = {
        "rope_theta": (rope.theta,),
        "factor": (rope.factor,),
        "attention_factor": (rope.attention_factor,),
        "low_freq_factor": (rope.low_freq_factor,),
        "high_freq_factor": (rope.high_freq_factor,),
        "beta_fast": (rope.beta_fast,),
        "beta_slow": (rope.beta_slow,),
        "short_factor": rope.short_factors,
        "long_factor": rope.long_factors,
    }
    for name, values in numbers.items():
        for value in values:
            if not _LEAST <= value <= _MOST or (name == "rope_theta" and value <= 1.0):
                lowest = "more than 1" if name == "rope_theta" else f"{_LEAST:g}"
                raise ModelConfigError(f"{name} = {value:g}: expected {lowest} to {_MOST:g}")
    rotated = rope.num_rotated(head_size)
    least = 4 if rope.kind == "dynamic" else 1  # the exponent of dynamic is r / (r - 2)
    if rotated < least:
        raise ModelConfigError(
            f"{rotated} of {head_size} dimensions of a head are rotated (partial_rotary_factor = "
            f"{rope.rotated_share:g}): expected at least {least} for rope type {rope.kind}"
        )
    pairs = (rotated + 1) // 2
    for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
        if rope.kind == "longrope" and len(factors) != pairs:
            raise ModelConfigError(
                f"{name} has {len(factors)} numbers: expected {pairs}, one for each rotated pair of a head"
            )


def _kind(given: Fields) -> str:
    kind = given.raw("rope_type") if given.has("rope_type") else given.raw("type")
    if kind is None and given.has("factor"):
        raise ModelConfigError(f"rope type is missing beside factor = {given.raw('factor')!r}")
    kind = "default" if kind is None else kind
    if isinstance(kind, str):
        kind = _OLDER_NAMES.get(kind, kind)
    if kind not in SUPPORTED_ROPE_TYPES:
        raise ModelConfigError(f"rope type {kind!r} is not supported; supported are {', '.join(SUPPORTED_ROPE_TYPES)}")
    if kind == "yarn" and given.has("short_factor"):
        return "longrope"  # what the first Phi-3 files call it
    return str(kind)


def _share(fields: Fields, given: Fields) -> float:
    source = given if given.has("partial_rotary_factor") else fields
    share = source.number("partial_rotary_factor", 1.0, above=0.0)
    if share > 1.0:
        raise source.refusal("partial_rotary_factor", share, "expected at most 1")
    return share


def _original(fields: Fields, given: Fields) -> int:
    """Read the original length: beside the rotary embedding, as Phi-3 has it, or in it."""
    source = fields if fields.has("original_max_position_embeddings") else given
    return source.count("original_max_position_embeddings")


def _stretch(given: Fields, default: float | None = None) -> float:
    factor = given.number("factor", default, above=0.0)
    if factor < 1.0:
        raise given.refusal("factor", factor, "expected at least 1")
    return factor


def _yarn(fields: Fields, given: Fields, theta: float, share: float) -> RopeConfig:
    original = _original(fields, given)
    factor = _stretch(given, fields.count("max_position_embeddings") / original)
    fast, slow = given.number("beta_fast", 32.0, above=0.0), given.number("beta_slow", 1.0, above=0.0)
    if fast < slow:
        raise ModelConfigError(f"beta_fast = {fast} must not be below beta_slow = {slow}")
    if given.has("attention_factor"):
        attention = given.number("attention_factor", None, above=0.0)
    elif given.raw("mscale") and given.raw("mscale_all_dim"):
        scale, all_dim = (given.number(name, None, above=0.0) for name in ("mscale", "mscale_all_dim"))
        attention = _magnitude(factor, scale) / _magnitude(factor, all_dim)
    else:
        attention = _magnitude(factor, 1.0)
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_positions=original,
        rotated_share=share,
        attention_factor=attention,
        beta_fast=fast,
        beta_slow=slow,
        truncates=given.flag("truncate", True),
    )


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(fields: Fields, given: Fields, theta: float, share: float) -> RopeConfig:
    for name in ("short_mscale", "long_mscale"):
        if given.has(name):
            raise given.refusal(name, given.raw(name), "not supported")
    original = _original(fields, given)
    factor = given.number("factor", fields.count("max_position_embeddings") / original, above=0.0)
    if given.has("attention_factor"):
        attention = given.number("attention_factor", None, above=0.0)
    elif factor <= 1.0:
        attention = 1.0
    elif original == 1:
        raise given.refusal("original_max_position_embeddings", original, "expected at least 2 for rope type longrope")
    else:
        attention = math.sqrt(1.0 + math.log(factor) / math.log(original))
    return RopeConfig(
        theta,
        "longrope",
        factor,
        original_max_positions=original,
        rotated_share=share,
        attention_factor=attention,
        short_factors=given.all_numbers("short_factor", above=0.0),
        long_factors=given.all_numbers("long_factor", above=0.0),
    )
