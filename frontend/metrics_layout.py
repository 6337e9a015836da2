"""What a frontend counts, and where: every number has its cell in one row of float64, known before the first request.

So the size is fixed, an update is one addition, and the rows of several frontends are added cell by cell.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

import grpc

from octavo.v1 import admin_pb2, generation_pb2, model_pb2, tokenizer_pb2
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


@dataclass(frozen=True)
class Counter:
    """A number that only grows, for each combination of its labels' values.

    Attributes:
        name: without `octavo_` and `_total`.
        words: what it counts.
        labels: their names.
        values: one tuple a cell, from `first` on.
        first: its first cell.
        always: how many cells are told even while they are 0: the first ones.
    """

    name: str
    words: str
    labels: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]
    first: int
    always: int

    @property
    def num_cells(self) -> int:
        """Cells from `first` on."""
        return len(self.values)


@dataclass(frozen=True)
class Histogram:
    """How often a number lay between bounds: a cell a bucket, the last one beyond all bounds, then their sum."""

    name: str
    words: str
    bounds: tuple[float, ...]
    first: int

    @property
    def num_cells(self) -> int:
        """Cells from `first` on."""
        return len(self.bounds) + 2


M = TypeVar("M", Counter, Histogram)


class Layout:
    """Gives each metric its cells, in the order in which they are asked for. The first two are PID and STARTED_AT."""

    PID, STARTED_AT = 0, 1

    def __init__(self) -> None:
        self.metrics: list[Counter | Histogram] = []
        self.num_cells = 2

    def counter(self, name: str, words: str, **labels: Sequence[str]) -> Counter:
        """Return a counter for every combination of labels."""
        return self.table(name, words, tuple(labels), tuple(product(*labels.values())))

    def table(
        self,
        name: str,
        words: str,
        labels: tuple[str, ...],
        values: tuple[tuple[str, ...], ...],
        always: int | None = None,
    ) -> Counter:
        """Return a counter for these combinations of labels."""
        shown = len(values) if always is None else always
        return self._add(Counter(name, words, labels, values, self.num_cells, shown))

    def histogram(self, name: str, words: str, bounds: tuple[float, ...]) -> Histogram:
        """Return a histogram."""
        return self._add(Histogram(name, words, bounds, self.num_cells))

    def _add(self, metric: M) -> M:
        self.metrics.append(metric)
        self.num_cells += metric.num_cells
        return metric


def _calls() -> Iterator[tuple[str, str, str]]:
    """Yield door, method and status of every kind of call."""
    for method in GRPC_METHODS:
        yield from (("grpc", method, code) for code in GRPC_CODES)
    for route in HTTP_ROUTES:
        yield from (("http", route, code) for code in HTTP_CODES)


LAYOUT = Layout()
REQUESTS = LAYOUT.table(
    "requests",
    "Calls that have ended, by door, method and status.",
    ("door", "method", "code"),
    tuple(_calls()),
    always=0,
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
