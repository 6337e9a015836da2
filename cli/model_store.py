"""From what a user calls a model to a folder on disk, fetched where it is absent."""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from octavo.cli import demo_model
from octavo.cli.errors import CommandError, ConfigurationError
from octavo.cli.places import models_folder

DEMO = "demo"
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]
"""Never code, never pickled weights."""
_UNKNOWN = f"model {{!r}} is neither a folder, nor a hub name (owner/model), nor {DEMO!r}"


@dataclass(frozen=True)
class Model:
    """A model folder with the names that it is served under, the default first."""

    folder: Path
    names: tuple[str, ...]


def resolve(name: str) -> Model:
    """Return the model of that name; fetch it where it is absent.

    Args:
        name: a folder, a hub name (owner/model), or `demo`.

    Raises:
        ConfigurationError: there is no such model.
        CommandError: it could not be fetched.
    """
    if name == DEMO:
        return Model(fetch(DEMO), (demo_model.NAME, DEMO))
    path = Path(name).expanduser()
    if path.is_dir():
        if not is_complete(path):
            raise ConfigurationError(f"{path} is no model folder: it has no config.json")
        return Model(path.absolute(), (path.absolute().name,))
    if _HUB_NAME.fullmatch(name):
        return Model(fetch(name), (name,))
    raise ConfigurationError(_UNKNOWN.format(name))


def locate(name: str) -> Path:
    """Return the folder of a model that is on this disk; nothing is fetched.

    Raises:
        ConfigurationError: there is no such model.
    """
    path = Path(name).expanduser()
    folder = path.absolute() if name != DEMO and path.is_dir() else folder_of(name)
    if not is_complete(folder):
        tried = [str(folder)] if name == DEMO else list(dict.fromkeys((str(path.absolute()), str(folder))))
        raise ConfigurationError(f"there is no model {name!r}: no config.json in {' or '.join(tried)}")
    return folder


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
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            if not is_complete(folder):  # another process may have fetched it while this one waited
                _remove_leftovers(folder)
                if name == DEMO:
                    demo_model.fetch(folder)
                else:
                    _fetch_from_hub(name, folder)
    except OSError as error:
        raise CommandError(f"{name} cannot be stored in {folder}: {error}") from error
    return folder


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder.with_name(f".{folder.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_leftovers(folder: Path) -> None:
    """Remove what fetches of this model left behind that were killed; the lock says that none is running."""
    for leftover in folder.parent.glob(f"{demo_model.temporary_prefix(folder)}*"):
        shutil.rmtree(leftover)


def _fetch_from_hub(name: str, folder: Path) -> None:
    from huggingface_hub import snapshot_download  # only this path needs it, and it takes half a second
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise CommandError(f"{name} is not in {folder.parent}, and HF_HUB_OFFLINE forbids fetching it")
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        snapshot_download(name, local_dir=partial, allow_patterns=_HUB_FILES)
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError, ValueError) as error:
        raise CommandError(f"{name} could not be fetched from the hub: {' '.join(str(error).split())}") from error
    if not (partial / "config.json").is_file():
        raise CommandError(f"{name} has no config.json: it is no model of transformers")
    partial.rename(folder)
