"""octavo bench serve: put a load on a running service, and say what its clients saw.

Over gRPC it measures Octavo; over HTTP any server of OpenAI's completions that takes token ids as prompts.
"""

import datetime
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from octavo.cli import bench_models, bench_report
from octavo.cli.bench_engine import say
from octavo.cli.bench_serve_job import DATASETS, RANDOM, Dataset, Job, Target
from octavo.cli.bench_serve_load import BUSY_PERCENT, lines, merge_failures, row_of, run_load
from octavo.cli.bench_signals import ending_in_order
from octavo.cli.command import Command
from octavo.cli.connection_options import DEFAULT_ADDRESS, Address, ApiKey, TlsCa, TlsCert, TlsKey
from octavo.cli.errors import CommandError, ConfigurationError

GENERATE_STREAM = "/octavo.v1.GenerationService/GenerateStream"
MAX_CLIENTS = 256
_PANEL_SERVER, _PANEL_LOAD, _PANEL_RESULT = "Server", "Load", "Result"
_CONCURRENT = ("decode", "serving")


class RequestsFailed(CommandError):
    """The load ran, and some of its requests failed."""


def _option(flag: str, words: str, panel: str = _PANEL_LOAD, **more: Any) -> Any:
    return typer.Option(flag, help=words, rich_help_panel=panel, **more)


def serve(
    context: typer.Context,
    address: Address = DEFAULT_ADDRESS,
    base_url: Annotated[
        str | None,
        _option("--base-url", "http://HOST:PORT or https://…: load this OpenAI server over HTTP.", _PANEL_SERVER),
    ] = None,
    endpoint: Annotated[str, _option("--endpoint", "Path below --base-url.", _PANEL_SERVER)] = "/v1/completions",
    model: Annotated[
        str | None,
        _option("--model", "Name that requests carry; default: the service's own, over gRPC.", _PANEL_SERVER),
    ] = None,
    vocab_size: Annotated[
        int | None,
        _option("--vocab-size", "Prompts have ids below it; default: asked over gRPC.", _PANEL_SERVER, min=1),
    ] = None,
    api_key: ApiKey = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    dataset_name: Annotated[str, _option("--dataset-name", f"One of {', '.join(DATASETS)}.")] = RANDOM,
    num_prompts: Annotated[
        int | None, _option("--num-prompts", "Requests; default: the dataset's, 1000 of random.", min=1)
    ] = None,
    random_input_len: Annotated[int, _option("--random-input-len", "Tokens of a random prompt.", min=1)] = 1024,
    random_output_len: Annotated[int, _option("--random-output-len", "Tokens of output.", min=1)] = 128,
    request_rate: Annotated[
        float, _option("--request-rate", "Requests a second, as a Poisson process; inf: all at once.")
    ] = math.inf,
    max_concurrency: Annotated[
        int | None, _option("--max-concurrency", "Requests under way at most: a closed loop.", min=1)
    ] = None,
    num_clients: Annotated[
        int | None,
        _option("--num-clients", "Client processes; default: the cores, at most 4.", min=1, max=MAX_CLIENTS),
    ] = None,
    num_connections: Annotated[
        int, _option("--num-connections", "Connections of each client over gRPC.", min=1, max=1024)
    ] = 8,
    num_warmups: Annotated[
        int,
        _option(
            "--num-warmups", "Requests of the load that come before, too, uncounted: cached ones afterwards.", min=0
        ),
    ] = 0,
    temperature: Annotated[float, _option("--temperature", "Of sampling.", min=0.0)] = 0.0,
    ignore_eos: Annotated[
        bool, _option("--ignore-eos/--no-ignore-eos", "Answers have exactly the asked length (not OpenAI's own field).")
    ] = True,
    seed: Annotated[int, _option("--seed", "Of random prompts and of arrivals.", min=0)] = 0,
    timeout: Annotated[float, _option("--timeout", "Seconds that a request may take.", min=0.001)] = 3600.0,
    label: Annotated[str | None, _option("--label", "Written into the row.", _PANEL_RESULT)] = None,
    output_json: Annotated[
        Path | None, _option("--output-json", "File that gets the row as a JSON line.", _PANEL_RESULT, dir_okay=False)
    ] = None,
    save_result: Annotated[
        bool, _option("--save-result", "Write the row to a file named by door, load and time.", _PANEL_RESULT)
    ] = False,
    result_dir: Annotated[Path, _option("--result-dir", "Folder for --save-result.", _PANEL_RESULT)] = Path(),
    result_filename: Annotated[
        str | None, _option("--result-filename", "Name for --save-result.", _PANEL_RESULT)
    ] = None,
    peers: Annotated[
        list[Path] | None,
        _option(
            "--peers",
            "File of other engines' rows, to be compared with (may be repeated).",
            _PANEL_RESULT,
            dir_okay=False,
        ),
    ] = None,
) -> None:
    """Load a running service and tell latencies, rates and errors. Exit status 1 if a request failed.

    Without --base-url it speaks gRPC to --address. --max-concurrency makes a closed loop, --request-rate a Poisson process
    (open loop); both together bound what is under way. Every answer is streamed. The prefix cache is not reset:
    'octavo cache reset' does it.
    """
    with ending_in_order():
        _serve(bench_report.with_paths(context.params))


