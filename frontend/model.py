"""What the frontend reads from the model's folder: tokenizer, chat template, default parameters, ends of sequence."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.frontend.chat_template import ChatTemplate, load_chat_template, token_text
from octavo.frontend.tokenizer import ModelFilesError, ModelTokenizer
from octavo.frontend.tools.detect import AUTO, find_dialect, find_reasoning
from octavo.frontend.tools.parser import ToolDialect
from octavo.frontend.tools.reasoning import BEGIN, END
from octavo.wire.model_digest import model_digest


@dataclass(frozen=True)
class SamplingDefaults:
    """What unset sampling parameters mean: the model's generation_config.json, else "off" (temperature 1)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class ModelFiles:
    """A model as the frontend sees it.

    Attributes:
        digest: identity of the model between processes.
        tokenizer: text to ids and back.
        chat_template: None if the model has none.
        defaults: what unset parameters mean.
        eos_ids: ids that end a sequence.
        tool_dialect: how the model writes calls of tools; None if that is not known.
        reasoning: how it writes what it thinks, deepseek_r1 or qwen3; None if it does not, or that is not known.
        marker_ids: special tokens that take part in either.
    """

    digest: str
    tokenizer: ModelTokenizer
    chat_template: ChatTemplate | None
    defaults: SamplingDefaults
    eos_ids: tuple[int, ...]
    tool_dialect: ToolDialect | None = None
    reasoning: str | None = None
    marker_ids: frozenset[int] = frozenset()


def load_model_files(folder: Path, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO) -> ModelFiles:
    """Read the model's folder.

    Args:
        folder: the folder.
        tool_call_parser: one of TOOL_PARSERS.
        reasoning_parser: one of REASONING_PARSERS.

    Raises:
        ModelFilesError: a file is missing or broken; the message names it.
    """
    config = _read_json(folder / "config.json", required=True)
    tokenizer = ModelTokenizer(folder)
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    generation_config = _read_json(folder / "generation_config.json")
    template = load_chat_template(folder, tokenizer_config)
    source = template.whole_source if template else ""
    dialect, reasoning = find_dialect(tool_call_parser, source), find_reasoning(reasoning_parser, source)
    markers = (dialect.markers if dialect else ()) + ((BEGIN, END) if reasoning else ())
    return ModelFiles(
        digest=model_digest(folder),
        tokenizer=tokenizer,
        chat_template=template,
        defaults=_read_defaults(folder / "generation_config.json", generation_config),
        eos_ids=_read_eos_ids(folder, config, generation_config, tokenizer, tokenizer_config),
        tool_dialect=dialect,
        reasoning=reasoning,
        marker_ids=tokenizer.special_ids_of(markers),
    )


def _read_json(path: Path, required: bool = False) -> dict[str, Any]:
    if not required and not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFilesError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path} holds no JSON object")
    return content


def _read_defaults(path: Path, values: dict[str, Any]) -> SamplingDefaults:
    def number(name: str, unset: float, low: float, high: float, low_excluded: bool = False) -> float:
        value = values.get(name)
        if value is None:
            return unset
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not low <= value <= high or (low_excluded and value == low):
            raise ModelFilesError(f"{path}: {name} is {value!r}, expected a number from {low:g} to {high:g}")
        return float(value)

    return SamplingDefaults(
        temperature=number("temperature", 1.0, 0.0, 1e6),
        top_p=number("top_p", 1.0, 0.0, 1.0, low_excluded=True),
        top_k=max(0, int(number("top_k", 0, -1, 2**31 - 1))),
        min_p=number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=number("repetition_penalty", 1.0, 0.0, 10.0, low_excluded=True),
    )


def _read_eos_ids(
    folder: Path,
    config: dict[str, Any],
    generation_config: dict[str, Any],
    tokenizer: ModelTokenizer,
    tokenizer_config: dict[str, Any],
) -> tuple[int, ...]:
    """Unite what generation_config.json (else config.json) and the tokenizer call the end of a sequence."""
    name = "generation_config.json" if generation_config.get("eos_token_id") is not None else "config.json"
    entry = generation_config.get("eos_token_id")
    if entry is None:
        entry = config.get("eos_token_id")
    listed = [] if entry is None else entry if isinstance(entry, list) else [entry]
    for value in listed:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise ModelFilesError(f"{folder / name}: eos_token_id holds {value!r}, expected token ids")
    text = token_text(tokenizer_config.get("eos_token"))
    own = tokenizer.id_of(text) if text else None
    return tuple(sorted({*listed, *([] if own is None else [own])}))
