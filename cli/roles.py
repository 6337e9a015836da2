"""octavo frontend | scheduler | worker: one process each, as compose or an operator starts them."""

import os
import sys

import typer

from octavo.cli import logs, observing_options, options, parent
from octavo.cli.command import Command
from octavo.cli.errors import ConfigurationError
from octavo.cli.model_store import Model, resolve
from octavo.cli.places import default_scheduler_address
from octavo.wire import failpoints
from octavo.wire.live import LiveAnswers, Progress
from octavo.wire.signals import end_at_once_until_ready

TURN_LIMIT_S = 60.0
"""How long one turn of the scheduler's loop may take; it takes milliseconds."""


def frontend(
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
    tool_call_parser: options.ToolCallParser = "auto",
    reasoning_parser: options.ReasoningParser = "auto",
    generation_config: options.GenerationConfig = "auto",
    override_generation_config: options.OverrideGenerationConfig = "",
    enable_auto_tool_choice: options.EnableAutoToolChoice = True,
    ssl_certfile: options.SslCertfile = None,
    ssl_keyfile: options.SslKeyfile = None,
    ssl_ca_certs: options.SslCaCerts = None,
    recovery_timeout: options.RecoveryTimeout = 120.0,
    access_log: observing_options.AccessLog = False,
    vllm_metric_names: observing_options.VllmMetricNames = False,
    scheduler_address: options.SchedulerAddress = None,
    curve_keys: options.CurveKeys = None,
    otlp_traces_endpoint: options.OtlpTracesEndpoint = None,
    log_level: options.LogLevel = "info",
    log_format: observing_options.LogFormat = "text",
    config: options.ConfigFile = None,
    reuse_port: options.ReusePort = False,
    health_port: options.HealthPort = None,
    local_socket: options.LocalSocket = "",
    live_socket: options.LiveSocket = "",
    metrics_file: options.MetricsFile = None,
    exit_with_parent: options.ExitWithParent = None,
) -> None:
    """Run a frontend: gRPC and HTTP services, tokenizer, streams."""
    _begin("frontend", log_level, log_format, exit_with_parent, access_log)
    from octavo.cli import keys
    from octavo.frontend.config import FrontendConfig
    from octavo.frontend.generation_config import parse_override
    from octavo.frontend.main import run

    found = resolve(model)
    sys.exit(
        run(
            FrontendConfig(
                model_path=found.folder,
                served_model_names=tuple(served_model_name or found.names),
                address=scheduler_address or default_scheduler_address(),
                curve_keys=curve_keys,
                host=host,
                grpc_port=grpc_port,
                http_port=http_port,
                auth=keys.load_auth(api_key, api_key_file, admin_api_key),
                tls=keys.load_tls(ssl_certfile, ssl_keyfile, ssl_ca_certs),
                local_socket=local_socket,
                private_socket=live_socket,
                metrics_file=metrics_file,
                vllm_metric_names=vllm_metric_names,
                health_port=health_port,
                reuse_port=reuse_port,
                share_prefix_cache=share_prefix_cache,
                tool_call_parser=tool_call_parser if enable_auto_tool_choice else "none",
                reasoning_parser=reasoning_parser,
                generation_config=generation_config,
                override_generation_config=parse_override(override_generation_config),
                max_message_bytes=max_message_bytes,
                grace_s=grace,
                recovery_timeout_s=recovery_timeout,
                otlp_traces_endpoint=otlp_traces_endpoint,
            )
        )
    )


