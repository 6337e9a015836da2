"""octavo serve: a whole service on one machine, supervised."""

import asyncio
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import typer

from octavo.cli import keys, logs, observing_options, options, places
from octavo.cli.command import Command
from octavo.cli.errors import ConfigurationError
from octavo.cli.keys import Access
from octavo.cli.model_check import require_servable
from octavo.cli.model_store import Model, resolve
from octavo.cli.places import (
    check_socket_paths,
    default_scheduler_address,
    metrics_folder,
    remove_left,
    runtime_folder,
)
from octavo.cli.ports import check_port, hold_port
from octavo.cli.summary import Announcement, announce, http_address
from octavo.cli.supervisor import STALL_TIMEOUT_S, ChildSpec, Supervisor
from octavo.wire.signals import has_controlling_terminal


def serve(
    model: options.ModelArgument,
    host: options.Host = "127.0.0.1",
    grpc_port: options.GrpcPort = 50051,
    http_port: options.HttpPort = 8000,
    num_frontends: options.NumFrontends = 1,
    served_model_name: options.ServedModelName = None,
    max_message_bytes: options.MaxMessageBytes = 16 * 2**20,
    grace: options.Grace = 30.0,
    api_key: options.ApiKey = None,
    api_key_file: options.ApiKeyFile = None,
    admin_api_key: options.AdminApiKey = None,
    share_prefix_cache: options.SharePrefixCache = False,
    tool_call_parser: options.ToolCallParser = "auto",
    reasoning_parser: options.ReasoningParser = "auto",
    generation_config: options.GenerationConfig = "auto",
    override_generation_config: options.OverrideGenerationConfig = "",
    enable_auto_tool_choice: options.EnableAutoToolChoice = True,
    ssl_certfile: options.SslCertfile = None,
    ssl_keyfile: options.SslKeyfile = None,
    ssl_ca_certs: options.SslCaCerts = None,
    device: options.Device = "auto",
    backend: options.Backend = "auto",
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = None,
    model_impl: options.ModelImpl = "auto",
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
    step_timeout: options.StepTimeout = None,
    recovery_timeout: options.RecoveryTimeout = 120.0,
    trace_plans: options.TracePlans = None,
    enable_prefix_caching: options.EnablePrefixCaching = True,
    block_size: options.BlockSize = 16,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    num_gpu_blocks_override: options.NumGpuBlocksOverride = None,
    kv_cache_memory_bytes: options.KvCacheMemoryBytes = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    access_log: observing_options.AccessLog = False,
    vllm_metric_names: observing_options.VllmMetricNames = False,
    stall_timeout: options.StallTimeout = STALL_TIMEOUT_S,
    scheduler_address: options.SchedulerAddress = None,
    curve_keys: options.CurveKeys = None,
    otlp_traces_endpoint: options.OtlpTracesEndpoint = None,
    log_level: options.LogLevel = "info",
    log_format: observing_options.LogFormat = "text",
    config: options.ConfigFile = None,
) -> None:
    """Serve a model: frontends, scheduler, worker, kept alive."""
    started = time.monotonic()
    logs.configure("serve", log_level, log_format)
    found = resolve(model)
    ports = _Ports(host, grpc_port, http_port, num_frontends)
    grpc_port, http_port = ports.grpc_port, ports.http_port
    require_servable(found, load_format, model_impl, quantization, max_model_len)
    access = _access(
        (api_key, api_key_file, admin_api_key), (ssl_certfile, ssl_keyfile, ssl_ca_certs), _reachable(host), grpc_port
    )
    address = scheduler_address or default_scheduler_address(f"scheduler-{grpc_port}")
    keys.check_curve(address, curve_keys)
    service = grpc_port or os.getpid()
    common = {
        "scheduler-address": address,
        "curve-keys": curve_keys,
        "log-level": log_level,
        "log-format": log_format,
        "otlp-traces-endpoint": otlp_traces_endpoint,
    }
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
            live_socket=places.live_socket(service, "s"),
        ),
        _child(
            "worker",
            found,
            common,
            {
                "device": device,
                "backend": backend,
                "dtype": dtype,
                "quantization": quantization,
                "model-impl": model_impl,
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
                "step-timeout": step_timeout,
            },
            live_socket=places.live_socket(service, "w"),
        ),
        *_frontends(
            num_frontends,
            ports,
            access,
            found,
            common,
            {
                "host": host,
                "served-model-name": served_model_name or list(found.names),
                "max-message-bytes": max_message_bytes,
                "grace": grace,
                "recovery-timeout": recovery_timeout,
                "access-log": access_log,
                "vllm-metric-names": vllm_metric_names,
                "api-key-file": api_key_file,
                "share-prefix-cache": share_prefix_cache,
                "tool-call-parser": tool_call_parser,
                "reasoning-parser": reasoning_parser,
                "generation-config": generation_config,
                "override-generation-config": override_generation_config or None,
                "enable-auto-tool-choice": enable_auto_tool_choice,
                "ssl-certfile": ssl_certfile,
                "ssl-keyfile": ssl_keyfile,
                "ssl-ca-certs": ssl_ca_certs,
            },
            keys.key_variables(api_key, admin_api_key),
        ),
    ]
    supervisor = Supervisor(
        children, grace_s=grace, stall_timeout_s=stall_timeout, ends_on_hangup=has_controlling_terminal()
    )
    announcement = Announcement(access, http_address(_reachable(host), http_port, access), num_frontends, started)
    try:
        sys.exit(asyncio.run(_run(supervisor, announcement)))
    finally:
        remove_left(grpc_port, filter(None, [access.local_socket, *(child.live_socket for child in children)]))
        ports.close()


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


