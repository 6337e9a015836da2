"""octavo top: a running service at a glance, again and again."""

import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated

import grpc
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from octavo.cli.client import cancelled_by_ctrl_c
from octavo.cli.command import Command
from octavo.cli.connection import Connection, connected
from octavo.cli.connection_options import DEFAULT_ADDRESS, Address, ApiKey, TlsCa, TlsCert, TlsKey
from octavo.cli.top_figures import Figures, Snapshot, figures
from octavo.v1 import admin_pb2, admin_pb2_grpc

_TIMEOUT_S = 5.0
_WINDOW_S = 10.0
"""Rates and quantiles are of so much time, or of one interval if that is longer."""


def top(
    address: Address = DEFAULT_ADDRESS,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, max=60.0, help="Seconds between two looks.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, an interval apart, show that and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One line of JSON for each look, instead of a table.")
    ] = False,
    api_key: ApiKey = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Show queue, blocks, tokens a second, latencies and processes, until Ctrl-C.

    Rates and latencies are of the last ten seconds, quantiles as exact as the histograms of the metrics. Where the output is
    no terminal it is a plain table for each look.
    """
    with connected(address, api_key, tls_ca, tls_cert, tls_key) as connection:
        ended = threading.Event()
        with cancelled_by_ctrl_c(ended.set):
            try:
                _show(connection, _looks(connection, interval_s, once, ended), as_json)
            except grpc.RpcError as error:
                raise connection.failure(error) from error


def _looks(connection: Connection, interval_s: float, once: bool, ended: threading.Event) -> Iterator[Figures]:
    stub = admin_pb2_grpc.AdminServiceStub(connection.channel)
    kept: deque[Snapshot] = deque()
    while True:
        answer = stub.GetMetrics(admin_pb2.GetMetricsRequest(), timeout=_TIMEOUT_S, metadata=connection.metadata)
        now = Snapshot.read(answer.text, time.monotonic())
        while len(kept) > 1 and now.time_s - kept[1].time_s >= _WINDOW_S:
            kept.popleft()
        if kept:
            yield figures(kept[0], now)
            if once:
                return
        kept.append(now)
        if ended.wait(interval_s):
            return


def _show(connection: Connection, looks: Iterator[Figures], as_json: bool) -> None:
    if as_json:
        for look in looks:
            typer.echo(
                json.dumps({"time": datetime.now().astimezone().isoformat(timespec="seconds"), **look.as_dict()})
            )
        return
    console = Console()
    if not console.is_terminal:
        for look in looks:
            console.print(view(connection.address, look))
        return
    with Live(console=console, auto_refresh=False) as live:
        for look in looks:
            live.update(view(connection.address, look), refresh=True)


def view(address: str, look: Figures) -> RenderableType:
    """Return what is shown of one look; 80 columns are enough."""
    state = "" if look.scheduler_up else "   [the scheduler does not answer]"
    head = Text(f"{address}   {datetime.now():%H:%M:%S}{state}", style="bold", overflow="ellipsis", no_wrap=True)
    lines = Table.grid(padding=(0, 2))
    for name, text in (
        ("requests", f"{_n(look.running)} running, {_n(look.waiting)} waiting{_for(look.waiting_for)}"),
        ("ended", f"{_n(look.requests_per_s, 2)} /s well, {_n(look.aborts_per_s, 2)} /s cut or failed"),
        ("tokens", f"{_n(look.output_tokens_per_s, 1)} /s out, {_n(look.input_tokens_per_s, 1)} /s in"),
        ("first token", f"p50 {_ms(look.ttft_p50_s)}, p99 {_ms(look.ttft_p99_s)}; queue p99 {_ms(look.queue_p99_s)}"),
        ("next tokens", f"p50 {_ms(look.itl_p50_s)}, p99 {_ms(look.itl_p99_s)}"),
        ("blocks", f"{_n(look.blocks_used)} of {_n(look.blocks)} used; prefix cache {_n(look.hit_percent, 1)} % hits"),
        ("steps", f"{_n(look.steps_per_s, 1)} /s of {_n(look.tokens_per_step, 1)} tokens"),
        ("since start", f"{_n(look.preemptions)} preemptions, {_n(look.recomputed_tokens)} tokens recomputed, "),
        ("", f"worker sessions: {_n(look.worker_epochs)}"),
    ):
        lines.add_row(Text(name, style="dim"), Text(text.rstrip(", ")))
    processes = Table("process", box=None, header_style="dim")
    for column in ("MiB", "CPU %", "files"):
        processes.add_column(column, justify="right")
    for process in look.processes:
        mib = None if process.rss_bytes is None else process.rss_bytes / 2**20
        processes.add_row(process.name or process.role, _n(mib), _n(process.cpu_percent, 1), _n(process.files))
    return Group(head, lines, processes)


def _for(reason: str) -> str:
    return f" for {reason.replace('_', ' ')}" if reason else ""


def _n(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.0f} ms"


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(cls=Command)(top)
