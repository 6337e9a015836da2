"""What the frontend reads from the model's folder: tokenizer, chat template, default parameters, ends of sequence."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.frontend.chat_template import ChatTemplate, load_chat_template, token_text
from octavo.frontend.generation_config import (
    EOS,
    GenerationConfig,
    SamplingDefaults,
    read_generation_config,
    read_json,
)
from octavo.frontend.tokenizer import ModelFilesError, ModelTokenizer
from octavo.frontend.tools.detect import AUTO, find_dialect, find_reasoning
from octavo.frontend.tools.parser import ToolDialect
from octavo.frontend.tools.reasoning import BEGIN, END
from octavo.wire.model_digest import model_digest


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


def load_model_files(
    folder: Path,
    tool_call_parser: str = AUTO,
    reasoning_parser: str = AUTO,
    generation_config: str = AUTO,
    override_generation_config: Mapping[str, Any] | None = None,
) -> ModelFiles:
    """Read the model's folder.

    Args:
        folder: the folder.
        tool_call_parser: one of TOOL_PARSERS.
        reasoning_parser: one of REASONING_PARSERS.
        generation_config: whose defaults hold: auto, vllm or a folder.
        override_generation_config: values that win over these.

    Raises:
        ModelFilesError: a file is missing or broken; the message names it.
    """
    config = read_json(folder / "config.json", required=True)
    tokenizer = ModelTokenizer(folder)
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    generation = read_generation_config(folder, generation_config, override_generation_config)
    template = load_chat_template(folder, tokenizer_config)
    source = template.whole_source if template else ""
    dialect, reasoning = find_dialect(tool_call_parser, source), find_reasoning(reasoning_parser, source)
    markers = (dialect.markers if dialect else ()) + ((BEGIN, END) if reasoning else ())
    return ModelFiles(
        digest=model_digest(folder),
        tokenizer=tokenizer,
        chat_template=template,
        defaults=generation.sampling,
        eos_ids=_read_eos_ids(folder, config, generation, tokenizer, tokenizer_config),
        tool_dialect=dialect,
        reasoning=reasoning,
        marker_ids=tokenizer.special_ids_of(markers),
    )


def _read_eos_ids(
    folder: Path,
    config: dict[str, Any],
    generation: GenerationConfig,
    tokenizer: ModelTokenizer,
    tokenizer_config: dict[str, Any],
) -> tuple[int, ...]:
    """Unite what the generation config (else config.json) and the tokenizer call the end of a sequence."""
    entry, place = generation.eos, generation.eos_place
    if entry is None:
        entry, place = config.get(EOS), str(folder / "config.json")
    listed = [] if entry is None else entry if isinstance(entry, list) else [entry]
    for value in listed:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise ModelFilesError(f"{place}: eos_token_id holds {value!r}, expected token ids")
    text = token_text(tokenizer_config.get("eos_token"))
    own = tokenizer.id_of(text) if text else None
    return tuple(sorted({*listed, *([] if own is None else [own])}))
