"""What `octavo serve` says once its service serves."""

import asyncio
import logging
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console

from octavo.cli.keys import Access
from octavo.cli.log_handler import write_all
from octavo.cli.supervisor import Supervisor
from octavo.v1 import admin_pb2, admin_pb2_grpc, generation_pb2

logger = logging.getLogger(__name__)

_CHANNEL_OPTIONS = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]


@dataclass(frozen=True)
class Announcement:
    """What is said once the service serves, but for what the service itself tells.

    Attributes:
        access: how it is reached.
        http: base address of the OpenAI-compatible API.
        num_frontends: that are to be ready.
        started: when its start began, by time.monotonic().
    """

    access: Access
    http: str
    num_frontends: int
    started: float


def http_address(host: str, port: int, access: Access) -> str:
    """Return the base address of the OpenAI-compatible API."""
    if not port:
        return "on a port that the system chose: the log names it"
    return f"{'http' if access.tls is None else 'https'}://{host}:{port}/v1"


async def announce(supervisor: Supervisor, announcement: Announcement) -> None:
    """Wait until the service serves, then say so on one screen."""
    access = announcement.access
    target = f"unix:{access.local_socket}" if access.local_socket else access.target
    metadata = (("authorization", f"Bearer {access.admin_key}"),) if access.admin_key else None
    async with grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        while True:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            try:
                async for answer in watch:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        break
                watch.cancel()
                status = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=5, metadata=metadata)
                if (
                    sum(p.role == "frontend" and p.state == "ready" for p in status.processes)
                    >= announcement.num_frontends
                ):
                    _print_summary(supervisor, announcement, status)
                    return
            except grpc.aio.AioRpcError as error:
                logger.debug("waiting for the frontend: %s", error.details())
            await asyncio.sleep(0.1)


def _print_summary(supervisor: Supervisor, announcement: Announcement, status: admin_pb2.GetStatusResponse) -> None:
    access, seconds = announcement.access, time.monotonic() - announcement.started
    target, flags = access.target, access.client_flags
    held = status.scheduler
    tokens = held.total_blocks * held.block_size
    request = json_format.MessageToJson(_example(), indent=None)
    rows = {
        "model": ", ".join(status.models),
        "gRPC": f"{target}, {access.words}",
        "HTTP": announcement.http,
        "context": f"{status.max_model_len} tokens",
        "KV cache": f"{held.total_blocks} blocks of {held.block_size} tokens ({tokens} tokens)",
        "processes": ", ".join(f"{name} {pid}" for name, pid in supervisor.pids.items()),
        "chat": f"{program()} chat --address {target}{flags}",
        "generate": f'{program()} generate --address {target}{flags} --temperature 0 "Once upon a time"',
        "grpcurl": f"grpcurl {access.grpcurl_flags} -d '{request}' {target} octavo.v1.GenerationService/GenerateStream",
    }
    # Lines, not a table: what is meant to be copied must not be folded.
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    with console.capture() as summary:
        console.print(f"\n[bold]Octavo is ready[/bold] after {seconds:.1f} s")
        for name, words in rows.items():
            console.print(f"  {name:<10}", end="")
            console.print(words, markup=False)
    try:
        write_all(sys.stderr, summary.get())
    except (OSError, ValueError) as error:
        logger.warning("the summary cannot be written: %s", error)


def program() -> str:
    """Return how the user can call octavo: by its name where a shell finds it, else by the path it was started with."""
    started = Path(sys.argv[0])
    if started.name != "octavo" or shutil.which("octavo") == str(started.absolute()):
        return "octavo"
    return os.path.relpath(started)


def _example() -> generation_pb2.GenerateStreamRequest:
    return generation_pb2.GenerateStreamRequest(
        input=generation_pb2.GenerationInput(
            text="Once upon a time",
            sampling=generation_pb2.SamplingParams(temperature=0),
            stopping=generation_pb2.StoppingParams(max_tokens=64),
        )
    )
