"""octavo models list | fetch | inspect: what is on disk, what it is, and whether it would run."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from octavo.cli.checkpoint import CheckpointFile
from octavo.cli.command import Command
from octavo.cli.model_check import examine
from octavo.cli.model_store import is_complete, locate, resolve
from octavo.cli.places import models_folder
from octavo.frontend.model import ModelFiles
from octavo.worker.models.description import ModelConfig

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

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
        table.add_row(folder.name.replace("--", "/", 1), _architecture(folder), _megabytes(size))
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
) -> None:
    """Show what a model is and whether it would run; reads headers, no weights."""
    model = locate(name)
    folder, found = model.folder, examine(model)
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_row("folder" if model.gguf is None else "file", str(model.gguf or folder))
    if found.config is not None:
        _describe(table, found.config)
    else:
        table.add_row("architecture", _architecture(folder))
    if found.weights is not None:
        _describe_files(table, found.weights, found.config)
    if found.text is not None:
        _describe_text(table, found.text)
    Console().print(table, soft_wrap=True)
    for problem in found.problems:
        typer.echo(f"would not run: {problem}")
    if found.problems:
        raise typer.Exit(1)
    typer.echo("would run")


def _describe(table: Table, config: ModelConfig) -> None:
    table.add_row("architecture", config.architecture)
    table.add_row("layers", f"{config.num_layers}, hidden size {config.hidden_size}, MLP {config.layers[0].mlp.size}")
    table.add_row(
        "attention",
        f"{config.num_heads} heads of {config.head_size}, {config.num_kv_heads} for keys and values"
        f"{', norm of queries and keys' if config.qk_norm else ''}",
    )
    table.add_row("context", f"{config.max_positions} tokens (rotary embedding: {_rotary(config)})")
    table.add_row("vocabulary", f"{config.vocab_size}, {'tied' if config.tied_embeddings else 'untied'} embeddings")
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_size
    table.add_row("KV cache", ", ".join(f"{per_token * size} bytes a token in {name}" for name, size in _CACHE_DTYPES))


_CACHE_DTYPES = (("float32", 4), ("16 bits", 2), ("fp8", 1))


def _rotary(config: ModelConfig) -> str:
    return ", ".join(dict.fromkeys(rope.kind for rope in config.ropes)) or "none"


def _describe_files(table: Table, files: list[CheckpointFile], config: ModelConfig | None) -> None:
    parameters = sum(file.num_parameters for file in files)
    dtypes = sorted(set[str]().union(*(file.dtypes for file in files)))
    table.add_row("parameters", f"{parameters:,} as {', '.join(dtypes)} in {sum(f.num_tensors for f in files)} tensors")
    for file in files:
        table.add_row("file", f"{file.path.name}, {_megabytes(file.num_bytes)}, {file.num_tensors} tensors")
    needs = [f"{_megabytes(parameters * 4)} on the CPU (float32)"]
    if config is not None and _BYTES[config.dtype] != 4:
        needs.append(f"{_megabytes(parameters * _BYTES[config.dtype])} as {config.dtype}")
    table.add_row("memory", f"weights need {', '.join(needs)}")


def _describe_text(table: Table, files: ModelFiles) -> None:
    table.add_row("tokenizer", f"{files.tokenizer.num_ids} ids, end of sequence: {', '.join(map(str, files.eos_ids))}")
    template, dialect = files.chat_template, files.tool_dialect
    table.add_row("chat template", "yes" if template else "none: chat requests will be refused")
    if template is None or not template.reads_tools:
        tools = "no: the template does not show them, chats with tools are refused"
    elif dialect is None:
        tools = "the form of calls is not known: name it with --tool-call-parser"
    else:
        tools = f"yes (--tool-call-parser {dialect.name})"
    table.add_row("tools", tools)
    table.add_row("reasoning", f"yes (--reasoning-parser {files.reasoning})" if files.reasoning else "no")


def _architecture(folder: Path) -> str:
    """Return what config.json says, whether it is supported or not."""
    try:
        names = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures")
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        return f"unknown ({error})"
    return ", ".join(map(str, names)) if isinstance(names, list) else f"unknown ({names!r})"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"


def register(parent: typer.Typer) -> None:
    """Add the commands of this module."""
    parent.add_typer(app)
