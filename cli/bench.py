"""octavo bench throughput | latency: measure the engine of this machine, as `octavo serve` would run it.

Scheduler and worker run in processes of their own; no frontend, no text and no network are in what is measured.
`octavo bench serve`, which loads a running service, has modules of its own.
"""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli import bench_engine, bench_models, bench_report, bench_serve, bench_suite, bench_workloads, options
from octavo.cli.bench_measure import Bench, Row
from octavo.cli.bench_signals import ending_in_order
from octavo.cli.bench_suite import DEFAULT_REPEATS, OFFLINE_REPEATS, TAKEN_BY
from octavo.cli.command import Command
from octavo.cli.errors import ConfigurationError

_WORKLOAD = "Workload"
_BATCH = 8
_CONCURRENCY = 8
_MOST_AT_ONCE = 999_999
"""Of requests or clients: names of workloads have six digits for them."""


def _size(flag: str, words: str, default: str) -> Any:
    """Return an option of the workloads that it holds for; its default is None, so that one that is given is known."""
    return typer.Option(
        f"--{flag}",
        help=f"{words} Of {', '.join(TAKEN_BY[flag])}.",
        min=1,
        max=_MOST_AT_ONCE if flag in ("batch", "concurrency") else None,
        show_default=default,
        rich_help_panel=_WORKLOAD,
    )


_REPEATS = ", ".join(f"{number} of {name}" for name, number in OFFLINE_REPEATS.items()) + f", else {DEFAULT_REPEATS}"

BenchModel = Annotated[
    str,
    typer.Argument(
        help="A model folder, a hub name (owner/model), 'demo', or a shape that is run with random weights: "
        f"{', '.join(bench_models.CONFIGS)}."
    ),
]
OutputJson = Annotated[
    Path | None,
    typer.Option("--output-json", help="File that gets one JSON line a row, as they come.", dir_okay=False),
]
Peers = Annotated[
    list[Path] | None,
    typer.Option("--peers", help="File of other engines' rows, to be compared with (may be repeated).", dir_okay=False),
]
InputLen = Annotated[int, typer.Option("--input-len", help="Tokens of a prompt.", min=1, rich_help_panel=_WORKLOAD)]
OutputLen = Annotated[int, typer.Option("--output-len", help="Tokens of output.", min=1, rich_help_panel=_WORKLOAD)]
WorkerArg = Annotated[
    list[str] | None,
    typer.Option("--worker-arg", help="Given to the worker as it is (may be repeated)."),
]

app = typer.Typer(
    name="bench", help="Measure the engine, or a running service.", no_args_is_help=True, rich_markup_mode=None
)


@app.command("throughput", cls=Command)
def throughput(
    context: typer.Context,
    model: BenchModel,
    workload: Annotated[
        str,
        typer.Option("--workload", help=f"One of {', '.join(bench_workloads.NAMES)}.", rich_help_panel=_WORKLOAD),
    ] = "sharegpt_like",
    num_prompts: Annotated[int | None, _size("num-prompts", "Requests.", "the workload's")] = None,
    batch: Annotated[int | None, _size("batch", "Requests at once.", str(_BATCH))] = None,
    input_len: Annotated[int | None, _size("input-len", "Tokens of a prompt.", "the workload's")] = None,
    output_len: Annotated[int | None, _size("output-len", "Tokens of output.", "the workload's")] = None,
    concurrency: Annotated[int | None, _size("concurrency", "Clients.", str(_CONCURRENCY))] = None,
    repeat: Annotated[int | None, _size("repeat", "Runs, the best of which counts.", _REPEATS)] = None,
    output_json: OutputJson = None,
    peers: Peers = None,
    worker_arg: WorkerArg = None,
    device: options.Device = "auto",
    backend: options.Backend = "auto",
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = None,
    model_impl: options.ModelImpl = "auto",
    load_format: options.LoadFormat = "auto",
    enforce_eager: options.EnforceEager = False,
    batch_invariant: options.BatchInvariant = False,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    enable_prefix_caching: options.EnablePrefixCaching = True,
    block_size: options.BlockSize = 16,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    num_gpu_blocks_override: options.NumGpuBlocksOverride = None,
    kv_cache_memory_bytes: options.KvCacheMemoryBytes = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    num_threads: options.NumThreads = None,
    seed: options.Seed = 0,
) -> None:
    """Run a workload whose requests all come at once, and say how many tokens a second it took.

    decode tells the time of a decode step; the other workloads tell rates. serving keeps so many clients busy. Flags for
    sizes that do not hold for the workload are refused.
    """
    if workload not in bench_workloads.NAMES:
        raise ConfigurationError(f"workload {workload!r} is unknown; there are {', '.join(bench_workloads.NAMES)}")
    sizes = bench_suite.Sizes(num_prompts, input_len, output_len, repeat)
    numbers = {"batch": batch, "concurrency": concurrency}
    given = sizes.flags | {flag: number for flag, number in numbers.items() if number is not None}
    bench_suite.check_flags(given, [workload])
    full_names = {"decode": f"decode_b{batch or _BATCH}", "serving": f"serving_c{concurrency or _CONCURRENCY}"}
    name = full_names.get(workload, workload)

    def check(max_model_len: int | None) -> None:
        bench_suite.check_lengths([name], sizes, max_model_len)

    def measure(bench: Bench, vocab_size: int) -> Row:
        return bench_suite.measure(bench, vocab_size, name, sizes)

    _measure(bench_report.with_paths(context.params), check, measure, with_rates=True)


