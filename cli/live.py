"""octavo live: whether one process is alive, for whoever keeps it so; a container's health check, say."""

import json
import socket
from typing import Annotated

import typer

from octavo.cli.command import Command
from octavo.cli.errors import CommandError
from octavo.cli.watchdog import MAX_ANSWER_BYTES, request_for

NO_LIFE = 1


def live(
    live_socket: Annotated[
        str,
        typer.Option(
            "--socket", help="Where it answers: what it was given as --live-socket.", envvar="OCTAVO_LIVE_SOCKET"
        ),
    ],
    ready: Annotated[bool, typer.Option("--ready", help="Ask whether it is ready for work, too.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait.", min=0.1, max=3600.0)] = 5.0,
) -> None:
    """Ask a frontend, scheduler or worker whether it is alive. Exit status 1 if it hangs or does not answer.

    A worker that loads is alive, and not ready. A frontend is ready when requests are taken, a scheduler when it listens, a
    worker when it is in session with the scheduler.
    """
    status, body = _ask(live_socket, "/ready" if ready else "/health", timeout_s)
    typer.echo(body)
    if status != "200":
        raise typer.Exit(NO_LIFE)


def _ask(path: str, what: str, timeout_s: float) -> tuple[str, str]:
    """Return status and body of the answer.

    Raises:
        CommandError: there is none.
    """
    answer = b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
            asker.settimeout(timeout_s)
            asker.connect(path)
            asker.sendall(request_for(what))
            while len(answer) < MAX_ANSWER_BYTES and (data := asker.recv(MAX_ANSWER_BYTES)):
                answer += data
    except TimeoutError:
        raise CommandError(f"{path}: no answer within {timeout_s:g} s") from None
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from error
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not head.startswith(b"HTTP/1.1 "):
        raise CommandError(f"{path}: {answer[:40]!r} is no answer")
    return words[1].decode("ascii", "replace"), _in_line(body)


def _in_line(body: bytes) -> str:
    try:
        return json.dumps(json.loads(body))
    except ValueError:
        return body.decode("utf-8", "replace")


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(cls=Command)(live)
