"""What a frontend counts; the rows of several frontends are added cell by cell."""

from collections.abc import Iterator

import grpc

from octavo.v1 import admin_pb2, generation_pb2, model_pb2, tokenizer_pb2
from octavo.wire.metrics import Layout
from octavo.wire.requests import FinishReason

OTHER = "other"

GRPC_METHODS = (
    *(
        f"{service.full_name}/{method}"
        for module in (generation_pb2, model_pb2, tokenizer_pb2, admin_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods_by_name
    ),
    OTHER,
)
GRPC_CODES = tuple(code.name for code in grpc.StatusCode)
HTTP_ROUTES = (
    "/health",
    "/ready",
    "/version",
    "/metrics",
    "/v1/models",
    "/v1/models/{model}",
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
    OTHER,
)
HTTP_CLIENT_GONE = 499
"""Not sent to anybody: the client closed its connection before its answer was whole."""
HTTP_CODES = ("200", "400", "401", "404", "405", "408", "413", "415", "422", "429", "499", "500", "503", "504", OTHER)
ABORTS = ("cancelled", "deadline", "slow_reader", "unavailable", "failed")

SECONDS = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
    640.0,
    2560.0,
)
"""Upper bounds of the buckets of what a request waits for."""

TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0),
    2.5,
    5.0,
    10.0,
    40.0,
)
"""Of what a token takes."""


class FrontendLayout(Layout):
    """The first two cells are PID and STARTED_AT."""

    PID, STARTED_AT = 0, 1

    def __init__(self) -> None:
        super().__init__(num_reserved=2)


def _calls() -> Iterator[tuple[str, str, str]]:
    """Yield door, method and status of every kind of call."""
    for method in GRPC_METHODS:
        yield from (("grpc", method, code) for code in GRPC_CODES)
    for route in HTTP_ROUTES:
        yield from (("http", route, code) for code in HTTP_CODES)


LAYOUT = FrontendLayout()
REQUESTS = LAYOUT.table(
    "requests",
    "Calls that have ended, by door, method and status.",
    ("door", "method", "code"),
    tuple(_calls()),
)
PROMPT_TOKENS = LAYOUT.counter("prompt_tokens", "Prompt tokens of requests that have begun.")
CACHED_TOKENS = LAYOUT.counter("prompt_tokens_cached", "Prompt tokens that were found in the prefix cache.")
GENERATION_TOKENS = LAYOUT.counter("generation_tokens", "Tokens generated.")
FINISHED = LAYOUT.counter(
    "request_success", "Choices that ended well.", finished_reason=[reason.name.lower() for reason in FinishReason]
)
ABORTED = LAYOUT.counter("stream_aborts", "Requests that began and did not end well.", reason=ABORTS)
TTFT = LAYOUT.histogram("time_to_first_token_seconds", "From a call's arrival to its first token.", SECONDS)
ITL = LAYOUT.histogram(
    "inter_token_latency_seconds", "Between tokens of a choice as they are sent to a client; of streams.", TOKEN_SECONDS
)
TPOT = LAYOUT.histogram(
    "request_time_per_output_token_seconds", "Mean time between a request's tokens, from first to last.", TOKEN_SECONDS
)
E2E = LAYOUT.histogram("e2e_request_latency_seconds", "From a call's arrival to the end of its request.", SECONDS)
QUEUE = LAYOUT.histogram("request_queue_time_seconds", "From the scheduler's receipt to the first plan.", SECONDS)
PREFILL = LAYOUT.histogram("request_prefill_time_seconds", "From the first plan to the first token.", SECONDS)
DECODE = LAYOUT.histogram("request_decode_time_seconds", "From the first token to the last.", SECONDS)
