"""What a frontend is told at its start; read once, never changed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.frontend.auth import Authenticator
from octavo.frontend.tls import TlsFiles
from octavo.frontend.tools.detect import AUTO, REASONING_PARSERS, TOOL_PARSERS
from octavo.wire.requests import MAX_REQUESTS_OF_FRONTEND


@dataclass(frozen=True)
class FrontendConfig:
    """Settings of one frontend process.

    Attributes:
        model_path: folder with tokenizer.json, config.json and, where the model has them, generation_config.json and a
            chat template.
        served_model_names: names under which clients ask for the model; the first is the default and is reported.
        address: where the scheduler listens (ipc:///folder/name or tcp://host:port).
        curve_keys: folder of the CURVE keys that tcp needs; None for ipc.
        host, grpc_port: where this frontend listens; port 0 lets the system choose one.
        http_port: where the HTTP door listens, on the same host; None: there is none.
        auth: the keys that open the services; without any, everybody may call.
        tls: certificate and key of this frontend; None: no TLS.
        local_socket: path of a Unix socket where the gRPC services are offered too, without TLS; '' for none. Its folder
            says who may connect; keys are needed as everywhere.
        private_socket: path of a Unix socket where this process alone answers /health, /ready and /metrics over HTTP; ''
            for none. Whoever keeps it alive asks there.
        health_port: the same on a port of the same host, without TLS; None for none, 0 lets the system choose one.
        tool_call_parser: how the model writes calls of tools, one of TOOL_PARSERS; auto: the chat template tells.
        reasoning_parser: how it writes what it thinks, one of REASONING_PARSERS; auto: the chat template tells.
        generation_config: whose defaults of sampling hold: auto (the model's), vllm (nobody's), or a folder with a
            generation_config.json.
        override_generation_config: values that win over these.
        metrics_file: where this frontend counts, in a folder with those of the frontends that it shares its ports with;
            None: it counts for itself.
        otlp_traces_endpoint: collector that is told of calls in spans; None: nobody is.
        vllm_metric_names: whether metrics that vLLM has too are told under its names as well.
        share_prefix_cache: whether callers with different keys find what the others have cached.
        reuse_port: whether several frontends share both ports (SO_REUSEPORT).
        max_message_bytes: largest request message; larger ones are RESOURCE_EXHAUSTED.
        max_unread_bytes: of all large requests that are being read at one time (or max_message_bytes, if that is more);
            more are RESOURCE_EXHAUSTED.
        max_n: most choices of a request.
        max_beam_width: most continuations that a beam search follows.
        max_logprobs: most log-probabilities beside the drawn one.
        max_stop_strings, max_stop_string_chars: number of stop strings of a request, and characters of each.
        max_stop_token_ids, max_logit_bias, max_allowed_token_ids: most entries of these lists.
        max_messages: most turns of a conversation.
        max_streams: requests in this frontend at one time; more are RESOURCE_EXHAUSTED.
        max_unsent_tokens: tokens of one stream that its client has not read yet; beyond it the client is too slow, and
            its stream ends RESOURCE_EXHAUSTED.
        grace_s: how long running requests may go on after SIGTERM.
        recovery_timeout_s: how long requests wait for a scheduler that is gone, before they end UNAVAILABLE and new
            ones are refused.
        unready_after_s: how long a pause may last until health says NOT_SERVING.
        status_timeout_s: how long GetStatus and ResetPrefixCache wait for the scheduler.
        num_tokenizer_threads: threads that tokenise and render.

    Raises:
        ValueError: a setting is out of its range.
    """

    model_path: Path
    served_model_names: tuple[str, ...]
    address: str
    curve_keys: Path | None = None
    host: str = "127.0.0.1"
    grpc_port: int = 50051
    http_port: int | None = None
    auth: Authenticator = field(default_factory=Authenticator, repr=False)
    tls: TlsFiles | None = None
    local_socket: str = ""
    private_socket: str = ""
    health_port: int | None = None
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    generation_config: str = AUTO
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    metrics_file: Path | None = None
    otlp_traces_endpoint: str | None = None
    vllm_metric_names: bool = False
    share_prefix_cache: bool = False
    reuse_port: bool = False
    max_message_bytes: int = 16 * 2**20
    max_unread_bytes: int = 256 * 2**20
    max_n: int = 128
    max_beam_width: int = 16
    max_logprobs: int = 20
    max_stop_strings: int = 16
    max_stop_string_chars: int = 1024
    max_stop_token_ids: int = 256
    max_logit_bias: int = 1024
    max_allowed_token_ids: int = 65536
    max_messages: int = 4096
    max_streams: int = MAX_REQUESTS_OF_FRONTEND
    max_unsent_tokens: int = 8192
    grace_s: float = 30.0
    recovery_timeout_s: float = 120.0
    unready_after_s: float = 10.0
    status_timeout_s: float = 2.0
    num_tokenizer_threads: int = 2

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise ValueError(
                f"served_model_names is {self.served_model_names!r}: at least one name is needed, none empty"
            )
        if not 0 <= self.grpc_port < 2**16:
            raise ValueError(f"grpc_port is {self.grpc_port}: it must be from 0 to 65535")
        for name in ("http_port", "health_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port < 2**16:
                raise ValueError(f"{name} is {port}: it must be from 0 to 65535")
        for name, known in (("tool_call_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}: it must be one of {', '.join(known)}")
        if self.max_streams > MAX_REQUESTS_OF_FRONTEND:
            raise ValueError(f"max_streams is {self.max_streams}: it must be at most {MAX_REQUESTS_OF_FRONTEND}")
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be positive")


_POSITIVE = (
    "max_message_bytes",
    "max_unread_bytes",
    "max_n",
    "max_beam_width",
    "max_streams",
    "max_unsent_tokens",
    "max_messages",
    "recovery_timeout_s",
    "unready_after_s",
    "status_timeout_s",
    "num_tokenizer_threads",
)
