"""octavo status, drain and replace-scheduler: the processes of a running service, its queues and blocks, its end."""

import time
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated

import grpc
import typer
from google.protobuf import json_format
from rich.console import Console
from rich.table import Table

from octavo.cli.client import cancelled_by_ctrl_c
from octavo.cli.command import Command
from octavo.cli.connection import Connection, connected
from octavo.cli.connection_options import DEFAULT_ADDRESS, Address, ApiKey, TlsCa, TlsCert, TlsKey
from octavo.v1 import admin_pb2, admin_pb2_grpc

_TIMEOUT_S = 5.0


def status(
    address: Address = DEFAULT_ADDRESS,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print GetStatusResponse as JSON, epochs in decimal.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again whenever it changes; with --json one line each time.")
    ] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, max=60.0, help="Least seconds between two states of --watch.")
    ] = 1.0,
    api_key: ApiKey = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Show processes, queues and blocks. Exit status 1 if the service is not ready.

    --watch ends with Ctrl-C, or when the service has drained; the exit status is that of the last state.
    """
    is_ready = False
    with connected(address, api_key, tls_ca, tls_cert, tls_key) as connection:
        try:
            for answer in _watch(connection, interval_s) if watch else _get(connection):
                is_ready = answer.ready
                if as_json:
                    typer.echo(_json(answer, is_line=watch))
                else:
                    if watch:
                        typer.echo(f"--- {datetime.now():%H:%M:%S}")
                    _show(answer)
        except grpc.RpcError as error:
            raise connection.failure(error) from error
    if not is_ready:
        raise typer.Exit(1)


def drain(
    address: Address = DEFAULT_ADDRESS,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when the last request has ended, and say meanwhile what runs.")
    ] = False,
    api_key: ApiKey = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Make the service take no new requests; running ones go on to their end. Only a restart undoes it."""
    with connected(address, api_key, tls_ca, tls_cert, tls_key) as connection:
        stub = admin_pb2_grpc.AdminServiceStub(connection.channel)
        try:
            answer = stub.Drain(admin_pb2.DrainRequest(), timeout=_TIMEOUT_S, metadata=connection.metadata)
            typer.echo(f"the service drains; requests that have begun: {answer.running_requests}")
            if not wait:
                return
            states = {"draining"}
            for status in _watch(connection, 1.0):
                states = {process.state for process in status.processes if process.role == "frontend"}
                held = status.scheduler
                if held.running_requests or held.waiting_requests:
                    typer.echo(f"{held.running_requests} running, {held.waiting_requests} waiting")
            if states != {"drained"}:  # Ctrl-C
                raise typer.Exit(1)
            typer.echo("drained")
        except grpc.RpcError as error:
            raise connection.failure(error) from error