def _serve(parameters: dict[str, Any]) -> None:
    rate = parameters["request_rate"]
    if not rate > 0:
        raise ConfigurationError(f"--request-rate {rate:g} must be above 0")
    peers = bench_report.read_rows(parameters["peers"] or ())
    target, vocab_size = _find_target(parameters)
    dataset = _dataset(parameters, vocab_size)
    workload = dataset.load()
    jobs = _jobs(parameters, target, dataset, len(workload.requests))
    path = _result_path(parameters, target)
    writer = bench_report.RowWriter(path)
    writer.common = bench_report.describe_client() | {"model": target.model or "default"}
    if parameters["label"]:
        writer.common["label"] = parameters["label"]
    say(f"{target.place}: {workload.name}: {workload.sizes}, from {len(jobs)} client processes")
    reports = run_load(jobs)
    writer.write(row_of(jobs[0], workload, reports))
    writer.close()
    _show(writer.rows[0], peers, parameters["peers"] or ())
    if path is not None:
        say(f"written to {path}")
    failures = merge_failures(reports)
    if failures:
        words = "; ".join(f"{failure.count} x {failure.kind}: {failure.example}" for failure in failures)
        number = sum(failure.count for failure in failures)
        raise RequestsFailed(f"{number} request{'s' if number > 1 else ''} failed: {words}")


