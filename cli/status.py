"""octavo status: the processes of a running service, its queues and blocks."""

from typing import Annotated

import grpc
import typer
from google.protobuf import json_format
from rich.console import Console
from rich.table import Table

from octavo.cli.client import DEFAULT_ADDRESS, Address, failure
from octavo.cli.command import Command
from octavo.v1 import admin_pb2, admin_pb2_grpc

_TIMEOUT_S = 5.0


def status(
    address: Address = DEFAULT_ADDRESS,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print GetStatusResponse as JSON, epochs in decimal.")
    ] = False,
) -> None:
    """Show processes, queues and blocks. Exit status 1 if the service is not ready."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = admin_pb2_grpc.AdminServiceStub(channel).GetStatus(
                admin_pb2.GetStatusRequest(), timeout=_TIMEOUT_S
            )
        except grpc.RpcError as error:
            raise failure(address, error) from error
    if as_json:
        typer.echo(
            json_format.MessageToJson(
                answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
            )
        )
    else:
        _show(answer)
    if not answer.ready:
        raise typer.Exit(1)


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
        if held.waiting_reason:
            console.print(f"next waits for: {held.waiting_reason}", markup=False)
        console.print(f"prefix cache: {_cache_line(held)}")
        if held.failed_checks:
            console.print(
                f"[bold]the scheduler's state contradicted itself {held.failed_checks} times[/bold]: see its log"
            )


def _cache_line(held: admin_pb2.SchedulerStatus) -> str:
    """Say how much is cached, and what part of the prompts was found."""
    if not held.prefix_caching:
        return "off"
    if not held.prompt_tokens:
        return f"{held.cached_blocks} blocks, no prompt yet"
    percent = 100 * held.cached_prompt_tokens / held.prompt_tokens
    return f"{held.cached_blocks} blocks, {percent:.1f} % of {held.prompt_tokens} prompt tokens found"


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(cls=Command)(status)
