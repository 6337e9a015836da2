"""octavo: the one command line."""

import os
import sys
from importlib import import_module

import typer

from octavo.cli.errors import CommandError

_MODULES = {
    "serve": "serve",
    "frontend": "roles",
    "scheduler": "roles",
    "worker": "roles",
    "generate": "client",
    "chat": "client",
    "models": "models",
    "status": "status",
    "drain": "status",
    "top": "top",
    "live": "live",
    "replace-scheduler": "status",
    "cache": "cache",
    "keys": "make_keys",
    "doctor": "doctor",
    "bench": "bench",
}
"""Which module of octavo.cli has which command: only the one that is called is imported, so that each starts fast."""


def build(command: str | None) -> typer.Typer:
    """Return the application with one command, or with all of them for --help."""
    app = typer.Typer(
        name="octavo",
        help="Large language models as a gRPC microservice.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_version)
    wanted = [_MODULES[command]] if command in _MODULES else dict.fromkeys(_MODULES.values())
    for name in wanted:
        import_module(f"octavo.cli.{name}").register(app)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"octavo {version('octavo')}")
        raise typer.Exit


def _version(
    version: bool = typer.Option(False, "--version", help="Show the version.", callback=_show_version, is_eager=True),
) -> None:
    """Hold the options that come before a command."""


def main() -> None:
    """Run the command that sys.argv names."""
    # gRPC's own log repeats on standard error, in its words, what the commands say in theirs.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    try:
        build(command)()
    except CommandError as error:
        typer.echo(f"octavo: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
