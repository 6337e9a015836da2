"""Keys and certificates of a service, from options to the process that needs them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from octavo.cli.errors import ConfigurationError
from octavo.cli.program import ADMIN_API_KEY_VARIABLE, API_KEY_VARIABLE
from octavo.frontend.auth import Authenticator, KeysError, read_keys
from octavo.frontend.tls import TlsError, TlsFiles
from octavo.wire.channel import check_address
from octavo.wire.curve import load_peer_keys, load_scheduler_keys
from octavo.wire.errors import WireError


@dataclass(frozen=True)
class Access:
    """How the service is reached, and what it takes.

    Attributes:
        target: HOST:PORT, for clients on this machine.
        admin_key: opens the administration; None if that is open.
        needs_key: whether clients need a key.
        tls: files of its TLS, None for none.
        local_socket: path of the Unix socket where we ask it; '' where we ask as clients do.
    """

    target: str
    admin_key: str | None = field(default=None, repr=False)
    needs_key: bool = False
    tls: TlsFiles | None = None
    local_socket: str = ""

    @property
    def words(self) -> str:
        """What clients need, in words."""
        tls = "no TLS" if self.tls is None else "TLS" if self.tls.ca_certs is None else "mutual TLS"
        return f"{tls}, {'clients need a key (OCTAVO_API_KEY)' if self.needs_key else 'no keys'}"

    @property
    def client_flags(self) -> str:
        """What `octavo generate` needs for TLS; names in capitals are the reader's own files."""
        if self.tls is None:
            return ""
        return " --tls-ca CA.pem" + (" --tls-cert CLIENT.pem --tls-key CLIENT.key" if self.tls.ca_certs else "")

    @property
    def grpcurl_flags(self) -> str:
        """The same for grpcurl."""
        if self.tls is None:
            words = "-plaintext"
        else:
            words = "-cacert CA.pem" + (" -cert CLIENT.pem -key CLIENT.key" if self.tls.ca_certs else "")
        return words + (' -H "authorization: Bearer $OCTAVO_API_KEY"' if self.needs_key else "")


def load_auth(
    api_keys: Sequence[str] | None, api_key_file: Path | None, admin_api_keys: Sequence[str] | None
) -> Authenticator:
    """Return what knows these keys.

    Raises:
        ConfigurationError: a key, or the file, cannot be used.
    """
    try:
        return Authenticator.from_sources(api_keys or (), api_key_file, admin_api_keys or ())
    except KeysError as error:
        raise ConfigurationError(str(error)) from error


def admin_key(
    api_keys: Sequence[str] | None, api_key_file: Path | None, admin_api_keys: Sequence[str] | None
) -> str | None:
    """Return a key that opens the administration, None if it needs none.

    Raises:
        ConfigurationError: as `load_auth`.
    """
    try:
        keys = read_keys(admin_api_keys or ()) or read_keys(api_keys or (), api_key_file)
    except KeysError as error:
        raise ConfigurationError(str(error)) from error
    return keys[0] if keys else None


def key_variables(api_keys: Sequence[str] | None, admin_api_keys: Sequence[str] | None) -> dict[str, str]:
    """Return the environment that hands keys to a frontend: everybody may read what stands in its command line."""
    given = {API_KEY_VARIABLE: api_keys, ADMIN_API_KEY_VARIABLE: admin_api_keys}
    return {name: " ".join(keys) for name, keys in given.items() if keys}


def load_tls(certfile: Path | None, keyfile: Path | None, ca_certs: Path | None) -> TlsFiles | None:
    """Return the files of TLS, checked; None for no TLS.

    Raises:
        ConfigurationError: one is missing, or cannot be used.
    """
    try:
        files = TlsFiles.from_options(certfile, keyfile, ca_certs)
        if files is not None:
            files.check()
    except TlsError as error:
        raise ConfigurationError(str(error)) from error
    return files


def check_curve(address: str, folder: Path | None) -> None:
    """See that every process of a service can use the scheduler's address with these CURVE keys.

    Raises:
        ConfigurationError: one cannot.
    """
    try:
        check_address(address, has_keys=folder is not None)
        load_scheduler_keys(folder)
        for role in ("frontend", "worker"):
            load_peer_keys(folder, role)
    except WireError as error:
        raise ConfigurationError(str(error)) from error
