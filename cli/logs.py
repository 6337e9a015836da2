"""Logging of every process: one line an event, on standard error, with the role."""

import logging

import typer

_LEVELS = ("debug", "info", "warning", "error")


def configure(role: str, level: str) -> None:
    """Set the log format and level of this process.

    Raises:
        typer.BadParameter: the level is unknown.
    """
    if level.lower() not in _LEVELS:
        raise typer.BadParameter(f"log level {level!r} is unknown; there are {', '.join(_LEVELS)}")
    logging.basicConfig(
        level=level.upper(), format=f"%(asctime)s {role:<10}%(levelname)s %(message)s", datefmt="%H:%M:%S", force=True
    )
