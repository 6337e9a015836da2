"""Who may call: bearer keys, of which this process keeps nothing but SHA-256 digests.

Keys are told apart from wrong ones in constant time: both sides are hashed, every known digest is compared, and no
comparison ends early. That costs about a tenth of a microsecond a key and call.
"""

import hashlib
import hmac
import ipaddress
import os
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from octavo.frontend.errors import Unauthenticated

MIN_KEY_CHARS, MAX_KEY_CHARS = 16, 512
MAX_KEYS = 10_000
MAX_KEY_FILE_BYTES = 2**20

_KEY = re.compile(rf"[\x21-\x7e]{{{MIN_KEY_CHARS},{MAX_KEY_CHARS}}}")
_SCHEME = "bearer"
_KEY_NAME = "a key of this service"
_OTHERS = stat.S_IROTH | stat.S_IWOTH


class KeysError(Exception):
    """Keys, or a file of them, cannot be used as they are. The message never holds a key."""


class Authenticator:
    """Tells right keys from wrong ones; without any, everybody passes.

    The law: nothing of a key leaves this class but its identity, `key:` and 16 hexadecimal digits of its SHA-256.

    Args:
        keys: open every service.
        admin_keys: open the administration as well, which without any of them takes `keys`.
    """

    def __init__(self, keys: Iterable[str] = (), admin_keys: Iterable[str] = ()) -> None:
        admin = frozenset(map(_digest, admin_keys))
        general = frozenset(map(_digest, keys))
        self._admin = tuple(sorted(admin or general))
        self._admin_name = f"{_KEY_NAME}'s administration" if admin else _KEY_NAME
        self._general = tuple(sorted(general | admin)) if general else ()

    @classmethod
    def from_sources(
        cls,
        api_keys: Sequence[str] = (),
        api_key_file: Path | None = None,
        admin_keys: Sequence[str] = (),
    ) -> "Authenticator":
        """Return what knows the keys of flags and variables, and those of a file.

        Raises:
            KeysError: a key is too short, too long or no printable ASCII, or there are too many; the file is missing,
                can be read or written by others, is too large, or holds no key.
        """
        return cls(read_keys(api_keys, api_key_file), read_keys(admin_keys))

    @property
    def needs_key(self) -> bool:
        """Whether a call needs a key."""
        return bool(self._general)

    @property
    def needs_admin_key(self) -> bool:
        """Whether a call of the administration needs a key."""
        return bool(self._admin)

    def check(self, authorization: str | None) -> str | None:
        """Return whose call this is, None where no key is needed.

        Args:
            authorization: the call's `authorization`, as `Bearer KEY`; None if it has none.

        Raises:
            Unauthenticated: it holds none of the keys.
        """
        return _check(authorization, self._general, _KEY_NAME)

    def check_admin(self, authorization: str | None) -> str | None:
        """Do the same for a call of the administration.

        Raises:
            Unauthenticated: it holds none of the keys that open the administration.
        """
        return _check(authorization, self._admin, self._admin_name)

    def identity(self, authorization: str | None) -> str | None:
        """Return whose call this is that `check` has let pass; it compares nothing."""
        key = _bearer_key(authorization)
        return _identity(_digest(key)) if self._general and key else None


def read_keys(keys: Sequence[str], key_file: Path | None = None) -> tuple[str, ...]:
    """Return keys and those of a file, in their order, each once.

    Raises:
        KeysError: as `Authenticator.from_sources`.
    """
    from_file = _read_file(key_file) if key_file is not None else []
    named = [(f"key {number} of {len(keys)}", key) for number, key in enumerate(keys, 1)] + from_file
    for place, key in named:
        if not _KEY.fullmatch(key):
            raise KeysError(
                f"{place} has {len(key)} characters: it must have from {MIN_KEY_CHARS} to {MAX_KEY_CHARS}, all of them "
                "printable ASCII without spaces"
            )
    if len(named) > MAX_KEYS:
        raise KeysError(f"there are {len(named)} keys, limit {MAX_KEYS}")
    return tuple(dict.fromkeys(key for _, key in named))


def exposure(host: str, auth: Authenticator, has_tls: bool) -> str:
    """Return what an operator should know who listens on this host, '' for nothing."""
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        is_local = False
    if is_local:
        return ""
    if not auth.needs_key:
        return f"there are no keys (--api-key): everybody who reaches {host} may call"
    return "" if has_tls else "there is no TLS (--ssl-certfile): keys and texts travel in the clear"


def _read_file(path: Path) -> list[tuple[str, str]]:
    """Return the keys of a file with their places; blank lines and those that begin with # hold none."""
    data = _read_private(path)
    try:
        lines = data.decode("ascii").splitlines()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise KeysError(f"line {line} of the key file {path} is not ASCII") from None
    stripped = ((number, line.strip()) for number, line in enumerate(lines, 1))
    found = [(f"line {number} of {path}", line) for number, line in stripped if line and not line.startswith("#")]
    if not found:
        raise KeysError(f"the key file {path} holds no key: one a line is needed")
    return found


def _read_private(path: Path) -> bytes:
    try:
        # Not to wait for a writer, were it a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise KeysError(f"the key file {path} is no regular file")
            if state.st_mode & _OTHERS:
                mode = stat.S_IMODE(state.st_mode)
                raise KeysError(f"the key file {path} has mode {mode:04o}: others may use it; 'chmod o-rwx' it")
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(MAX_KEY_FILE_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise KeysError(f"the key file {path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_KEY_FILE_BYTES:
        raise KeysError(f"the key file {path} has {state.st_size} bytes, limit {MAX_KEY_FILE_BYTES}")
    return data


def _check(authorization: str | None, known: tuple[bytes, ...], what: str) -> str | None:
    if not known:
        return None
    if authorization is None:
        raise Unauthenticated(f"{what} is needed: send 'authorization: Bearer KEY'")
    key = _bearer_key(authorization)
    if key is None:
        raise Unauthenticated("authorization must be 'Bearer KEY'")
    digest = _digest(key)
    # Not `in` and not `any`: how long it takes must not depend on what is equal.
    is_known = False
    for one in known:
        is_known |= hmac.compare_digest(digest, one)
    if not is_known:
        raise Unauthenticated(f"the key is not {what}")
    return _identity(digest)


def _bearer_key(authorization: str | None) -> str | None:
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip(" ") or None if scheme.lower() == _SCHEME else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _identity(digest: bytes) -> str:
    return f"key:{digest.hex()[:16]}"
