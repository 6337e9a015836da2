"""octavo keys: makes the keys with which the processes of a service know each other over tcp."""

import os
import re
import secrets
import stat
from pathlib import Path
from typing import Annotated

import typer
from zmq.auth import create_certificates

from octavo.cli.command import Command
from octavo.cli.errors import ConfigurationError
from octavo.wire.curve import PUBLIC_SUFFIX, SCHEDULER, SECRET_SUFFIX

API_KEY_FILE = "api_keys"
API_KEY_BYTES = 32
MAX_API_KEYS = 1000

_PEERS = ("frontend", "worker")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")

FolderArgument = Annotated[Path, typer.Argument(help="Where to put them; made where absent.", file_okay=False)]
PeerNames = Annotated[
    list[str] | None,
    typer.Option(
        "--peer", help="Make keys of one more peer instead, in a folder that has the others (may be repeated)."
    ),
]
NumApiKeys = Annotated[
    int, typer.Option("--api-keys", help=f"Write so many API keys for clients to FOLDER/{API_KEY_FILE} as well.", min=0)
]


def keys(folder: FolderArgument, peer: PeerNames = None, api_keys: NumApiKeys = 0) -> None:
    """Make CURVE keys for tcp between the processes (--curve-keys), and API keys for clients if asked for.

    NAME.key is public, NAME.key_secret is NAME's own. Nothing that exists is replaced.
    """
    names = tuple(peer) if peer else (SCHEDULER, *_PEERS)
    for name in names:
        if not _NAME.fullmatch(name) or (peer and name == SCHEDULER):
            raise ConfigurationError(f"{name!r} is no name of a peer: small letters, digits, - and _, at most 64")
    if api_keys > MAX_API_KEYS:
        raise ConfigurationError(f"--api-keys {api_keys}, limit {MAX_API_KEYS}")
    paths = [folder / f"{name}{suffix}" for name in names for suffix in (PUBLIC_SUFFIX, SECRET_SUFFIX)]
    if api_keys:
        paths.append(folder / API_KEY_FILE)
    old_mask = os.umask(0o077)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if there := [path for path in paths if path.exists()]:
            raise ConfigurationError(f"{there[0]} exists: keys are never replaced; remove it, or choose another folder")
        if peer and not (folder / f"{SCHEDULER}{PUBLIC_SUFFIX}").exists():
            raise ConfigurationError(f"{folder} has no keys yet: make them without --peer first")
        if mode := stat.S_IMODE(folder.stat().st_mode) & 0o077:
            raise ConfigurationError(f"{folder} is open to others (mode bits {mode:03o}): chmod 700 it")
        for name in names:
            create_certificates(folder, name)
        if api_keys:
            lines = [secrets.token_urlsafe(API_KEY_BYTES) for _ in range(api_keys)]
            (folder / API_KEY_FILE).write_text("\n".join(lines) + "\n", encoding="ascii")
    except OSError as error:
        raise ConfigurationError(f"keys cannot be written to {folder}: {error.strerror}") from error
    finally:
        os.umask(old_mask)
    for path in paths:
        typer.echo(path)


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(cls=Command)(keys)
