"""The YAML file of --config: its values are the defaults of a command."""

from pathlib import Path
from typing import Any

import typer
import yaml

from octavo.cli.command import FROM_FILE

MAX_CONFIG_BYTES = 2**20
_NOT_IN_FILES = ("config", "help", "exit_with_parent")


def read_config_file(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the defaults of the command.

    Raises:
        typer.BadParameter: the file cannot be read, is no mapping, or names an option that the command does not have.
            Values are checked later, and only where neither flag nor variable takes their place.
    """
    if path is None:
        return None
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise typer.BadParameter(f"{path} has {path.stat().st_size} bytes, limit {MAX_CONFIG_BYTES}")
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be read: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise typer.BadParameter(f"{path} cannot be read: {line}{error.problem}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise typer.BadParameter(f"{path} holds no mapping of options")
    # Names in files are written as flags are, or with underscores; parameters are matched by their Python name.
    known = {p.opts[0].removeprefix("--").replace("-", "_"): p for p in context.command.params}
    defaults: dict[str, Any] = {}
    places: dict[str, str] = {}
    for key, value in values.items():
        parameter = known.get(str(key).replace("-", "_"))
        if parameter is None or parameter.name in (None, *_NOT_IN_FILES):
            raise typer.BadParameter(
                f"{path} names {key!r}, which {context.command.name} does not have{_instead(str(key), known)}"
            )
        many = parameter.multiple and not isinstance(value, list)
        defaults[str(parameter.name)] = [value] if many else value
        places[str(parameter.name)] = f"'{key}' in {path}"
    context.meta[FROM_FILE] = places
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def _instead(key: str, known: dict[str, Any]) -> str:
    """Say how a switch is turned off in a file, where the key is the flag that does so."""
    positive = key.replace("-", "_").removeprefix("no_")
    if positive != key.replace("-", "_") and positive in known and known[positive].secondary_opts:
        return f"; write '{positive.replace('_', '-')}: false'"
    return ""
