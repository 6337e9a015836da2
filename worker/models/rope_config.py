"""The rotary embedding as config.json describes it."""

from dataclasses import dataclass

from octavo.worker.errors import ModelConfigError
from octavo.worker.models.fields import Fields

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding; `factor` and the llama3 numbers are those of config.json."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    rotated_share: float = 1.0  # of a head's dimensions, the first ones


def parse_rope(fields: Fields, given: Fields, theta: float = 10000.0) -> RopeConfig:
    """Read one rotary embedding.

    Args:
        fields: of config.json, where older files have rope_theta.
        given: rope_parameters, or the older rope_scaling.
        theta: where neither has one.

    Raises:
        ModelConfigError: its type is not supported, or a number is missing or malformed.
    """
    kind = given.raw("rope_type") or given.raw("type") or "default"
    if kind not in SUPPORTED_ROPE_TYPES:
        raise ModelConfigError(f"rope type {kind!r} is not supported; supported are {', '.join(SUPPORTED_ROPE_TYPES)}")
    theta = (given if given.has("rope_theta") else fields).number("rope_theta", theta, above=0.0)
    if kind == "default":
        return RopeConfig(theta)
    factor = given.number("factor", None, above=0.0)
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    low = given.number("low_freq_factor", None, above=0.0)
    high = given.number("high_freq_factor", None, above=0.0)
    if high <= low:
        raise ModelConfigError(f"high_freq_factor = {high} must be above low_freq_factor = {low}")
    return RopeConfig(theta, kind, factor, low, high, given.count("original_max_position_embeddings"))


def given_rope(fields: Fields) -> Fields:
    """Return what config.json says of its one rotary embedding: rope_parameters over the older rope_scaling."""
    older, newer = fields.part("rope_scaling"), fields.part("rope_parameters")
    return newer or older or Fields({})
