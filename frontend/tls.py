"""Certificates of the doors, from their files."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import grpc

MAX_PEM_BYTES = 2**20


class TlsError(Exception):
    """Certificates or keys cannot be used as they are."""


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of a door that speaks TLS.

    Attributes:
        certfile: certificate chain of the service, its own first.
        keyfile: private key of it, without a password.
        ca_certs: certificates of the authorities whose clients are let in; None: clients need no certificate.
    """

    certfile: Path
    keyfile: Path
    ca_certs: Path | None = None

    @classmethod
    def from_options(cls, certfile: Path | None, keyfile: Path | None, ca_certs: Path | None) -> "TlsFiles | None":
        """Return the files that options name, None for no TLS.

        Raises:
            TlsError: one is given without those that it needs.
        """
        if certfile is None and keyfile is None and ca_certs is None:
            return None
        if certfile is None or keyfile is None:
            raise TlsError("TLS needs both --ssl-certfile and --ssl-keyfile (--ssl-ca-certs asks clients for theirs)")
        return cls(certfile, keyfile, ca_certs)

    def check(self) -> None:
        """Read the files as a handshake would.

        Raises:
            TlsError: a file is missing, unreadable or no PEM, or the key is another certificate's or has a password.
        """
        for path in (self.certfile, self.keyfile, self.ca_certs):
            if path is not None:
                _read(path)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certfile, self.keyfile, password=self._refuse_password)
        except ssl.SSLError as error:
            reason = "the key is another certificate's" if "MISMATCH" in (error.reason or "") else _words(error)
            raise TlsError(f"{self.certfile} and {self.keyfile} are no certificate with its key: {reason}") from error
        if self.ca_certs is not None:
            try:
                context.load_verify_locations(self.ca_certs)
            except ssl.SSLError as error:
                raise TlsError(f"{self.ca_certs} holds no certificates: {_words(error)}") from error

    def credentials(self) -> grpc.ServerCredentials:
        """Return what gRPC needs of them.

        Raises:
            TlsError: as `check`.
        """
        self.check()
        pair = (_read(self.keyfile), _read(self.certfile))
        roots = _read(self.ca_certs) if self.ca_certs is not None else None
        return grpc.ssl_server_credentials([pair], roots, require_client_auth=roots is not None)

    def _refuse_password(self) -> NoReturn:
        raise TlsError(f"{self.keyfile} has a password: the service cannot ask for it")


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PEM_BYTES + 1)
    except OSError as error:
        raise TlsError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_PEM_BYTES:
        raise TlsError(f"{path} has more than {MAX_PEM_BYTES} bytes: it is no PEM file of certificates")
    return data


def _words(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