@app.command("latency", cls=Command)
def latency(
    context: typer.Context,
    model: BenchModel,
    batch_size: Annotated[
        int,
        typer.Option("--batch-size", help="Requests at once.", min=1, max=_MOST_AT_ONCE, rich_help_panel=_WORKLOAD),
    ] = 8,
    input_len: InputLen = 512,
    output_len: OutputLen = 128,
    num_iters: Annotated[int, typer.Option("--num-iters", help="Timed runs.", min=1, rich_help_panel=_WORKLOAD)] = 10,
    output_json: OutputJson = None,
    peers: Peers = None,
    worker_arg: WorkerArg = None,
    device: options.Device = "auto",
    backend: options.Backend = "auto",
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = None,
    model_impl: options.ModelImpl = "auto",
    load_format: options.LoadFormat = "auto",
    enforce_eager: options.EnforceEager = False,
    batch_invariant: options.BatchInvariant = False,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    enable_prefix_caching: options.EnablePrefixCaching = True,
    block_size: options.BlockSize = 16,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    num_gpu_blocks_override: options.NumGpuBlocksOverride = None,
    kv_cache_memory_bytes: options.KvCacheMemoryBytes = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    num_threads: options.NumThreads = None,
    seed: options.Seed = 0,
) -> None:
    """Run one batch from its first request to its last token, several times, with nothing cached."""
    sizes = bench_suite.Sizes(num_prompt_tokens=input_len, num_output_tokens=output_len)
    name = f"decode_b{batch_size}"

    def check(max_model_len: int | None) -> None:
        bench_suite.check_lengths([name], sizes, max_model_len)

    def measure(bench: Bench, vocab_size: int) -> Row:
        workload = bench_suite.make(name, vocab_size, sizes)
        with bench_suite.timed(f"latency_b{batch_size}", workload):
            return bench.latency(workload, num_iters)

    _measure(bench_report.with_paths(context.params), check, measure)


def _measure(
    parameters: Mapping[str, Any],
    check: Callable[[int | None], None],
    measure: Callable[[Bench, int], Row],
    *,
    with_rates: bool = False,
) -> None:
    """Start an engine, take one row, write and show it; a signal ends all of it in order.

    Args:
        parameters: of the command.
        check: called with the most tokens of a request where they are known, before anything is started.
        measure: called with what measures and the size of the vocabulary.
        with_rates: show the tokens a second in any case.
    """
    with ending_in_order():
        _take_row(parameters, check, measure, with_rates)


def _take_row(
    parameters: Mapping[str, Any],
    check: Callable[[int | None], None],
    measure: Callable[[Bench, int], Row],
    with_rates: bool,
) -> None:
    peers = bench_report.read_rows(parameters["peers"] or ())
    flags = {flag: parameters.get(flag.replace("-", "_")) for flag in bench_engine.FLAGS}
    model, worker_arguments = parameters["model"], tuple(parameters["worker_arg"] or ())
    with bench_engine.settings_for(model, flags, worker_arguments) as settings:
        check(bench_engine.known_max_model_len(settings))
        with (
            contextlib.closing(bench_report.RowWriter(parameters["output_json"])) as writer,
            bench_engine.running_engine(settings) as engine,
        ):
            writer.common = bench_report.describe(model, settings, engine)
            writer.write({"bench": "engine"})
            writer.write(measure(Bench(engine.client), engine.facts.vocab_size))
    bench_report.print_table(writer.rows, peers, parameters["peers"] or (), with_rates=with_rates)


def register(parent: typer.Typer) -> None:
    """Add the commands of this module."""
    bench_serve.register(app)
    parent.add_typer(app)
