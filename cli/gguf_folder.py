"""A small folder beside a GGUF file: config, tokenizer and chat template as files, made from the file's metadata.

It lies in the store, keyed by the file's path, size and time of change, and is made once; the weights stay in the file.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from octavo.cli.errors import CommandError, ConfigurationError
from octavo.cli.folder_lock import locked
from octavo.cli.gguf_tokenizer import GgufVocabulary, tokenizer_config, tokenizer_json
from octavo.cli.places import models_folder
from octavo.worker.errors import StartError
from octavo.worker.gguf.config import model_config_values
from octavo.worker.gguf.header import GgufFile, read_header

FOLDERS = ".gguf"
"""Of the store: what begins with a dot is no model by itself."""
_FORMAT = 1
"""Raised when other files are made of the same metadata."""
BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files of a model folder that win over what the GGUF file in it says."""
_END_MARKS = frozenset({"<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>", "<|eom_id|>"})
"""Control tokens that end a turn in the templates which write them; older files do not name them as ends."""
_TEMPLATE = "tokenizer.chat_template"
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def folder_for(path: Path, beside: Path | None = None) -> Path:
    """Return the folder for a GGUF file, made if it is not there.

    Args:
        path: of the file.
        beside: a folder whose tokenizer, template and defaults win over the file's own.

    Raises:
        ConfigurationError: the file cannot be read, is damaged, or describes something that is not supported.
        CommandError: the folder cannot be made.
    """
    path = path.absolute()
    others = [] if beside is None else [beside / name for name in BESIDE if (beside / name).is_file()]
    try:
        versions = [_version(one) for one in (path, *others)]
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    of_path = f"{path.stem[:64]}-{_hash([str(path)])}"
    folder = models_folder() / FOLDERS / f"{of_path}-{_hash([_FORMAT, *versions])}"
    if (folder / "config.json").is_file():
        return folder
    try:
        contents = _contents(read_header(path), frozenset(other.name for other in others))
    except StartError as error:
        raise ConfigurationError(str(error)) from error
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{of_path}.lock")):
            if not (folder / "config.json").is_file():  # another process may have made it meanwhile
                _write(folder, contents, others)
                _remove_older(folder, of_path)
    except OSError as error:
        raise CommandError(f"{folder} cannot be made: {error}") from error
    return folder


def _contents(file: GgufFile, beside: frozenset[str]) -> dict[str, Any]:
    """Return the files by name, as JSON values; those that are `beside` the file are not made.

    Raises:
        StartError: the metadata describe something that is not supported.
        ConfigurationError: the tokenizer does.
    """
    split = file.metadata.get("split.count")
    if split not in (None, 0, 1):
        raise ConfigurationError(
            f"{file.path} is one of {split} parts of a model; split files are not read: merge them (llama-gguf-split --merge)"
        )
    config = model_config_values(file)
    vocabulary = GgufVocabulary(file)
    templates = _templates(file)
    ends = _ends(vocabulary, templates)
    special = {
        "bos_token_id": vocabulary.special_id("bos"),
        "eos_token_id": ends or None,
        "pad_token_id": vocabulary.special_id("padding"),
    }
    sampling = {name: file.metadata[key] for key, name in _SAMPLING.items() if key in file.metadata}
    architecture = str(file.metadata["general.architecture"])
    contents = {
        "generation_config.json": {**special, **sampling},
        "tokenizer_config.json": tokenizer_config(vocabulary, templates),
        "config.json": config | special,
    }
    if "tokenizer.json" not in beside:
        contents["tokenizer.json"] = tokenizer_json(vocabulary, architecture)
    return contents


def _templates(file: GgufFile) -> dict[str, str]:
    """Return the chat templates by name; the usual one is called default."""
    found: dict[str, str] = {}
    for key, value in file.metadata.items():
        if isinstance(value, str) and (key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")):
            found[key.removeprefix(_TEMPLATE).removeprefix(".") or "default"] = value
    return found


def _ends(vocabulary: GgufVocabulary, templates: dict[str, str]) -> list[int]:
    """Return the ids that end a sequence."""
    named = [vocabulary.special_id(name) for name in ("eos", "eot", "eom")]
    written = [
        index
        for index, token in enumerate(vocabulary.tokens)
        if token in _END_MARKS and vocabulary.is_control(index) and any(token in text for text in templates.values())
    ]
    return sorted({index for index in (*named, *written) if index is not None})


def _write(folder: Path, contents: dict[str, Any], others: list[Path]) -> None:
    """Write the folder; it appears when it is complete."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        work = Path(temporary) / "folder"
        work.mkdir()
        for name, values in contents.items():
            (work / name).write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
        for path in others:
            shutil.copyfile(path, work / path.name)
        work.rename(folder)


def _remove_older(folder: Path, of_path: str) -> None:
    """Remove what was made of the same file when it was another one, and what was not finished."""
    for older in (*folder.parent.glob(f"{of_path}-*"), *folder.parent.glob(f".{of_path}-*.*")):
        if older != folder and older.is_dir():
            shutil.rmtree(older, ignore_errors=True)


def _version(path: Path) -> list[str | int]:
    status = os.stat(path)
    return [path.name, status.st_size, status.st_mtime_ns]


def _hash(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12]
