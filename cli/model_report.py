"""What is told of a model, for people and as JSON."""

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from octavo.cli.checkpoint import CheckpointFile
from octavo.cli.model_check import Examined
from octavo.cli.model_needs import MemoryNeed, Needs
from octavo.cli.model_store import Model
from octavo.frontend.model import ModelFiles
from octavo.worker.models.description import ModelConfig
from octavo.worker.quantization.methods import method_in_words

_CACHE_DTYPES = (("float32", 4), ("16 bits", 2), ("fp8", 1))


def print_report(model: Model, found: Examined, needs: Needs | None) -> None:
    """Write a table, and what keeps the model from running."""
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_row("folder" if model.gguf is None else "file", str(model.gguf or model.folder))
    if found.config is not None:
        _describe(table, found.config)
    else:
        table.add_row("architecture", architecture_of(model.folder))
    if found.weights is not None:
        _describe_files(table, found.weights, None if needs is None else needs.num_parameters)
    for need in needs.memory if needs is not None else ():
        _describe_need(table, need)
    if found.text is not None:
        _describe_text(table, found.text)
    Console().print(table, soft_wrap=True)
    for problem in found.problems:
        typer.echo(f"would not run: {problem}")
    if not found.problems and found.foreign is not None:
        known = "whether it runs is known once it is loaded"
        typer.echo(f"transformers would be tried: {found.foreign} is not described here; {known}")
    elif not found.problems:
        typer.echo("would run")


def report_json(model: Model, found: Examined, needs: Needs | None) -> dict[str, Any]:
    """Return the same as JSON values; parts that are missing, broken or not known are null."""
    return {
        "model": str(model.source),
        "runs": None if found.foreign is not None and not found.problems else not found.problems,
        "problems": found.problems,
        "architecture": architecture_of(model.folder),
        "config": None if found.config is None else _config_json(found.config),
        "num_parameters": None if needs is None else needs.num_parameters,
        "files": None if found.weights is None else [_file_json(file) for file in found.weights],
        "memory": None if needs is None else [need.as_json() for need in needs.memory],
        "text": None if found.text is None else _text_json(found.text),
    }


def _config_json(config: ModelConfig) -> dict[str, Any]:
    method = config.quantization
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_size": config.head_size,
        "max_positions": config.max_positions,
        "vocab_size": config.vocab_size,
        "tied_embeddings": config.tied_embeddings,
        "dtype": config.dtype,
        "quantization": method.get("quant_method") if isinstance(method, dict) else None,
    }


def _file_json(file: CheckpointFile) -> dict[str, Any]:
    return {
        "path": str(file.path),
        "num_bytes": file.num_bytes,
        "num_tensors": file.num_tensors,
        "num_elements": file.num_parameters,
        "dtypes": sorted(file.dtypes),
    }


def _text_json(files: ModelFiles) -> dict[str, Any]:
    template = files.chat_template
    return {
        "num_ids": files.tokenizer.num_ids,
        "eos_ids": list(files.eos_ids),
        "chat_template": template is not None,
        "tools": template is not None and template.reads_tools,
        "tool_call_parser": None if files.tool_dialect is None else files.tool_dialect.name,
        "reasoning_parser": files.reasoning,
    }


def _describe(table: Table, config: ModelConfig) -> None:
    table.add_row("architecture", config.architecture)
    table.add_row("layers", f"{config.num_layers}, hidden size {config.hidden_size}, MLP {config.layers[0].mlp.size}")
    table.add_row(
        "attention",
        f"{config.num_heads} heads of {config.head_size}, {config.num_kv_heads} for keys and values"
        f"{', norm of queries and keys' if config.qk_norm else ''}{_windows(config)}",
    )
    table.add_row("context", f"{config.max_positions} tokens (rotary embedding: {_rotary(config)})")
    table.add_row("vocabulary", f"{config.vocab_size}, {'tied' if config.tied_embeddings else 'untied'} embeddings")
    if config.quantization is not None:
        table.add_row("quantisation", method_in_words(config.quantization))
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_size
    table.add_row("KV cache", ", ".join(f"{per_token * size} bytes a token in {name}" for name, size in _CACHE_DTYPES))


def _windows(config: ModelConfig) -> str:
    sizes = sorted({layer.window for layer in config.layers if layer.window})
    if not sizes:
        return ""
    count = sum(layer.window > 0 for layer in config.layers)
    where = "all layers" if count == config.num_layers else f"{count} of the layers"
    return f", a window of {' or '.join(map(str, sizes))} tokens in {where}"


def _rotary(config: ModelConfig) -> str:
    return ", ".join(dict.fromkeys(rope.kind for rope in config.ropes)) or "none"


def _describe_files(table: Table, files: list[CheckpointFile], num_parameters: int | None) -> None:
    dtypes = sorted(set[str]().union(*(file.dtypes for file in files)))
    count = "unknown" if num_parameters is None else f"{num_parameters:,}"
    table.add_row("parameters", f"{count} as {', '.join(dtypes)} in {sum(f.num_tensors for f in files)} tensors")
    for file in files:
        table.add_row("file", f"{file.path.name}, {megabytes(file.num_bytes)}, {file.num_tensors} tensors")


def _describe_need(table: Table, need: MemoryNeed) -> None:
    beside = f", context and graphs {megabytes(need.reserved_bytes)}" if need.reserved_bytes else ""
    tokens = need.kv_cache_bytes // max(1, need.kv_cache_bytes_per_token)
    table.add_row(
        f"memory ({need.device})",
        f"{megabytes(need.total_bytes)} for one request of {tokens} tokens in {need.dtype}: weights "
        f"{megabytes(need.weight_bytes)}, KV cache {megabytes(need.kv_cache_bytes)}{beside}",
    )


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


def architecture_of(folder: Path) -> str:
    """Return what config.json says, whether it is supported or not."""
    try:
        names = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures")
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        return f"unknown ({error})"
    return ", ".join(map(str, names)) if isinstance(names, list) else f"unknown ({names!r})"


def megabytes(num_bytes: int) -> str:
    """Write a size."""
    return f"{num_bytes / 1e6:,.0f} MB"
