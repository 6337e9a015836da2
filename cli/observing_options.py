"""Options about what can be seen of a process from outside: numbers and lines."""

from typing import Annotated, Literal

from octavo.cli.options import option

_PANEL = "Observing"

MetricsHost = Annotated[str, option("--metrics-host", _PANEL, "Address of --metrics-port.")]
MetricsPort = Annotated[
    int | None,
    option(
        "--metrics-port",
        _PANEL,
        "Port where this process alone answers /metrics, without keys; default: none, since frontends tell of it.",
        min=0,
        max=65535,
    ),
]
VllmMetricNames = Annotated[
    bool,
    option(
        "--vllm-metric-names/--no-vllm-metric-names",
        _PANEL,
        "Tell metrics that vLLM has too under its names as well.",
    ),
]
LogFormatName = Literal["text", "json"]
LogFormat = Annotated[
    LogFormatName,
    option("--log-format", _PANEL, "text, or json: an object a line with ts, level, process, pid, fields."),
]
AccessLog = Annotated[
    bool,
    option(
        "--access-log/--no-access-log",
        _PANEL,
        "Log a line for each call at its end: method, status, tokens, times; never text.",
    ),
]