class _Ports:
    """The ports of the service: looked at, and held where several frontends share them.

    Raises (on construction):
        ConfigurationError: one is taken, or the host is not ours.
    """

    def __init__(self, host: str, grpc_port: int, http_port: int, num_frontends: int) -> None:
        self.grpc_port, self.http_port = grpc_port, http_port
        self._holders: list[socket.socket] = []
        if num_frontends == 1:
            check_port(host, grpc_port)
            check_port(host, http_port)
            return
        try:
            self.grpc_port, self.http_port = self._hold(host, grpc_port), self._hold(host, http_port)
        except ConfigurationError:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the ports."""
        for holder in self._holders:
            holder.close()

    def _hold(self, host: str, port: int) -> int:
        holder = hold_port(host, port)
        self._holders.append(holder)
        found: int = holder.getsockname()[1]
        return found


def _frontends(
    number: int,
    ports: _Ports,
    access: Access,
    model: Model,
    common: Mapping[str, object],
    settings: dict[str, object],
    environment: Mapping[str, str],
) -> list[ChildSpec]:
    """Return the frontends; where there are several they share the ports, and have numbers."""
    folder = metrics_folder(ports.grpc_port) if number > 1 else None
    children = []
    for index in range(number):
        own = {
            "grpc-port": ports.grpc_port,
            "http-port": ports.http_port,
            "reuse-port": number > 1,
            "metrics-file": None if folder is None else folder / f"frontend-{index}.metrics",
            # We ask one of them; which one does not matter.
            "local-socket": access.local_socket or None if index == 0 else None,
        }
        path = places.live_socket(ports.grpc_port or os.getpid(), str(index))
        child = _child("frontend", model, common, {**settings, **own}, environment, path)
        children.append(replace(child, index=index if number > 1 else None))
    return children


def _child(
    role: str,
    model: Model,
    common: Mapping[str, object],
    settings: dict[str, object],
    environment: Mapping[str, str] = MappingProxyType({}),
    live_socket: str = "",
) -> ChildSpec:
    arguments = [str(model.source)]
    for name, value in {**settings, **common, "live-socket": live_socket}.items():
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
            continue
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            arguments += [f"--{name}", str(one)]
    return ChildSpec(role, tuple(arguments), environment, live_socket=live_socket)


def _reachable(host: str) -> str:
    """Return how a client on this machine writes the host in an address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host.strip("[]"), host.strip("[]"))
    return f"[{host}]" if ":" in host else host


async def _run(supervisor: Supervisor, announcement: Announcement) -> int:
    announcing = asyncio.create_task(announce(supervisor, announcement))
    try:
        return await supervisor.run()
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(cls=Command)(serve)
