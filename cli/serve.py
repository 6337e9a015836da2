"""octavo serve: a whole service on one machine, supervised."""

import asyncio
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import grpc
import typer
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console

from octavo.cli import keys, logs, options
from octavo.cli.command import Command
from octavo.cli.errors import ConfigurationError
from octavo.cli.keys import Access
from octavo.cli.model_check import require_servable
from octavo.cli.model_store import Model, resolve
from octavo.cli.places import check_socket_paths, default_scheduler_address, runtime_folder
from octavo.cli.supervisor import ChildSpec, Supervisor
from octavo.v1 import admin_pb2, admin_pb2_grpc, generation_pb2

logger = logging.getLogger(__name__)

_CHANNEL_OPTIONS = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]


def serve(
    model: options.ModelArgument,
    host: options.Host = "127.0.0.1",
    grpc_port: options.GrpcPort = 50051,
    http_port: options.HttpPort = 8000,
    served_model_name: options.ServedModelName = None,
    max_message_bytes: options.MaxMessageBytes = 16 * 2**20,
    grace: options.Grace = 30.0,
    api_key: options.ApiKey = None,
    api_key_file: options.ApiKeyFile = None,
    admin_api_key: options.AdminApiKey = None,
    share_prefix_cache: options.SharePrefixCache = False,
    ssl_certfile: options.SslCertfile = None,
    ssl_keyfile: options.SslKeyfile = None,
    ssl_ca_certs: options.SslCaCerts = None,
    device: options.Device = "auto",
    backend: options.Backend = "auto",
    dtype: options.Dtype = "auto",
    load_format: options.LoadFormat = "auto",
    enforce_eager: options.EnforceEager = False,
    batch_invariant: options.BatchInvariant = False,
    num_threads: options.NumThreads = None,
    seed: options.Seed = 0,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    long_prefill_token_threshold: options.LongPrefillTokenThreshold = 0,
    scheduling_policy: options.SchedulingPolicy = "fcfs",
    max_waiting_requests: options.MaxWaitingRequests = 1024,
    max_waiting_tokens: options.MaxWaitingTokens = 4 * 2**20,
    max_requests_per_caller: options.MaxRequestsPerCaller = 0,
    max_waiting_tokens_per_caller: options.MaxWaitingTokensPerCaller = 0,
    max_preemptions: options.MaxPreemptions = 3,
    step_timeout: options.StepTimeout = 300.0,
    recovery_timeout: options.RecoveryTimeout = 120.0,
    trace_plans: options.TracePlans = None,
    enable_prefix_caching: options.EnablePrefixCaching = True,
    block_size: options.BlockSize = 16,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    num_gpu_blocks_override: options.NumGpuBlocksOverride = None,
    kv_cache_memory_bytes: options.KvCacheMemoryBytes = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    scheduler_address: options.SchedulerAddress = None,
    curve_keys: options.CurveKeys = None,
    log_level: options.LogLevel = "info",
    config: options.ConfigFile = None,
) -> None:
    """Serve a model: frontend, scheduler, worker, kept alive."""
    started = time.monotonic()
    logs.configure("serve", log_level)
    found = resolve(model)
    _check_port(host, grpc_port)
    _check_port(host, http_port)
    require_servable(found.folder, with_weights=load_format != "dummy")
    access = _access(
        (api_key, api_key_file, admin_api_key), (ssl_certfile, ssl_keyfile, ssl_ca_certs), _reachable(host), grpc_port
    )
    address = scheduler_address or default_scheduler_address(f"scheduler-{grpc_port}")
    keys.check_curve(address, curve_keys)
    common = {"scheduler-address": address, "curve-keys": curve_keys, "log-level": log_level}
    children = [
        _child(
            "scheduler",
            found,
            common,
            {
                "max-model-len": max_model_len,
                "long-prefill-token-threshold": long_prefill_token_threshold,
                "scheduling-policy": scheduling_policy,
                "max-waiting-requests": max_waiting_requests,
                "max-waiting-tokens": max_waiting_tokens,
                "max-requests-per-caller": max_requests_per_caller,
                "max-waiting-tokens-per-caller": max_waiting_tokens_per_caller,
                "max-preemptions": max_preemptions,
                "enable-prefix-caching": enable_prefix_caching,
                "step-timeout": step_timeout,
                "recovery-timeout": recovery_timeout,
                "trace-plans": trace_plans,
            },
        ),
        _child(
            "worker",
            found,
            common,
            {
                "device": device,
                "backend": backend,
                "dtype": dtype,
                "load-format": load_format,
                "enforce-eager": enforce_eager,
                "batch-invariant": batch_invariant,
                "num-threads": num_threads,
                "seed": seed,
                "max-model-len": max_model_len,
                "max-num-seqs": max_num_seqs,
                "max-num-batched-tokens": max_num_batched_tokens,
                "block-size": block_size,
                "gpu-memory-utilization": gpu_memory_utilization,
                "num-gpu-blocks-override": num_gpu_blocks_override,
                "kv-cache-memory-bytes": kv_cache_memory_bytes,
                "kv-cache-dtype": kv_cache_dtype,
            },
        ),
        _child(
            "frontend",
            found,
            common,
            {
                "host": host,
                "grpc-port": grpc_port,
                "http-port": http_port,
                "served-model-name": served_model_name or list(found.names),
                "max-message-bytes": max_message_bytes,
                "grace": grace,
                "recovery-timeout": recovery_timeout,
                "api-key-file": api_key_file,
                "share-prefix-cache": share_prefix_cache,
                "ssl-certfile": ssl_certfile,
                "ssl-keyfile": ssl_keyfile,
                "ssl-ca-certs": ssl_ca_certs,
                "local-socket": access.local_socket or None,
            },
            keys.key_variables(api_key, admin_api_key),
        ),
    ]
    supervisor = Supervisor(children, grace_s=grace)
    http = _http_address(_reachable(host), http_port, access)
    sys.exit(asyncio.run(_run(supervisor, access, http, started)))


