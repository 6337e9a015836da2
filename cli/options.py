"""Options that several commands share. Each can also come from OCTAVO_<NAME> or from the --config file.

The command line wins over the environment, the environment over the file, the file over the default.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from octavo.cli.config_file import read_config_file
from octavo.cli.errors import ConfigurationError
from octavo.scheduler.policy import POLICIES
from octavo.wire.tracing import TracingError, traces_url

MAX_FRONTENDS = 64


def option(flag: str, panel: str, words: str, **more: Any) -> Any:
    """Describe an option with its environment variable and its place in --help."""
    name = flag.removeprefix("--").split("/")[0].replace("-", "_")
    return typer.Option(flag, envvar=f"OCTAVO_{name.upper()}", help=words, rich_help_panel=panel, **more)


def _config_callback(context: typer.Context, path: Path | None) -> Path | None:
    return read_config_file(context, path)


def _share(value: float) -> float:
    if not 0.0 < value <= 1.0:
        raise typer.BadParameter(f"{value} must be above 0 and at most 1")
    return value


def _positive(what: type[int] | type[float]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value is not None and not what(value) > 0:
            raise typer.BadParameter(f"{value} must be above 0")
        return value

    return check


def _policies() -> str:
    """Say what each policy does, in the first clause of its own words."""
    clauses = {name: (policy.__doc__ or "").partition("\n")[0] for name, policy in POLICIES.items()}
    return " ".join(f"{name}: {clause.partition(';')[0].rstrip('.')}." for name, clause in clauses.items())


def _traces_endpoint(value: str | None) -> str | None:
    if value is not None:
        try:
            traces_url(value)
        except TracingError as error:
            raise ConfigurationError(f"--otlp-traces-endpoint: {error}") from error
    return value


def _override(value: str) -> str:
    from octavo.frontend.generation_config import parse_override  # the frontend's modules are not loaded for --help
    from octavo.frontend.tokenizer import ModelFilesError

    try:
        parse_override(value)
    except ModelFilesError as error:
        raise ConfigurationError(str(error)) from error
    return value


_LISTEN, _MODEL, _LIMITS, _MEMORY = "Listening", "Model", "Scheduling", "Memory"
_ACCESS = "Keys and TLS"
_PROCESS = "Process"

ModelArgument = Annotated[
    str, typer.Argument(help="A model folder, a GGUF file, a hub name (owner/model), or 'demo'.", envvar="OCTAVO_MODEL")
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML file of options; flags and variables win.",
        callback=_config_callback,
        is_eager=True,
        dir_okay=False,
    ),
]
Host = Annotated[str, option("--host", _LISTEN, "Address to listen on.")]
GrpcPort = Annotated[int, option("--grpc-port", _LISTEN, "Port of the gRPC service.", min=0, max=65535)]
HttpPort = Annotated[int, option("--http-port", _LISTEN, "Port of the OpenAI-compatible API.", min=0, max=65535)]
NumFrontends = Annotated[
    int,
    option(
        "--num-frontends",
        _LISTEN,
        "Frontend processes, which share both ports; connections are spread over them.",
        min=1,
        max=MAX_FRONTENDS,
    ),
]
ReusePort = Annotated[
    bool,
    option(
        "--reuse-port/--no-reuse-port",
        _LISTEN,
        "Share both ports with other frontends of this machine and user that say so too. Nobody then notices that a port "
        "is taken.",
    ),
]
HealthPort = Annotated[
    int | None,
    option(
        "--health-port",
        _LISTEN,
        "Port where this process alone answers /health, /ready and /metrics, without TLS: for whoever keeps it alive, where "
        "it shares the others.",
        min=0,
        max=65535,
    ),
]
StallTimeout = Annotated[
    float,
    option(
        "--stall-timeout",
        _PROCESS,
        "Seconds without an answer until a process is killed and started again.",
        callback=_positive(float),
    ),
]
ServedModelName = Annotated[
    list[str] | None,
    option("--served-model-name", _LISTEN, "Names that clients ask for, the default first (may be repeated)."),
]
MaxMessageBytes = Annotated[
    int, option("--max-message-bytes", _LISTEN, "Largest request message.", min=1024, max=2**30)
]
Grace = Annotated[
    float, option("--grace", _LISTEN, "Seconds that running streams get after SIGTERM.", callback=_positive(float))
]
ApiKey = Annotated[
    list[str] | None,
    option(
        "--api-key",
        _ACCESS,
        "A key that clients must send (may be repeated; several in the variable are separated by spaces). Others on "
        "this machine can read a command line: prefer the variable or the file.",
        show_default=False,
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    option("--api-key-file", _ACCESS, "File of such keys, one a line, that others cannot read.", dir_okay=False),
]
AdminApiKey = Annotated[
    list[str] | None,
    option(
        "--admin-api-key",
        _ACCESS,
        "A key that the administration needs (may be repeated); default: any key. It opens all else as well.",
        show_default=False,
    ),
]
SharePrefixCache = Annotated[
    bool,
    option(
        "--share-prefix-cache/--no-share-prefix-cache",
        _ACCESS,
        "Holders of different keys find each other's cached prefixes, which tells them by the time what others asked.",
    ),
]
SslCertfile = Annotated[
    Path | None, option("--ssl-certfile", _ACCESS, "PEM file of the certificate chain; turns TLS on.", dir_okay=False)
]
SslKeyfile = Annotated[
    Path | None, option("--ssl-keyfile", _ACCESS, "PEM file of its private key, without a password.", dir_okay=False)
]
SslCaCerts = Annotated[
    Path | None,
    option(
        "--ssl-ca-certs",
        _ACCESS,
        "PEM file of authorities: clients need a certificate of theirs (mutual TLS).",
        dir_okay=False,
    ),
]
DeviceName = Literal["auto", "cpu", "cuda"]
BackendName = Literal["auto", "cpu", "reference", "triton"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormatName = Literal["auto", "safetensors", "gguf", "dummy"]
ModelImplName = Literal["auto", "octavo", "transformers"]
KvCacheDtypeName = Literal["auto", "fp8"]
QuantizationName = Literal["auto-round", "awq", "compressed-tensors", "fp8", "gptq", "int8", "squeezellm"]
if TYPE_CHECKING:
    PolicyName = str
else:
    PolicyName = Literal[tuple(POLICIES)]
ToolParserName = Literal["auto", "hermes", "llama3_json", "mistral", "pythonic", "none"]
ReasoningParserName = Literal["auto", "deepseek_r1", "qwen3", "none"]
LevelName = Literal["debug", "info", "warning", "error"]

Device = Annotated[DeviceName, option("--device", _MODEL, "auto: a CUDA device where there is one, else the CPU.")]
Backend = Annotated[
    BackendName,
    option(
        "--backend",
        _MODEL,
        "Kernels: cpu and triton (CUDA) are fast, the ids of reference do not depend on the batch; auto: cpu, on CUDA "
        "triton.",
    ),
]
Dtype = Annotated[
    DtypeName, option("--dtype", _MODEL, "Of weights and activations; auto: float32, on CUDA the checkpoint's.")
]
Quantization = Annotated[
    QuantizationName | None,
    option(
        "--quantization",
        _MODEL,
        "How weights are quantised; default: as config.json says. int8 and fp8 quantise plain weights on load.",
    ),
]
ModelImpl = Annotated[
    ModelImplName,
    option(
        "--model-impl",
        _MODEL,
        "Whose code computes the model: octavo, or transformers with our paged attention, slower and without CUDA graphs; "
        "auto: octavo where it knows the architecture.",
    ),
]
LoadFormat = Annotated[LoadFormatName, option("--load-format", _MODEL, "auto: what is there; dummy: random weights.")]
EnforceEager = Annotated[
    bool,
    option("--enforce-eager/--no-enforce-eager", _MODEL, "Launch every kernel by itself: no CUDA graphs."),
]
BatchInvariant = Annotated[
    bool,
    option(
        "--batch-invariant/--no-batch-invariant",
        _MODEL,
        "The bits of an answer do not depend on what runs beside it; slower. Backend reference is always so.",
    ),
]
ToolCallParser = Annotated[
    ToolParserName,
    option("--tool-call-parser", _MODEL, "How the model writes calls of tools; auto: its chat template tells."),
]
ReasoningParser = Annotated[
    ReasoningParserName,
    option("--reasoning-parser", _MODEL, "How the model writes what it thinks; auto: its chat template tells."),
]
GenerationConfig = Annotated[
    str,
    option(
        "--generation-config",
        _MODEL,
        "What unset sampling parameters mean. auto: the model's generation_config.json; vllm: neutral values; else a folder "
        "with such a file.",
    ),
]
OverrideGenerationConfig = Annotated[
    str,
    option(
        "--override-generation-config",
        _MODEL,
        "Values that win over these, as JSON: '{\"temperature\": 0.2}'.",
        callback=_override,
        show_default=False,
    ),
]
EnableAutoToolChoice = Annotated[
    bool,
    option(
        "--enable-auto-tool-choice/--no-enable-auto-tool-choice",
        _MODEL,
        "Chats with tools are taken; off: those alone that must not call any.",
    ),
]
NumThreads = Annotated[int | None, option("--num-threads", _MODEL, "Threads of the worker; default: all cores.", min=1)]
Seed = Annotated[int, option("--seed", _MODEL, "Seed of dummy weights.")]
MaxModelLen = Annotated[
    int | None,
    option("--max-model-len", _LIMITS, "Most tokens of prompt and output; default: what model and pool allow.", min=2),
]
MaxNumSeqs = Annotated[
    int | None,
    option("--max-num-seqs", _LIMITS, "Most sequences that run at once; default: 64, on CUDA 256.", min=1),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    option("--max-num-batched-tokens", _LIMITS, "Most tokens of a step; default: 512, on CUDA 8192.", min=1),
]
LongPrefillTokenThreshold = Annotated[
    int,
    option(
        "--long-prefill-token-threshold", _LIMITS, "Most prompt tokens of one sequence in a step; 0: no cap.", min=0
    ),
]
SchedulingPolicy = Annotated[
    PolicyName,
    option(
        "--scheduling-policy",
        _LIMITS,
        f"Who runs first. {_policies()}",
    ),
]
MaxWaitingRequests = Annotated[
    int, option("--max-waiting-requests", _LIMITS, "Bound of the queue, in requests.", min=1)
]
MaxWaitingTokens = Annotated[
    int,
    option(
        "--max-waiting-tokens",
        _LIMITS,
        "Bound of the queue, in prompt tokens times choices; a single request may exceed it when none waits.",
        min=1,
    ),
]
MaxRequestsPerCaller = Annotated[
    int,
    option(
        "--max-requests-per-caller",
        _LIMITS,
        "Requests that one caller (key, else address) may have at once; 0: no limit.",
        min=0,
    ),
]
MaxWaitingTokensPerCaller = Annotated[
    int,
    option(
        "--max-waiting-tokens-per-caller",
        _LIMITS,
        "Prompt tokens times choices that one caller (key, else address) may have waiting; a single request may exceed it when "
        "none of the caller's waits; 0: no limit.",
        min=0,
    ),
]
MaxPreemptions = Annotated[
    int,
    option(
        "--max-preemptions",
        _LIMITS,
        "Times that a sequence may lose its blocks; then it comes back with all that it can need.",
        min=0,
    ),
]
StepTimeout = Annotated[
    float | None,
    option(
        "--step-timeout",
        _LIMITS,
        "Seconds without a finished step until a worker is lost (default: 60 on a GPU, 300 on a CPU).",
        callback=_positive(float),
        show_default=False,
    ),
]
RecoveryTimeout = Annotated[
    float,
    option("--recovery-timeout", _LIMITS, "Seconds that requests wait for a lost process.", callback=_positive(float)),
]
TracePlans = Annotated[
    Path | None, option("--trace-plans", _LIMITS, "File that gets one JSON line a plan and a result.", dir_okay=False)
]
BlockSize = Annotated[int, option("--block-size", _MEMORY, "Tokens in a block.", min=1, max=1024)]
EnablePrefixCaching = Annotated[
    bool,
    option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        _MEMORY,
        "Share and find again blocks with equal prefixes.",
    ),
]
GpuMemoryUtilization = Annotated[
    float,
    option(
        "--gpu-memory-utilization",
        _MEMORY,
        "Share of a CUDA device's memory that the worker takes, weights and KV cache together; what other processes "
        "have there does not change it.",
        callback=_share,
    ),
]
NumGpuBlocksOverride = Annotated[
    int | None,
    option("--num-gpu-blocks-override", _MEMORY, "Blocks of the KV cache, whatever memory that takes.", min=2),
]
KvCacheMemoryBytes = Annotated[
    int | None,
    option(
        "--kv-cache-memory-bytes",
        _MEMORY,
        "Bytes of the KV cache; default: 1 GiB, on CUDA what --gpu-memory-utilization leaves.",
        min=1,
    ),
]
KvCacheDtype = Annotated[
    KvCacheDtypeName,
    option(
        "--kv-cache-dtype",
        _MEMORY,
        "auto: as --dtype; fp8: 8 bits a number (backend triton, compute capability 8.9 or higher).",
    ),
]
SchedulerAddress = Annotated[
    str | None,
    option("--scheduler-address", _PROCESS, "ipc:///folder/name or tcp://host:port; default: in the runtime folder."),
]
CurveKeys = Annotated[
    Path | None,
    option(
        "--curve-keys",
        _PROCESS,
        "Folder of the keys with which the processes know each other over tcp ('octavo keys' makes them).",
        file_okay=False,
    ),
]
LogLevel = Annotated[LevelName, option("--log-level", _PROCESS, "Least level of what is logged.")]
LiveSocket = Annotated[
    str,
    option(
        "--live-socket",
        _PROCESS,
        "Path of a Unix socket where this process tells whether it is alive ('octavo live' asks), for whoever keeps it so.",
    ),
]
OtlpTracesEndpoint = Annotated[
    str | None,
    option(
        "--otlp-traces-endpoint",
        _PROCESS,
        "Collector that is told of each request in spans, by OTLP over HTTP: http://HOST:4318. Needs octavo[otel]; OTEL_* "
        "variables say the rest.",
        callback=_traces_endpoint,
    ),
]
ExitWithParent = Annotated[int | None, typer.Option("--exit-with-parent", hidden=True)]
LocalSocket = Annotated[str, typer.Option("--local-socket", hidden=True)]
MetricsFile = Annotated[Path | None, typer.Option("--metrics-file", hidden=True)]
