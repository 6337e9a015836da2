"""How commands reach a running service: its address, a key, certificates."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from octavo.cli.connection_options import DEFAULT_ADDRESS
from octavo.cli.errors import CommandError, ConfigurationError

_KEY = re.compile(r"[\x21-\x7e]+")
_TLS_FAILED = ("handshake", "Socket closed", "Connection reset")
"""Of gRPC's words for a connection that was made and broke before its first call."""


@dataclass(frozen=True)
class Connection:
    """A channel to a service, and what every call over it must carry."""

    address: str
    channel: grpc.Channel
    metadata: tuple[tuple[str, str], ...]

    def failure(self, error: grpc.RpcError) -> CommandError:
        """Return the one line that the user gets for a failed call."""
        return failure(self.address, error)


@contextmanager
def connected(
    address: str,
    api_key: str | None = None,
    tls_ca: Path | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
) -> Iterator[Connection]:
    """Open a channel, with TLS where the address begins with https:// or a certificate is given.

    Raises:
        ConfigurationError: a file cannot be read, or one of certificate and key is missing; the key is no key.
    """
    scheme, _, target = address.rpartition("://")
    if scheme not in ("", "http", "https"):
        raise ConfigurationError(f"the address {address} begins with {scheme}://; there are http:// and https://")
    if (tls_cert is None) != (tls_key is None):
        raise ConfigurationError("--tls-cert and --tls-key go together")
    has_tls = scheme == "https" or tls_ca is not None or tls_cert is not None
    if scheme == "http" and has_tls:
        raise ConfigurationError(f"the address {address} speaks no TLS, but certificates are given; https:// does")
    if has_tls:
        credentials = grpc.ssl_channel_credentials(_read(tls_ca), _read(tls_key), _read(tls_cert))
        channel = grpc.secure_channel(target, credentials)
    else:
        channel = grpc.insecure_channel(target)
    with channel:
        yield Connection(target, channel, _metadata(api_key))


def _metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    # The service's own variable may hold several keys: any of them will do.
    key = next(iter(api_key.split()), "") if api_key else ""
    if not key:
        return ()
    if not _KEY.fullmatch(key):
        raise ConfigurationError("the key must be printable ASCII without spaces")
    return (("authorization", f"Bearer {key}"),)


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error


def failure(address: str, error: grpc.RpcError) -> CommandError:
    """Return the one line that the user gets for a failed call."""
    details = " ".join((error.details() or "").split())
    if error.code() is grpc.StatusCode.UNAVAILABLE and "failed to connect" in details:
        if any(words in details for words in _TLS_FAILED):
            return CommandError(
                f"the service at {address} and this client do not agree on TLS (https://, --tls-ca, --tls-cert): "
                + details
            )
        return CommandError(f"no service answers at {address} (HOST:PORT){_how_to_start(address)}")
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        details += "; --api-key or OCTAVO_API_KEY gives the key"
    return CommandError(f"{error.code().name}: {details}")


def _how_to_start(address: str) -> str:
    """Return what would start a service at an address of this machine, '' for another one."""
    host, _, port = address.rpartition(":")
    if host.strip("[]") not in ("127.0.0.1", "localhost", "::1") or not port.isdecimal():
        return ""
    flags = " --host ::1" if host.strip("[]") == "::1" else ""
    flags += "" if port == DEFAULT_ADDRESS.rpartition(":")[2] else f" --grpc-port {port}"
    return f"; 'octavo serve demo{flags}' starts one here"
