"""Certificates for tests, made by openssl."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Authority:
    """A certificate authority in a folder of its own."""

    folder: Path
    name: str

    @property
    def certificate(self) -> Path:
        return self.folder / f"{self.name}.pem"

    def issue(self, name: str, *, days: int = 2) -> tuple[Path, Path]:
        """Return certificate and key of one that both sides of a connection over 127.0.0.1 can show."""
        key, request, certificate = (self.folder / f"{name}.{end}" for end in ("key", "csr", "pem"))
        extensions = self.folder / f"{name}.ext"
        extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n")
        _openssl("req", *_NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        authority = ("-CA", self.certificate, "-CAkey", self.folder / f"{self.name}.key", "-CAcreateserial")
        _openssl("x509", "-req", "-in", request, *authority, "-days", days, "-extfile", extensions, "-out", certificate)
        return certificate, key


def make_authority(folder: Path, name: str) -> Authority:
    """Return a new authority; skip the test where openssl is absent."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates of this test and is absent")
    files = ("-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem")
    _openssl("req", "-x509", *_NEW_KEY, *files, "-subj", f"/CN={name}", "-days", 2)
    return Authority(folder, name)


def with_password(key: Path) -> Path:
    """Return a copy of a private key that needs a password."""
    locked = key.with_suffix(".locked")
    _openssl("ec", "-in", key, "-aes256", "-passout", "pass:of-a-test", "-out", locked)
    return locked


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