def replace_scheduler(
    address: Address = DEFAULT_ADDRESS,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the next scheduler is in session.")] = False,
    api_key: ApiKey = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Make the scheduler leave, so that whoever supervises starts the next one; requests pause and go on with it."""
    with connected(address, api_key, tls_ca, tls_cert, tls_key) as connection:
        stub = admin_pb2_grpc.AdminServiceStub(connection.channel)
        try:
            started, old = time.monotonic(), [_boot_ids(status, "scheduler") for status in _get(connection)]
            request = admin_pb2.ReplaceSchedulerRequest()
            answer = stub.ReplaceScheduler(request, timeout=_TIMEOUT_S, metadata=connection.metadata)
            typer.echo(f"the scheduler leaves; requests that have begun: {answer.running_requests}")
            if not wait:
                return
            for status in _watch(connection, 0.1):
                if (new := _boot_ids(status, "scheduler")) and new not in old and status.ready:
                    typer.echo(f"the next one is there after {time.monotonic() - started:.1f} s")
                    return
            raise typer.Exit(1)  # Ctrl-C
        except grpc.RpcError as error:
            raise connection.failure(error) from error


def _boot_ids(status: admin_pb2.GetStatusResponse, role: str) -> set[str]:
    return {process.boot_id for process in status.processes if process.role == role}


def _get(connection: Connection) -> Iterator[admin_pb2.GetStatusResponse]:
    stub = admin_pb2_grpc.AdminServiceStub(connection.channel)
    yield stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=_TIMEOUT_S, metadata=connection.metadata)


def _watch(connection: Connection, interval_s: float) -> Iterator[admin_pb2.GetStatusResponse]:
    request = admin_pb2.WatchStatusRequest()
    request.interval.FromMilliseconds(round(interval_s * 1000))
    call = admin_pb2_grpc.AdminServiceStub(connection.channel).WatchStatus(request, metadata=connection.metadata)
    with cancelled_by_ctrl_c(call.cancel):
        try:
            for message in call:
                yield message.status
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                raise


def _json(answer: admin_pb2.GetStatusResponse, is_line: bool) -> str:
    return json_format.MessageToJson(
        answer,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
        indent=None if is_line else 2,
    )


def _show(answer: admin_pb2.GetStatusResponse) -> None:
    console = Console(soft_wrap=True)
    state = "ready" if answer.ready else f"not ready: {answer.reason}"
    context = f", context {answer.max_model_len} tokens" if answer.max_model_len else ""
    console.print(f"{', '.join(answer.models)}: {state}{context}", markup=False)
    table = Table("role", "pid", "state", "epoch", "boot id", box=None)
    for process in answer.processes:
        epoch = f"{process.epoch:016x}" if process.epoch else "-"
        table.add_row(process.role, str(process.pid), process.state, epoch, process.boot_id)
    console.print(table)
    if answer.HasField("scheduler"):
        held = answer.scheduler
        console.print(
            f"requests: {held.running_requests} running, {held.waiting_requests} waiting; "
            f"blocks: {held.free_blocks} of {held.total_blocks} free (size {held.block_size}); "
            f"steps: {held.steps}; preemptions: {held.preemptions}, {held.recomputed_tokens} tokens recomputed"
        )
        if held.scheduling_policy:
            console.print(f"policy: {held.scheduling_policy}; at most {held.max_num_seqs} sequences run at once")
        if held.HasField("limits"):
            console.print(_limits_line(held))
        if held.waiting_reason:
            console.print(f"next waits for: {held.waiting_reason}", markup=False)
        console.print(f"prefix cache: {_cache_line(held)}")
        if held.failed_checks:
            console.print(
                f"[bold]the scheduler's state contradicted itself {held.failed_checks} times[/bold]: see its log"
            )


def _limits_line(held: admin_pb2.SchedulerStatus) -> str:
    """Say how much may wait, of all callers and of each."""
    limits = held.limits
    line = (
        f"queue: {held.waiting_tokens} tokens; at most {limits.max_waiting_requests} requests, "
        f"{limits.max_waiting_tokens} tokens"
    )
    of_each = []
    if limits.max_requests_per_caller:
        of_each.append(f"{limits.max_requests_per_caller} requests")
    if limits.max_waiting_tokens_per_caller:
        of_each.append(f"{limits.max_waiting_tokens_per_caller} waiting tokens")
    return f"{line}; of each caller {', '.join(of_each) if of_each else 'no limit'}"


def _cache_line(held: admin_pb2.SchedulerStatus) -> str:
    """Say how much is cached, and what part of the prompts was found."""
    if not held.prefix_caching:
        return "off"
    if not held.prompt_tokens:
        return f"{held.cached_blocks} blocks, no prompt yet"
    percent = 100 * held.cached_prompt_tokens / held.prompt_tokens
    return f"{held.cached_blocks} blocks, {percent:.1f} % of {held.prompt_tokens} prompt tokens found"


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command(cls=Command)(status)
    app.command(cls=Command)(drain)
    app.command("replace-scheduler", cls=Command)(replace_scheduler)
