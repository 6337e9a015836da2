"""Where things live: models under OCTAVO_HOME, sockets in a private runtime folder."""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from octavo.cli.errors import ConfigurationError

DEFAULT_SOCKET = "scheduler"
MAX_SOCKET_PATH_BYTES = 107
"""Of Linux: sun_path less its final zero."""
_LONGEST_SOCKET = f"{DEFAULT_SOCKET}-65535"
"""live-4194304-63, with the greatest process id and number of a frontend, is as long; live-4194304-w is shorter."""


def models_folder() -> Path:
    """Return $OCTAVO_HOME/models; without OCTAVO_HOME the user's cache folder takes its place."""
    if home := os.environ.get("OCTAVO_HOME"):
        return Path(home).expanduser().absolute() / "models"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).absolute() / "octavo" / "models"


def runtime_folder() -> Path:
    """Return the folder of the sockets between our processes, made with mode 0700 where absent.

    It is $OCTAVO_RUNTIME_DIR, else $XDG_RUNTIME_DIR/octavo, else octavo-UID in the folder for temporary files.

    Raises:
        ConfigurationError: it belongs to somebody else, others can enter it, or it cannot be made.
    """
    if explicit := os.environ.get("OCTAVO_RUNTIME_DIR"):
        folder = Path(explicit).absolute()
    elif base := os.environ.get("XDG_RUNTIME_DIR"):
        folder = Path(base).absolute() / "octavo"
    else:
        folder = Path(tempfile.gettempdir()) / f"octavo-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigurationError(f"the runtime folder {folder} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigurationError(f"the runtime folder {folder} is no folder of this user")
    if status.st_mode & 0o077:
        raise ConfigurationError(
            f"the runtime folder {folder} has mode {stat.S_IMODE(status.st_mode):04o}: others could enter; chmod 700 it"
        )
    return folder


def default_scheduler_address(name: str = DEFAULT_SOCKET) -> str:
    """Return the ipc address of the scheduler's socket in the runtime folder.

    Raises:
        ConfigurationError: the runtime folder is unsafe, cannot be made, or its path is too long.
    """
    folder = runtime_folder()
    check_socket_paths(folder)
    return f"ipc://{folder}/{name}"


def live_socket(service: int, name: str) -> str:
    """Return the path of the socket where a process of a service answers for itself alone.

    Args:
        service: tells services of this user apart: a port or a process id.
        name: of the process, of one or two characters: a frontend's number, or a letter.

    Raises:
        ConfigurationError: as `default_scheduler_address`.
    """
    folder = runtime_folder()
    check_socket_paths(folder)
    return str(folder / f"live-{service}-{name}")


def metrics_folder(service: int) -> Path:
    """Return an empty folder where the frontends of a service count; what an earlier service left there is removed.

    Args:
        service: tells services of this user apart: a port.

    Raises:
        ConfigurationError: the runtime folder is unsafe, or the folder cannot be made.
    """
    folder = runtime_folder() / f"metrics-{service}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        for left in folder.glob("*.metrics"):
            left.unlink()
    except OSError as error:
        raise ConfigurationError(f"the folder of metrics {folder} cannot be used: {error.strerror}") from error
    return folder


def remove_left(service: int, sockets: Iterable[str]) -> None:
    """Remove what the processes of a service that has ended left: their sockets, and the folder where frontends counted.

    Args:
        service: as for `metrics_folder`.
        sockets: paths; what is not there, or is no socket, is left alone.
    """
    for path in map(Path, sockets):
        if path.is_socket():
            path.unlink(missing_ok=True)
    folder = runtime_folder() / f"metrics-{service}"
    for left in folder.glob("*.metrics"):
        left.unlink(missing_ok=True)
    if folder.is_dir():
        with contextlib.suppress(OSError):  # somebody else's files are in it
            folder.rmdir()


def check_socket_paths(folder: Path) -> None:
    """Check that the paths of sockets in this folder are short enough for the system.

    Raises:
        ConfigurationError: they are not.
    """
    size = len(os.fsencode(folder / _LONGEST_SOCKET))
    if size > MAX_SOCKET_PATH_BYTES:
        raise ConfigurationError(
            f"the runtime folder {folder} is too long: the path of a socket in it would have {size} bytes, "
            f"limit {MAX_SOCKET_PATH_BYTES}"
        )