def _jobs(parameters: dict[str, Any], target: Target, dataset: Dataset, num_requests: int) -> list[Job]:
    concurrency, rate = parameters["max_concurrency"], parameters["request_rate"]
    num_clients = min(parameters["num_clients"] or min(4, len(os.sched_getaffinity(0))), num_requests)
    num_clients = min(num_clients, concurrency or num_clients)
    num_warmups = parameters["num_warmups"]
    return [
        Job(
            target=target,
            dataset=dataset,
            client=client,
            num_clients=num_clients,
            parent_pid=os.getpid(),
            max_concurrency=concurrency,
            request_rate=None if math.isinf(rate) else rate,
            num_connections=min(parameters["num_connections"], -(-(concurrency or num_requests) // num_clients)),
            timeout_s=parameters["timeout"],
            ignore_eos=parameters["ignore_eos"],
            temperature=parameters["temperature"],
            seed=parameters["seed"],
            num_warmups=num_warmups // num_clients + (client < num_warmups % num_clients),
        )
        for client in range(num_clients)
    ]


def _dataset(parameters: dict[str, Any], vocab_size: int) -> Dataset:
    name, concurrency = parameters["dataset_name"], parameters["max_concurrency"]
    if name not in DATASETS:
        raise ConfigurationError(f"--dataset-name {name!r} is unknown; there are {', '.join(DATASETS)}")
    if name in _CONCURRENT and concurrency is None:
        raise ConfigurationError(f"--dataset-name {name} needs --max-concurrency: its requests are made for so many")
    if name == "decode" and parameters["num_prompts"] is not None:
        raise ConfigurationError("--num-prompts does not hold for decode, which has --max-concurrency requests")
    return Dataset(
        name=name,
        vocab_size=vocab_size,
        num_prompts=parameters["num_prompts"],
        input_len=parameters["random_input_len"],
        output_len=parameters["random_output_len"],
        max_concurrency=concurrency,
        seed=parameters["seed"],
    )


def _find_target(parameters: dict[str, Any]) -> tuple[Target, int]:
    """Return the server and the size of its vocabulary.

    Raises:
        ConfigurationError: the address makes no sense, or nobody says how large the vocabulary is.
        CommandError: the service does not answer.
    """
    base_url, model, vocab_size = parameters["base_url"], parameters["model"], parameters["vocab_size"]
    files = {name: parameters[name] and str(parameters[name]) for name in ("tls_ca", "tls_cert", "tls_key")}
    key = next(iter((parameters["api_key"] or "").split()), None)
    if base_url is None:
        from octavo.cli.bench_serve_model import ask_model  # gRPC is loaded for this command alone

        found = ask_model(parameters)
        size = vocab_size or found.vocab_size
        host, port, is_tls = _split_address(parameters["address"], 50051)
        is_tls = is_tls or any(files.values())
        return Target("grpc", host, port, GENERATE_STREAM, model or found.name, key, is_tls, **files), size
    host, port, is_tls = _split_address(base_url, None)
    if model is None:
        raise ConfigurationError("--base-url needs --model: the name under which the server has its model")
    size = vocab_size or bench_models.VOCABULARIES.get(model)
    if size is None:
        raise ConfigurationError("--base-url needs --vocab-size: a server of OpenAI's API does not tell it")
    return Target("http", host, port, parameters["endpoint"], model, key, is_tls, **files), size


def _split_address(address: str, default_port: int | None) -> tuple[str, int, bool]:
    """Return host, port and whether TLS is asked for."""
    words = f"{address} is no address (HOST:PORT, http://HOST:PORT or https://HOST:PORT)"
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        port = parts.port
    except ValueError as error:
        raise ConfigurationError(words) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise ConfigurationError(words)
    is_tls = parts.scheme == "https"
    return parts.hostname, port or default_port or (443 if is_tls else 80), is_tls


def _result_path(parameters: dict[str, Any], target: Target) -> Path | None:
    """Return where the row is written; None for nowhere."""
    if not parameters["save_result"]:
        path: Path | None = parameters["output_json"]
        return path
    if parameters["output_json"] is not None:
        raise ConfigurationError("--output-json and --save-result both name a file: give one")
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    rate, concurrency = parameters["request_rate"], parameters["max_concurrency"]
    load = f"{rate:g}qps" + (f"-concurrency{concurrency}" if concurrency else "")
    folder: Path = parameters["result_dir"]
    return folder / (parameters["result_filename"] or f"{target.door}-{load}-{now}.json")


def _show(row: bench_report.Row, peers: Iterable[bench_report.Row], files: Iterable[Path]) -> None:
    typer.echo("\n".join(lines(row)))
    if row["client_cpu_percent_max"] > BUSY_PERCENT:
        say(f"a client used {row['client_cpu_percent_max']} % of a core: the clients may be the limit (--num-clients)")
    if files:
        # Other engines have no gRPC door: what they do over HTTP is what both of ours are compared with.
        same = [{**peer, "bench": row["bench"]} for peer in peers if peer.get("bench") in ("http", row["bench"])]
        bench_report.print_table([row], same, files)


def register(parent: typer.Typer) -> None:
    """Add the command."""
    parent.command("serve", cls=Command)(serve)
