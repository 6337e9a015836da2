"""config.json of a model folder, checked, as the description that the decoder is built from."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.wire.model_files import read_model_text
from octavo.worker.errors import ModelConfigError
from octavo.worker.models.description import ModelConfig
from octavo.worker.models.families import (
    cohere,
    falcon,
    gemma,
    glm,
    gpt2,
    gpt_neo,
    gpt_neox,
    gptj,
    llama,
    mistral,
    moe,
    opt,
    phi,
    phi3,
    qwen,
    smollm3,
    stablelm,
    starcoder2,
)
from octavo.worker.models.fields import Fields
from octavo.worker.models.rope_config import check_rope
from octavo.worker.quantization.methods import config_beside, method_of

CONFIG_NAME = "config.json"
MAX_CONFIG_BYTES = 2**20
MIN_POSITIONS = 2

_FAMILIES: dict[str, Callable[[str, Fields], ModelConfig]] = {
    **llama.ARCHITECTURES,
    **cohere.ARCHITECTURES,
    **falcon.ARCHITECTURES,
    **gemma.ARCHITECTURES,
    **glm.ARCHITECTURES,
    **gpt2.ARCHITECTURES,
    **gpt_neo.ARCHITECTURES,
    **gpt_neox.ARCHITECTURES,
    **gptj.ARCHITECTURES,
    **mistral.ARCHITECTURES,
    **moe.ARCHITECTURES,
    **opt.ARCHITECTURES,
    **phi.ARCHITECTURES,
    **phi3.ARCHITECTURES,
    **qwen.ARCHITECTURES,
    **smollm3.ARCHITECTURES,
    **stablelm.ARCHITECTURES,
    **starcoder2.ARCHITECTURES,
}
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)
"""Names in config.json's `architectures` that the decoder is described for."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Say in errors about values of a config which file they come from.

    Raises:
        ModelConfigError: what was raised within, with the file's name.
    """
    try:
        yield
    except ModelConfigError as error:
        raise ModelConfigError(f"{path}: {error}") from error


def load_model_config(folder: Path) -> ModelConfig:
    """Read and check `folder`/config.json.

    Raises:
        ModelConfigError: it is missing or malformed, or names something unsupported; the message says what is supported.
    """
    values = read_config_values(folder)
    with naming(folder / CONFIG_NAME):
        return parse_model_config(values)


def read_config_values(folder: Path) -> dict[str, Any]:
    """Return the object in `folder`/config.json, with the quantization_config that older tools wrote beside it.

    Raises:
        ModelConfigError: it, or the file beside it, is missing or malformed.
    """
    path = folder / CONFIG_NAME
    try:
        size = path.stat().st_size
        if size > MAX_CONFIG_BYTES:
            raise ModelConfigError(f"{path} has {size} bytes, limit {MAX_CONFIG_BYTES}")
        values = json.loads(read_model_text(path))
    except FileNotFoundError as error:
        raise ModelConfigError(f"{folder} is no model folder: it has no config.json") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ModelConfigError(f"{path} holds no JSON object")
    if values.get("quantization_config") is None and (beside := config_beside(folder)) is not None:
        return values | {"quantization_config": beside}
    return values


def parse_model_config(values: dict[str, Any]) -> ModelConfig:
    """Build the description from config.json's values.

    Raises:
        ModelConfigError: a value is missing, malformed or unsupported.
    """
    architecture = architecture_of(values)
    if architecture not in _FAMILIES:
        raise ModelConfigError(
            f"architecture {architecture!r} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    method_of(values.get("quantization_config"))
    config = _FAMILIES[architecture](architecture, Fields(values))
    if config.max_positions < MIN_POSITIONS:
        raise ModelConfigError(
            f"{config.max_positions} positions: expected at least {MIN_POSITIONS}, a prompt and an answer"
        )
    for rope in config.ropes:
        check_rope(rope, config.head_size)
    return config


def architecture_of(values: dict[str, Any]) -> str:
    """Return the one name in `architectures`.

    Raises:
        ModelConfigError: there is not one.
    """
    names = values.get("architectures")
    if not (isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)):
        raise ModelConfigError(f"architectures = {names!r}: expected a list of one name")
    return names[0]