def _access(
    keys_from: tuple[list[str] | None, Path | None, list[str] | None],
    tls_from: tuple[Path | None, Path | None, Path | None],
    host: str,
    port: int,
) -> Access:
    """Return how the service is reached, once its keys and certificates have been checked.

    With TLS we ask over a socket of our own: the certificate may be for another name, and we have none for mutual TLS.

    Raises:
        ConfigurationError: they cannot be used.
    """
    auth, tls = keys.load_auth(*keys_from), keys.load_tls(*tls_from)
    local_socket = ""
    if tls is not None:
        folder = runtime_folder()
        check_socket_paths(folder)
        local_socket = str(folder / f"frontend-{port}")
    return Access(
        target=f"{host}:{port}",
        admin_key=keys.admin_key(*keys_from),
        needs_key=auth.needs_key,
        tls=tls,
        local_socket=local_socket,
    )


def _child(
    role: str,
    model: Model,
    common: Mapping[str, object],
    settings: dict[str, object],
    environment: Mapping[str, str] = MappingProxyType({}),
) -> ChildSpec:
    arguments = [str(model.folder)]
    for name, value in {**settings, **common}.items():
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
            continue
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            arguments += [f"--{name}", str(one)]
    return ChildSpec(role, tuple(arguments), environment)


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def _reachable(host: str) -> str:
    """Return how a client on this machine writes the host in an address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host.strip("[]"), host.strip("[]"))
    return f"[{host}]" if ":" in host else host


def _http_address(host: str, port: int, access: Access) -> str:
    """Return the base address of the OpenAI-compatible API."""
    if not port:
        return "on a port that the system chose: the log names it"
    return f"{'http' if access.tls is None else 'https'}://{host}:{port}/v1"


async def _run(supervisor: Supervisor, access: Access, http: str, started: float) -> int:
    announcing = asyncio.create_task(_announce(supervisor, access, http, started))
    try:
        return await supervisor.run()
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)


async def _announce(supervisor: Supervisor, access: Access, http: str, started: float) -> None:
    """Wait until the service serves, then say so on one screen."""
    target = f"unix:{access.local_socket}" if access.local_socket else access.target
    metadata = (("authorization", f"Bearer {access.admin_key}"),) if access.admin_key else None
    async with grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS) as channel:
        while True:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            try:
                async for answer in watch:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        status = await admin_pb2_grpc.AdminServiceStub(channel).GetStatus(
                            admin_pb2.GetStatusRequest(), timeout=5, metadata=metadata
                        )
                        _print_summary(supervisor, access, http, status, time.monotonic() - started)
                        return
            except grpc.aio.AioRpcError as error:
                logger.debug("waiting for the frontend: %s", error.details())
                await asyncio.sleep(0.1)


def _print_summary(
    supervisor: Supervisor, access: Access, http: str, status: admin_pb2.GetStatusResponse, seconds: float
) -> None:
    target, flags = access.target, access.client_flags
    held = status.scheduler
    tokens = held.total_blocks * held.block_size
    request = json_format.MessageToJson(_example(), indent=None)
    rows = {
        "model": ", ".join(status.models),
        "gRPC": f"{target}, {access.words}",
        "HTTP": http,
        "context": f"{status.max_model_len} tokens",
        "KV cache": f"{held.total_blocks} blocks of {held.block_size} tokens ({tokens} tokens)",
        "processes": ", ".join(f"{role} {pid}" for role, pid in supervisor.pids.items()),
        "chat": f"{_program()} chat --address {target}{flags}",
        "generate": f'{_program()} generate --address {target}{flags} --temperature 0 "Once upon a time"',
        "grpcurl": f"grpcurl {access.grpcurl_flags} -d '{request}' {target} octavo.v1.GenerationService/GenerateStream",
    }
    # Lines, not a table: what is meant to be copied must not be folded.
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"\n[bold]Octavo is ready[/bold] after {seconds:.1f} s")
    for name, words in rows.items():
        console.print(f"  {name:<10}", end="")
        console.print(words, markup=False)


def _program() -> str:
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


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(cls=Command)(serve)
