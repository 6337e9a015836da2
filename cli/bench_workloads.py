"""Workloads of benchmarks: lists of prompts as token ids, each with the number of tokens to put out.

Every list follows from a fixed seed, so that any engine on any machine gets the same tokens; `digest` names a list.
Requests run without regard to the end of sequence, for exactly `num_output_tokens` tokens, greedily unless the workload
has a temperature.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

FIRST_ID = 1_000
"""Least id in a prompt: bytes and special tokens lie below."""

END_ID = 128_000
"""No id of a prompt reaches it, however large the vocabulary: special tokens lie above."""

DECODE_BATCHES = (1, 8, 32, 64, 128, 256)

Integers = npt.NDArray[np.int64]


class UnknownWorkload(ValueError):
    """There is no workload of this name; the message names those there are."""


class SmallVocabulary(ValueError):
    """The vocabulary has no ids for prompts."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request."""

    prompt_ids: list[int]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Some requests under a name; the seed of each one's noise is its place in the list."""

    name: str
    requests: list[Request]
    temperature: float = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(len(request.prompt_ids) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Of all requests."""
        return sum(request.num_output_tokens for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return max((len(request.prompt_ids) + request.num_output_tokens for request in self.requests), default=0)

    @property
    def sizes(self) -> str:
        """In words."""
        tokens = f"{self.num_prompt_tokens:,} tokens in, {self.num_output_tokens:,} out"
        return f"{len(self.requests)} request{'s' if len(self.requests) > 1 else ''}, {tokens}"

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that differ when a token or a length does."""
        digest = sha256()
        for request in self.requests:
            digest.update(np.array([*request.prompt_ids, request.num_output_tokens], "<i4").tobytes())
        return digest.hexdigest()[:16]


def sharegpt_like(vocab_size: int, num_requests: int = 1000, seed: int = 22) -> Workload:
    """Return chats with the lengths of the usual ShareGPT sample: log-normal, clipped to 4..1024.

    The means are 220 tokens of prompt and 190 of output.
    """
    rng = np.random.default_rng(seed)
    prompts = _lognormal(rng, num_requests, 4.954, 1.0)
    outputs = _lognormal(rng, num_requests, 4.866, 0.9)
    return Workload("sharegpt_like", _random_prompts(rng, vocab_size, prompts, outputs))


def decode(vocab_size: int, batch: int, num_prompt_tokens: int = 512, num_output_tokens: int = 128) -> Workload:
    """Return equal requests for one batch."""
    rng = np.random.default_rng([11, batch])
    prompts = [num_prompt_tokens] * batch
    return Workload(f"decode_b{batch}", _random_prompts(rng, vocab_size, prompts, [num_output_tokens] * batch))


def prefill(vocab_size: int, num_requests: int = 64, num_prompt_tokens: int = 1024) -> Workload:
    """Return prompts with one token of output each."""
    rng = np.random.default_rng(33)
    prompts = [num_prompt_tokens] * num_requests
    return Workload("prefill", _random_prompts(rng, vocab_size, prompts, [1] * num_requests))


def shared_prefix(
    vocab_size: int,
    num_requests: int = 256,
    num_shared_tokens: int = 1024,
    num_own_tokens: int = 64,
    num_output_tokens: int = 32,
) -> Workload:
    """Return requests that begin with the same tokens."""
    rng = np.random.default_rng(44)
    shared = _ids(rng, vocab_size, num_shared_tokens)
    own = _random_prompts(rng, vocab_size, [num_own_tokens] * num_requests, [num_output_tokens] * num_requests)
    requests = [Request(shared + request.prompt_ids, request.num_output_tokens) for request in own]
    return Workload("shared_prefix", requests)


def unique_prefix(
    vocab_size: int, num_requests: int = 256, num_prompt_tokens: int = 1088, num_output_tokens: int = 32
) -> Workload:
    """Return requests of the sizes of `shared_prefix` that share nothing."""
    rng = np.random.default_rng(55)
    prompts = [num_prompt_tokens] * num_requests
    return Workload("unique_prefix", _random_prompts(rng, vocab_size, prompts, [num_output_tokens] * num_requests))


def offline_256(num_requests: int = 256, least: int = 100, greatest: int = 1024) -> Workload:
    """Return the offline run that many small engines publish: lengths uniform, ids up to 10000, seed 0."""
    rng = random.Random(0)  # noqa: S311 - a fixed list is what is wanted
    prompts = [
        [rng.randint(0, 10_000) for _ in range(rng.randint(least, greatest))] for _ in range(num_requests)
    ]  # first all prompts, then all lengths of outputs
    requests = [Request(prompt, rng.randint(least, greatest)) for prompt in prompts]
    return Workload("offline_256", requests, temperature=0.6)


def serving(
    vocab_size: int,
    concurrency: int,
    requests_per_client: int = 4,
    fixed: bool = False,
    num_requests: int | None = None,
) -> Workload:
    """Return requests for so many clients, each of which sends its next request when the last one has ended.

    Args:
        vocab_size: of the model.
        concurrency: clients.
        requests_per_client: on average; there are at least 16 requests.
        fixed: 512 tokens in and 128 out each, instead of the lengths of `sharegpt_like`.
        num_requests: exactly so many, instead.
    """
    num_requests = num_requests or max(16, concurrency * requests_per_client)
    if fixed:
        rng = np.random.default_rng([66, concurrency])
        requests = _random_prompts(rng, vocab_size, [512] * num_requests, [128] * num_requests)
        return Workload(f"serving_fixed_c{concurrency}", requests)
    chats = sharegpt_like(vocab_size, num_requests, seed=66 + concurrency)
    return Workload(f"serving_sharegpt_c{concurrency}", chats.requests)


def random_lengths(
    vocab_size: int, num_requests: int, num_prompt_tokens: int, num_output_tokens: int, seed: int = 0
) -> Workload:
    """Return equal requests of random ids."""
    rng = np.random.default_rng([88, seed])
    prompts = [num_prompt_tokens] * num_requests
    return Workload("random", _random_prompts(rng, vocab_size, prompts, [num_output_tokens] * num_requests))


def warmup(
    vocab_size: int,
    num_requests: int = 32,
    num_prompt_tokens: int = 96,
    num_output_tokens: int = 16,
    max_model_len: int | None = None,
) -> Workload:
    """Return requests of growing prompts that bring an engine to its working temperature before anything is timed.

    Args:
        vocab_size: of the model.
        num_requests: of the workload.
        num_prompt_tokens: of the first request.
        num_output_tokens: of each request.
        max_model_len: most tokens of a request, at least 2; what is longer is cut.
    """
    rng = np.random.default_rng(99)
    prompts: Iterable[int] = range(num_prompt_tokens, num_prompt_tokens + num_requests)
    if max_model_len is not None:
        num_output_tokens = min(num_output_tokens, max_model_len // 2)
        prompts = [min(prompt, max_model_len - num_output_tokens) for prompt in prompts]
    return Workload("warmup", _random_prompts(rng, vocab_size, prompts, [num_output_tokens] * num_requests))


OFFLINE: dict[str, Callable[..., Workload]] = {
    "sharegpt_like": sharegpt_like,
    "prefill": prefill,
    "shared_prefix": shared_prefix,
    "unique_prefix": unique_prefix,
    "offline_256": lambda _vocab_size, **sizes: offline_256(**sizes),
}
"""Workloads whose requests all come at once, by name."""

NAMES = (*OFFLINE, "decode", "serving")


def make_offline(name: str, vocab_size: int, num_requests: int | None = None, **tokens: int) -> Workload:
    """Return one of OFFLINE, in its usual size or with so many requests and tokens (as its own arguments are called).

    Raises:
        UnknownWorkload: there is none of this name.
        SmallVocabulary: the vocabulary has no ids for it.
    """
    if name not in OFFLINE:
        raise UnknownWorkload(f"workload {name!r} is unknown; there are {', '.join(NAMES)}")
    sizes: dict[str, Any] = {} if num_requests is None else {"num_requests": num_requests}
    return OFFLINE[name](vocab_size, **sizes, **tokens)


def all_workloads(vocab_size: int) -> list[Workload]:
    """Return every workload that figures are published for, in its usual size."""
    return [
        *(decode(vocab_size, batch) for batch in DECODE_BATCHES),
        *(make_offline(name, vocab_size) for name in OFFLINE),
        *(serving(vocab_size, concurrency) for concurrency in DECODE_BATCHES),
    ]


def _lognormal(rng: np.random.Generator, count: int, mu: float, sigma: float) -> Integers:
    drawn = np.exp(mu + sigma * rng.standard_normal(count))
    return np.clip(np.rint(drawn), 4, 1024).astype(np.int64)


def _random_prompts(
    rng: np.random.Generator, vocab_size: int, prompts: Iterable[int], outputs: Iterable[int]
) -> list[Request]:
    lengths = zip(prompts, outputs, strict=True)
    return [Request(_ids(rng, vocab_size, int(prompt)), int(output)) for prompt, output in lengths]


def _ids(rng: np.random.Generator, vocab_size: int, count: int) -> list[int]:
    if vocab_size <= FIRST_ID:
        raise SmallVocabulary(f"a vocabulary of {vocab_size}: prompts are made of ids from {FIRST_ID} on")
    drawn: list[int] = rng.integers(FIRST_ID, min(vocab_size, END_ID), count, dtype=np.int64).tolist()
    return drawn