def scheduler(
    model: options.ModelArgument,
    max_model_len: options.MaxModelLen = None,
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
    served_model_name: options.ServedModelName = None,
    metrics_host: observing_options.MetricsHost = "127.0.0.1",
    metrics_port: observing_options.MetricsPort = None,
    scheduler_address: options.SchedulerAddress = None,
    curve_keys: options.CurveKeys = None,
    live_socket: options.LiveSocket = "",
    otlp_traces_endpoint: options.OtlpTracesEndpoint = None,
    log_level: options.LogLevel = "info",
    log_format: observing_options.LogFormat = "text",
    config: options.ConfigFile = None,
    exit_with_parent: options.ExitWithParent = None,
) -> None:
    """Run the scheduler: request queues, block tables, plans."""
    _begin("scheduler", log_level, log_format, exit_with_parent)
    from octavo.scheduler.config import SchedulerConfig
    from octavo.scheduler.main import run
    from octavo.wire.model_digest import model_digest

    progress = Progress(TURN_LIMIT_S)
    with _watched("scheduler", progress, live_socket):
        found = _found(model, progress)
        code = run(
            SchedulerConfig(
                address=scheduler_address or default_scheduler_address(),
                curve_keys=curve_keys,
                config_digest=model_digest(found.folder),
                max_model_len=max_model_len,
                long_prefill_token_threshold=long_prefill_token_threshold,
                scheduling_policy=scheduling_policy,
                max_waiting_requests=max_waiting_requests,
                max_waiting_tokens=max_waiting_tokens,
                max_requests_per_caller=max_requests_per_caller,
                max_waiting_tokens_per_caller=max_waiting_tokens_per_caller,
                max_preemptions=max_preemptions,
                enable_prefix_caching=enable_prefix_caching,
                step_timeout_s=step_timeout,
                recovery_timeout_s=recovery_timeout,
                trace_plans=trace_plans,
                model_name=(served_model_name or found.names)[0],
                metrics_host=metrics_host,
                metrics_port=metrics_port,
                otlp_traces_endpoint=otlp_traces_endpoint,
            ),
            progress,
        )
    sys.exit(code)


def worker(
    model: options.ModelArgument,
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
    block_size: options.BlockSize = 16,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    num_gpu_blocks_override: options.NumGpuBlocksOverride = None,
    kv_cache_memory_bytes: options.KvCacheMemoryBytes = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    num_threads: options.NumThreads = None,
    seed: options.Seed = 0,
    step_timeout: options.StepTimeout = None,
    served_model_name: options.ServedModelName = None,
    metrics_host: observing_options.MetricsHost = "127.0.0.1",
    metrics_port: observing_options.MetricsPort = None,
    scheduler_address: options.SchedulerAddress = None,
    curve_keys: options.CurveKeys = None,
    live_socket: options.LiveSocket = "",
    otlp_traces_endpoint: options.OtlpTracesEndpoint = None,
    log_level: options.LogLevel = "info",
    log_format: observing_options.LogFormat = "text",
    config: options.ConfigFile = None,
    exit_with_parent: options.ExitWithParent = None,
) -> None:
    """Run a worker: weights, KV cache, forward passes, sampling."""
    _begin("worker", log_level, log_format, exit_with_parent)
    progress = Progress()
    with _watched("worker", progress, live_socket):  # what is imported here takes seconds, from a slow disk minutes
        from octavo.worker.config import WorkerConfig
        from octavo.worker.main import run

        found = _found(model, progress)
        code = run(
            WorkerConfig(
                model_path=found.folder,
                gguf=found.gguf,
                address=scheduler_address or default_scheduler_address(),
                curve_keys=curve_keys,
                device=device,
                backend=backend,
                dtype=dtype,
                block_size=block_size,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                gpu_memory_utilization=gpu_memory_utilization,
                num_gpu_blocks_override=num_gpu_blocks_override,
                kv_cache_memory_bytes=kv_cache_memory_bytes,
                kv_cache_dtype=kv_cache_dtype,
                enforce_eager=enforce_eager,
                batch_invariant=batch_invariant,
                quantization=quantization,
                model_impl=model_impl,
                load_format=load_format,
                num_threads=num_threads,
                seed=seed,
                model_name=(served_model_name or found.names)[0],
                metrics_host=metrics_host,
                metrics_port=metrics_port,
                otlp_traces_endpoint=otlp_traces_endpoint,
                step_timeout_s=step_timeout,
            ),
            progress,
        )
    sys.exit(code)


def _found(model: str, progress: Progress) -> Model:
    """Return a model's folder and names; where the model must be fetched first, that takes as long as it takes."""
    progress.rest()
    found = resolve(model)
    progress.move()
    return found


def _watched(role: str, progress: Progress, path: str) -> LiveAnswers:
    try:
        return LiveAnswers(role, progress, path)
    except OSError as error:
        raise ConfigurationError(f"cannot answer at --live-socket {path}: {error.strerror or error}") from error


def _begin(role: str, log_level: str, log_format: str, parent_pid: int | None, access_log: bool = False) -> None:
    end_at_once_until_ready()
    logs.configure(role, log_level, log_format, access_log)
    try:
        failpoints.arm(os.environ.get(failpoints.VARIABLE, ""))
    except failpoints.FaultSpecError as error:
        raise ConfigurationError(str(error)) from error
    if parent_pid is not None:
        parent.exit_with_parent(parent_pid)


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    for command in (frontend, scheduler, worker):
        app.command(cls=Command)(command)
