"""How every command shows its help and refuses a value: in plain lines that no terminal cuts.

Typer's own tables shorten what does not fit into a column; at 80 columns those are the names of long flags.
"""

import os
from typing import Any

import typer
from typer.core import TyperCommand

FROM_FILE = "octavo.cli.from_file"
"""Key in a context's meta: by parameter, where the --config file gives its value, in words."""


class Command(TyperCommand):
    """A command with one section of help for each panel of options, that names the source of a refused value."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, each panel under its own heading."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            heading = "Arguments" if parameter.param_type_name == "argument" else "Options"
            panel = getattr(parameter, "rich_help_panel", None)
            sections.setdefault(panel or heading, []).append(record)
        first = [heading for heading in ("Arguments", "Options") if heading in sections]
        for heading in (*first, *(heading for heading in sections if heading not in first)):
            with formatter.section(heading):
                formatter.write_dl(sections[heading])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as Typer does; a refusal says where the value came from, and what it is.

        Raises:
            typer.BadParameter: a value is refused.
        """
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            _explain(ctx, error)
            raise


def _explain(ctx: Any, error: typer.BadParameter) -> None:
    """Name file or variable instead of the flag where the value is from there, and the value itself."""
    error.message = error.message.removeprefix("Value error, ")
    parameter = error.param
    if parameter is None or parameter.name is None:
        return
    source = ctx.get_parameter_source(parameter.name)
    if source is None:
        return
    if source.name == "DEFAULT_MAP":
        error.param_hint = ctx.meta.get(FROM_FILE, {}).get(parameter.name)
        value = ctx.default_map[parameter.name]
    elif source.name == "ENVIRONMENT":
        error.param_hint = f"environment variable {parameter.envvar}"
        value = os.environ.get(str(parameter.envvar))
    else:
        error.param_hint = f"'{parameter.opts[0]}'" if parameter.param_type_name == "option" else None
        return
    if not error.message.startswith((str(value), repr(value))):
        error.message = f"{value!r}: {error.message}"
