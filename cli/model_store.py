"""From what a user calls a model to a folder on disk, fetched where it is absent."""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from octavo.cli import demo_model
from octavo.cli.errors import CommandError, ConfigurationError
from octavo.cli.folder_lock import locked
from octavo.cli.places import models_folder
from octavo.worker.safetensors_file import INDEX_FILE, SINGLE_FILE

DEMO = "demo"
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]
"""Never code, never pickled weights."""
_FILES_SHOWN = 8
GGUF_SUFFIX = ".gguf"
_UNKNOWN = f"model {{!r}} is neither a folder, nor a GGUF file, nor a hub name (owner/model), nor {DEMO!r}"


@dataclass(frozen=True)
class Model:
    """A model on this disk.

    Attributes:
        folder: with config.json, tokenizer and, unless they are in a GGUF file, the weights.
        names: that it is served under, the default first.
        source: what it was found by: naming that finds the same model.
        gguf: the file with the weights, if that is what they are in.
    """

    folder: Path
    names: tuple[str, ...]
    source: Path
    gguf: Path | None = None


def resolve(name: str) -> Model:
    """Return the model of that name; fetch it where it is absent.

    Args:
        name: a folder, a GGUF file, a hub name (owner/model), or `demo`.

    Raises:
        ConfigurationError: there is no such model, or its GGUF file cannot be used.
        CommandError: it could not be fetched.
    """
    if name == DEMO:
        folder = fetch(DEMO)
        return Model(folder, (demo_model.NAME, DEMO), folder)
    path = Path(name).expanduser()
    if path.is_dir() or path.suffix == GGUF_SUFFIX:
        return _local(path.absolute())
    if _HUB_NAME.fullmatch(name):
        folder = fetch(name)
        return Model(folder, (name,), folder)
    raise ConfigurationError(_UNKNOWN.format(name))


def _local(path: Path) -> Model:
    """Return the model that a folder or a GGUF file holds."""
    if path.suffix == GGUF_SUFFIX and not path.is_dir():
        if not path.is_file():
            raise ConfigurationError(f"there is no file {path}")
        return Model(_gguf_folder(path, None), (path.stem,), path, path)
    _require_files(path)
    gguf = gguf_file_of(path)
    if gguf is not None:
        return Model(_gguf_folder(gguf, path), (path.name,), path, gguf)
    if not is_complete(path):
        raise ConfigurationError(
            f"{path} is no model folder: it has neither config.json nor exactly one GGUF file{_inner_folder(path)}"
        )
    return Model(path, (path.name,), path)


def _require_files(folder: Path) -> None:
    """Refuse a folder with pipes, sockets or devices in it: who opens one may wait for ever."""
    try:
        for entry in folder.iterdir():
            if entry.exists() and not entry.is_file() and not entry.is_dir():
                raise ConfigurationError(f"{entry} is no regular file")
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be read: {error}") from error


def gguf_file_of(folder: Path) -> Path | None:
    """Return the file that a folder's weights are in, if it is a GGUF file.

    Raises:
        ConfigurationError: there are several, and no safetensors.
    """
    if (folder / SINGLE_FILE).exists() or (folder / INDEX_FILE).exists():
        return None
    files = sorted(path for path in folder.glob(f"*{GGUF_SUFFIX}") if path.is_file())
    if len(files) > 1:
        names = ", ".join(path.name for path in files[:_FILES_SHOWN])
        raise ConfigurationError(
            f"{folder} holds {len(files)} GGUF files ({names}{', ...' if len(files) > _FILES_SHOWN else ''}): name one of them"
        )
    return files[0] if files else None


def _gguf_folder(path: Path, beside: Path | None) -> Path:
    from octavo.cli.gguf_folder import folder_for  # only for such files: it takes a fifth of a second

    return folder_for(path, beside)


def locate(name: str) -> Model:
    """Return a model that is on this disk; nothing is fetched.

    Raises:
        ConfigurationError: there is no such model, or its GGUF file cannot be used.
        CommandError: the folder for a GGUF file cannot be made.
    """
    path = Path(name).expanduser()
    if name != DEMO and (path.is_dir() or path.suffix == GGUF_SUFFIX):
        return _local(path.absolute())
    folder = folder_of(name)
    if not is_complete(folder):
        tried = [str(folder)] if name == DEMO else list(dict.fromkeys((str(path.absolute()), str(folder))))
        raise ConfigurationError(f"there is no model {name!r}: no config.json in {' or '.join(tried)}")
    return Model(folder, (name,), folder)


def folder_of(name: str) -> Path:
    """Return where a fetched model lies, whether it is there or not."""
    return models_folder() / (demo_model.NAME if name == DEMO else name.replace("/", "--"))


def is_complete(folder: Path) -> bool:
    """Say whether a folder of the store holds a whole model; folders are moved into place when they are complete."""
    return (folder / "config.json").is_file()


def fetch(name: str) -> Path:
    """Fetch a model into the store, unless it is there; return its folder.

    Raises:
        ConfigurationError: the name is no name of a model.
        CommandError: it cannot be fetched; the message says why.
    """
    if name != DEMO and not _HUB_NAME.fullmatch(name):
        raise ConfigurationError(_UNKNOWN.format(name))
    folder = folder_of(name)
    if is_complete(folder):
        return folder
    if name != DEMO and _is_offline():
        return _cached_by_hub(name, folder.parent)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{folder.name}.lock")):
            if not is_complete(folder):  # another process may have fetched it while this one waited
                _remove_leftovers(folder)
                if name == DEMO:
                    demo_model.fetch(folder)
                else:
                    _fetch_from_hub(name, folder)
    except OSError as error:
        raise CommandError(f"{name} cannot be stored in {folder}: {error}") from error
    return folder


def _remove_leftovers(folder: Path) -> None:
    """Remove what fetches of this model left behind that were killed; the lock says that none is running."""
    for leftover in folder.parent.glob(f"{demo_model.temporary_prefix(folder)}*"):
        shutil.rmtree(leftover)


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _cached_by_hub(name: str, store: Path) -> Path:
    """Return the folder where the hub's own library keeps a model that others have fetched; the hub is not asked.

    Raises:
        CommandError: it has not got it.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError) as error:
        message = f"{name} is neither in {store} nor in the hub's cache, and HF_HUB_OFFLINE forbids fetching it"
        raise CommandError(message) from error
    if not is_complete(folder):
        raise CommandError(
            f"{folder}, the hub's cache of {name}, has no config.json, and HF_HUB_OFFLINE forbids fetching it"
        )
    return folder


def _fetch_from_hub(name: str, folder: Path) -> None:
    from huggingface_hub import snapshot_download  # only this path needs it, and it takes half a second
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    partial = folder.with_name(f".{folder.name}.partial")
    try:
        snapshot_download(name, local_dir=partial, allow_patterns=_HUB_FILES)
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError, ValueError) as error:
        raise CommandError(f"{name} could not be fetched from the hub: {' '.join(str(error).split())}") from error
    if not (partial / "config.json").is_file():
        raise CommandError(f"{name} has no config.json: it is no model of transformers")
    partial.rename(folder)


def _inner_folder(path: Path) -> str:
    """Name the one folder within that has a config.json: tools that quantise write such."""
    inner = [entry.name for entry in path.iterdir() if (entry / "config.json").is_file()] if path.is_dir() else []
    return f"; the folder {inner[0]!r} within has" if len(inner) == 1 else ""
