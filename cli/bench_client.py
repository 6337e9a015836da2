"""A frontend without text for benchmarks: sends lists of ids to the scheduler, takes ids back, looks at the clock.

It speaks the wire as any frontend does. What a step brings is noted in arrays, a few numpy calls a message, so that the
measuring process is not what limits an engine of a thousand steps a second.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import zmq

from octavo.cli.bench_workloads import Request, Workload
from octavo.cli.errors import CommandError, ConfigurationError
from octavo.wire.channel import HEARTBEAT_INTERVAL_S, DealerChannel
from octavo.wire.codec import FromScheduler
from octavo.wire.columns import pack_ints
from octavo.wire.errors import WireError
from octavo.wire.handshake import PROTOCOL_VERSION, FrontendHello, FrontendWelcome, ServiceFacts, WorkerState
from octavo.wire.ids import new_boot_id
from octavo.wire.peer import Peer, PeerEvent, SessionBegan, SessionEnded, Waiting
from octavo.wire.plan import RowSampling
from octavo.wire.prefix import prompt_keys, root_key
from octavo.wire.requests import (
    CancelRequest,
    PrefixCacheReset,
    ResetPrefixCache,
    StatusReport,
    StatusRequest,
    StepOutput,
    SubmitRequest,
)

Seconds = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

SUBMIT_AT_ONCE = 16
"""Requests that are sent before the client looks whether something has come."""

ANSWER_TIMEOUT_S = 30.0
_SEEK_INTERVAL_MS = 20
_BLOCKED_MS = 1

A = TypeVar("A", StatusReport, PrefixCacheReset)


class RunFailed(CommandError):
    """A run brought no figures: a request failed, or the engine is gone."""


class TimeIsUp(CommandError):
    """The run was cut at its deadline."""


def require_fit(workload: Workload, max_model_len: int) -> None:
    """Check that an engine takes the longest request of a workload.

    Raises:
        ConfigurationError: it does not.
    """
    if workload.longest > max_model_len:
        raise ConfigurationError(
            f"{workload.name} has a request of {workload.longest} tokens with its output, the engine takes at most "
            f"{max_model_len}"
        )


@dataclass(frozen=True)
class Run:
    """What one run of a workload showed. Times are seconds of one monotonic clock, one entry a request."""

    wall_s: float  # from before the first request was packed until the last one had ended
    submitted: Seconds
    first: Seconds  # token
    last: Seconds  # token
    num_tokens: Counts
    num_cached_tokens: int  # prompt tokens that were found in the prefix cache
    gaps: Seconds  # between tokens of one request, of all requests
    steps: list[tuple[float, int]]  # time and tokens of each message

    @property
    def tpot_s(self) -> Seconds:
        """Mean seconds a token after the first, of each request with more than one."""
        several = self.num_tokens > 1
        spans: Seconds = (self.last - self.first)[several] / (self.num_tokens[several] - 1)
        return spans

    @property
    def ttft_s(self) -> Seconds:
        """Seconds from sending to the first token, of each request."""
        return self.first - self.submitted


class Progress:
    """What has come of the requests of one run; requests of earlier runs are passed over.

    Args:
        wanted: tokens that each request must put out.
        base: handle of the first request.
    """

    def __init__(self, wanted: Counts, base: int = 0) -> None:
        self.num_ended = 0
        self.num_cached_tokens = 0
        self.first: Seconds = np.zeros(len(wanted))
        self.last: Seconds = np.zeros(len(wanted))
        self.counts: Counts = np.zeros(len(wanted), np.int64)
        self.steps: list[tuple[float, int]] = []
        self._gaps: list[Seconds] = []
        self._wanted = wanted
        self._positions: Counts = np.full(len(wanted), -1)
        self._base = base

    def take(self, output: StepOutput, now: float) -> None:
        """Note what a message brings.

        Raises:
            RunFailed: a request failed or ended early.
        """
        for failed in output.failed:
            if failed.handle >= self._base:
                raise RunFailed(f"request {failed.handle - self._base} failed ({failed.code.name}): {failed.message}")
        for started in output.started:
            self.num_cached_tokens += started.num_cached_tokens if started.handle >= self._base else 0
        if output.handle:
            self._take_tokens(output, now)
        for finished in output.finished:
            index = finished.handle - self._base
            if index < 0:
                continue
            if finished.num_tokens != self._wanted[index] or finished.num_tokens != self.counts[index]:
                raise RunFailed(
                    f"request {index} ended ({finished.reason.name}) after {finished.num_tokens} tokens, of which "
                    f"{self.counts[index]} came; expected {self._wanted[index]}"
                )
            self.num_ended += 1

    def _take_tokens(self, output: StepOutput, now: float) -> None:
        index = np.frombuffer(output.handle, "<i4") - self._base
        position = np.frombuffer(output.position, "<i4")
        if int(index.min()) < 0:  # what was under way when an earlier run was cut
            index, position = index[index >= 0], position[index >= 0]
        begins = index[position == 0]
        if len(begins):
            self.first[begins] = now
        # Results of two steps may share a message, which then names a request twice: its later position wins, and the
        # two tokens came together.
        gap = now - self.last[index]
        gap[position != self._positions[index] + 1] = 0.0
        self._gaps.append(gap[position > 0] if len(begins) else gap)
        self.last[index] = now
        self._positions[index] = position
        np.add.at(self.counts, index, 1)
        self.steps.append((now, len(index)))

    def gaps(self) -> Seconds:
        """Return the seconds between tokens of one request, of all requests."""
        return np.concatenate(self._gaps) if self._gaps else np.zeros(0)

    def check(self) -> None:
        """Check at the end that each position came once.

        Raises:
            RunFailed: one is missing or came twice.
        """
        if not np.array_equal(self._positions + 1, self._wanted):
            raise RunFailed("the positions of the tokens that came are not contiguous")


class EngineClient:
    """One session with the scheduler, over which workloads run.

    Args:
        address: the scheduler's.
        digest: identity of the model.
        check_engine: raises if a process of the engine has ended; called whenever nothing comes for a while.

    Raises (on construction):
        WireError: the address is malformed.
    """

    def __init__(self, address: str, digest: str, check_engine: Callable[[], None]) -> None:
        boot_id = new_boot_id()
        hello = FrontendHello(PROTOCOL_VERSION, digest, boot_id, os.getpid())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            channel = DealerChannel(self._context, address, boot_id)
        except Exception:
            self._context.term()
            raise
        self._peer = Peer(channel, lambda: hello, time.monotonic)
        self._check_engine = check_engine
        self._prefix_root = root_key(digest)
        self._poller = zmq.Poller()
        self._next_handle = 0
        self._next_tag = 0
        self.facts: ServiceFacts | None = None

    def connect(self, timeout_s: float, on_wait: Callable[[str], None]) -> ServiceFacts:
        """Wait for the scheduler's welcome, which comes when a worker is ready.

        Args:
            timeout_s: most seconds.
            on_wait: called again and again meanwhile, with what is waited for.

        Raises:
            RunFailed: it did not come in time, or the scheduler refuses.
        """
        end = time.monotonic() + timeout_s
        reason = "the scheduler cannot be reached yet"
        while self.facts is None:
            if time.monotonic() > end:
                raise RunFailed(f"the engine is not ready after {timeout_s:g} s: {reason}")
            self._check_engine()
            on_wait(reason)
            self._peer.channel.socket.poll(_SEEK_INTERVAL_MS)
            for event in self._events():
                if isinstance(event, SessionBegan) and isinstance(event.welcome, FrontendWelcome):
                    self.facts = event.welcome.facts
                elif isinstance(event, Waiting):
                    reason = event.reason
        self._poller.register(self._peer.channel.socket, zmq.POLLIN)
        self._poller.register(self._peer.channel.monitor, zmq.POLLIN)
        return self.facts

    def run(
        self,
        workload: Workload,
        *,
        max_tokens: int | None = None,
        concurrency: int | None = None,
        deadline: float | None = None,
    ) -> Run:
        """Run a workload to its end.

        Args:
            workload: the requests.
            max_tokens: put out at most so many tokens each, instead of what the workload says.
            concurrency: requests under way at most; None: all at once.
            deadline: of time.monotonic(), at which the run is given up.

        Raises:
            ConfigurationError: a request with its whole output is longer than the engine takes.
            RunFailed: a request failed, or the engine is gone.
            TimeIsUp: the deadline has passed; what was under way is cancelled.
        """
        requests = workload.requests
        wanted = np.array([min(r.num_output_tokens, max_tokens or r.num_output_tokens) for r in requests], np.int64)
        require_fit(workload, self._known_facts().max_model_len)
        self._drain()
        base = self._next_handle
        self._next_handle += len(requests)
        progress = Progress(wanted, base)
        submitted = np.zeros(len(requests))
        in_flight = len(requests) if concurrency is None else concurrency
        num_sent = 0
        began = time.monotonic()
        while progress.num_ended < len(requests):
            due = min(len(requests), progress.num_ended + in_flight) - num_sent
            blocked = False
            for _ in range(min(due, SUBMIT_AT_ONCE)):
                if blocked := not self._can_send():
                    break
                submitted[num_sent] = time.monotonic()
                self._submit(base + num_sent, requests[num_sent], int(wanted[num_sent]), num_sent, workload.temperature)
                num_sent += 1
                due -= 1
            self._wait(_BLOCKED_MS if blocked else 0 if due else None)
            for event in self._events():
                if isinstance(event, StepOutput):
                    progress.take(event, time.monotonic())
            if deadline is not None and time.monotonic() > deadline:
                self._cancel(range(base, base + num_sent))
                raise TimeIsUp(f"{workload.name} was cut after {time.monotonic() - began:.1f} s")
        wall_s = time.monotonic() - began
        progress.check()
        return Run(
            wall_s=wall_s,
            submitted=submitted,
            first=progress.first,
            last=progress.last,
            num_tokens=progress.counts,
            num_cached_tokens=progress.num_cached_tokens,
            gaps=progress.gaps(),
            steps=progress.steps,
        )

    def reset_prefix_cache(self) -> int:
        """Make the scheduler forget what it has cached; return how many blocks could be found until then."""
        return self._ask(ResetPrefixCache(self._tag()), PrefixCacheReset).num_blocks

    def status(self) -> StatusReport:
        """Return what the scheduler holds."""
        return self._ask(StatusRequest(self._tag()), StatusReport)

    def close(self) -> None:
        """Say Goodbye and close."""
        self._peer.leave("the benchmark has ended")
        self._context.term()

    def _submit(self, handle: int, request: Request, max_tokens: int, seed: int, temperature: float) -> None:
        facts = self._known_facts()
        ids = pack_ints(request.prompt_ids)
        root = self._prefix_root if facts.prefix_caching else b""
        message = SubmitRequest(
            handle=handle,
            prompt_ids=ids,
            num_choices=1,
            max_tokens=max_tokens,
            sampling=RowSampling(seed=seed, temperature=temperature),
            prefix_root=root,
            prefix_keys=prompt_keys(root, ids, facts.block_size) if root else b"",
        )
        self._peer.send(message)  # if the session ended by this, the next events say so

    def _cancel(self, handles: range) -> None:
        for handle in handles:
            while not self._can_send():
                self._wait(_BLOCKED_MS)
            self._peer.send(CancelRequest(handle))

    def _known_facts(self) -> ServiceFacts:
        if self.facts is None:
            raise RunFailed("there is no session with the engine")
        return self.facts

    def _ask(self, question: StatusRequest | ResetPrefixCache, kind: type[A]) -> A:
        self._peer.send(question)
        end = time.monotonic() + ANSWER_TIMEOUT_S
        while time.monotonic() < end:
            self._wait(None)
            for event in self._events():
                if isinstance(event, kind) and event.tag_id == question.tag_id:
                    return event
        raise RunFailed(f"the scheduler did not answer within {ANSWER_TIMEOUT_S:g} s")

    def _tag(self) -> int:
        self._next_tag += 1
        return self._next_tag

    def _drain(self) -> None:
        for _ in self._events():
            pass

    def _wait(self, timeout_ms: int | None) -> None:
        """Wait until something comes; None: for as long as a heartbeat may take."""
        wait_ms = int(HEARTBEAT_INTERVAL_S * 1000) if timeout_ms is None else timeout_ms
        if not self._poller.poll(wait_ms) and timeout_ms is None:
            self._check_engine()

    def _can_send(self) -> bool:
        return bool(int(self._peer.channel.socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    def _events(self) -> Iterator[PeerEvent | FromScheduler]:
        """Yield what has come.

        Raises:
            RunFailed: the session is over, or the worker is gone.
        """
        try:
            for event in self._peer.step():
                if isinstance(event, SessionEnded):
                    raise RunFailed(f"the session with the scheduler is over: {event.reason}")
                if isinstance(event, WorkerState) and not event.ready:
                    raise RunFailed(f"the worker is gone: {event.reason}")
                yield event
        except WireError as error:
            raise RunFailed(f"the scheduler takes this client no more: {error}") from error
