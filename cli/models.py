"""octavo models list | fetch | inspect: what is on disk, what it is, and whether it would run."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from octavo.cli.command import Command
from octavo.cli.errors import ConfigurationError
from octavo.cli.model_check import examine
from octavo.cli.model_needs import find_needs
from octavo.cli.model_report import architecture_of, megabytes, print_report, report_json
from octavo.cli.model_store import is_complete, locate, resolve
from octavo.cli.places import models_folder

Name = Annotated[str, typer.Argument(help="A hub name (owner/model), or 'demo'; a folder is there already.")]

app = typer.Typer(name="models", help="List, fetch and inspect models.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list", cls=Command)
def list_models() -> None:
    """List the fetched models."""
    store = models_folder()
    # What begins with a dot is not finished.
    found = sorted(path for path in store.glob("[!.]*") if is_complete(path))
    if not found:
        typer.echo(f"{store} holds no model; 'octavo models fetch demo' fetches one")
        return
    table = Table("model", "architecture", "size", box=None)
    for folder in found:
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        table.add_row(folder.name.replace("--", "/", 1), architecture_of(folder), megabytes(size))
    console = Console()
    console.print(table)
    console.print(f"in {store}", soft_wrap=True)


@app.command("fetch", cls=Command)
def fetch_model(name: Name) -> None:
    """Fetch a model, unless it is there, and print its folder."""
    typer.echo(str(resolve(name).source))


@app.command("inspect", cls=Command)
def inspect(
    name: Annotated[str, typer.Argument(help="A model folder, a GGUF file, or the name of a fetched model.")],
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", help="Tokens that memory is told for; default: the model's.", min=2)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Show what a model is, whether it would run and what memory it needs; reads headers, no weights."""
    try:
        model = locate(name)
    except ConfigurationError as error:
        if not as_json:
            raise
        typer.echo(json.dumps({"model": name, "runs": False, "problems": [str(error)]}))
        raise typer.Exit(1) from error
    found = examine(model)
    needs = None
    if found.config is not None and found.weights is not None:
        needs = find_needs(model, found.config, max_model_len or found.config.max_positions)
        if needs.problem is not None:
            found.problems.append(needs.problem)
    if as_json:
        typer.echo(json.dumps(report_json(model, found, needs), indent=2, ensure_ascii=False))
    else:
        print_report(model, found, needs)
    if found.problems:
        raise typer.Exit(1)


def register(parent: typer.Typer) -> None:
    """Add the commands of this module."""
    parent.add_typer(app)
