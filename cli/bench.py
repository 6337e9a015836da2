"""octavo bench throughput | latency: measure the engine of this machine, as `octavo serve` would run it.

Scheduler and worker run in processes of their own; no frontend, no text and no network are in what is measured.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli import bench_engine, bench_models, bench_report, bench_suite, bench_workloads, options
from octavo.cli.bench_measure import Bench, Row
from octavo.cli.command import Command
from octavo.cli.errors import CommandError, ConfigurationError

_WORKLOAD = "Workload"

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
NumPrompts = Annotated[
    int | None,
    typer.Option("--num-prompts", help="Requests; default: the workload's.", min=1, rich_help_panel=_WORKLOAD),
]
InputLen = Annotated[int, typer.Option("--input-len", help="Tokens of a prompt.", min=1, rich_help_panel=_WORKLOAD)]
OutputLen = Annotated[int, typer.Option("--output-len", help="Tokens of output.", min=1, rich_help_panel=_WORKLOAD)]
WorkerArg = Annotated[
    list[str] | None,
    typer.Option("--worker-arg", help="Given to the worker as it is (may be repeated)."),
]

app = typer.Typer(name="bench", help="Measure the engine.", no_args_is_help=True, rich_markup_mode=None)


@app.command("throughput", cls=Command)
def throughput(
    context: typer.Context,
    model: BenchModel,
    workload: Annotated[
        str,
        typer.Option("--workload", help=f"One of {', '.join(bench_workloads.NAMES)}.", rich_help_panel=_WORKLOAD),
    ] = "sharegpt_like",
    num_prompts: NumPrompts = None,
    batch: Annotated[
        int,
        typer.Option("--batch", help="Requests at once, of workload decode.", min=1, rich_help_panel=_WORKLOAD),
    ] = 8,
    input_len: InputLen = 512,
    output_len: OutputLen = 128,
    concurrency: Annotated[
        int,
        typer.Option("--concurrency", help="Clients, of workload serving.", min=1, rich_help_panel=_WORKLOAD),
    ] = 8,
    repeat: Annotated[
        int | None, typer.Option("--repeat", help="Runs, the best of which counts.", min=1, rich_help_panel=_WORKLOAD)
    ] = None,
    output_json: OutputJson = None,
    peers: Peers = None,
    worker_arg: WorkerArg = None,
    device: options.Device = "auto",
    backend: options.Backend = "auto",
    dtype: options.Dtype = "auto",
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

    decode tells the time of a decode step; the other workloads tell rates. serving keeps so many clients busy.
    """
    full_names = {"decode": f"decode_b{batch}", "serving": f"serving_c{concurrency}"}
    if workload not in bench_workloads.NAMES:
        raise ConfigurationError(f"workload {workload!r} is unknown; there are {', '.join(bench_workloads.NAMES)}")
    sizes = bench_suite.Sizes(num_prompts, input_len, output_len, repeat)

    def measure(bench: Bench, vocab_size: int) -> Row:
        return bench_suite.measure(bench, vocab_size, full_names.get(workload, workload), sizes)

    _measure(context.params, measure)


@app.command("latency", cls=Command)
def latency(
    context: typer.Context,
    model: BenchModel,
    batch_size: Annotated[
        int, typer.Option("--batch-size", help="Requests at once.", min=1, rich_help_panel=_WORKLOAD)
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

    def measure(bench: Bench, vocab_size: int) -> Row:
        try:
            workload = bench_workloads.decode(vocab_size, batch_size, input_len, output_len)
        except bench_workloads.SmallVocabulary as error:
            raise CommandError(str(error)) from error
        return bench.latency(workload, num_iters)

    _measure(context.params, measure)


def _measure(parameters: dict[str, Any], measure: Callable[[Bench, int], Row]) -> None:
    """Start an engine, take one row, write and show it."""
    peers = bench_report.read_rows(parameters["peers"] or ())
    flags = {flag: parameters.get(flag.replace("-", "_")) for flag in bench_engine.FLAGS}
    model, worker_arguments = parameters["model"], tuple(parameters["worker_arg"] or ())
    writer = bench_report.RowWriter(parameters["output_json"])
    try:
        with (
            bench_engine.settings_for(model, flags, worker_arguments) as settings,
            bench_engine.running_engine(settings) as engine,
        ):
            writer.common = bench_report.describe(model, settings, engine)
            writer.write({"bench": "engine"})
            writer.write(measure(Bench(engine.client), engine.facts.vocab_size))
    finally:
        writer.close()
    bench_report.print_table(writer.rows, peers)


def register(parent: typer.Typer) -> None:
    """Add the commands of this module."""
    parent.add_typer(app)
