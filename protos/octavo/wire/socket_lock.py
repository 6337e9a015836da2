"""The lock beside the scheduler's ipc socket: one process listens on a path at a time."""

import fcntl
import os
import stat
from pathlib import Path

from octavo.wire.errors import AddressInUse


def lock(path: Path) -> int:
    """Hold `<path>.lock`: a second bind on one ipc path silently succeeds and would steal the peers.

    A socket file without a held lock is what a crash left, and is replaced by the bind. Whoever leaves removes the lock
    file while it holds it; so a lock counts only if its file is still the one at the path.

    Raises:
        AddressInUse: another process holds it, or something else than a socket of ours is at the path.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock_path = _lock_path(path)
    while True:
        try:
            descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise AddressInUse(f"cannot open the lock file {lock_path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise AddressInUse(f"another process listens on {path} (it holds {lock_path})") from error
        if _is_at(lock_path, descriptor):
            break
        os.close(descriptor)  # of one that has just left
    reason = ""
    if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        reason = f"{path} exists and is no socket"
    elif path.exists() and path.stat().st_uid != os.geteuid():
        reason = f"{path} belongs to another user (uid {path.stat().st_uid})"
    if reason:
        unlock(path, descriptor, is_bound=False)
        raise AddressInUse(reason)
    return descriptor


def unlock(path: Path, descriptor: int, is_bound: bool) -> None:
    """Remove the lock file, and before it the socket's if it is ours; what another holds by now stays."""
    if _is_at(lock_path := _lock_path(path), descriptor):
        if is_bound:
            path.unlink(missing_ok=True)
        lock_path.unlink()
    os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether a path still leads to this open file."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")
