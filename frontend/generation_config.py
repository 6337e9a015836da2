"""Defaults of sampling: generation_config.json of the model, or of another folder, and what the operator sets over it."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.frontend.tokenizer import ModelFilesError
from octavo.wire.model_files import read_model_text

FILE = "generation_config.json"
AUTO, NEUTRAL = "auto", "vllm"
"""Whose defaults hold: the model's own, or nobody's; any other value is a folder."""
EOS = "eos_token_id"
_FLAG = "--override-generation-config"


@dataclass(frozen=True)
class SamplingDefaults:
    """What unset sampling parameters mean: the model's generation_config.json, else "off" (temperature 1)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", EOS)
"""What is read of a generation config, and may be set over it."""


@dataclass(frozen=True)
class GenerationConfig:
    """What a model's requests mean where they say nothing.

    Attributes:
        sampling: of unset parameters.
        eos: value of eos_token_id, None where there is none.
        eos_place: where that stands.
    """

    sampling: SamplingDefaults
    eos: object
    eos_place: str


def parse_override(text: str) -> dict[str, Any]:
    """Read what is set over the generation config: a JSON object with some of FIELDS; empty: nothing.

    Raises:
        ModelFilesError: it is none, or a value is out of its range.
    """
    if not text:
        return {}
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{_FLAG} is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelFilesError(f"{_FLAG} is no JSON object: {text}")
    if unknown := sorted(values.keys() - set(FIELDS)):
        raise ModelFilesError(f"{_FLAG} has {', '.join(unknown)}; there are {', '.join(FIELDS)}")
    _read_sampling(_FLAG, values)
    return values


def read_generation_config(
    folder: Path, source: str = AUTO, override: Mapping[str, Any] | None = None
) -> GenerationConfig:
    """Read the defaults.

    Args:
        folder: of the model.
        source: AUTO, NEUTRAL, or a folder whose generation_config.json holds in place of the model's.
        override: values that win.

    Raises:
        ModelFilesError: a file is broken, or a folder has none; the message names it.
    """
    path = (folder if source in (AUTO, NEUTRAL) else Path(source)) / FILE
    values = read_json(path, required=source not in (AUTO, NEUTRAL))
    own = _read_sampling(str(path), values)  # a broken file is told, whether its values hold or not
    override = override or {}
    sampling = (
        own
        if not override and source != NEUTRAL
        else _read_sampling(f"{_FLAG} or {path}", {**({} if source == NEUTRAL else values), **override})
    )
    is_set = override.get(EOS) is not None
    # The ends are the model's also where its way to sample is not: without them nothing would end.
    return GenerationConfig(sampling, override[EOS] if is_set else values.get(EOS), _FLAG if is_set else str(path))


def read_json(path: Path, required: bool = False) -> dict[str, Any]:
    """Return the object in a file; an empty one where there is no file and none is required.

    Raises:
        ModelFilesError: it cannot be read, or holds no JSON object.
    """
    if not required and not path.exists():
        return {}
    try:
        content = json.loads(read_model_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFilesError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path} holds no JSON object")
    return content


def _read_sampling(place: str, values: Mapping[str, Any]) -> SamplingDefaults:
    def number(name: str, unset: float, low: float, high: float, low_excluded: bool = False) -> float:
        value = values.get(name)
        if value is None:
            return unset
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not low <= value <= high or (low_excluded and value == low):
            raise ModelFilesError(f"{place}: {name} is {value!r}, expected a number from {low:g} to {high:g}")
        return float(value)

    return SamplingDefaults(
        temperature=number("temperature", 1.0, 0.0, 1e6),
        top_p=number("top_p", 1.0, 0.0, 1.0, low_excluded=True),
        top_k=max(0, int(number("top_k", 0, -1, 2**31 - 1))),
        min_p=number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=number("repetition_penalty", 1.0, 0.0, 10.0, low_excluded=True),
    )
