"""What a client process of `octavo bench serve` is told, and what it tells: messages over its standard streams."""

from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from octavo.cli import bench_workloads
from octavo.cli.bench_suite import Sizes, make
from octavo.cli.bench_workloads import SmallVocabulary, Workload
from octavo.cli.errors import ConfigurationError

RANDOM = "random"
DATASETS = (RANDOM, *bench_workloads.NAMES)

READY = b"ready\n"
"""What a client process says when it is connected and has built its requests."""


class Target(msgspec.Struct, frozen=True):
    """A server, and what every request to it carries."""

    door: Literal["grpc", "http"]
    host: str
    port: int
    path: str  # of the HTTP resource, or of the gRPC method
    model: str
    api_key: str | None = None
    is_tls: bool = False
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None

    @property
    def authority(self) -> str:
        """HOST:PORT."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def place(self) -> str:
        """Where it is, for people."""
        if self.door == "grpc":
            return f"gRPC{' with TLS' if self.is_tls else ''} at {self.authority}"
        return f"{'https' if self.is_tls else 'http'}://{self.authority}{self.path}"


class Dataset(msgspec.Struct, frozen=True):
    """A list of requests by its name and sizes: every process makes the same one."""

    name: str  # of DATASETS
    vocab_size: int
    num_prompts: int | None = None
    input_len: int = 1024  # of random
    output_len: int = 128  # of random
    max_concurrency: int | None = None  # the clients of serving, the batch of decode
    seed: int = 0  # of random

    def load(self) -> Workload:
        """Return the requests.

        Raises:
            ConfigurationError: there is no such dataset, or the vocabulary is too small for it.
        """
        try:
            if self.name == RANDOM:
                return bench_workloads.random_lengths(
                    self.vocab_size, self.num_prompts or 1000, self.input_len, self.output_len, self.seed
                )
        except SmallVocabulary as error:
            raise ConfigurationError(str(error)) from error
        numbers = {"decode": f"decode_b{self.max_concurrency}", "serving": f"serving_c{self.max_concurrency}"}
        return make(numbers.get(self.name, self.name), self.vocab_size, Sizes(num_requests=self.num_prompts))


class Job(msgspec.Struct, frozen=True):
    """The part of a load that one client process makes.

    Requests are dealt to what may be under way at one time, and that to the clients, so that all end at about one time.
    """

    target: Target
    dataset: Dataset
    client: int
    num_clients: int
    parent_pid: int
    max_concurrency: int | None  # of all clients together
    request_rate: float | None  # a second, of all clients together; None: all at once
    num_connections: int  # of this client, over gRPC
    timeout_s: float  # of each request
    ignore_eos: bool
    temperature: float
    seed: int
    num_warmups: int  # requests of this client that come before, and are not counted

    @property
    def own_concurrency(self) -> int | None:
        """Of this client."""
        if self.max_concurrency is None:
            return None
        return self.max_concurrency // self.num_clients + (self.client < self.max_concurrency % self.num_clients)

    def own_requests(self, num_requests: int) -> list[int]:
        """Return the places in the dataset of this client's requests."""
        lanes = self.max_concurrency or num_requests
        return [index for index in range(num_requests) if index % lanes % self.num_clients == self.client]

    def arrivals_s(self, num_requests: int) -> npt.NDArray[np.float64]:
        """Return when each request of the whole load comes, from the start: the same in every process."""
        if self.request_rate is None:
            return np.zeros(num_requests)
        rng = np.random.default_rng([77, self.seed])
        gaps: npt.NDArray[np.float64] = rng.exponential(1 / self.request_rate, num_requests)
        gaps[0] = 0.0
        return np.cumsum(gaps)


class Failure(msgspec.Struct, frozen=True):
    """Requests that failed in one way."""

    kind: str
    count: int
    example: str


Floats = bytes
"""float64 in the machine's own order, one a request that was answered."""


class Report(msgspec.Struct, frozen=True):
    """What a client process saw. Times are seconds of time.monotonic()."""

    began: float
    ended: float
    cpu_s: Annotated[float, Meta(ge=0)]  # of this process between the two
    sent: Floats
    first: Floats  # token
    last: Floats  # token
    end: Floats  # of the answer
    late: Floats  # how much later than it should have been a request was sent, where requests have their times
    num_prompt_tokens: Floats
    num_tokens: Floats
    gaps: Floats  # between messages of one answer, of all answers
    num_messages: int
    failures: tuple[Failure, ...]


def floats(column: Floats) -> npt.NDArray[np.float64]:
    """Return a column as an array."""
    return np.frombuffer(column, np.float64)
